"""Windows of episodes in pieces: their memory, and what a view knows of the pieces of an episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.data.view import View, bases
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.learning.batch import TensorBatch
from tests.data.seeded import SeededSampler
from tests.lake.factories import IMAGES, SCHEMA, derive
from tests.lake.pieces import fill_twice

LENGTHS = [7, 3, 23, 4, 20, 9]
WINDOW = 6


@pytest.fixture
def lakes(tmp_path: Path) -> tuple[Lake, Lake]:
    return Lake.create(tmp_path / "whole"), Lake.create(tmp_path / "pieces")


def refreshed(lake: Lake, schema_id: str = SCHEMA.id) -> View:
    view = View(lake, schema_id)
    view.refresh()
    return view


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "images"])
@pytest.mark.parametrize("burn_in", [0, 2, 5])
def test_a_window_at_the_beginning_of_a_piece_remembers_the_piece_before(lakes, burn_in, schema):
    whole, pieces = lakes
    known, cut = fill_twice(whole, pieces, LENGTHS, steps=4, schema=schema)
    episodes = [Reader(whole).read(uid).columns for uid in known]
    episode_of = {uid: number for number, uids in enumerate(cut) for uid in uids}
    view = refreshed(pieces, schema.id)
    uids = [uid.ljust(16, b"\0").hex() for uid in view.uids().tolist()]
    sampler = SeededSampler(view, length=WINDOW, seed=0, burn_in=burn_in)
    lent = begins = 0
    for _ in range(30):
        batch = sampler.sample(16)
        for i, (row, start, rows) in enumerate(zip(batch.trajectory, batch.start, batch.lengths, strict=True)):
            episode = episodes[episode_of[uids[row]]]
            for name, values in batch.columns.items():
                if name != "truncated":  # a piece is truncated at its end, which no loss looks at
                    np.testing.assert_array_equal(values[i, :rows], episode[name][start : start + rows])
                assert not values[i, rows:].any()
            assert rows <= WINDOW + 1
            first, length = int(view.table["first_step"][row]), int(view.table["length"][row])
            assert first - burn_in <= start
            assert start + rows - 1 <= first + length
            if not burn_in:
                assert batch.warm_up is None
                continue
            if start > first:
                assert batch.warm_up[i] == burn_in
            else:  # all steps of the piece count, and none of the piece before
                assert batch.warm_up[i] == first - start
                begins += first > 0
                lent += first > start
    assert bool(lent) == bool(burn_in)
    if burn_in:
        assert lent > begins / 2
        tensors = TensorBatch.from_numpy(batch, schema.spaces)
        for i, (start, skipped) in enumerate(zip(batch.start, batch.warm_up, strict=True)):
            assert tensors.time[i, 0] == start
            assert not tensors.loss_mask[i, :skipped].any()
            assert tensors.loss_mask[i, skipped:].equal(tensors.mask[i, skipped:])


def test_derived_columns_are_lent_too(lakes):
    whole, pieces = lakes
    _, cut = fill_twice(whole, pieces, [8], steps=4)
    derive(pieces, {cut[0][0]: {"reward": np.full(5, 7, np.float32)}})
    assert refreshed(pieces).neighbours is not None  # a version of one piece is an episode of its own
    view = refreshed(pieces)
    derived = np.flatnonzero(view.table["segment"] != bases(view.table))
    assert (view.neighbours.before[derived] == -1).all()
    assert (view.neighbours.after[derived] == -1).all()


@pytest.mark.system
def test_neighbours_are_found_again_after_changes(lakes):
    whole, pieces = lakes
    _, cut = fill_twice(whole, pieces, LENGTHS, steps=4)
    view = refreshed(pieces)

    def episodes() -> set[tuple[str, ...]]:
        uids = [uid.ljust(16, b"\0").hex() for uid in view.uids().tolist()]
        return {tuple(uids[row] for row in view.neighbours.episode(row)) for row in range(len(uids))}

    assert episodes() == {tuple(uids) for uids in cut}
    compact(pieces, grace_seconds=0)
    view.refresh()
    assert episodes() == {tuple(uids) for uids in cut}
    expire(pieces, RetentionLimits(where=f"uid = '{cut[2][2]}'"), grace_seconds=0)
    view.refresh()
    left = [uids for uids in cut if len(uids) != len(cut[2])]
    assert episodes() == {*map(tuple, left), tuple(cut[2][:2]), tuple(cut[2][3:])}
    assert refreshed(whole).neighbours is None


def test_the_longest_episode_is_that_of_its_last_piece(lakes):
    from pipelines.data.mixture import Mixture, Share

    whole, pieces = lakes
    fill_twice(whole, pieces, LENGTHS, steps=4)
    assert [Mixture([(refreshed(lake), Share())], length=4, seed=0).longest for lake in lakes] == [23, 23]
