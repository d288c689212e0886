"""Announcing reads to the operating system, for data that is not in memory.

A mapped file is read page by page, one disk access after the other. Announcing all ranges of a batch first lets the
disk work on them at once; where the pages are in memory already, announcing costs as much as the copy. So it is done
only after a gather that had to wait for a read.
"""

from __future__ import annotations

import ctypes
import mmap
import resource

import numpy as np

PAGE = mmap.PAGESIZE
GAP = 8 << 10  # bytes between two ranges that are cheaper to read than another call
PATIENCE = 16  # gathers announced after one that had to wait

_WHO = getattr(resource, "RUSAGE_THREAD", None)
_ADVICE = getattr(mmap, "MADV_WILLNEED", None)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Readahead:
    """Decides before each gather whether to `prepare` it; never where the system does not count page faults."""

    def __init__(self) -> None:
        self._left = PATIENCE if _WHO is not None and _ADVICE is not None else 0
        self._reads = -1

    @property
    def wanted(self) -> bool:
        """Whether the next gather should announce its reads."""
        return self._left > 0

    def begin(self) -> None:
        """Start a gather."""
        self._reads = _reads()

    def end(self) -> None:
        """End a gather, in the same thread."""
        if _reads() > self._reads:
            self._left = PATIENCE
        elif self._left:
            self._left -= 1


def prepare(column: np.ndarray, rows: np.ndarray, count: int) -> None:
    """Announce rows [r, r + count) of a mapped `column` for every r in `rows`."""
    for address, length in ranges(column, rows, count):
        _libc.madvise(address, length, _ADVICE)


def ranges(column: np.ndarray, rows: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Return addresses and sizes of whole pages that hold these rows, merging close ones."""
    stride, first = column.strides[0], column.ctypes.data
    order = np.sort(rows)
    begin = first + order * stride & -PAGE
    end = first + np.minimum((order + count) * stride, column.nbytes)
    apart = np.flatnonzero(begin[1:] > end[:-1] + GAP) + 1
    starts, stops = begin[np.r_[0, apart]], end[np.r_[apart - 1, len(end) - 1]]
    return list(zip(starts.tolist(), (stops - starts).tolist(), strict=True))


def _reads() -> int:
    """Return this thread's page faults that waited for a disk, and blocks read for it."""
    if _WHO is None:
        return 0
    used = resource.getrusage(_WHO)
    return used.ru_majflt + used.ru_inblock
