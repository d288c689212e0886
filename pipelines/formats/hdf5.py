"""HDF5 files, opened and read so that a damaged one is reported in a line, and one that points elsewhere is refused.

An HDF5 file can name other files of this machine, whose content would then be read as if it were the dataset's own:
external links, external storage, virtual datasets. A damaged file can also keep libhdf5 in an endless loop: see
`_require_sound_heaps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.files.malformed import reason
from pipelines.formats.base import require, require_file

CHUNK_CACHE = 16 << 20  # of an array: a chunk that ends in the next block is not unpacked twice
_SLOTS = 10_007
_HEAP = b"GCOL\x01\0\0\0"  # signature and version of a global heap
_SMALLEST_HEAP = 4096
_SEARCHED = 4 << 20  # bytes at a time
_DEEPEST = 64  # groups in groups; more is a link to a group around itself


def open_file(path: Path, *, cache_bytes: int = CHUNK_CACHE) -> Any:
    """Open the file for reading. InputMissing if there is none, no h5py, or it links to other files; IntegrityError if
    it is damaged."""
    require("h5py", "hdf5", f"'{path}'")
    import h5py

    require_file(path)
    try:
        file = h5py.File(path, "r", rdcc_nbytes=cache_bytes, rdcc_nslots=_SLOTS)
        try:
            _refuse_external_links(file, path)
            _require_sound_heaps(path, length_bytes=file.id.get_create_plist().get_sizes()[1])
        except BaseException:
            file.close()
            raise
        return file
    except PermissionError as error:
        raise InputMissing(f"cannot read '{path}': permission denied") from error
    except OSError as error:
        if not h5py.is_hdf5(path):
            raise IntegrityError(f"'{path}' is not an HDF5 file", hint="fetch it again") from error
        raise _damaged(path, error) from error


def _refuse_external_links(file: Any, path: Path) -> None:
    import h5py

    def is_external(name: bytes, info: Any) -> bytes | None:
        return name if info.type == h5py.h5l.TYPE_EXTERNAL else None

    with reading(path):
        found = file.id.links.visit(is_external, info=True)
    if found is not None:
        raise _elsewhere(path, found.decode(errors="replace"), "is a link into another file")


def _require_sound_heaps(path: Path, *, length_bytes: int) -> None:
    """Raise IntegrityError if the objects of a global heap do not end where the heap does.

    A file stores texts and other values of variable length, those of attributes included, in global heaps. libhdf5
    reads a heap object by object and adds their sizes without a check: an object of size 0 keeps it in an endless loop,
    in which it holds Python's lock, so that nothing in this process can stop it. Addresses of heaps cannot be had from
    h5py. The file is therefore searched for their signature, which costs one more sequential read. A sound file is
    refused only if it has the remains of a deleted heap, partly overwritten, in its free space.
    """
    header = _align(8 + length_bytes)  # of a heap, and of each of its objects
    size = path.stat().st_size
    # Sound heaps do not overlap. A file made of heaps in heaps would take quadratic time.
    left = size // header
    with path.open("rb") as file:
        for at in _find_all(file, _HEAP):
            file.seek(at + 8)
            end = at + int.from_bytes(file.read(length_bytes), "little")
            if not at + _SMALLEST_HEAP <= end <= size:  # libhdf5 refuses these itself
                continue
            place = at + header
            # A rest that is too short for an object is free.
            while place + header <= end:
                file.seek(place)
                head = file.read(8 + length_bytes)
                index, length = int.from_bytes(head[:2], "little"), int.from_bytes(head[8:], "little")
                # Index 0 is the free space, whose size includes its header.
                taken = header + _align(length) if index else length
                left -= 1
                if taken < header or place + taken > end or left < 0:
                    raise IntegrityError(
                        f"'{path}' is damaged: the objects of its heap at byte {at:,} do not end with it",
                        hint="fetch or make it again; if other tools can read it, copy it with h5repack",
                    )
                place += taken


def _find_all(file: BinaryIO, wanted: bytes) -> Iterator[int]:
    """Yield the places of `wanted` in a file, which the caller may move in meanwhile."""
    kept, start = b"", 0
    while True:
        file.seek(start + len(kept))
        block = kept + file.read(_SEARCHED)
        at = block.find(wanted)
        while at >= 0:
            yield start + at
            at = block.find(wanted, at + 1)
        if len(block) < len(kept) + _SEARCHED:
            return
        kept, start = block[1 - len(wanted) :], start + len(block) - len(wanted) + 1


def _align(size: int) -> int:
    return -(-size // 8) * 8


def contained(dataset: Any, path: Path) -> Any:
    """Return a dataset whose values are in this file; InputMissing for one that takes them from others."""
    if dataset.external:
        raise _elsewhere(path, dataset.name, "has its values in other files")
    if dataset.is_virtual:
        raise _elsewhere(path, dataset.name, "is virtual: its values are in other datasets")
    return dataset


def _elsewhere(path: Path, name: str, what: str) -> InputMissing:
    hint = "it could bring in any file of this machine; if you trust it, copy it into one file with h5repack or h5py"
    return InputMissing(f"'{path}': '{name}' {what}", hint=hint)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what h5py raises over a damaged file into IntegrityError."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, EOFError) as error:
        raise _damaged(path, error) from error


def array(group: Any, name: str, *, path: Path) -> Any:
    """Open the dataset `name` (a path) in `group`. InputMissing if there is none; lists what there is."""
    import h5py

    found = group.get(name)
    if found is None and _is_linked(group, name):
        raise IntegrityError(f"'{path}' is damaged: '{name}' cannot be opened", hint="fetch or make it again")
    if not isinstance(found, h5py.Dataset):
        what = "is a group, not an array" if found is not None else "is missing"
        raise InputMissing(f"'{path}': '{name}' {what}", hint=f"it has: {', '.join(sorted(group.keys())) or 'nothing'}")
    return contained(found, path)


def _is_linked(group: Any, name: str) -> bool:
    """Check whether a group lists an object that cannot be opened, which h5py takes for one that is not there."""
    import h5py

    for part in name.split("/"):
        if not isinstance(group.get(part, getlink=True), h5py.HardLink):
            return False
        group = group.get(part)
        if not isinstance(group, h5py.Group):
            break
    return group is None


def leaves(node: Any, path: Path, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the datasets at or below `node` as ("a/b", dataset); "" for `node` itself. Errors as `array`, and
    IntegrityError for endlessly nested groups.
    """
    import h5py

    if isinstance(node, h5py.Dataset):
        yield prefix, contained(node, path)
        return
    if prefix.count("/") > _DEEPEST:
        raise IntegrityError(f"'{path}': '{prefix[:60]}...' is nested without end", hint="fetch or make it again")
    for name in node:
        yield from leaves(node[name], path, f"{prefix}/{name}" if prefix else name)


def chunk_bytes(values: Any) -> int:
    """Return the unpacked size of a chunk of a dataset; 0 if it has none."""
    return int(np.prod(values.chunks, dtype=np.int64)) * values.dtype.itemsize if values.chunks else 0


def scalar(value: Any) -> Any:
    """Convert a scalar of h5py to one of Python."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value


def _damaged(path: Path, error: BaseException) -> IntegrityError:
    return IntegrityError(f"'{path}' is damaged: {reason(error)}", hint="fetch or make it again")
