"""One run of the learning benchmark with the reference implementation (UT-Austin-RPL/amago, version 3.3).

Started by `learning.py run --reference DIR --reference-python PYTHON`: that Python executes this file with DIR on its
path. Nothing of this project is imported. A job comes as JSON on stdin, the result leaves as the last line of stdout.

The network, batch and learning rate are those of our recipes. Tasks are drawn by the reference's own environments, so
that held-out maps are not kept apart. The reference keeps no best checkpoint: here it is the one whose evaluation along
the way was best. Its exploration is not seeded: a run is not repeatable. Compilation is off: what it compiles is small,
fails on some versions of torch, and the compiler's own CPU seconds would count.
"""

import copy
import io
import json
import math
import os
import random
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout

EVALUATE_EPISODES, FINAL_EPISODES = 96, 256
EPOCHS, UPDATES = 1000, 100  # the CPU limit ends a run; updates of an epoch
TASKS = {
    "lake-3x3": {"lake": (3, 9), "length": 45, "actors": 16, "steps": 100, "anneal": 4000},
    "lake-4x4": {"lake": (4, 10), "length": 50, "actors": 32, "steps": 100, "anneal": 4000},
    "lake-5x5": {"lake": (5, 16), "length": 80, "actors": 32, "steps": 160, "anneal": 4000},
    "dark-key-door-5x5": {"room": (5, 16, 80), "length": 80, "actors": 32, "steps": 160, "anneal": 3000},
    "tmaze-20": {"corridor": 20, "length": 21, "actors": 8, "steps": 84, "anneal": 3000},
    "tmaze-100": {"corridor": 100, "length": 101, "actors": 8, "steps": 808, "anneal": 3000},
}


def make_env(task):
    """Build one environment of the reference."""
    from amago.envs import AMAGOEnv
    from amago.envs.builtin.tmaze import TMazeAltPassive
    from amago.envs.builtin.toy_gym import MetaFrozenLake, RoomKeyDoor

    if "lake" in task:
        size, steps = task["lake"]
        inner = MetaFrozenLake(size, k_episodes=5, max_episode_steps=steps)
    elif "room" in task:
        size, steps, horizon = task["room"]
        inner = RoomKeyDoor(size=size, max_episode_steps=steps, meta_rollout_horizon=horizon)
    else:
        inner = TMazeAltPassive(corridor_length=task["corridor"], penalty=-1.0 / task["corridor"])
    return AMAGOEnv(inner, env_name="task")


def exploration(task, config):
    """Choose and configure the exploration: bilevel in the dark room, quiet inside a corridor."""
    from amago import cli_utils
    from amago.envs.exploration import EpsilonGreedy

    if "room" in task:
        horizon = task["room"][2]
        return cli_utils.switch_exploration(config, "bilevel", steps_anneal=task["anneal"], rollout_horizon=horizon)
    end = 0.01 if "corridor" in task else 0.05
    cli_utils.switch_exploration(config, "egreedy", eps_start=1.0, eps_end=end, steps_anneal=task["anneal"])
    if "corridor" not in task:
        return EpsilonGreedy
    corridor = task["corridor"]

    class Windowed(EpsilonGreedy):
        def current_eps(self, local_step):
            epsilon = super().current_eps(local_step)
            inside = (local_step > 0) & (local_step < corridor - 3)
            epsilon[inside] = 0.5 / corridor
            return epsilon

    return Windowed


