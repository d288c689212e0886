"""Figures about encoders for the log, from a forward pass on a few tokens of a batch. B batch, T time, W width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.nets.activation import ACTIVATIONS
from pipelines.nets.sequence import SequenceEncoder

WINDOWS, TOKENS = 4, 256  # maximum used
DEAD = 0.025  # share of a layer's mean activation below which a unit is dead (Sokar et al. 2023, arXiv 2302.12902)


@torch.no_grad()
def probe(
    timestep: nn.Module, sequence: SequenceEncoder, encode: Callable[[slice, slice], tuple[Tensor, Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Compute the share of dead units of both encoders, and the sequence encoder's own figures; 0-d tensors.

    `encode` returns tokens (B, T, W) of windows and places, their time (B, T), and which are valid.
    """
    with _activations(timestep) as early, _activations(sequence) as late:
        tokens_BTW, time_BT, real_BT = encode(slice(WINDOWS), slice(TOKENS))
        figures = sequence.inspect(tokens_BTW, time_BT)
    for name, found in (("timestep", early), ("sequence", late)):
        dead = [dead_units(x_BTW, real_BT) for x_BTW in found if x_BTW.dim() == 3]
        if dead:
            figures[f"dead_units_{name}"] = torch.cat(dead).float().mean()
    return figures


def dead_units(x_BTW: Tensor, real_BT: Tensor) -> Tensor:
    """Return whether each unit of a layer is dead (W,)."""
    mean_W = x_BTW[real_BT].float().abs().mean(0)
    return mean_W <= DEAD * mean_W.mean()


@contextmanager
def _activations(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of activations in `module` while the context lasts."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        found.append(output)

    kinds = tuple(ACTIVATIONS.values())
    hooks = [part.register_forward_hook(keep) for part in module.modules() if isinstance(part, kinds)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
