"""Conversion of requests, in JSON or packed, to stored form. ValueError names the value that does not fit.

A packed request is the length of a JSON object (4 bytes, little-endian), the object, and the observation: the arrays of
its columns, in order, one after another, little-endian and in C order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from pipelines.lake.spaces import LENGTH, Box, Ragged, Space, Spaces, convert_to_stored

_LARGEST = 3.4e38  # below the largest float32


def parse(text: bytes | str) -> dict[str, Any]:
    """Parse the JSON object in `text`. ValueError for anything else, numbers that are not finite included."""
    found = orjson.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def unpack(content: bytes) -> dict[str, Any]:
    """Parse a packed request: its JSON object, with the arrays as `observation`, a memoryview. ValueError otherwise."""
    length = int.from_bytes(content[:4], "little")
    if len(content) < 4 + length:
        raise ValueError(f"its object has {length:,} bytes, and only {max(len(content) - 4, 0):,} follow")
    found = parse(content[4 : 4 + length])
    if "observation" in found:
        raise ValueError("its observation follows the object")
    return found | {"observation": memoryview(content)[4 + length :]}


class Observations:
    """Converter of observations to the columns of `spaces`."""

    def __init__(self, spaces: Spaces) -> None:
        names = spaces.observation
        lengths = {f"{name}.{LENGTH}" for name, space in names.items() if isinstance(space, Ragged)}
        self.columns = {name: space for name, space in names.items() if name not in lengths}

    def one(self, value: Any) -> dict[str, np.ndarray]:
        """Convert one observation to columns (1, ...)."""
        return self._unpack(value, 1) if isinstance(value, memoryview) else self._convert(value, None)

    def many(self, value: Any, count: int) -> dict[str, np.ndarray]:
        """Convert a batch to columns (count, ...): each array of the observation has one more axis, the first."""
        return self._unpack(value, count) if isinstance(value, memoryview) else self._convert(value, count)

    def _unpack(self, content: memoryview, count: int) -> dict[str, np.ndarray]:
        ragged = [name for name, space in self.columns.items() if isinstance(space, Ragged)]
        if ragged:
            raise ValueError(f"'{ragged[0]}' has any length: send this policy's observations as JSON")
        sizes = {name: count * math.prod(space.shape) for name, space in self.columns.items()}
        kinds = {name: np.dtype(space.dtype).newbyteorder("<") for name, space in self.columns.items()}
        wanted = sum(size * kinds[name].itemsize for name, size in sizes.items())
        if len(content) != wanted:
            raise ValueError(f"the observation has {len(content):,} bytes, not {wanted:,}")
        found, place = {}, 0
        for name, space in self.columns.items():
            given = np.frombuffer(content, kinds[name], sizes[name], place).reshape(count, *space.shape)
            place += given.nbytes
            try:
                found[name] = _array(given, space, count)
            except ValueError as error:
                raise ValueError(f"observation '{name}': {str(error)[:200]}") from None
        return found

    def _convert(self, value: Any, count: int | None) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, space in self.columns.items():
            path = name.split(".")[1:]
            label = f"observation '{'.'.join(path)}'" if path else "the observation"
            leaf = value
            for part in path:
                if isinstance(leaf, Mapping) and part in leaf:
                    leaf = leaf[part]
                elif isinstance(leaf, list) and part.isdecimal() and int(part) < len(leaf):
                    leaf = leaf[int(part)]
                else:
                    raise ValueError(f"{label} is missing")
            try:
                if isinstance(space, Ragged):
                    rows = [leaf] if count is None else leaf
                    if not isinstance(rows, list) or len(rows) != (count or 1):
                        raise ValueError(f"it is not a list of {count}")
                    padded = [space.pad(row) for row in rows]
                    found[name] = np.stack([row for row, _ in padded])
                    found[f"{name}.{LENGTH}"] = np.array([length for _, length in padded], np.int32)
                else:
                    found[name] = _array(leaf, space, count)
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{label}: {str(error)[:200]}") from None
        return found


def rewards(value: Any, count: int) -> np.ndarray:
    """Convert rewards to (count,): a list, or a number if `count` is 1."""
    if type(value) in (int, float) and count == 1 and abs(value) < _LARGEST:  # as most are: without NumPy's checks
        return np.array([value], np.float32)
    try:
        return _array(value if isinstance(value, list) else [value], Box(shape=()), count)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"the reward: {str(error)[:200]}") from None


def _array(value: Any, space: Space, count: int | None) -> np.ndarray:
    given = np.asarray(value)
    if given.dtype.kind not in "biuf":
        raise ValueError("it is not an array of numbers")
    if count is None:
        given = given[None]
    shape = (len(given) if count is None else count, *space.shape)
    if given.shape != shape:
        raise ValueError(f"its shape is {list(given.shape[1:])}, not {list(space.shape)}" if count is None else
                         f"its shape is {list(given.shape)}, not {list(shape)}")  # fmt: skip
    return convert_to_stored(given, space, shape[:1])
