"""AdamW over the trainable parameters, with weight decay on kernels alone, and the schedule of its rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipelines.config.settings import TrainSettings
from pipelines.nets.transformer import LearnedTable
from pipelines.training.sharding import NO_SHARDS, Shards

_KERNELS = ("weight", "taps")  # how the networks name what multiplies activations
_NOT_KERNELS = (nn.Embedding, LearnedTable, nn.LayerNorm, nn.RMSNorm)  # whose `weight` is a table, or a gain


class ScaledAdamW(torch.optim.AdamW):
    """AdamW whose kernel divides gradients by a number as it reads them; `clip_grads_with_norm_` would pass over them
    once more."""

    grad_scale: torch.Tensor | None = None  # torch's name for it


def make_optimizer(network: nn.Module, settings: TrainSettings, shards: Shards = NO_SHARDS) -> ScaledAdamW:
    """Fused AdamW (Loshchilov & Hutter, 2019) at the settings' rate; the schedule scales it.

    Kernels decay. Biases, gains, norms, positions and embeddings do not: zero is not a neutral value for them.
    """
    parameters = shards.own(dict(network.named_parameters()))
    kernels, others = group_parameters(network)
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in kernels]},
        {"params": [parameters[name] for name in others], "weight_decay": 0.0},
    ]
    return ScaledAdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)


def group_parameters(network: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the trainable parameters that decay and of those that do not, in the optimiser's order."""
    kernels = find_decayed(network)
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    return [name for name in names if name in kernels], [name for name in names if name not in kernels]


def find_decayed(network: nn.Module) -> set[str]:
    """Names of the trainable parameters that weight decay shrinks: matrices and convolutions, by role.

    The role is the parameter's own name (its list's name within a `ParameterList`), because the shape does not show it:
    the biases of an ensemble are (members, 1, outputs), and a table of positions is a matrix.
    """
    kernels = set()
    for name, parameter in network.named_parameters():
        path = name.split(".")
        while path[-1].isdigit():
            path.pop()
        owner = network.get_submodule(".".join(path[:-1]))
        is_kernel = any(word in path[-1] for word in _KERNELS) and not isinstance(owner, _NOT_KERNELS)
        if parameter.requires_grad and parameter.dim() >= 2 and is_kernel:
            kernels.add(name)
    return kernels


def learning_rate(update: int, settings: TrainSettings) -> float:
    """Rate of the `update`-th update (0-based): linear warm-up, then constant or linear decay to a tenth."""
    scale = 1.0
    if update < settings.warmup_steps:
        scale = (update + 1) / settings.warmup_steps
    elif settings.decay_steps > settings.warmup_steps:
        progress = (update - settings.warmup_steps) / (settings.decay_steps - settings.warmup_steps)
        scale = 1.0 - 0.9 * min(progress, 1.0)
    return settings.learning_rate * scale


def compute_entropy_share(update: int, settings: TrainSettings) -> float:
    """Share of the entropy bonus that is left at the `update`-th update (0-based): it falls linearly to nothing."""
    return max(0.0, 1 - update / settings.entropy_decay_steps) if settings.entropy_decay_steps else 1.0


def restore(optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]) -> None:
    """Load the state of parameters; options stay as they were made. ValueError unless every state fits its parameter.

    PyTorch itself takes any state, and fails in the next step.
    """
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(stored))
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
        for parameter in group["params"]:
            state: Any = optimizer.state.get(parameter)
            shapes = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
            for name, shape in shapes.items() if state is not None else ():
                found = state.get(name)
                if not isinstance(found, torch.Tensor) or found.shape != shape or found.dtype != torch.float32:
                    raise ValueError(f"the optimiser's '{name}' of a parameter does not fit it")
