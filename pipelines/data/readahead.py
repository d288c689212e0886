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
SMALL_FILE = 64 << 10  # bytes of a file that is cheaper to announce as a whole
_FEW = 12  # rows for which a loop is faster than NumPy
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


def prepare_file(mapped: np.ndarray) -> None:
    """Announce a whole file, from the array of its bytes."""
    _libc.madvise(mapped.ctypes.data, len(mapped), _ADVICE)


def ranges(column: np.ndarray, rows: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Return addresses and sizes of whole pages that hold these rows, merging close ones."""
    stride, first = column.strides[0], column.ctypes.data
    if len(rows) <= _FEW:
        found: list[tuple[int, int]] = []
        for row in sorted(rows.tolist()):
            begin, end = first + row * stride & -PAGE, first + min((row + count) * stride, column.nbytes)
            if found and begin <= sum(found[-1]) + GAP:
                found[-1] = found[-1][0], end - found[-1][0]
            else:
                found.append((begin, end - begin))
        return found
    order = np.sort(rows)
    begins = first + order * stride & -PAGE
    ends = first + np.minimum((order + count) * stride, column.nbytes)
    apart = np.flatnonzero(begins[1:] > ends[:-1] + GAP) + 1
    starts, stops = begins[np.r_[0, apart]], ends[np.r_[apart - 1, len(ends) - 1]]
    return list(zip(starts.tolist(), (stops - starts).tolist(), strict=True))


def _reads() -> int:
    """Return this thread's page faults that waited for a disk, and blocks read for it."""
    if _WHO is None:
        return 0
    used = resource.getrusage(_WHO)
    return used.ru_majflt + used.ru_inblock
