"""Several lakes: which is drawn how often, and the same again after a restart."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.data.mixture import Mixture, Share
from pipelines.data.randomness import Purpose, stream
from pipelines.data.sampler import WindowSampler
from pipelines.data.strategy import Strategy
from pipelines.data.view import View
from pipelines.errors import InputMissing, StageFailed
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.data.test_sampler import assert_same_batch, check_batch
from tests.data.test_strategy import assert_drawn
from tests.lake.factories import SCHEMA, columns, fill

SHARES = [Share(0.5, 0.5), Share(3.0, 0.0), Share(0.0, 1.5)]


@pytest.fixture
def lakes(tmp_path: Path) -> list[Lake]:
    return [Lake.create(tmp_path / name) for name in "abc"]


def mixture_of(
    lakes: list[Lake], shares: list[Share] | None = None, *, anneal: int = 0, strategy: Strategy | None = None
) -> Mixture:
    strategy = strategy or Strategy()
    views = [View(Lake(lake.path), SCHEMA.id, extra=strategy.extra) for lake in lakes]
    shares = shares or [Share()] * len(views)
    pairs = list(zip(views, shares, strict=True))
    mixture = Mixture(pairs, length=6, seed=4, strategy=strategy, anneal_steps=anneal)
    mixture.refresh(0)
    return mixture


def lengths_of(mixture: Mixture, batch) -> list[int]:
    return [int(mixture.parts[k].view.table["length"][i]) for k, i in zip(batch.lake, batch.trajectory, strict=True)]


def test_a_mixture_of_one_lake_is_its_sampler(lakes: list[Lake]) -> None:
    fill(lakes[0], [9, 30, 4, 12])
    view = View(lakes[0], SCHEMA.id)
    view.refresh()
    alone, mixed = WindowSampler(view, length=6), mixture_of(lakes[:1], [Share(0.3)])
    for update, part in [(0, 0), (0, 1), (1, 0), (7, 3)]:
        expected = alone.sample(5, stream(4, update, part, Purpose.WINDOWS))
        assert_same_batch(expected, mixed.sample(5, update, part))


def test_the_longest_trajectory_is_one_that_can_be_drawn(lakes: list[Lake]) -> None:
    fill(lakes[0], [9, 30, 4])
    fill(lakes[1], [12])
    mixture = mixture_of(lakes[:2])
    assert mixture.longest == 30
    mixture.parts[0].view.set_weights(np.array([1.0, 0.0, 1.0]))
    assert mixture.longest == 12


def test_windows_of_all_lakes_hold_what_they_should(lakes: list[Lake]) -> None:
    written: dict = {}
    for seed, lake in enumerate(lakes):
        written |= fill(lake, [9, 30, 4, 12], seed=seed, seal_every=2)
    mixture = mixture_of(lakes)
    for update in range(5):
        batch = mixture.sample(16, update)
        check_batch(batch, written, list(written))
        for i, (lake, row) in enumerate(zip(batch.lake, batch.trajectory, strict=True)):
            view = mixture.parts[lake].view
            uid = view.uids()[row].ljust(16, b"\0").hex()
            n, start = int(batch.lengths[i]), int(batch.start[i])
            np.testing.assert_array_equal(batch.columns["reward"][i, :n], written[uid]["reward"][start : start + n])


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (0, [1 / 7, 6 / 7, 0]),
        (50, [0.5 / 2.75, 1.5 / 2.75, 0.75 / 2.75]),
        (100, [1 / 4, 0, 3 / 4]),
        (900, [1 / 4, 0, 3 / 4]),
    ],
)
def test_each_lake_has_its_share_which_moves_linearly(lakes: list[Lake], update: int, expected: list[float]) -> None:
    for lake, length in zip(lakes, (5, 50, 500), strict=True):  # how much is in a lake does not matter
        fill(lake, [length])
    mixture = mixture_of(lakes, SHARES, anneal=100)
    assert mixture.shares(update) == pytest.approx(expected)
    drawn = np.concatenate([mixture.sample(500, update, part).lake for part in range(20)])
    assert_drawn(np.bincount(drawn, minlength=3).tolist(), expected)


def test_within_a_lake_windows_are_drawn_as_from_it_alone(lakes: list[Lake]) -> None:
    for lake in lakes[:2]:
        fill(lake, [3, 8, 20])
    mixture = mixture_of(lakes[:2], [Share(1.0), Share(3.0)])
    counts = np.zeros((2, 3), dtype=int)
    for part in range(20):
        batch = mixture.sample(500, 0, part)
        np.add.at(counts, (batch.lake, batch.trajectory), 1)
    expected = np.outer([0.25, 0.75], np.array([1, 13 / 6, 25 / 6]) / (44 / 6))  # windows of 6
    assert_drawn(counts.ravel().tolist(), expected.ravel().tolist())


def test_a_lake_with_nothing_in_it_is_left_out_until_it_has_something(lakes: list[Lake]) -> None:
    lakes[1].register(SCHEMA)
    fill(lakes[0], [9, 30])
    mixture = mixture_of(lakes[:2])
    assert mixture.shares(0).tolist() == [1, 0]
    assert mixture.sample(8, 0).lake.tolist() == [0] * 8
    fill(lakes[1], [7])
    assert mixture.refresh(3) == 1
    assert mixture.shares(3).tolist() == [0.5, 0.5]


def test_nothing_anywhere_is_said(lakes: list[Lake]) -> None:
    for lake in lakes:
        lake.register(SCHEMA)
    mixture = mixture_of(lakes)
    assert mixture.is_empty
    with pytest.raises(InputMissing, match="no trajectories to draw from"):
        mixture.sample(2, 0)


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(weighting="task", half_life=30, per_alpha=0.5)])
def test_draws_go_on_exactly_after_a_restart(lakes: list[Lake], strategy: Strategy) -> None:
    for seed, lake in enumerate(lakes):
        fill(lake, [9, 30, 4, 12], seed=seed, seal_every=2)
    rng = np.random.default_rng(0)

    def work(mixture: Mixture, updates: range, errors) -> list:
        batches = []
        for update in updates:
            batches.append(mixture.sample(9, update))
            if strategy.per_alpha:
                mixture.prioritise(batches[-1].trajectory, batches[-1].lake, errors[update])
        return batches

    errors = rng.random((20, 9))
    mixture = mixture_of(lakes, SHARES, anneal=10, strategy=strategy)
    work(mixture, range(4), errors)
    fill(lakes[0], [50, 7], seed=9)
    mixture.refresh(4)
    work(mixture, range(4, 7), errors)
    saved = json.loads(json.dumps(mixture.snapshots()))
    arrays = {name: values.copy() for name, values in mixture.arrays().items()}
    again = mixture_of(lakes, SHARES, anneal=10, strategy=strategy)
    again.restore(saved)
    again.load_arrays(arrays)
    for one, two in zip(work(mixture, range(7, 12), errors), work(again, range(7, 12), errors), strict=True):
        assert_same_batch(one, two)
        np.testing.assert_array_equal(one.lake, two.lake)
    assert again.snapshots() == mixture.snapshots()


def test_history_tells_what_an_update_could_draw_from(lakes: list[Lake]) -> None:
    fill(lakes[0], [9, 30], seal_every=1)
    mixture = mixture_of(lakes[:1])
    mixture.refresh(0)
    mixture.refresh(5)
    fill(lakes[0], [4])
    mixture.refresh(7)
    snapshot = mixture.snapshots()[0]
    assert snapshot["history"] == [[1, 2], [8, 3]]
    assert snapshot["id"] == lakes[0].id
    assert len(snapshot["segments"]) == 3
    gone = {**snapshot, "segments": ["2001010100/gone", *snapshot["segments"]], "history": [[1, 2], [8, 4]]}
    again = mixture_of(lakes[:1])
    again.restore([gone])
    assert again.snapshots()[0]["history"] == [[1, 1], [8, 3]]


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EROFS])
def test_a_lake_whose_log_cannot_be_sealed_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """As on a full disk: the log of a dead writer holds all that there is."""
    lake = Lake.open_or_create(tmp_path / "lake")
    rng = np.random.default_rng(0)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        writer.append(columns(rng, 5), TrajectoryInfo(env="maze", task="t"))
        (log,) = (tmp_path / "lake" / "wal").glob("*.wal")
        shutil.copytree(tmp_path / "lake", tmp_path / "dead")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(refusal, os.strerror(refusal))

    with monkeypatch.context() as patched:
        patched.setattr("pipelines.lake.writer.publish_log", refuse)
        dead = Lake(tmp_path / "dead")
        dead.salvage()
        mixture = mixture_of([dead])
        with pytest.raises(StageFailed, match=rf"'.*{log.name}' could not be sealed; its disk has .* MB free"):
            mixture.shares(0)
    assert dead.salvage() == 1, "nothing was lost"
