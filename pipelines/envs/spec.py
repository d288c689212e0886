"""Conversion between gymnasium's spaces and the system's, and of the values that cross the boundary.

Observations: Box float -> float32 (uint8 stays; other integers -> int32; bool -> uint8); Discrete and
MultiDiscrete become 0-based int32; MultiBinary uint8; Dict and Tuple are flattened to columns `obs.a.b`,
`obs.0`. Text (any space of strings) and Sequence (of Box or Discrete) become Ragged: code points, or the members'
numbers one after another. Actions: Discrete is 0-based; a bounded Box is [-1, 1] inside and rescaled linearly, an
unbounded one passes unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from pipelines.envs.env import rows_not_finite
from pipelines.errors import UsageError
from pipelines.lake.spaces import (
    LENGTH,
    OBSERVATION,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Ragged,
    Space,
    TooLong,
    require_sound,
)

MAX_LENGTH = 256


class ObservationCodec:
    """Writes one environment's observations into the batch's columns.

    `max_length`: numbers of a sequence, or characters of a text, where the space itself sets no limit.
    """

    def __init__(self, space: gymnasium.Space[Any], *, name: str, max_length: int = MAX_LENGTH) -> None:
        self.spaces: dict[str, Space] = {}
        self._leaves: list[_Leaf] = []
        self._ragged: list[tuple[str, tuple[Any, ...], Ragged]] = []
        self._texts: list[tuple[Any, ...]] = []
        self._name, self._max_length = name, max_length
        self._add(space, OBSERVATION, ())

    def _add(self, space: gymnasium.Space[Any], column: str, path: tuple[Any, ...]) -> None:
        if isinstance(space, gymnasium.spaces.Dict):
            for key, member in space.spaces.items():
                self._add(member, f"{column}.{key}", (*path, key))
            return
        if isinstance(space, gymnasium.spaces.Tuple):
            for index, member in enumerate(space.spaces):
                self._add(member, f"{column}.{index}", (*path, index))
            return
        where = f"environment '{self._name}': observation '{column}'"
        ragged = _convert_ragged(space, where, self._max_length)
        if ragged is not None:
            self._put(f"{column}.{LENGTH}", ragged.length_space)
            self._put(column, ragged)
            self._ragged.append((column, path, ragged))
            if _is_text(space):
                self._texts.append(path)
            return
        ours, start = _convert(space, where)
        self._put(column, ours)
        values = np.array(ours.nvec) if isinstance(ours, MultiDiscrete) else ours.n if isinstance(ours, Discrete) else 2
        self._leaves.append(_Leaf(column, path, tuple(space.shape or ()), start, values))

    def _put(self, column: str, space: Space) -> None:
        if column in self.spaces:
            raise UsageError(
                f"environment '{self._name}': two parts of the observation would be column '{column}'",
                hint="rename a key of the Dict space, by a wrapper",
            )
        self.spaces[column] = space

    def text(self, observation: Any) -> str:
        """Find the first text in `observation`; "" if it has none."""
        return str(_look_up(observation, self._texts[0])) if self._texts else ""

    def empty(self, num_envs: int) -> dict[str, np.ndarray]:
        """Make columns of `num_envs` rows, to be filled by `write`."""
        return {name: np.empty((num_envs, *space.shape), dtype=space.dtype) for name, space in self.spaces.items()}

    def write(self, observation: Any, columns: Mapping[str, np.ndarray], row: int) -> None:
        """Write `observation` to `row`. ValueError where it violates the declared space; see also `not_finite`."""
        for column, path, space in self._ragged:
            try:
                columns[column][row], columns[f"{column}.{LENGTH}"][row] = space.pad(_look_up(observation, path))
            except TooLong as error:
                raise ValueError(f"observation '{column}': {error}, as its space or env.max_length says") from error
            except ValueError as error:
                raise ValueError(f"observation '{column}': {error}") from error
        for leaf in self._leaves:
            value = np.asarray(_look_up(observation, leaf.path))
            if value.shape != leaf.shape:
                raise ValueError(f"observation '{leaf.column}' has shape {value.shape}, its space says {leaf.shape}")
            if leaf.start is not None:
                value = (value - leaf.start).reshape(columns[leaf.column].shape[1:])
                if (value < 0).any() or (value >= leaf.values).any():
                    raise ValueError(f"observation '{leaf.column}' is outside its space: {_format_values(value)}")
            target = columns[leaf.column]
            target[row] = value
            if target.dtype.kind != "f" and target.dtype != value.dtype and (target[row] != value).any():
                raise ValueError(f"observation '{leaf.column}' is not {target.dtype}: {_format_values(value)}")

    def not_finite(self, columns: Mapping[str, np.ndarray]) -> dict[int, str]:
        """Explain, by row, which observations that were written are infinite or not numbers.

        All rows are checked at once, because the check of one costs as much as a step of a quick environment.
        """
        found: dict[int, str] = {}
        for leaf in self._leaves:
            column = columns[leaf.column]
            if column.dtype.kind == "f":
                for row in rows_not_finite(column):
                    found.setdefault(row, f"observation '{leaf.column}' is not finite: {_format_values(column[row])}")
        return found


def _look_up(observation: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        observation = observation[key]
    return observation


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One array of an observation: its column, path and shape, and, unless it is a Box, the environment's first value
    and the number of values.
    """

    column: str
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    start: np.ndarray | int | None
    values: np.ndarray | int


