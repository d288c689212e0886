"""Minari's spaces (gymnasium's, as JSON) as ours, and how their values are laid into columns.

Columns are those that the environment itself would have: Dict and Tuple are flattened to `obs.a.b`, `obs.0`; texts
and sequences are padded, with their length in a column beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.formats.intake import infer_space
from pipelines.lake.spaces import (
    LENGTH,
    OBSERVATION,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Ragged,
    Space,
    Spaces,
)

_IMAGE_SIDE = 32  # a smaller picture is stored as it is


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A part of an observation: its column, the keys that lead to it from `root`, and whether it is stored as JPEG
    pictures.
    """

    column: str
    path: tuple[str, ...]
    space: Space
    jpeg: bool = False
    root: str = "observations"

    def pad(self, values: Sequence[Any], *, what: str) -> dict[str, np.ndarray]:
        """Pad texts or sequences, and return the rows and their lengths. InputMissing for one that does not fit."""
        assert isinstance(self.space, Ragged)
        padded = np.zeros((len(values), self.space.max_length), dtype=self.space.dtype)
        lengths = np.zeros(len(values), dtype=np.int32)
        for row, value in enumerate(values):
            try:
                padded[row], lengths[row] = self.space.pad(value)
            except ValueError as error:
                raise InputMissing(f"{what}: '{self.column}': {error}", hint="raise source.max_length") from error
        return {f"{self.column}.{LENGTH}": lengths, self.column: padded}


class SpaceReader:
    """The spaces of a dataset. InputMissing for one that is not supported."""

    def __init__(
        self, observation: Mapping[str, Any], action: Mapping[str, Any], *, what: str, jpeg: bool, max_length: int
    ) -> None:
        self._what, self._jpeg, self._max_length = what, jpeg, max_length
        self.leaves = list(self._walk(observation, OBSERVATION, ()))
        columns = [column for column, _ in self._list_columns()]
        if len(set(columns)) < len(columns):
            raise InputMissing(f"{what}: two parts of an observation would be the same column")
        self.action_jpeg = jpeg and is_image(action)
        self.spaces = Spaces(observation=dict(self._list_columns()), action=self._convert_action(action))

    def _list_columns(self) -> Iterator[tuple[str, Space]]:
        for leaf in self.leaves:
            if isinstance(leaf.space, Ragged):
                yield f"{leaf.column}.{LENGTH}", leaf.space.length_space
            yield leaf.column, leaf.space

    def _walk(self, space: Mapping[str, Any], column: str, path: tuple[str, ...]) -> Iterator[Leaf]:
        kind = space.get("type")
        if kind == "Dict":
            for key, member in space["subspaces"].items():
                yield from self._walk(member, f"{column}.{key}", (*path, key))
        elif kind == "Tuple":
            for place, member in enumerate(space["subspaces"]):
                yield from self._walk(member, f"{column}.{place}", (*path, str(place)))
        else:
            jpeg = self._jpeg and is_image(space)
            yield Leaf(column=column, path=path, space=self._convert(space, column), jpeg=jpeg)

    def _convert(self, space: Mapping[str, Any], where: str) -> Space:
        kind = space.get("type")
        if kind == "Box":
            return infer_space(space["shape"], np.dtype(space["dtype"]))
        if kind == "Discrete":
            return Discrete(n=int(space["n"]), start=int(space.get("start", 0)))
        if kind == "MultiDiscrete":
            start = _as_list(space.get("start", [0]))
            nvec = tuple(int(n) for n in _as_list(space["nvec"]))
            return MultiDiscrete(nvec=nvec, start=tuple(int(n) for n in start) if any(start) else None)
        if kind == "MultiBinary":
            return MultiBinary(n=int(np.prod(space["n"])))
        if kind == "Text":
            highest = max(map(ord, space.get("charset") or "")) if space.get("charset") else 0x10FFFF
            length = int(space.get("max_length") or self._max_length)
            dtype = "uint8" if highest < 256 else "int32"
            return Ragged(max_length=max(length, 1), dtype=dtype, scale=float(min(highest, 255)), text=True)
        raise InputMissing(
            f"{self._what}: '{where}' has the space {kind}, which is not supported",
            hint="supported: Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict or Tuple of these",
        )

    def _convert_action(self, space: Mapping[str, Any]) -> Space:
        if space.get("type") in ("Dict", "Tuple", "Text"):
            raise InputMissing(f"{self._what}: actions of the space {space['type']} are not supported")
        if space.get("type") != "Box":
            return self._convert(space, "action")
        low, high = (np.array(_as_list(space[name]), dtype=np.float64) for name in ("low", "high"))
        bounded = np.isfinite(low) & np.isfinite(high)
        dtype = np.dtype(space["dtype"])
        return Box(
            shape=tuple(space["shape"]),
            low=tuple(np.where(bounded, low, -1.0).tolist()),
            high=tuple(np.where(bounded, high, 1.0).tolist()),
            native=None if np.can_cast(np.float32, dtype) else str(dtype),
        )


def is_image(space: Mapping[str, Any]) -> bool:
    """Whether Minari may have stored values of the space as JPEG pictures: bytes, 32 x 32 or more."""
    if space.get("type") != "Box" or space.get("dtype") != "uint8" or len(space["shape"]) not in (2, 3):
        return False
    large = min(space["shape"][:2]) >= _IMAGE_SIDE
    return large and set(_as_list(space["low"])) <= {0} and set(_as_list(space["high"])) <= {255}


def _as_list(values: Any) -> list[Any]:
    return list(np.asarray(values, dtype=object).ravel()) if isinstance(values, list) else [values]
