"""Windows: what is in them, how often which, and the same ones again after a restart."""

import json
from collections import Counter

import numpy as np
import pytest

from pipelines.data.strategy import Strategy
from pipelines.data.view import Selection, View
from pipelines.errors import InputMissing
from pipelines.events import Notice
from pipelines.lake.footer import hex_uids
from pipelines.lake.store import Lake
from tests.data.seeded import SeededSampler
from tests.lake.factories import IMAGES, MIXED, SCHEMA, columns, derive, fill, segment_files


@pytest.fixture
def lake(tmp_path) -> Lake:
    return Lake.create(tmp_path / "lake")


def open_view(lake: Lake, schema=SCHEMA, **options) -> View:
    view = View(lake, schema.id, **options)
    view.refresh()
    return view


def only(uids: list[str]) -> Selection:
    """The selection of these trajectories."""
    chosen = np.array([bytes.fromhex(uid) for uid in uids], dtype="S16")
    return Selection(evaluate=lambda uids: np.isin(uids, chosen).astype(float))


def uids_of(view: View) -> list[str]:
    """The uid of every row of a view's table."""
    return hex_uids(view.uids())


def check_batch(batch, written: dict, chosen: list[str], *, uniform: bool = True) -> None:
    """Every window is the slice of the trajectory that it says it is, with zeros behind. It has all rows that there
    are; a `uniform` one may be cut short where it begins the trajectory."""
    windows = Counter()
    rows = batch.columns["reward"].shape[1]
    for i, start in enumerate(batch.start.tolist()):
        n = int(batch.lengths[i])
        matches = [
            uid
            for uid in chosen
            if len(written[uid]["reward"]) - start >= n
            and (n == min(len(written[uid]["reward"]) - start, rows) or (uniform and start == 0))
            and all(np.array_equal(batch.columns[c][i, :n], written[uid][c][start : start + n]) for c in batch.columns)
        ]
        assert matches, (i, start, n)
        windows[matches[0], start] += 1
        for values in batch.columns.values():
            assert not values[i, n:].any()
    np.testing.assert_array_equal(batch.mask.sum(axis=1), batch.lengths - 1)
    assert all(batch.columns[c].dtype == written[chosen[0]][c].dtype for c in batch.columns)


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES, MIXED], ids=["plain", "images", "mixed"])
@pytest.mark.parametrize("seal_every", [1, 100], ids=["many-files", "one-file"])
@pytest.mark.parametrize("placement", ["uniform", "full"])
def test_a_window_is_a_slice_of_a_trajectory(lake: Lake, schema, seal_every: int, placement) -> None:
    written = fill(lake, [1, 5, 16, 17, 40, 90], schema=schema, seal_every=seal_every)
    sampler = SeededSampler(open_view(lake, schema), length=16, seed=0, strategy=Strategy(placement=placement))
    for _ in range(4):
        batch = sampler.sample(20)
        assert batch.columns["reward"].shape == (20, 17)
        check_batch(batch, written, list(written), uniform=placement == "uniform")
        if placement == "full":
            np.testing.assert_array_equal(batch.lengths == 17, batch.lengths > 6)


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "images"])
def test_windows_of_overlays_equal_those_of_whole_trajectories(lake: Lake, schema) -> None:
    written = fill(lake, [30, 50, 20, 80, 9], schema=schema, seal_every=2)
    rng, expected = np.random.default_rng(0), {}
    others = {uid: columns(rng, 7, schema) for uid in written}
    changes = {uid: {name: other[name] for name in ("action", "reward")} for uid, other in others.items()}
    for (uid, changed), new in zip(changes.items(), derive(lake, changes, offset=2), strict=True):
        expected[new] = {name: array[2:10] for name, array in written[uid].items()} | changed
    view = open_view(lake, schema)
    everything = {**written, **expected}
    assert set(uids_of(view)) == set(everything)
    for uids in (list(expected), list(everything)):
        chosen = open_view(lake, schema, selection=only(uids))
        assert np.count_nonzero(chosen.table["weight"]) == len(uids)
        check_batch(SeededSampler(chosen, length=5, seed=1).sample(64), everything, uids)


