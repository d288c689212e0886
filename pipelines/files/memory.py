"""Copies of this process's memory by address."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np


class _Blocks:
    """All blocks of `size` bytes that begin in a range of memory, one for each byte, as numpy's array interface."""

    def __init__(self, begin: int, count: int, size: int, *, is_read_only: bool) -> None:
        self.__array_interface__ = {
            "data": (begin, is_read_only), "shape": (count,), "strides": (1,), "typestr": f"|V{size}", "version": 3,
        }  # fmt: skip


def copy_rows(
    address_NC: np.ndarray, start_N: np.ndarray, count_N: np.ndarray, targets: Sequence[np.ndarray], row_N: np.ndarray
) -> None:
    """Copy N ranges of rows to C arrays (R, ...): `count_N` ones from row `start_N` of the columns at these
    addresses in memory, to row `row_N` and those after it. IndexError if these are not all in a target.

    Addresses are not checked: one outside of mapped memory crashes the process. A few calls copy any number of ranges;
    slicing an array for each would cost a microsecond a range and column.
    """
    if not targets or not count_N.any():
        return
    if row_N.min() < 0 or (row_N + count_N).max() > min(map(len, targets)):
        raise IndexError("rows lie outside a target")
    steps = [(size, start_N[at] + later, at, row_N[at] + later) for size, at, later in _cover(count_N)]
    lowest, highest, furthest = address_NC.min(0).tolist(), address_NC.max(0).tolist(), int((start_N + count_N).max())
    for column, target in enumerate(targets):
        assert target.flags.c_contiguous  # otherwise the copies would end up in another array
        row_bytes, begin = target.itemsize * math.prod(target.shape[1:]), lowest[column]
        span, offset_N = highest[column] - begin + furthest * row_bytes, address_NC[:, column] - begin
        for size, start, at, row in steps if row_bytes else ():
            block = size * row_bytes
            blocks = np.asarray(_Blocks(begin, span, block, is_read_only=True))
            places = np.asarray(_Blocks(target.ctypes.data, target.nbytes - block + 1, block, is_read_only=False))
            places[row * row_bytes] = blocks[offset_N[at] + start * row_bytes]


def find_usual(count_N: np.ndarray) -> int:
    """Find the most frequent number that is not 0 of ranges of which one is not empty."""
    frequency = np.bincount(count_N)
    frequency[0] = 0
    return int(frequency.argmax())


def _cover(count_N: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Cover ranges of `count_N` rows by blocks of few sizes, of which one call copies any number: the ranges of the
    usual length by one block, those up to four times as long by several of them, others by up to four of a power of
    four, which may overlap. Yields a size, and for its blocks (n,) the range and the first row in it."""
    usual = find_usual(count_N)
    if (count_N == usual).all():
        yield usual, np.arange(len(count_N)), np.zeros_like(count_N)
        return
    power_N = 4 ** ((np.frexp(count_N)[1].astype(np.int64) - 1).clip(0) // 2)
    size_N = np.where((count_N >= usual) & (count_N <= 4 * usual), usual, power_N)
    order = np.argsort(size_N, kind="stable")
    number = -(-count_N[order] // size_N[order])
    at = np.repeat(order, number)
    size = size_N[at]
    place = np.arange(len(at)) - np.repeat(np.cumsum(number) - number, number)
    later = np.minimum(place * size, count_N[at] - size)
    edges = [0, *(np.flatnonzero(size[1:] != size[:-1]) + 1).tolist(), len(at)]
    for a, b in itertools.pairwise(edges):
        yield int(size[a]), at[a:b], later[a:b]
