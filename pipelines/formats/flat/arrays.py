"""Arrays of a flat file, of HDF5 or NPZ, and slices of their columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.formats import hdf5
from pipelines.formats.archive import NpzArchive

_SLICE = re.compile(r"(?P<name>[^\[\]]+)\[(?P<start>\d*):(?P<stop>\d*)\]")


class _NpzArrays:
    """An NPZ file behind the part of h5py's interface that flat files need; an array is read whole, once."""

    def __init__(self, path: Path) -> None:
        self.attrs = dict[str, Any]()
        self._archive = NpzArchive(path)
        self._read: dict[str, _NpzArray] = {}

    def close(self) -> None:
        self._archive.close()

    def keys(self) -> list[str]:
        """List the names of the arrays."""
        return self._archive.names()

    def __contains__(self, name: str) -> bool:
        return name in self._archive

    def __getitem__(self, name: str) -> _NpzArray:
        if name not in self._read:
            self._read[name] = _NpzArray(name, self._archive[name])
        return self._read[name]


class _NpzArray:
    """An array in memory behind the interface of h5py's datasets."""

    chunks = None

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name, self._values = name, values
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self) -> int:
        return len(self._values) if self.shape else 0

    def __getitem__(self, rows: Any) -> Any:
        return self._values[rows]


class Columns:
    """Columns [start, stop) of an array of vectors, read when they are asked for."""

    def __init__(self, base: Any, start: int, stop: int) -> None:
        self._base, self._columns = base, slice(start, stop)
        self.name, self.dtype, self.chunks = f"{base.name}[{start}:{stop}]", base.dtype, base.chunks
        self.shape = (len(base), stop - start)

    def __len__(self) -> int:
        return len(self._base)

    def __getitem__(self, rows: Any) -> Any:
        return self._base[:, self._columns] if isinstance(rows, tuple) else self._base[rows, self._columns]


def open_flat(path: Path, *, cache_bytes: int) -> Any:
    """Open an NPZ or HDF5 file for reading. Errors as `hdf5.open_file`."""
    if path.suffix == ".npz":
        return _NpzArrays(path)
    return hdf5.open_file(path, cache_bytes=cache_bytes)


def open_array(file: Any, text: str, *, path: Path) -> Any:
    """Open the array `NAME`, or the columns `NAME[START:STOP]` of one. InputMissing if there is none."""
    name, bounds = split_slice(text)
    if isinstance(file, _NpzArrays):
        if name not in file:
            raise InputMissing(f"'{path}': '{name}' is missing", hint=f"it has: {', '.join(sorted(file.keys()))}")
        values: Any = file[name]
    else:
        values = hdf5.open_array(file, name, path=path)
    return values if bounds is None else Columns(values, *find_slice(bounds, values.shape, text, what=f"'{path}'"))


def split_slice(text: str) -> tuple[str, tuple[str, str] | None]:
    """Split `NAME[START:STOP]` into the name and the bounds; None for `NAME` alone."""
    found = _SLICE.fullmatch(text)
    return (found["name"], (found["start"], found["stop"])) if found else (text, None)


def find_slice(bounds: tuple[str, str], shape: tuple[int, ...], text: str, *, what: str) -> tuple[int, int]:
    """Convert bounds to numbers. InputMissing unless arrays of this shape have such columns; `text` names them."""
    width = shape[1] if len(shape) == 2 else 0
    start, stop = int(bounds[0] or 0), int(bounds[1] or width)
    if not 0 <= start < stop <= width:
        size = f"{width} columns" if width else f"the shape {shape}"
        name = text.partition("[")[0]
        raise InputMissing(f"{what}: there is no '{text}': '{name}' has {size}", hint="NAME[START:STOP], from 0")
    return start, stop


def walk_leaves(file: Any, name: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the arrays at or below `name`, as `hdf5.walk_leaves`."""
    if isinstance(file, _NpzArrays):
        yield "", file[name]
    else:
        yield from hdf5.walk_leaves(file[name], path)