def experiment(task, folder):
    """Set up an experiment whose epochs are run one by one."""
    import amago
    from amago import cli_utils
    from amago.loading import DiskTrajDataset
    from amago.nets.transformer import VanillaAttention

    config = {}
    sequence = cli_utils.switch_traj_encoder(
        config, "transformer", memory_size=64, layers=2, n_heads=4, attention_type=VanillaAttention
    )
    timestep = cli_utils.switch_tstep_encoder(
        config, "ff", n_layers=1, d_hidden=64, d_output=64, normalize_inputs=False
    )
    own = {"reward_multiplier": 100.0} if "room" in task else {}  # as in its examples for the dark room and the T-Maze
    own |= {"reward_multiplier": 100.0, "gamma": 0.9999} if "corridor" in task else {}
    agent = cli_utils.switch_agent(config, "agent", tau=0.004, **own)
    explore = exploration(task, config)
    cli_utils.use_config(config)
    return amago.Experiment(
        run_name="run",
        ckpt_base_dir=folder,
        max_seq_len=task["length"],
        traj_save_len=task["length"],
        dataset=DiskTrajDataset(dset_root=folder, dset_name="run", dset_max_size=10**6),
        tstep_encoder_type=timestep,
        traj_encoder_type=sequence,
        agent_type=agent,
        exploration_wrapper_type=explore,
        make_train_env=lambda: make_env(task),
        make_val_env=lambda: make_env(task),
        val_timesteps_per_epoch=0,
        parallel_actors=task["actors"],
        env_mode="sync",
        sample_actions_train="corridor" not in task,
        sample_actions_val=False,
        epochs=EPOCHS,
        train_timesteps_per_epoch=task["steps"],
        train_batches_per_epoch=UPDATES,
        val_interval=None,
        ckpt_interval=None,
        always_save_latest=False,
        dloader_workers=0,
        batch_size=24,
        learning_rate=3e-4,
        lr_warmup_steps=100,
        verbose=False,
    )


def evaluated(running, task, episodes):
    """Play whole episodes greedily: return, and success by attempt where there are attempts."""
    rounds = math.ceil(episodes / task["actors"])
    length = task["length"] + 1  # attempts may end early: then a round has more episodes
    running.policy_aclr.eval()
    metrics = running.evaluate_test(lambda: make_env(task), timesteps=rounds * length)
    attempts = [metrics.get(f"Average Episode {k} Success in task") for k in range(5)]
    return {
        "return_mean": float(metrics["Average Total Return in task"]),
        "episodes": rounds * task["actors"],
        "per_attempt": [float(value) for value in attempts if value is not None],
    }


def play(job, folder):
    """Train for the CPU seconds of the job and evaluate the best and the last weights on new episodes."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(job["seed"])
    task = TASKS[job["task"]]
    running = experiment(task, folder)
    running.start()
    curve, spent, best, longest, told = [], 0.0, None, 0.0, 0.0
    for epoch in range(EPOCHS):
        begun = time.process_time()
        running.epoch, running.epochs = epoch, epoch + 1
        running.learn()
        used = time.process_time()
        longest = max(longest, used - begun)
        over = used - spent + longest / 2 > job["cpu_limit"]
        if over or used - told >= job["cpu_limit"] / max(job["points"], 1):
            found = evaluated(running, task, EVALUATE_EPISODES)
            score = found["per_attempt"][-1] if found["per_attempt"] else found["return_mean"]
            updates = (epoch + 1) * UPDATES
            steps = (epoch + 1) * task["steps"] * task["actors"]
            curve.append({"update": updates, "cpu_seconds": round(used - spent, 2), "env_steps": steps, **found})
            if best is None or score > best[0]:
                best = (score, copy.deepcopy(running.policy.state_dict()), updates)
            told = time.process_time()
            spent += told - used
        if over:
            break
    last = evaluated(running, task, FINAL_EPISODES)
    running.policy.load_state_dict(best[1])
    final = evaluated(running, task, FINAL_EPISODES)
    return {
        "status": "limit",
        "updates": updates,
        "env_steps": steps,
        "replay_ratio": updates * 24 * task["length"] / steps,
        **final,
        **{f"last_{name}": value for name, value in last.items()},
        "best_update": best[2],
        "curve": curve,
        "curve_cpu_seconds": spent,
    }


def main():
    job = json.load(sys.stdin)
    os.environ |= {"WANDB_MODE": "disabled", "TORCHDYNAMO_DISABLE": "1"}
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        result = play(job, folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
