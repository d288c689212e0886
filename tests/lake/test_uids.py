from __future__ import annotations

import numpy as np
import pytest

from pipelines.errors import InputMissing
from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.lake.uids import UidSet, contains, find_place, halves
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
    reader.refresh()
    with pytest.raises(InputMissing, match=f"has no trajectory {gone}"):
        reader.locate(gone)
    assert reader.uids() == [uid for uid in written if uid != gone]
    for uid in set(written) - {gone}:
        segment, place = reader.locate(uid)
        assert hex_uids(segment.uids)[place] == uid
        assert segment.length[place] == len(written[uid]["reward"]) - 1


def drawn(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """Uids of which many are equal, or equal in one half, or in what a set stores of them."""
    if kind == "texts":
        return rng.integers(0, 300, size).astype("S16")
    first, second = rng.integers(0, 1 << 63, (2, 40), dtype=np.uint64)
    if kind == "first":
        first[:] = first[0]
    elif kind == "second":
        second[:] = second[0]
    elif kind == "extremes":
        first, second = (np.repeat(np.array([0, 1, (1 << 63), (1 << 64) - 1], np.uint64), 10) for _ in "ab")
    if kind == "hashes":
        pairs = np.stack([first % np.uint64(3) - second * np.uint64(0x9E3779B97F4A7C15), second], axis=1)
        return rng.choice(pairs.astype("<u8").view("S16")[:, 0], size)
    pairs = np.stack([rng.choice(first, size), rng.choice(second, size)], axis=1)
    return pairs.astype(">u8").view("S16")[:, 0]


@pytest.mark.parametrize("kind", ["texts", "first", "second", "both", "extremes", "hashes"])
def test_uid_set_equals_a_python_set(kind: str) -> None:
    theirs: set[bytes] = set()
    rng, ours = np.random.default_rng(0), UidSet(lambda uids: np.array([uid in theirs for uid in uids.tolist()]))
    for size in [1, 0, 50, 3, 700, 2, 2, 90, 5, 1, 1, 400]:
        values = drawn(rng, kind, size)
        assert ours.add(values).tolist() == [v not in theirs and v not in values[:i] for i, v in enumerate(values)]
        theirs |= set(values.tolist())
    assert len(ours._runs) <= 4
    for size in [0, 1, 300, 40, 1000]:
        gone, values = drawn(rng, kind, size), drawn(rng, kind, size // 2)
        gone = np.unique(gone[[value in theirs for value in gone.tolist()]])
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


@pytest.mark.parametrize("kind", ["texts", "first", "second", "both", "extremes"])
def test_uids_are_found_as_a_python_set_finds_them(kind: str) -> None:
    rng = np.random.default_rng(3)
    for size in (0, 1, 30, 5000):
        known, wanted = drawn(rng, kind, size), drawn(rng, kind, 60)
        wanted = np.concatenate([wanted, known[: size // 2]])
        assert contains(np.sort(known), wanted).tolist() == [uid in {*known.tolist()} for uid in wanted.tolist()]


def test_uids_of_one_hash_are_told_apart() -> None:
    """By hand: -C and 0, and 0 and 1, have the same hash, 0, as C = 2^64 - 0x61c8864680b583eb."""
    one, other = bytes(8) + bytes(8), (0x61C8864680B583EB).to_bytes(8, "little") + (1).to_bytes(8, "little")
    held: list[bytes] = []
    uids = UidSet(lambda asked: np.isin(asked, np.array(held, "S16")))
    both, third = np.array([one, other, one], "S16"), np.array([b"another"], "S16")
    assert uids.add(both[:1]).tolist() == [True]
    held.append(one)
    assert uids.contains(both).tolist() == [True, False, True]
    assert uids.add(np.append(both, third)).tolist() == [False, True, False, True]
    held += [other, third[0]]
    uids.discard(both[1:2])
    held.remove(other)
    assert uids.contains(np.append(both, third)).tolist() == [True, False, True, True]
    assert sum(map(len, uids._runs)) == 2
