"""Copies of this process's memory by address."""

from __future__ import annotations

import numpy as np


class _Blocks:
    """All blocks of `size` bytes that begin in a range of memory, one for each byte, as numpy's array interface."""

    def __init__(self, begin: int, count: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (begin, True), "shape": (count,), "strides": (1,), "typestr": f"|V{size}", "version": 3,
        }  # fmt: skip


def copy_blocks(address_N: np.ndarray, target: np.ndarray, place_N: np.ndarray) -> None:
    """Copy N blocks of memory to the places `place_N` of `target` (B, ...), each as large as an entry of it.

    Addresses are not checked: one outside of mapped memory crashes the process. A single call copies the blocks of any
    number of files; slicing an array for each block would cost a microsecond a block.
    """
    assert target.flags.c_contiguous  # otherwise the copies would end up in another array
    size = target.itemsize * target[:1].size
    if len(address_N) == 0 or size == 0:
        return
    begin = int(address_N.min())
    blocks = np.asarray(_Blocks(begin, int(address_N.max()) - begin + 1, size))
    target.reshape(len(target), -1).view(f"V{size}")[place_N, 0] = blocks[address_N - begin]