def test_the_mask_counts_a_step_iff_the_next_row_is_real(lake: Lake) -> None:
    fill(lake, [3])
    batch = SeededSampler(open_view(lake), length=5, seed=0, strategy=Strategy(placement="full")).sample(1)
    assert batch.lengths.tolist() == [4]
    assert batch.mask.tolist() == [[True, True, True, False, False]]
    assert batch.columns["reward"].shape == (1, 6)
    assert batch.start.tolist() == [0]


def test_draws_go_on_exactly_after_a_restart(lake: Lake) -> None:
    fill(lake, [9, 30, 4], seal_every=1)
    view = open_view(lake)
    sampler = SeededSampler(view, length=8, seed=5)
    sampler.sample(3)
    fill(lake, [50, 7], seed=1)
    view.refresh()
    sampler.sample(3)
    saved = json.loads(json.dumps(view.snapshot()))
    fill(lake, [11, 12], seed=2)  # after the checkpoint, before the restart
    again_view = View(Lake(lake.path), SCHEMA.id)
    again_view.restore(saved)
    again = SeededSampler(again_view, length=8, seed=99)
    again.continue_from(sampler)
    for _ in range(3):
        assert_same_batch(sampler.sample(5), again.sample(5))
    assert view.refresh() == again_view.refresh() == 2
    for _ in range(3):
        assert_same_batch(sampler.sample(5), again.sample(5))


def assert_same_batch(one, two) -> None:
    np.testing.assert_array_equal(one.start, two.start)
    np.testing.assert_array_equal(one.lengths, two.lengths)
    for name in one.columns:
        np.testing.assert_array_equal(one.columns[name], two.columns[name])


def test_a_batch_that_is_held_keeps_its_values(lake: Lake) -> None:
    fill(lake, [50, 60])
    sampler = SeededSampler(open_view(lake), length=8, seed=0)
    held = [sampler.sample(4) for _ in range(10)]
    copies = [{name: values.copy() for name, values in batch.columns.items()} for batch in held]
    part = sampler.sample(4).columns["reward"][1:, 2:]
    part_copy = part.copy()
    for _ in range(10):
        sampler.sample(4)
    for batch, copy in zip(held, copies, strict=True):
        for name, values in batch.columns.items():
            np.testing.assert_array_equal(values, copy[name])
    np.testing.assert_array_equal(part, part_copy)


def test_memory_of_a_batch_nobody_holds_is_used_again(lake: Lake) -> None:
    fill(lake, [50, 60])
    sampler = SeededSampler(open_view(lake), length=8, seed=0)
    places = {sampler.sample(4).columns["reward"].ctypes.data for _ in range(20)}
    assert len(places) <= 2


def test_nothing_to_draw_from_is_said(lake: Lake) -> None:
    lake.register(SCHEMA)
    sampler = SeededSampler(open_view(lake), length=8, seed=0)
    with pytest.raises(InputMissing, match="no trajectories to draw from"):
        sampler.sample(2)
    fill(lake, [3])
    sampler.view.refresh()
    assert len(sampler.sample(2)) == 2


def test_a_segment_lost_while_training_is_passed_over(lake: Lake) -> None:
    written = fill(lake, [30, 31, 32], schema=IMAGES, seal_every=1)
    told: list = []
    view = open_view(lake, IMAGES, listener=told.append)
    sampler = SeededSampler(view, length=8, seed=0)
    main = next(p for p in segment_files(lake) if ".blob" not in p.name)
    main.with_suffix(".blob.arrow").unlink()
    for _ in range(5):
        check_batch(sampler.sample(8), written, list(written)[1:])
    assert [type(event) for event in told] == [Notice]
    assert "1 trajectories are passed over" in told[0].text
    again = View(lake, IMAGES.id)
    again.restore(view.snapshot())
    resumed = SeededSampler(again, length=8, seed=0)
    resumed.continue_from(sampler)
    assert_same_batch(sampler.sample(8), resumed.sample(8))
