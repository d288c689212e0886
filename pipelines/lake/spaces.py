"""Space descriptions for every layer: no gymnasium, no torch, plain data that JSON preserves.

An observation is a flat mapping from column name to space: `{"obs": Box(...)}` for a plain observation, `{"obs.goal":
..., "obs.image": ...}` for a Dict. Actions are one space. Inside the system a Discrete action is 0-based, and a Box
action is in [-1, 1]; `low`/`high` of an action Box are the environment's own bounds, used only where the environment is
stepped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipelines.errors import UsageError

OBSERVATION = "obs"
_MOST_CHOICES = 1 << 24
"""Largest size of an axis, and number of choices of a discrete value, that a network could have inputs for."""
MOST_BYTES = 64 << 20
"""Largest value of one step."""
_MOST_START = 2**31 - 1
LENGTH = "length"  # the column "NAME.length" belongs to the ragged column NAME


@dataclass(frozen=True, kw_only=True)
class Box:
    """An array of `shape` and numpy `dtype`. Of actions only: `low`/`high`, flat bounds, None if unbounded; `native`,
    the environment's own dtype if it does not take floats.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    native: str | None = None

    @property
    def is_image(self) -> bool:
        """uint8 and three axes (height, width, channels)."""
        return self.dtype == "uint8" and len(self.shape) == 3

    @property
    def flat_size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Discrete:
    """One of `n` values, 0-based inside the system; `start` is the environment's first value."""

    n: int
    start: int = 0
    shape: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[str] = "int32"

    @property
    def flat_size(self) -> int:
        return self.n


@dataclass(frozen=True, kw_only=True)
class MultiDiscrete:
    """A vector of discrete values, `nvec[i]` choices at index i, 0-based inside the system; `start` are the
    environment's first values (None: all 0).
    """

    nvec: tuple[int, ...]
    start: tuple[int, ...] | None = None
    dtype: ClassVar[str] = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    @property
    def flat_size(self) -> int:
        return sum(self.nvec)


@dataclass(frozen=True, kw_only=True)
class MultiBinary:
    """A vector of `n` bits."""

    n: int
    dtype: ClassVar[str] = "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)

    @property
    def flat_size(self) -> int:
        return self.n


class TooLong(ValueError):
    """A sequence exceeds its maximum length."""


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """A text (code points) or a sequence of up to `max_length` numbers of numpy `dtype`, padded with zeros.

    Its length is in a separate column, `NAME.length`, of the space `length_space`. `scale` is the magnitude that a
    network maps to 1; `text`: the numbers are code points.
    """

    max_length: int
    dtype: str = "float32"
    scale: float = 1.0
    text: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.max_length,)

    @property
    def flat_size(self) -> int:
        return self.max_length

    @property
    def length_space(self) -> Discrete:
        """The space of the column of lengths."""
        return Discrete(n=self.max_length + 1)

    def pad(self, value: Any) -> tuple[np.ndarray, int]:
        """Return a text, or a sequence of numbers or of arrays, as (max_length,) and its length.

        TooLong, or ValueError if its numbers do not fit `dtype`.
        """
        given: np.ndarray
        if isinstance(value, str):
            given = np.frombuffer(value.encode("utf-32-le", "surrogatepass"), np.uint32)
        else:
            parts = [np.ravel(part) for part in value]
            given = np.concatenate(parts) if parts else np.zeros(0)
        if len(given) > self.max_length:
            raise TooLong(f"it has a length of {len(given)}, more than {self.max_length}")
        stored = np.zeros(self.max_length, dtype=self.dtype)
        if given.dtype.kind not in "biuf":
            raise ValueError(f"it holds {given.dtype}, not numbers")
        with np.errstate(all="ignore"):
            stored[: len(given)] = given
        exact = stored.dtype.kind == "f" or np.array_equal(stored[: len(given)], given)
        if not exact or not np.isfinite(stored).all():
            raise ValueError(f"it holds a number that is not {self.dtype}")
        return stored, len(given)


Space = Box | Discrete | MultiDiscrete | MultiBinary | Ragged
_KINDS: dict[str, type] = {
    "box": Box,
    "discrete": Discrete,
    "multi_discrete": MultiDiscrete,
    "multi_binary": MultiBinary,
    "ragged": Ragged,
}


