"""Trajectories that move to another file or die while they are drawn from."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.data.strategy import Strategy
from pipelines.data.view import View
from pipelines.lake.footer import hex_uids
from pipelines.lake.store import Lake
from tests.data.rewriting import rewrite
from tests.data.seeded import SeededSampler
from tests.data.test_sampler import assert_same_batch, check_batch
from tests.lake.factories import SCHEMA, columns, derive, fill, flip_a_bit, live_ids, quarantine, remove

EVERYTHING = Strategy(weighting="task", half_life=100.0, per_alpha=0.7)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def twin(lake: Lake) -> Lake:
    """A copy of the lake that nobody will touch."""
    shutil.copytree(lake.path, lake.path.with_name("twin"))
    return Lake(lake.path.with_name("twin"))


def sampler_of(lake: Lake, strategy: Strategy = EVERYTHING, told: list | None = None) -> SeededSampler:
    view = View(lake, SCHEMA.id, extra=strategy.extra, listener=(told if told is not None else []).append)
    view.refresh()
    return SeededSampler(view, length=6, seed=3, strategy=strategy)


def overlays(lake: Lake, written: dict) -> dict:
    """Overlays of all trajectories; the steps of everything by uid."""
    derived = {}
    changed = {name: columns(np.random.default_rng(1), 4)[name] for name in ("action", "reward")}
    for uid, new in zip(written, derive(lake, dict.fromkeys(written, changed), offset=1), strict=True):
        derived[new] = {name: array[1:6] for name, array in written[uid].items()} | changed
    return written | derived


@pytest.mark.parametrize("refreshed", [True, False], ids=["refreshed", "found-missing"])
def test_compaction_changes_no_draw_and_no_step(lake: Lake, refreshed: bool) -> None:
    written = overlays(lake, fill(lake, [9, 30, 12, 40, 8, 25], seal_every=1))
    still = twin(lake)
    told: list = []
    moved, kept = sampler_of(lake, told=told), sampler_of(still)
    if refreshed:
        assert_same_batch(moved.sample(40), kept.sample(40))
    for sampler in (moved, kept):
        sampler.draw(40)
        sampler.prioritise(np.arange(5), np.array([4.0, 1, 0.1, 2, 3]))
    ids = [id for id in live_ids(lake) if not id.endswith(".ovl")]
    rewrite(lake, ids[1:5])
    if refreshed:
        assert moved.view.refresh() == 0
        for _ in range(3):
            assert_same_batch(moved.sample(40), kept.sample(40))
    else:  # a batch is drawn again after what is missing was found
        for _ in range(3):
            check_batch(moved.sample(40), written, list(written))
    moved.view.refresh()
    np.testing.assert_array_equal(moved.view.uids(), kept.view.uids())
    for name in ("length", "segment", "base", "weight", "task", "priority", "measured"):
        np.testing.assert_array_equal(moved.view.table[name], kept.view.table[name], err_msg=name)
    assert told == []


def test_the_files_of_what_moved_are_closed(lake: Lake) -> None:
    fill(lake, [9, 30, 12, 40], seal_every=1)
    sampler = sampler_of(lake, Strategy())
    sampler.sample(30)
    ids = live_ids(lake)
    assert all(id in Path("/proc/self/maps").read_text() for id in ids)
    rewrite(lake, ids[:3])
    sampler.view.refresh()
    sampler.sample(30)
    maps = Path("/proc/self/maps").read_text()
    assert [id in maps for id in ids] == [False, False, False, True]


def test_a_view_is_restored_from_compacted_segments_with_the_same_draws(lake: Lake) -> None:
    overlays(lake, fill(lake, [9, 30, 12, 40, 8], seal_every=2))
    sampler = sampler_of(lake, Strategy(weighting="task", placement="full"))
    sampler.sample(5)
    saved = json.loads(json.dumps(sampler.view.snapshot()))
    before = copy.deepcopy(sampler.rng)
    expected = [sampler.sample(20) for _ in range(3)]
    sampler.rng = before
    rewrite(lake, [id for id in live_ids(lake) if not id.endswith(".ovl")])
    again = sampler_of(Lake(lake.path), Strategy(weighting="task", placement="full"))
    again.view.restore(saved)
    again.continue_from(sampler)
    for batch in expected:
        assert_same_batch(batch, again.sample(20))


@pytest.mark.parametrize("compacted", [False, True])
def test_what_is_expired_is_drawn_no_more_and_the_rest_keeps_its_place(lake: Lake, compacted: bool) -> None:
    written = fill(lake, [9, 30, 12, 40, 8, 25], seal_every=2)
    everything = overlays(lake, written)
    sampler = sampler_of(lake)
    sampler.sample(40)
    rows = np.arange(len(everything))
    sampler.prioritise(rows, rows + 1.0)
    before = sampler.view.table.copy()
    uids = hex_uids(sampler.view.uids())
    ids = live_ids(lake)
    dead = list(written)[1]
    if compacted:
        new = rewrite(lake, [id for id in ids if not id.endswith(".ovl")])
        sampler.view.refresh()
        remove(lake, trajectories={new: [dead, *list(written)[4:]]})
    else:
        remove(lake, segments=[ids[2]], trajectories={ids[0]: [dead]})
    sampler.view.refresh()
    gone = {dead, *list(written)[4:]}
    alive = [i for i, uid in enumerate(uids) if uid not in gone]
    left = [uid for uid in hex_uids(sampler.view.uids()) if uid not in gone]
    assert [uids[i] for i in alive if uids[i] in written] == [uid for uid in left if uid in written]
    kept = [i for i, uid in enumerate(uids) if uid in left]
    for name in ("length", "segment", "weight", "task", "priority", "measured"):
        np.testing.assert_array_equal(sampler.view.table[name], before[name][kept], err_msg=name)
    assert sampler.view.num_trajectories == len(left)
    assert sampler.view.num_steps == int(sampler.view.table["length"].sum())
    for _ in range(4):
        check_batch(sampler.sample(40), everything, left)


def test_a_segment_put_into_quarantine_is_drawn_no_more(lake: Lake) -> None:
    written = fill(lake, [9, 30, 12], seal_every=1)
    sampler = sampler_of(lake, Strategy())
    sampler.sample(5)
    quarantine(lake, live_ids(lake)[1])
    sampler.view.refresh()
    assert sampler.view.table["length"].tolist() == [9, 12]
    check_batch(sampler.sample(20), written, [uid for uid in written if len(written[uid]["reward"]) != 31])


def test_priorities_are_restored_by_uid(lake: Lake) -> None:
    fill(lake, [9, 30, 12, 40], seal_every=2)
    sampler = sampler_of(lake)
    sampler.sample(4)
    sampler.prioritise(np.array([0, 2, 3]), np.array([5.0, 1.0, 2.0]))
    known = {name: values.copy() for name, values in sampler.priorities().items()}
    ids = live_ids(lake)
    remove(lake, time=0.0, reason="t", segments=(ids[0],))
    fill(lake, [7], seed=1)
    again = sampler_of(lake)
    again.load_priorities(known)
    again.sample(4)
    assert again.view.table["priority"].tolist() == pytest.approx([1.0, 2.0, 5.0], rel=1e-5)  # the new one: the highest
    assert again.view.table["measured"].tolist() == [True, True, False]


@pytest.mark.parametrize("verify", [False, True])
def test_checksums_are_compared_at_the_first_read_where_wanted(lake: Lake, verify: bool) -> None:
    written = fill(lake, [5, 6, 7], seal_every=1)
    damaged = next(iter(written))
    flip_a_bit(lake, written[damaged]["reward"])
    told: list = []
    view = View(lake, SCHEMA.id, listener=told.append, verify=verify)
    view.refresh()
    sampler = SeededSampler(view, length=6, seed=3, strategy=Strategy())
    drawn = {hex_uids(view.uids())[i] for _ in range(20) for i in sampler.sample(8).trajectory.tolist()}
    assert drawn == (written.keys() - {damaged} if verify else written.keys())
    assert ["wrong checksum in reward" in notice.text for notice in told] == [True] * verify
