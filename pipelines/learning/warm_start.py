"""Giving an agent the weights of another one, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipelines.config.settings import InitSettings
from pipelines.errors import UsageError
from pipelines.learning.agent import Agent

_MOST_LISTED = 12
# Names of an agent's tensors begin with these. The actor's come before those of all heads.
_PARTS: tuple[tuple[str, str], ...] = (
    ("timestep", "timestep."),
    ("sequence", "sequence."),
    ("auxiliary", "auxiliary."),
    ("actor", "heads.actor."),
    ("actor", "temperature."),
    ("critics", "heads."),
    ("critics", "popart."),
    ("critics", "advantage_scale."),
)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What was taken from the source: numbers of parameters, and a line for every tensor that was not."""

    taken: int
    total: int
    kept: tuple[str, ...]


@torch.no_grad()
def transfer(agent: Agent, weights: Mapping[str, torch.Tensor], settings: InitSettings) -> Transfer:
    """Copy the chosen parts of `weights`, those that another agent acts with, into `agent`; target heads become copies
    of its heads.

    Statistics belong to parts: of inputs to "timestep", of values to "critics". Critics that are not copied begin with
    random weights and no statistics.

    Raises:
        UsageError: a tensor of these parts is missing or has another shape, and `settings.strict`; every one is listed.
    """
    differing: list[str] = []
    taken = total = 0
    for name, own in agent.state_dict().items():
        part = next((part for part, prefix in _PARTS if name.startswith(prefix)), None)
        if part is None:  # target heads
            continue
        size = own.numel() if own.is_floating_point() else 0
        total += size
        if part not in settings.parts:
            continue
        given = weights.get(name)
        if given is None or given.shape != own.shape or given.dtype != own.dtype:
            # An agent that only acts has no scale of advantages and no weight of its entropy: they are found again.
            if given is not None or not name.startswith(("advantage_scale.", "temperature.")):
                differing.append(f"{name}: {_describe_shape(own)} here, {_describe_shape(given)} in the source")
            continue
        own.copy_(given)
        taken += size
    if differing and settings.strict:
        more = len(differing) - _MOST_LISTED
        problems = (*differing[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else ()))
        raise UsageError(
            f"the network differs from that of '{settings.source}'",
            hint="leave the size and [agent] to the source, choose init.parts, or take what fits: init.strict=false",
            problems=problems,
        )
    if agent.target_heads is not None:
        agent.target_heads.load_state_dict(agent.heads.state_dict())
    return Transfer(taken=taken, total=total, kept=tuple(differing))


def _describe_shape(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else " x ".join(map(str, tensor.shape)) or "1"
