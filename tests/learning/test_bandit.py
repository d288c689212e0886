"""Every kind of action learns one-step tasks: the best action is shown in the observation, and better ones pay more."""

import numpy as np
import pytest
import torch

from pipelines.lake.spaces import Box
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.batch import TensorBatch
from tests.learning.factories import agent, values, windows
from tests.tiers import some

EPISODES, UPDATES, RATE = 192, 110, 1e-2  # what an update costs is overhead: few, each on many episodes
SMALL = {"actor": {"hidden": [32]}, "critic": {"hidden": [64, 64]}, "timestep": {"hidden": [32], "output": 32}}
MULTI = {"kind": "multi-task"}
CASES = {
    **{action: (action, {}) for action in ("discrete", "multi_discrete", "multi_binary", "box")},
    **{f"multi-task {action}": (action, MULTI) for action in ("discrete", "multi_discrete", "multi_binary", "box")},
    "gumbel": ("multi_discrete", {"actor": {"hidden": [32], "gumbel": True}}),
    "two-hot maximised": ("box", {"critic": {"kind": "two-hot", "hidden": [64, 64]}}),
    "two-hot labels": ("discrete", MULTI | {"critic": {"labels": "two-hot", "hidden": [64, 64]}}),
    "beta": ("box", {"actor": {"hidden": [32], "distribution": "beta"}}),
    "mixture": ("box", {"actor": {"hidden": [32], "distribution": "gaussian-mixture"}}),
}


SLOWER = {"two-hot maximised": 2}


def pay(action, wanted):
    """(N, ...) each -> (N,): 1 for the wanted action; mean squared distance (Box) or share of wrong choices less."""
    miss = np.square(action - wanted) if action.dtype == np.float32 else action != wanted
    return 1 - miss.reshape(len(action), -1).mean(1)


def learnt(action, changes, *, scales=(1.0,), episodes=EPISODES, updates=UPDATES):
    """Train on random actions; tasks take turns, shown by their number, and pay on their own scale.

    Returns the mean pay of greedy actions in each task, before its scale."""
    observation = {"obs": Box(shape=(4,))}
    owner = agent(action, observation, sequence="identity", gammas=[], acting_gamma=0.5, **(SMALL | changes))
    space, rng = owner.spaces.action, np.random.default_rng(0)
    optimizer = torch.optim.AdamW(owner.trainable_parameters().values(), lr=RATE)
    noise = torch.Generator().manual_seed(0)
    task = np.arange(episodes) % len(scales)

    def play():
        source = windows(owner.spaces, lengths=(2,) * episodes, rows=2, seed=int(rng.integers(1 << 30)), terminated=1)
        source.start[:] = 0
        wanted = values(space, (episodes,), rng)
        shown = wanted.reshape(episodes, -1) / (1 if action in ("box", "multi_binary") else 2)
        source.columns["obs"][:, 0] = 0
        source.columns["obs"][:, 0, : shown.shape[1]] = shown
        source.columns["obs"][:, 0, 3] = task
        return source, wanted

    for _ in range(updates):
        source, wanted = play()
        source.columns["reward"][:, 1] = pay(source.columns["action"][:, 1], wanted) * np.asarray(scales)[task]
        optimizer.zero_grad()
        owner.loss(TensorBatch.from_numpy(source, owner.spaces), noise)[0].backward()
        torch.nn.utils.clip_grad_norm_(owner.trainable_parameters().values(), 1.0)
        optimizer.step()
        owner.update_targets()
    source, wanted = play()
    zero = np.zeros(episodes)
    policy = AgentPolicy(owner, num_actors=episodes, capacity=1, greedy=True)
    chosen = policy.act({"obs": source.columns["obs"][:, 0]}, source.columns["action"][:, 0], zero, zero)
    return [pay(chosen, wanted)[task == number].mean() for number in range(len(scales))]


@pytest.mark.system
@pytest.mark.parametrize("case", some(CASES, 3))  # `discrete` learns in another test of the quick tier
def test_the_policy_comes_to_match_what_it_sees(case):
    (reached,) = learnt(*CASES[case], updates=UPDATES * SLOWER.get(case, 1))
    assert reached > 0.9


@pytest.mark.parametrize("action", some(["discrete", "box"]))
def test_the_multi_task_agent_learns_tasks_whose_rewards_differ_a_thousandfold(action):
    small, large = learnt(action, MULTI, scales=(1.0, 1000.0), updates=150)
    assert small > 0.95
    assert large > 0.95


@pytest.mark.system
@pytest.mark.parametrize("scale", some([1e-3, 1e3], 1))
@pytest.mark.parametrize("action", some(["discrete", "multi_discrete", "multi_binary", "box"], 0))
def test_what_a_reward_is_measured_in_does_not_matter(action, scale):
    (usual,) = learnt(action, {}, updates=60)
    (scaled,) = learnt(action, {}, scales=(scale,), updates=60)
    assert usual > 0.85
    assert scaled == pytest.approx(usual, rel=0.1)


@pytest.mark.system
def test_cloning_repeats_what_it_was_shown():
    """Data of random actions: the clone is no better than these, whatever they pay."""
    (reached,) = learnt("discrete", {"kind": "behaviour-cloning"})
    assert reached < 0.6
