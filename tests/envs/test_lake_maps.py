"""Maps have gymnasium's distribution, and a held-out map is never drawn in training."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map, is_valid

from pipelines.envs.draws import Draws
from pipelines.envs.suites.lake_maps import MapSource, find_reachable, is_held_out, list_maps, name_maps, parse_map
from pipelines.errors import UsageError
from tests.tiers import some


def source(size, split="train", holdout=0.2, seed=0):
    return MapSource(size, Draws(seed, split, "maps"), 0, holdout=holdout, split=split)


@pytest.mark.parametrize(("size", "count"), [(3, 51), (4, 3828)])
def test_number_of_solvable_maps(size, count):
    holes, weight = list_maps(size)
    assert len(holes) == count
    assert weight.sum() == pytest.approx(1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_maps_name_is_its_rows_between_slashes(size):
    holes = np.random.default_rng(0).random((7, size * size)) < 0.5
    holes[:, 0] = False
    names = name_maps(np.where(holes, ord("#"), ord(".")).astype(np.uint8), size)
    assert names == ["/".join("".join(".#"[cell] for cell in row) for row in m.reshape(size, size) * 1) for m in holes]
    np.testing.assert_array_equal([parse_map(name, size) for name in names], holes)
    assert name_maps(np.zeros((0, size * size), dtype=np.uint8), size) == []


def test_reachability_agrees_with_gymnasium():
    rng = np.random.default_rng(0)
    holes = rng.random((400, 25)) < 0.35
    holes[:, [0, -1]] = False
    for row, found in zip(holes, find_reachable(holes, 5)[:, -1], strict=True):
        board = np.where(row, "H", "F").reshape(5, 5)
        board[0, 0], board[-1, -1] = "S", "G"
        assert found == is_valid(board, 5)


@pytest.mark.parametrize("size", some([3, 5], 0))
def test_holes_are_as_frequent_as_in_gymnasiums_maps(size):
    ours = source(size, holdout=0).draw(np.arange(20_000)).mean(axis=0)
    theirs = np.mean(
        [[cell == "H" for row in generate_random_map(size, seed=s) for cell in row] for s in range(1500)],
        axis=0,
    )
    np.testing.assert_allclose(ours, theirs, atol=0.05)


@pytest.mark.system
def test_enumerated_and_rejected_maps_are_one_distribution():
    enumerated = source(4, holdout=0).draw(np.arange(40_000))
    rejecting = source(4, holdout=0)
    rejecting._maps = None
    np.testing.assert_allclose(enumerated.mean(axis=0), rejecting.draw(np.arange(40_000)).mean(axis=0), atol=0.012)


@pytest.mark.parametrize("size", some([4, 6], 0))
def test_splits_share_no_map_whatever_the_seed(size):
    maps = {
        split: {row.tobytes() for seed in range(3) for row in source(size, split, seed=seed).draw(np.arange(1500))}
        for split in ("train", "test")
    }
    assert len(maps["train"]) > 500
    assert len(maps["test"]) > 200
    assert not maps["train"] & maps["test"]


def test_held_out_share_is_as_asked():
    assert is_held_out(list_maps(4)[0], 0.2).mean() == pytest.approx(0.2, abs=0.03)


def test_a_map_depends_on_its_episode_alone():
    whole = source(5).draw(np.arange(50))
    parts = np.concatenate([source(5).draw(np.arange(i, i + 10)) for i in range(0, 50, 10)])
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("size", [4, 5])
def test_cells_in_reach_come_with_their_map(size):
    holes, reach = source(size).draw_reachable(np.arange(60))
    np.testing.assert_array_equal(holes, source(size).draw(np.arange(60)))
    np.testing.assert_array_equal(reach, find_reachable(holes, size))


def test_a_split_without_maps_is_refused():
    with pytest.raises(UsageError, match="no test map"):
        source(2, "test", holdout=0.0001)
