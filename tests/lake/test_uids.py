from __future__ import annotations

import numpy as np
import pytest

from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.lake.uids import UidSet, find_place, halves
from tests.lake.factories import fill, remove


def test_a_place_is_that_of_the_uid_and_of_no_other() -> None:
    raw = np.random.default_rng(0).bytes(16 * 200)
    ordered = np.sort(np.frombuffer(raw, "S16"))
    assert [find_place(ordered, uid) for uid in hex_uids(ordered)] == list(range(200))
    other = bytes(np.random.default_rng(1).bytes(16)).hex()
    for uid in (other, "", "ab", "no uid", hex_uids(ordered)[0][:30], "ff" * 16, "00" * 16):
        assert find_place(ordered, uid) is None
    assert find_place(ordered[:0], other) is None


def test_zeros_at_the_end_belong_to_a_uid() -> None:
    ordered = np.array([bytes.fromhex("ab" * 15 + "00"), bytes.fromhex("ab" * 16)], dtype="S16")
    assert find_place(ordered, "ab" * 15 + "00") == 0
    assert find_place(ordered, "ab" * 15) is None


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_reader_finds_what_lives_whatever_dies_and_comes(lake: Lake, lost: int) -> None:
    written = fill(lake, [3, 4, 5], seal_every=1)
    reader = Reader(lake)
    assert reader.uids() == list(written)
    ids = [segment.id for segment in reader.live.segments]
    remove(lake, time=1.0, reason="x", segments=(ids[lost],))
    written |= fill(lake, [6, 7], seed=1)
    gone = list(written)[lost]
    assert not reader.is_live(gone)
    assert reader.uids() == [uid for uid in written if uid != gone]
    for uid in set(written) - {gone}:
        segment, place = reader.locate(uid)
        assert hex_uids(segment.uids)[place] == uid
        assert segment.length[place] == len(written[uid]["reward"]) - 1


def drawn(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """Uids of which many are equal, or equal in one half."""
    if kind == "texts":
        return rng.integers(0, 300, size).astype("S16")
    first, second = rng.integers(0, 1 << 63, (2, 40), dtype=np.uint64)
    if kind == "first":
        first[:] = first[0]
    elif kind == "second":
        second[:] = second[0]
    elif kind == "extremes":
        first, second = (np.repeat(np.array([0, 1, (1 << 63), (1 << 64) - 1], np.uint64), 10) for _ in "ab")
    pairs = np.stack([rng.choice(first, size), rng.choice(second, size)], axis=1)
    return pairs.astype(">u8").view("S16")[:, 0]


@pytest.mark.parametrize("kind", ["texts", "first", "second", "both", "extremes"])
def test_uid_set_equals_a_python_set(kind: str) -> None:
    rng, ours, theirs = np.random.default_rng(0), UidSet(), set()
    for size in [1, 0, 50, 3, 700, 2, 2, 90, 5, 1, 1, 400]:
        values = drawn(rng, kind, size)
        expected = []
        for value in values.tolist():
            expected.append(value not in theirs)
            theirs.add(value)
        assert ours.add(values).tolist() == expected
    assert len(ours._runs) <= 4
    for size in [0, 1, 300, 40, 1000]:
        gone, values = drawn(rng, kind, size), drawn(rng, kind, size // 2)
        ours.discard(gone)
        theirs -= set(gone.tolist())
        assert ours.add(values).tolist() == [v not in theirs and v not in values[:i] for i, v in enumerate(values)]
        theirs |= set(values.tolist())
    ours.discard(np.array(sorted(theirs), "S16"))
    assert not ours._runs


@pytest.mark.parametrize("kind", ["texts", "first", "second", "both", "extremes"])
def test_halves_sort_and_are_found_as_uids_are(kind: str) -> None:
    rng = np.random.default_rng(1)
    ordered, wanted = np.sort(drawn(rng, kind, 500)), drawn(rng, kind, 300)
    assert halves(ordered).place(halves(wanted)).tolist() == np.searchsorted(ordered, wanted).tolist()


def test_uids_with_the_same_first_half_are_told_apart() -> None:
    """By hand: a run of three, looked up between, before and after them."""
    run = UidSet()
    assert run.add(np.array([b"sameHALF" + bytes([0, 0, 0, 0, 0, 0, 0, i]) for i in (2, 4, 6)], "S16")).all()
    asked = np.array([b"sameHALF" + bytes([0, 0, 0, 0, 0, 0, 0, i]) for i in (1, 2, 3, 6, 7, 0, 3)], "S16")
    assert run.add(asked).tolist() == [True, False, True, False, True, True, False]