@dataclass(frozen=True, kw_only=True)
class Spaces:
    """An environment's observation (column name -> space, in order) and action spaces."""

    observation: Mapping[str, Space]
    action: Space

    def with_column(self, name: str, space: Space) -> Spaces:
        """Return a copy with one observation column more: in alphabetical order if the others are, as those of
        gymnasium's Dict, else at the end."""
        names = list(self.observation)
        added = {**self.observation, name: space}
        return Spaces(observation=dict(sorted(added.items())) if names == sorted(names) else added, action=self.action)

    def covers(self, other: Spaces) -> bool:
        """Check whether these have all that the other ones have, and perhaps more observation columns."""
        return self.action == other.action and self.observation.items() >= other.observation.items()

    def to_json(self) -> dict[str, Any]:
        return {
            "observation": [[name, space_to_json(space)] for name, space in self.observation.items()],
            "action": space_to_json(self.action),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spaces:
        observation = {name: space_from_json(space) for name, space in data["observation"]}
        if not all(isinstance(name, str) for name in observation):
            raise ValueError("a column's name is not a text")
        return cls(observation=observation, action=space_from_json(data["action"]))


def find_widest(found: Sequence[Spaces]) -> Spaces | None:
    """Find those of some spaces that cover all of them; None if none do."""
    widest = max(found, key=lambda spaces: len(spaces.observation), default=None)
    return widest if widest is not None and all(widest.covers(spaces) for spaces in found) else None


_MOST_GRID_POINTS = 1024  # each is an output of the policy and of every critic


def make_grid(space: Space, points: int) -> np.ndarray:
    """Make a grid over a Box with `points` values in each dimension, evenly spaced from -1 to 1, the last dimension
    varying fastest: (points ** size, *shape) float32. UsageError for other spaces, and where it has too many points.
    """
    if not isinstance(space, Box) or points**space.flat_size > _MOST_GRID_POINTS:
        what = f"a Box of {space.flat_size} dimensions" if isinstance(space, Box) else f"{type(space).__name__} actions"
        raise UsageError(
            f"a grid of {points} points in each dimension is not for {what}",
            hint=f"use another agent.actor.distribution, or fewer agent.actor.grid_points: {_MOST_GRID_POINTS} in all",
        )
    axes = np.meshgrid(*[np.linspace(-1, 1, points, dtype=np.float32)] * space.flat_size, indexing="ij")
    return np.stack(axes, -1).reshape(-1, *space.shape)


def space_to_json(space: Space) -> dict[str, Any]:
    """Encode a space as a JSON object with `kind` and its fields."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(space, cls))
    fields = {name: value for name, value in vars(space).items() if value is not None}
    return {"kind": kind} | {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}


def space_from_json(data: Mapping[str, Any]) -> Space:
    """Invert `space_to_json`."""
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "kind"}
    space: Space = _KINDS[data["kind"]](**fields)
    require_sound(space)
    return space


_TYPE = re.compile(r"([a-z]+\d*)(?:\[([\d, ]+)\])?")


def parse_type(text: str) -> Space:
    """Read the space of an observation column from text: float32, uint8[8,8,3], discrete[5] (one of 5 choices),
    discrete[3,4] (a vector of choices) or binary[4]. ValueError for another text."""
    match = _TYPE.fullmatch(text.strip())
    sizes = tuple(int(size) for size in match[2].split(",")) if match is not None and match[2] else ()
    try:
        if match is None:
            raise ValueError(f"'{text}' is not a type")
        space: Space
        if match[1] == "discrete" and sizes:
            space = Discrete(n=sizes[0]) if len(sizes) == 1 else MultiDiscrete(nvec=sizes)
        elif match[1] == "binary" and len(sizes) == 1:
            space = MultiBinary(n=sizes[0])
        else:
            space = Box(shape=sizes, dtype=np.dtype(match[1]).name)
        require_sound(space)
    except TypeError as error:
        raise ValueError(f"'{text}' is not a type") from error
    return space


def format_type(space: Space) -> str | None:
    """Write the text that `parse_type` reads; None if there is none."""
    text = None
    if isinstance(space, Box):
        text = space.dtype + (f"[{','.join(map(str, space.shape))}]" if space.shape else "")
    elif isinstance(space, Discrete):
        text = f"discrete[{space.n}]"
    elif isinstance(space, MultiDiscrete):
        text = f"discrete[{','.join(map(str, space.nvec))}]"
    elif isinstance(space, MultiBinary):
        text = f"binary[{space.n}]"
    return text if text is not None and parse_type(text) == space else None


def require_sound(space: Space) -> None:
    """Raise ValueError for a space that has no values, or whose values are too large to store."""
    whole = [*space.shape]
    if isinstance(space, Discrete | MultiBinary):
        whole.append(space.n)
    elif isinstance(space, MultiDiscrete):
        whole += space.nvec
    for number in whole:
        if type(number) is not int or not 1 <= number <= _MOST_CHOICES:
            raise ValueError(f"a size or number of choices is {number!r}, from 1 to {_MOST_CHOICES:,} can be stored")
    if np.dtype(space.dtype).kind not in "biuf":
        raise ValueError(f"its dtype {space.dtype!r} is not numeric")
    size = np.dtype(space.dtype).itemsize * math.prod(space.shape)
    if size > MOST_BYTES:
        raise ValueError(f"a value has {size >> 20:,} MiB, up to {MOST_BYTES >> 20} can be stored")
    bounds = (space.low, space.high) if isinstance(space, Box) else ()
    for bound in bounds:
        if bound is not None and (len(bound) != space.flat_size or not np.isfinite(np.array(bound, dtype=float)).all()):
            raise ValueError("its bounds are not a number for each value")
    starts = space.start if isinstance(space, MultiDiscrete) else (getattr(space, "start", 0),)
    if starts is not None and not all(type(start) is int and abs(start) <= _MOST_START for start in starts):
        raise ValueError("its first value is not a whole number of 32 bits")
    if isinstance(space, MultiDiscrete) and space.start is not None and len(space.start) != len(space.nvec):
        raise ValueError("it lacks a first value for each index")
    if isinstance(space, Ragged) and not (np.isfinite(float(space.scale)) and space.scale > 0):
        raise ValueError(f"its scale is {space.scale!r}")
    if isinstance(space, Ragged) and type(space.text) is not bool:
        raise ValueError(f"its text is {space.text!r}, neither true nor false")


def zeros(space: Space, leading: tuple[int, ...] = ()) -> np.ndarray:
    """Return zeros in the form in which values of `space` are stored."""
    return np.zeros((*leading, *space.shape), dtype=space.dtype)


def require_values(values: np.ndarray, space: Space, leading: tuple[int, ...] = ()) -> None:
    """Raise ValueError unless `values` have the shape, the dtype and the range of `space` in stored form; numbers of a
    Box must be finite."""
    if values.shape != (*leading, *space.shape):
        raise ValueError(f"its shape is {values.shape[len(leading) :]}, not {space.shape}")
    if values.dtype != np.dtype(space.dtype):
        raise ValueError(f"its dtype is {values.dtype}, not {space.dtype}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("it has a number that is not finite")
    choices: Any = None
    if isinstance(space, Discrete | MultiDiscrete):
        choices = space.n if isinstance(space, Discrete) else np.asarray(space.nvec)
    elif isinstance(space, MultiBinary):
        choices = 2
    if choices is not None and ((values < 0) | (values >= choices)).any():
        raise ValueError(f"it has a choice outside of 0 to {np.max(choices) - 1}")


def convert_to_stored(given: np.ndarray, space: Space, leading: tuple[int, ...] = ()) -> np.ndarray:
    """Convert an environment's numbers to stored form. ValueError if they are not of the space: by a cast, an image
    that was scaled to [0, 1] would be black, and an action that follows from it would look as good as any."""
    if isinstance(space, Discrete | MultiDiscrete) and space.start is not None:
        given = given - np.asarray(space.start)
    with np.errstate(all="ignore"):
        stored = given.astype(space.dtype)
    if stored.dtype.kind in "biu" and not np.array_equal(stored, given):
        raise ValueError(f"it has a number that is not {space.dtype}")
    require_values(stored, space, leading)
    return stored