class ActionCodec:
    """Turns the system's actions into what the environment's `step` takes."""

    def __init__(self, space: gymnasium.Space[Any], *, name: str) -> None:
        where = f"environment '{name}': action"
        if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
            raise UsageError(f"{where} space {type(space).__name__} is not supported", hint="flatten it to one space")
        self.space, start = _convert(space, where, action=True)
        self._start = 0 if start is None else start
        self._shape, self._dtype = tuple(space.shape or ()), space.dtype
        self._scale: tuple[np.ndarray, np.ndarray] | None = None
        if isinstance(space, gymnasium.spaces.Box):
            low, high = _find_bounds(space)
            self._scale = low, (high - low) / 2

    def decode(self, actions: np.ndarray) -> list[Any]:
        """Convert (N, ...) actions of the system to one action for each environment."""
        if isinstance(self.space, Discrete):
            return (np.asarray(actions) + self.space.start).tolist()
        if self._scale is not None:
            low, half = self._scale
            scaled = low + (np.asarray(actions, dtype=np.float64) + 1) * half
            whole = np.issubdtype(self._dtype, np.integer)
            return list((np.rint(scaled) if whole else scaled).astype(self._dtype))
        shaped = np.asarray(actions).reshape(-1, *self._shape)
        return list((shaped + self._start).astype(self._dtype))


def _convert(space: gymnasium.Space[Any], where: str, *, action: bool = False) -> tuple[Space, np.ndarray | int | None]:
    """Convert to the system's space, and the environment's first value (None for a Box). UsageError for a space whose
    values cannot be stored.
    """
    ours: Space
    start: np.ndarray | int | None = None
    if isinstance(space, gymnasium.spaces.Discrete):
        ours, start = Discrete(n=int(space.n), start=int(space.start)), int(space.start)
    elif isinstance(space, gymnasium.spaces.MultiDiscrete):
        firsts, start = tuple(int(first) for first in space.start.ravel()), space.start
        ours = MultiDiscrete(nvec=tuple(int(n) for n in space.nvec.ravel()), start=firsts if any(firsts) else None)
    elif isinstance(space, gymnasium.spaces.MultiBinary):
        ours, start = MultiBinary(n=int(np.prod(space.shape))), 0
    elif isinstance(space, gymnasium.spaces.Box) and action:
        low, high = (tuple(bound.ravel().tolist()) for bound in _find_bounds(space))
        native = None if np.can_cast(np.float32, space.dtype) else str(space.dtype)
        ours = Box(shape=tuple(space.shape), low=low, high=high, native=native)
    elif isinstance(space, gymnasium.spaces.Box):
        ours = Box(shape=tuple(space.shape), dtype=_choose_dtype(space.dtype))
    else:
        raise UsageError(
            f"{where} space {type(space).__name__} is not supported",
            hint="supported: Box, Discrete, MultiDiscrete, MultiBinary; for observations also Dict, Tuple, Text, and "
            "Sequence of Box or Discrete",
        )
    try:
        require_sound(ours)
    except ValueError as error:
        raise UsageError(f"{where} space {space}: {error}", hint="change the space by a wrapper") from error
    return ours, start


def _is_text(space: gymnasium.Space[Any]) -> bool:
    return space.dtype is not None and space.dtype.kind == "U"


def _convert_ragged(space: gymnasium.Space[Any], where: str, max_length: int) -> Ragged | None:
    """Convert a space whose values vary in length; None for any other."""
    if _is_text(space):
        highest = max(map(ord, getattr(space, "characters", ""))) if getattr(space, "characters", "") else 0x10FFFF
        length = int(getattr(space, "max_length", max_length))
        dtype = "uint8" if highest < 256 else "int32"
        return Ragged(max_length=max(length, 1), dtype=dtype, scale=float(min(highest, 255)), text=True)
    if not isinstance(space, gymnasium.spaces.Sequence):
        return None
    member = space.feature_space
    if isinstance(member, gymnasium.spaces.Discrete):
        last = int(member.start + member.n - 1)
        return Ragged(max_length=max_length, dtype="int32", scale=float(max(abs(int(member.start)), abs(last), 1)))
    if isinstance(member, gymnasium.spaces.Box):
        return Ragged(max_length=max_length, dtype=_choose_dtype(member.dtype))
    raise UsageError(
        f"{where} space Sequence of {type(member).__name__} is not supported",
        hint="supported: Sequence of Box or Discrete",
    )


def _find_bounds(space: gymnasium.spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Find the float64 bounds that [-1, 1] is rescaled to. What has one bound reaches 2 from it, what has none from -1
    to 1."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    least = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high - 2.0, -1.0))
    return least, np.where(np.isfinite(high), high, least + 2.0)


def _choose_dtype(dtype: np.dtype) -> str:
    if dtype == np.uint8 or dtype == np.bool_:
        return "uint8"
    return "int32" if np.issubdtype(dtype, np.integer) else "float32"


def _format_values(value: np.ndarray) -> str:
    return np.array2string(np.asarray(value), threshold=8, precision=4)
