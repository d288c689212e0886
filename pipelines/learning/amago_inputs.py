"""Weights of AMAGO for the spaces of an agent of ours: the first layer's inputs, in our order and encoding.

AMAGO concatenates the observation's arrays by name, then the previous reward and action. A Discrete observation is a
number there and a choice in one-hot form here; images are x / 128 - 1 there and x / 255 here. Both are linear maps,
which the first layer absorbs. Padded convolutions could not absorb the second; ours, those of IMPALA, receive x / 128
- 1, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pipelines.config.amago_weights import AmagoWeights
from pipelines.config.model import AgentSettings, Route
from pipelines.errors import InputMissing, UsageError
from pipelines.files.malformed import MALFORMED, reason
from pipelines.lake.spaces import OBSERVATION, Discrete, MultiDiscrete, Ragged, Space, Spaces
from pipelines.learning.checkpoint import Checkpoint
from pipelines.nets.timestep import choose_routes

_FIRST = "timestep.body.hidden.0.weight"
_PIXELS = "timestep.image_encoders.0.convolutions.0"
_CONTEXT_LENGTH = 256  # where config.txt has none


class AmagoCheckpoint(Checkpoint):
    """Weights of AMAGO as a checkpoint for some spaces."""

    @property
    def label(self) -> str:
        return f"'{self.path}'"

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        try:
            yield
        except MALFORMED as error:
            raise InputMissing(
                f"{self.label} is of an agent for other spaces: {reason(error)}",
                hint="give the environment that it was trained in",
            ) from error


def make_checkpoint(weights: AmagoWeights, spaces: Spaces, settings: AgentSettings | None = None) -> AmagoCheckpoint:
    """Make a checkpoint to act with, or to begin with, in `spaces`; `settings` of the agent, if not those of the
    weights. UsageError where their encoder does not observe what these spaces have."""
    agent = AgentSettings.model_validate(weights.agent) if settings is None else settings
    routes = choose_routes(spaces.observation, agent.timestep.columns)
    wanted = {name: _choose_route(weights, name) for name in routes}
    differing = {name: route for name, route in wanted.items() if routes[name] != route}
    if differing and settings is None:
        timestep = agent.timestep.model_copy(update={"columns": agent.timestep.columns | differing})
        agent = agent.model_copy(update={"timestep": timestep})
    elif differing:
        name = next(iter(differing))
        own = ", ".join(f'"{each}"="{route}"' for each, route in (agent.timestep.columns | differing).items())
        raise UsageError(
            f"'{weights.path}': its agent has '{name}' as {differing[name]}, not as {routes[name]}",
            hint=f"--set 'agent.timestep.columns={{{own}}}'",
        )
    return AmagoCheckpoint(
        path=weights.path,
        record={
            "update": weights.epoch,
            "spaces": spaces.to_json(),
            "agent": agent.model_dump(mode="json"),
            "context_length": weights.context_length or _CONTEXT_LENGTH,
            "seed": 0,
        },
        weights=arrange_inputs(weights, spaces),
        average={},
    )


def arrange_inputs(weights: AmagoWeights, spaces: Spaces) -> dict[str, Tensor]:
    """Arrange the inputs of the timestep encoder; tensors whose sizes are not those of `spaces` stay as they are."""
    if isinstance(spaces.action, MultiDiscrete | Ragged):
        raise UsageError(f"'{weights.path}': AMAGO has no {type(spaces.action).__name__} actions")
    tensors = dict(weights.tensors)
    routes = {name: _choose_route(weights, name) for name in spaces.observation}
    if _FIRST not in tensors:
        images = [space for name, space in spaces.observation.items() if routes[name] == "image"]
        dtype = images[0].dtype if images else "uint8"
        if weights.agent["timestep"]["image"]["kind"] != "impala":
            return tensors | (_rescale_pixels(tensors, dtype) if images else {})
        if dtype != "uint8":
            raise UsageError(f"'{weights.path}': its IMPALAishCNN observes bytes, and '{dtype}' has no equivalent here")
        return tensors
    flat = {name: space for name, space in spaces.observation.items() if routes[name] == "flat"}
    if any(isinstance(space, Ragged) for space in flat.values()):
        raise UsageError(f"'{weights.path}': AMAGO has no observations of varying length")
    begins, end = {}, 0
    for name in sorted(flat, key=_name_theirs):
        begins[name], end = end, end + math.prod(flat[name].shape)
    inputs = tensors[_FIRST].shape[1]
    if end + 1 + spaces.action.flat_size != inputs:
        return tensors
    sources = [source for name, space in flat.items() for source in _list_sources(space, begins[name])]
    sources += [(index, math.nan) for index in range(end, inputs)]
    place, value = (torch.tensor(each) for each in zip(*sources, strict=True))
    is_choice = ~value.isnan()
    mean, square = tensors.get("timestep.norm.mean"), tensors.get("timestep.norm.square")
    first = tensors[_FIRST][:, place]
    if mean is None or square is None:
        return tensors | {_FIRST: torch.where(is_choice, first * value, first)}
    # What a choice adds to the first layer is known, so its own statistics are those that change nothing.
    deviation = (square - mean.square()).clamp_min(1e-4).sqrt()
    first = torch.where(is_choice, first * (value - mean[place]) / deviation[place], first)
    norm = {"mean": mean[place].masked_fill(is_choice, 0.0), "square": square[place].masked_fill(is_choice, 1.0)}
    return tensors | {_FIRST: first} | {f"timestep.norm.{name}": tensor for name, tensor in norm.items()}


def _choose_route(weights: AmagoWeights, name: str) -> Route:
    """Choose the route of a column by which an agent of ours observes what AMAGO's did."""
    if weights.columns is not None and _name_theirs(name) not in weights.columns:
        return "hidden"
    return "flat" if _FIRST in weights.tensors else "image"


def _rescale_pixels(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Convert the first convolution, which receives x / 128 - 1 in AMAGO; here, x / 255 of bytes and x of others."""
    weight, bias = tensors[f"{_PIXELS}.weight"], tensors[f"{_PIXELS}.bias"]
    scale = (255 if dtype == "uint8" else 1) / 128
    return {f"{_PIXELS}.weight": weight * scale, f"{_PIXELS}.bias": bias - weight.sum((1, 2, 3))}


def _name_theirs(name: str) -> str:
    """Name a column as AMAGO does, which calls a plain observation "observation"."""
    return "observation" if name == OBSERVATION else name.removeprefix(f"{OBSERVATION}.")


def _list_sources(space: Space, begin: int) -> list[tuple[int, float]]:
    """List, for each of our features of a column, the input of AMAGO that has it; and the number that this input is
    where we have a one-hot choice, else NaN."""
    if isinstance(space, Discrete):
        return [(begin, float(space.start + choice)) for choice in range(space.n)]
    if isinstance(space, MultiDiscrete):
        starts = space.start or (0,) * len(space.nvec)
        return [
            (begin + place, float(start + choice))
            for place, (n, start) in enumerate(zip(space.nvec, starts, strict=True))
            for choice in range(n)
        ]
    return [(begin + place, math.nan) for place in range(space.flat_size)]
