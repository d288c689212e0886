"""Asking the system to read what will be copied next, when it is not in memory.

A mapped file is read page by page, one disk access after the other. Naming all ranges of a batch first lets the disk
work on them at once; where the pages are in memory already, naming them costs as much as the copy. So it is done
only after a gather for which something had to be read.
"""

from __future__ import annotations

import ctypes
import mmap
import resource

import numpy as np

PATIENCE = 16  # gathers that are prepared after one that had to wait

_PAGE = mmap.PAGESIZE
_WHO = getattr(resource, "RUSAGE_THREAD", None)
_ADVICE = getattr(mmap, "MADV_WILLNEED", None)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Readahead:
    """Decides before each gather whether to `prepare` it; nothing is prepared where the system cannot tell."""

    def __init__(self) -> None:
        self._left = PATIENCE if _WHO is not None and _ADVICE is not None else 0
        self._reads = -1

    @property
    def wanted(self) -> bool:
        """Whether what the next gather copies should be named first."""
        return self._left > 0

    def begin(self) -> None:
        """Called before a gather."""
        self._reads = _reads()

    def end(self) -> None:
        """Called after it, by the same thread."""
        if _reads() > self._reads:
            self._left = PATIENCE
        elif self._left:
            self._left -= 1


def prepare(column: np.ndarray, rows: np.ndarray, count: int) -> None:
    """Ask for rows [r, r + count) of a mapped `column` for every r in `rows`."""
    stride, size = column.strides[0], column.nbytes
    first = column.ctypes.data
    begin = first + rows * stride & -_PAGE
    end = first + np.minimum((rows + count) * stride, size)
    for address, length in zip(begin.tolist(), (end - begin).tolist(), strict=True):
        _libc.madvise(address, length, _ADVICE)


def _reads() -> int:
    """Page faults of this thread that waited for a disk, and blocks it had read."""
    if _WHO is None:
        return 0
    used = resource.getrusage(_WHO)
    return used.ru_majflt + used.ru_inblock
