"""HDF5 files, opened and read so that a damaged one is told in a line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.sources.base import require

CHUNK_CACHE = 16 << 20  # of an array: a chunk that ends in the next block is not unpacked twice
_SLOTS = 10_007


def open_file(path: Path, *, cache_bytes: int = CHUNK_CACHE) -> Any:
    """The file, for reading. InputMissing if there is none, or no h5py; IntegrityError if it is damaged."""
    require("h5py", "hdf5", f"'{path}'")
    import h5py

    if not path.is_file():
        raise InputMissing(f"no file '{path}'", hint="check the path")
    try:
        return h5py.File(path, "r", rdcc_nbytes=cache_bytes, rdcc_nslots=_SLOTS)
    except PermissionError as error:
        raise InputMissing(f"cannot read '{path}': permission denied") from error
    except OSError as error:
        if not h5py.is_hdf5(path):
            raise IntegrityError(f"'{path}' is no HDF5 file", hint="fetch it again") from error
        raise _damaged(path, error) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what h5py raises over a damaged file into IntegrityError."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, EOFError) as error:
        raise _damaged(path, error) from error


def array(group: Any, name: str, *, path: Path) -> Any:
    """The dataset `name` (a path) in `group`. InputMissing if there is none; lists what there is."""
    import h5py

    found = group.get(name)
    if not isinstance(found, h5py.Dataset):
        what = "is a group, not an array" if found is not None else "is missing"
        raise InputMissing(f"'{path}': '{name}' {what}", hint=f"it has: {', '.join(sorted(group.keys())) or 'nothing'}")
    return found


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The datasets at or below `node` as ("a/b", dataset); "" for `node` itself."""
    import h5py

    if isinstance(node, h5py.Dataset):
        yield prefix, node
        return
    for name in node:
        yield from leaves(node[name], f"{prefix}/{name}" if prefix else name)


def chunk_bytes(values: Any) -> int:
    """Size of a chunk of a dataset once it is unpacked; 0 where it has none."""
    return int(np.prod(values.chunks, dtype=np.int64)) * values.dtype.itemsize if values.chunks else 0


def scalar(value: Any) -> Any:
    """A scalar of h5py as Python has it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value


def _damaged(path: Path, error: BaseException) -> IntegrityError:
    reason = str(error).strip("'\"").split("\n")[0]
    return IntegrityError(f"'{path}' is damaged: {reason[:160]}", hint="fetch or make it again")
