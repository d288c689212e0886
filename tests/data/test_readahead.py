"""Which pages are asked for, and when."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data import readahead
from pipelines.data.readahead import GAP, PAGE, PATIENCE, Readahead, prepare, ranges
from tests.tiers import examples


@given(
    rows=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    count=st.integers(1, 200),
    width=st.integers(1, 30),
    offset=st.integers(0, 5000),
)
@examples(60)
def test_pages_hold_the_rows_and_little_else(rows: list[int], count: int, width: int, offset: int) -> None:
    memory = np.zeros(3200 * 30 + 5000, dtype=np.uint8)
    column = memory[offset : offset + 3200 * width].reshape(3200, width)
    first = column.ctypes.data
    wanted: set[int] = set()
    for row in rows:
        wanted |= set(range((first + row * width) // PAGE, (first + min(row + count, 3200) * width - 1) // PAGE + 1))
    asked: set[int] = set()
    for address, length in ranges(column, np.array(rows), count):
        assert address % PAGE == 0
        assert address + length <= first + column.nbytes
        asked |= set(range(address // PAGE, -(-(address + length) // PAGE)))
    assert wanted <= asked
    near = {page + step for page in wanted for step in range(-GAP // PAGE - 1, GAP // PAGE + 2)}
    assert asked <= near


def test_only_what_waited_for_a_disk_makes_the_next_gathers_prepare(monkeypatch) -> None:
    reads = iter([5, 5] * PATIENCE + [5, 6] + [6, 6] * PATIENCE)
    monkeypatch.setattr(readahead, "_reads", lambda: next(reads))
    ahead = Readahead()
    wanted = []
    for _ in range(2 * PATIENCE + 1):
        wanted.append(ahead.wanted)
        ahead.begin()
        ahead.end()
    assert wanted == [True] * PATIENCE + [False] + [True] * PATIENCE
    assert not ahead.wanted


def test_a_mapped_file_takes_the_advice(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100 * PAGE))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    column = np.frombuffer(memory, np.float32).reshape(-1, 10)
    taken = []
    real = readahead._libc.madvise
    try:
        readahead._libc.madvise = lambda *call: taken.append(real(*call))
        prepare(column, np.array([0, 500, len(column) - 2]), 50)
    finally:
        readahead._libc.madvise = real
    assert taken == [0, 0, 0]
