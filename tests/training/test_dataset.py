"""Windows for a training loop of one's own: whose they are, and that workers change nothing."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pipelines import Lake, WindowDataset, collect
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.reading import trajectories


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "maze"
    collect("tmaze", run=place, steps=1000)
    return Lake(place)


def draw(number, place, **options):
    return list(islice(WindowDataset(place, **{"length": 6, "batch_size": 8, **options}), number))


def is_part_of_any(batch, window, wanted):
    rows, start = int(batch["lengths"][window]), int(batch["start"][window])
    found = {name: batch[name][window, :rows].numpy() for name in ("obs", "action", "reward")}
    return any(
        all(np.array_equal(each.columns[name][start : start + rows], values) for name, values in found.items())
        for each in wanted
    )


@pytest.mark.system
def test_windows_are_parts_of_the_trajectories_that_match(lake):
    wanted = list(trajectories(lake, "length > 9"))
    assert 0 < len(wanted) < len(list(trajectories(lake)))
    for batch in draw(5, lake.name, where="length > 9"):
        for window in range(8):
            assert batch["mask"][window].sum() == batch["lengths"][window] - 1
            assert is_part_of_any(batch, window, wanted)


@pytest.mark.system
def test_workers_draw_the_batches_of_one_process(lake):
    alone = draw(5, lake.name, seed=3)
    loader = DataLoader(WindowDataset(lake.name, length=6, batch_size=8, seed=3), batch_size=None, num_workers=2)
    for one, other in zip(alone, islice(loader, 5), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(values, other[name]) for name, values in one.items())
    assert not torch.equal(draw(1, lake.name, seed=4)[0]["obs"], alone[0]["obs"])


@pytest.mark.parametrize("refresh", [2, 1000])
def test_what_collectors_add_is_drawn_after_a_refresh(tmp_path, refresh):
    place = tmp_path / "own"
    collect("tmaze", lake=place, steps=100)
    batches = iter(WindowDataset(place, length=6, batch_size=64, refresh=refresh))
    next(batches)
    known = list(trajectories(Lake(place)))
    collect("tmaze", lake=place, add=3000)
    drawn = list(islice(batches, 4))
    whole = all(is_part_of_any(batch, window, known) for batch in drawn for window in range(64))
    assert whole == (refresh == 1000)


def test_nothing_to_draw_from_is_refused(lake):
    with pytest.raises(InputMissing, match="no trajectories to draw from"):
        draw(1, lake.name, where="length > 100000")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"where": "lenght > 1"}, UsageError),
        ({"length": 0}, UsageError),
        ({"half_life": -1}, UsageError),
        ({"seed": -1}, UsageError),
        ({"halflife": 3}, UsageError),
        ({"learning_rate": 0.1}, UsageError),
        ({"per_alpha": 0.5}, UsageError),
    ],
)
def test_mistakes_are_refused(lake, options, error):
    with pytest.raises(error):
        draw(1, lake.name, **options)


def test_settings_of_drawing_have_an_effect(lake):
    changes = {}, {"placement": "full"}, {"burn_in": 2}
    plain, full, warmed = (draw(20, lake.name, length=3, **each) for each in changes)
    assert not all(batch["mask"].all() for batch in plain)
    assert all(batch["mask"].all() for batch in full)
    # A window that begins its trajectory has nothing to warm up.
    assert all(not batch["mask"][batch["start"] > 0, :2].any() for batch in warmed)
    assert all(batch["mask"][batch["start"] == 0, 0].all() for batch in warmed)


def test_no_lake_is_refused():
    with pytest.raises(UsageError, match="no lake to draw from"):
        WindowDataset(length=6, batch_size=8)


def test_a_lake_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(InputMissing, match="no lake at"):
        WindowDataset(tmp_path / "none", length=6, batch_size=8)
