from __future__ import annotations

import numpy as np
import pytest

from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.lake.tombstones import Tombstone, bury
from pipelines.lake.uids import place_of
from tests.lake.factories import fill


def test_a_place_is_that_of_the_uid_and_of_no_other() -> None:
    raw = np.random.default_rng(0).bytes(16 * 200)
    ordered = np.sort(np.frombuffer(raw, "S16"))
    assert [place_of(ordered, uid) for uid in hex_uids(ordered)] == list(range(200))
    other = bytes(np.random.default_rng(1).bytes(16)).hex()
    for uid in (other, "", "ab", "no uid", hex_uids(ordered)[0][:30], "ff" * 16, "00" * 16):
        assert place_of(ordered, uid) is None
    assert place_of(ordered[:0], other) is None


def test_zeros_at_the_end_belong_to_a_uid() -> None:
    ordered = np.array([bytes.fromhex("ab" * 15 + "00"), bytes.fromhex("ab" * 16)], dtype="S16")
    assert place_of(ordered, "ab" * 15 + "00") == 0
    assert place_of(ordered, "ab" * 15) is None


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_reader_finds_what_lives_whatever_dies_and_comes(lake: Lake, lost: int) -> None:
    written = fill(lake, [3, 4, 5], seal_every=1)
    reader = Reader(lake)
    assert reader.uids() == list(written)
    ids = [segment.id for segment in reader.follower.segments]
    bury(lake.storage, Tombstone(time=1.0, reason="x", segments=(ids[lost],)))
    written |= fill(lake, [6, 7], seed=1)
    gone = list(written)[lost]
    assert not reader.lives(gone)
    assert reader.uids() == [uid for uid in written if uid != gone]
    for uid in set(written) - {gone}:
        segment, place = reader.locate(uid)
        assert hex_uids(segment.uids)[place] == uid
        assert segment.length[place] == len(written[uid]["reward"]) - 1
