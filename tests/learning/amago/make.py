"""Write the golden files from AMAGO itself: python -m tests.learning.amago.make [NAME ...].

Needs an environment of its own with AMAGO 3.3 (https://github.com/UT-Austin-RPL/amago) and what it imports, on a CPU;
nothing of this project but `cases` is imported. TORCHDYNAMO_DISABLE=1 leaves out its compilation, which is slow and
changes only rounding. Mamba needs mamba-ssm, whose kernels give way to its own scan in torch (MAMBA_FORCE_BUILD=TRUE
MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps mamba-ssm).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import numpy as np

from tests.learning.amago.cases import BATCH, CASES, GOLDEN, LENGTH, Case, draw_tokens, draw_weights, gin_of


def import_mamba() -> None:
    """Import mamba-ssm without CUDA and triton: what its modules ask for at import is empty, and no kernel is used."""
    found = importlib.util.find_spec("mamba_ssm")
    if found is None:
        return
    package = ModuleType("mamba_ssm")
    package.__path__ = found.submodule_search_locations or []
    norms: Any = ModuleType("mamba_ssm.ops.triton.layer_norm")
    norms._layer_norm_fwd = norms.RMSNorm = norms.layer_norm_fn = norms.rms_norm_fn = None
    sys.modules |= {"mamba_ssm": package, norms.__name__: norms, "selective_scan_cuda": ModuleType("kernels")}
    simple: Any = importlib.import_module("mamba_ssm.modules.mamba_simple")
    simple.selective_scan_fn = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_ref
    package.Mamba = simple.Mamba  # type: ignore[attr-defined]


def make_agent(case: Case) -> tuple[Any, str]:
    """Make AMAGO's agent; return it with the text of its config.txt, which its experiment writes beside weights."""
    import amago.agent
    import gin
    import gymnasium as gym
    import torch
    from amago.nets import actor_critic, cnn, traj_encoders, transformer, tstep_encoders

    kind, size = case.action
    gin.clear_config()
    for known in (transformer.VanillaAttention, cnn.DrQCNN):
        if not gin.config._REGISTRY.get_match(known.__name__):
            gin.external_configurable(known)
    gin.parse_config(gin_of(case), skip_unknown=False)
    spaces = {name: gym.spaces.Box(0, 255, shape, np.dtype(dtype)) for name, (shape, dtype) in case.arrays.items()}
    spaces |= {name: gym.spaces.Discrete(n) for name, n in case.choices.items()}
    actions = {"discrete": gym.spaces.Discrete, "bits": gym.spaces.MultiBinary}
    action = gym.spaces.Box(-1, 1, (size,), np.float32) if kind == "box" else actions[kind](size)
    agent = getattr(amago.agent, case.agent)(
        obs_space=gym.spaces.Dict(spaces),
        rl2_space=gym.spaces.Box(-np.inf, np.inf, (1 + size,), np.float32),
        action_space=action,
        max_seq_len=LENGTH,
        tstep_encoder_type=getattr(tstep_encoders, case.tstep),
        traj_encoder_type=getattr(traj_encoders, case.encoder),
        actor_type=getattr(actor_critic, case.actor),
    )
    weights = draw_weights({name: tuple(tensor.shape) for name, tensor in agent.state_dict().items()})
    agent.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return agent.eval(), gin.operative_config_str()


def describe_policy(dist: Any, kind: str) -> dict[str, np.ndarray]:
    if kind != "box":
        return {"probs": dist.probs.numpy()}
    base = dist.base_dist
    if hasattr(base, "concentration1"):
        return {"a": base.concentration1.numpy(), "b": base.concentration0.numpy()}
    if hasattr(base, "mixture_distribution"):
        modes = base.component_distribution.base_dist
        return {
            "weight": base.mixture_distribution.probs.numpy(),
            "mean": modes.loc.numpy(),
            "std": modes.scale.numpy(),
        }
    return {"mean": base.loc.numpy(), "std": base.scale.numpy()}


def compute(case: Case) -> dict[str, Any]:
    """Compute states, action distributions and values of a batch of windows, at once and step by step."""
    import torch
    from amago.agent import DiscreteLikeContinuous
    from torch.nn import functional as F

    agent, config = make_agent(case)
    kind, size = case.action
    tokens = draw_tokens(case)
    observation = {name: torch.from_numpy(value) for name, value in tokens["observation"].items()}
    taken = torch.from_numpy(tokens["action"])
    action = (F.one_hot(taken.long(), size) if kind == "discrete" else taken).float()
    previous = action.clone()
    previous[:, 0] = 0
    rl2 = torch.cat((torch.from_numpy(tokens["reward"])[..., None], previous), -1)
    time = torch.arange(LENGTH).expand(BATCH, -1)[..., None]
    with torch.no_grad():
        states, _ = agent.get_state_embedding(observation, rl2, time)
        dist = agent.actor(states, straight_from_obs={})
        actions = action[:, :, None].expand(-1, -1, len(agent.gammas), -1)[None]
        values = agent.critics(states, actions)
        if case.agent == "MultiTaskAgent":
            values = agent.critics.bin_dist_to_raw_vals(values)
            dist = DiscreteLikeContinuous(dist) if kind == "discrete" else dist
        else:
            values = agent.popart(values, normalized=False)
        hidden = agent.init_hidden_state(BATCH, torch.device("cpu"))
        stepped = []
        for t in range(LENGTH):
            now = {name: value[:, t : t + 1] for name, value in observation.items()}
            state, hidden = agent.get_state_embedding(now, rl2[:, t : t + 1], time[:, t : t + 1], hidden)
            stepped.append(agent.actor(state, straight_from_obs={}))
    acting = [describe_policy(each, kind) for each in stepped]
    found: dict[str, Any] = {"states": states.numpy(), "values": values[0, ..., 0].numpy()}
    found |= {f"policy_{name}": value for name, value in describe_policy(dist, kind).items()}
    for name in acting[0]:
        found[f"acting_{name}"] = np.concatenate([each[name][:, :, -1] for each in acting], 1)
    shapes = {name: list(tensor.shape) for name, tensor in agent.state_dict().items()}
    return found | {"shapes": json.dumps(shapes), "config": config}


def main() -> None:
    import_mamba()
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        np.savez_compressed(GOLDEN / f"{name}.npz", **compute(CASES[name]))


if __name__ == "__main__":
    main()
