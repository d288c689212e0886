"""AdamW over the trainable parameters, or Muon for the matrices of the sequence encoder's blocks; weight decay on
kernels alone; the schedule of the rate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.config.settings import TrainSettings
from pipelines.nets.sequence import SequenceEncoder
from pipelines.nets.transformer import LearnedTable
from pipelines.training.sharding import NO_SHARDS, Shards

_KERNELS = ("weight", "taps")  # how the networks name what multiplies activations
_NOT_KERNELS = (nn.Embedding, LearnedTable, nn.LayerNorm, nn.RMSNorm)  # whose `weight` is a table, or a gain


_MOMENTUM = 0.95  # of Muon
_QUINTIC = (3.4445, -4.7750, 2.0315)  # a polynomial that brings singular values of (0, 1] near 1 in five turns
_STEP_OF_ADAM = 0.2  # its usual root mean square, in learning rates


class ScaledAdamW(torch.optim.AdamW):
    """AdamW whose kernel divides gradients by a number as it reads them; `clip_grads_with_norm_` would pass over them
    once more."""

    grad_scale: Tensor | None = None  # torch's name for it


class Muon(ScaledAdamW):
    """Muon (Jordan et al., 2024) for the matrices of the last group, AdamW for the other groups.

    A matrix moves by its momentum made orthogonal, so that all directions of its inputs change as much, and as far as
    AdamW would usually move it (Liu et al., 2025, arXiv 2502.16982, section 2.2): both share one learning rate.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        *others, matrices = self.param_groups
        self._move_matrices(matrices)
        self.param_groups = others
        try:
            return super().step(closure)
        finally:
            self.param_groups = [*others, matrices]

    def _move_matrices(self, group: dict[str, Any]) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        moved = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: tuple(p.shape))
        for shape, same in itertools.groupby(moved, key=lambda p: p.shape):  # a batch of products for each shape
            parameters = list(same)
            grads = torch.stack([parameter.grad for parameter in parameters])
            if self.grad_scale is not None:
                grads /= self.grad_scale
            for each in parameters:
                if not self.state[each]:  # torch expects the count of steps in every parameter's state
                    self.state[each].update(step=torch.zeros((), device=each.device), momentum=torch.zeros_like(each))
            states = [self.state[each] for each in parameters]
            momenta = [state["momentum"] for state in states]
            torch._foreach_add_([state["step"] for state in states], 1)
            torch._foreach_lerp_(momenta, [*grads], 1 - _MOMENTUM)
            steps = orthogonalize(grads.lerp_(torch.stack(momenta), _MOMENTUM)) * (-_STEP_OF_ADAM * max(shape) ** 0.5)
            torch._foreach_mul_(parameters, 1 - rate * decay)
            torch._foreach_add_(parameters, [*(steps * rate)])


def orthogonalize(x_NIO: Tensor) -> Tensor:
    """Bring the singular values of matrices near 1 (very small ones less near) by five turns of Newton and Schulz."""
    is_tall = x_NIO.size(-2) > x_NIO.size(-1)
    x_NRC = x_NIO.mT if is_tall else x_NIO
    x_NRC = x_NRC / (x_NRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    first, third, fifth = _QUINTIC
    for _ in range(5):
        square_NRR = torch.bmm(x_NRC, x_NRC.mT)
        factor_NRR = torch.baddbmm(square_NRR, square_NRR, square_NRR, beta=third, alpha=fifth)
        x_NRC = torch.baddbmm(x_NRC, factor_NRR, x_NRC, beta=first)
    return x_NRC.mT if is_tall else x_NRC


def make_optimizer(network: nn.Module, settings: TrainSettings, shards: Shards = NO_SHARDS) -> ScaledAdamW:
    """Fused AdamW (Loshchilov & Hutter, 2019) at the settings' rate, or Muon with it; the schedule scales the rate.

    Kernels decay. Biases, gains, norms, positions and embeddings do not: zero is not a neutral value for them.
    """
    parameters = shards.own(dict(network.named_parameters()))
    decays = (settings.weight_decay, 0.0, settings.weight_decay)
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for names, decay in zip(group_parameters(network, settings), decays, strict=False)
    ]
    kind = Muon if len(groups) == len(decays) else ScaledAdamW
    return kind(groups, lr=settings.learning_rate, fused=True)


def group_parameters(network: nn.Module, settings: TrainSettings) -> list[list[str]]:
    """List the names of the trainable parameters in the optimiser's order: those that decay, those that do not, and
    the matrices that Muon moves, if there are any, which decay, too."""
    kernels = find_decayed(network)
    matrices = find_matrices(network) if settings.optimizer == "muon" else set[str]()
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    groups = [[n for n in names if n in kernels - matrices], [n for n in names if n not in kernels]]
    return [*groups, [n for n in names if n in matrices]] if matrices else groups


def find_matrices(network: nn.Module) -> set[str]:
    """Names of the matrices in the blocks of sequence encoders, whose inputs and outputs are hidden features.

    Those that read observations or write actions and values stay with AdamW: Autoencode, which a Transformer solves by
    Muon, stayed at chance after as many updates when Muon moved these, too.
    """
    blocks = [block for each in network.modules() if isinstance(each, SequenceEncoder) for block in each.shardable()]
    inside = {id(parameter) for block in blocks for parameter in block.parameters() if parameter.dim() == 2}
    kernels = find_decayed(network)
    return {n for n, p in network.named_parameters() if id(p) in inside and n in kernels and n.endswith(".weight")}


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
            if isinstance(optimizer, Muon) and group is optimizer.param_groups[-1]:
                shapes = {"step": (), "momentum": parameter.shape}
            for name, shape in shapes.items() if state is not None else ():
                found = state.get(name)
                if not isinstance(found, torch.Tensor) or found.shape != shape or found.dtype != torch.float32:
                    raise ValueError(f"the optimiser's '{name}' of a parameter does not fit it")
