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
from pipelines.formats.base import require_file
from pipelines.registry import require_package

CHUNK_CACHE = 16 << 20  # of an array: a chunk that ends in the next block is not unpacked twice
_SLOTS = 10_007
_HEAP = b"GCOL\x01\0\0\0"  # signature and version of a global heap
_SMALLEST_HEAP = 4096
_SEARCHED = 4 << 20  # bytes at a time
_DEEPEST = 64  # groups in groups; more is a link to a group around itself


def open_file(path: Path, *, cache_bytes: int = CHUNK_CACHE) -> Any:
    """Open the file for reading. InputMissing if there is none, no h5py, or it links to other files; IntegrityError if
    it is damaged."""
    require_package("h5py", "hdf5", f"'{path}'")
    import h5py

    require_file(path)
    try:
        file = h5py.File(path, "r", rdcc_nbytes=cache_bytes, rdcc_nslots=_SLOTS)
        try:
            with reading(path):
                external = file.id.links.visit(
                    lambda name, info: name if info.type == h5py.h5l.TYPE_EXTERNAL else None, info=True
                )
            if external is not None:
                raise _refuse(path, external.decode(errors="replace"), "is a link into another file")
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
        raise IntegrityError(f"'{path}' is damaged: {reason(error)}", hint="fetch or make it again") from error


def _require_sound_heaps(path: Path, *, length_bytes: int) -> None:
    """Raise IntegrityError if the objects of a global heap do not end where the heap does.

    A file stores texts and other values of variable length, those of attributes included, in global heaps. libhdf5
    reads a heap object by object and adds their sizes without a check: an object of size 0 keeps it in an endless loop,
    in which it holds Python's lock, so that nothing in this process can stop it. Addresses of heaps cannot be had from
    h5py. The file is therefore searched for their signature, which costs one more sequential read. A sound file is
    refused only if it has the remains of a deleted heap, partly overwritten, in its free space.
    """

    def align(size: int) -> int:
        return -(-size // 8) * 8

    header = align(8 + length_bytes)  # of a heap, and of each of its objects
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
                taken = header + align(length) if index else length
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


def require_contained(dataset: Any, path: Path) -> Any:
    """Return `dataset`; InputMissing if it takes its values from other files or datasets."""
    if dataset.external:
        raise _refuse(path, dataset.name, "has its values in other files")
    if dataset.is_virtual:
        raise _refuse(path, dataset.name, "is virtual: its values are in other datasets")
    return dataset


def _refuse(path: Path, name: str, what: str) -> InputMissing:
    hint = "it could bring in any file of this machine; if you trust it, copy it into one file with h5repack or h5py"
    return InputMissing(f"'{path}': '{name}' {what}", hint=hint)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what h5py raises over a damaged file into IntegrityError."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, EOFError) as error:
        raise IntegrityError(f"'{path}' is damaged: {reason(error)}", hint="fetch or make it again") from error


def open_array(group: Any, name: str, *, path: Path) -> Any:
    """Open the dataset `name` (a path) in `group`. InputMissing if there is none; lists what there is."""
    import h5py

    found, inner = group.get(name), group
    if found is None:
        # h5py takes an object that cannot be opened for one that is not there: the link to it is.
        for part in name.split("/"):
            is_linked = isinstance(inner.get(part, getlink=True), h5py.HardLink)
            inner = inner.get(part) if is_linked else None
            if not isinstance(inner, h5py.Group):
                break
        if is_linked and inner is None:
            raise IntegrityError(f"'{path}' is damaged: '{name}' cannot be opened", hint="fetch or make it again")
    if not isinstance(found, h5py.Dataset):
        what = "is a group, not an array" if found is not None else "is missing"
        raise InputMissing(f"'{path}': '{name}' {what}", hint=f"it has: {', '.join(sorted(group.keys())) or 'nothing'}")
    return require_contained(found, path)


def walk_leaves(node: Any, path: Path, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the datasets at or below `node` as ("a/b", dataset); "" for `node` itself. Errors as `open_array`, and
    IntegrityError for endlessly nested groups.
    """
    import h5py

    if isinstance(node, h5py.Dataset):
        yield prefix, require_contained(node, path)
        return
    if prefix.count("/") > _DEEPEST:
        raise IntegrityError(f"'{path}': '{prefix[:60]}...' is nested without end", hint="fetch or make it again")
    for name in node:
        yield from walk_leaves(node[name], path, f"{prefix}/{name}" if prefix else name)


def as_scalar(value: Any) -> Any:
    """Convert a scalar of h5py to one of Python."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value
