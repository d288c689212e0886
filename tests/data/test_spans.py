"""Hosts that draw from spans of a lake: together as often as one process from the whole, and each from files of its
own."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from pipelines.data.mixture import Mixture, Share
from pipelines.data.strategy import Strategy
from pipelines.data.view import View, bases
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.store import Lake
from tests.data.seeded import SeededSampler
from tests.data.test_strategy import assert_drawn
from tests.lake.factories import SCHEMA, columns, derive, fill

HALVES = ((0.0, 0.5), (0.5, 1.0))
LENGTHS = [9, 30, 4, 12, 50, 7, 21, 3, 16, 80, 5, 11, 25, 8]


@pytest.fixture
def lake(tmp_path) -> Lake:
    return Lake.create(tmp_path / "lake")


def view_of(lake: Lake, strategy: Strategy) -> View:
    view = View(lake, SCHEMA.id, extra=strategy.extra)
    view.refresh()
    return view


def draws(sampler: SeededSampler, count: int) -> np.ndarray:
    """How often each row of the table is drawn."""
    chosen, _, _ = sampler.draw(count)
    return np.bincount(chosen, minlength=sampler.view.num_trajectories)


def files_read(sampler: SeededSampler, count: int) -> set[int]:
    chosen, _, _ = sampler.draw(count)
    return set(sampler.view.file_of[bases(sampler.view.table)[chosen]].tolist())


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(weighting="task"), Strategy(half_life=60.0), Strategy(placement="full")],
    ids=["timestep", "task", "half-life", "full"],
)
@pytest.mark.parametrize("spans", [HALVES, ((0.0, 0.25), (0.25, 0.5), (0.5, 1.0))], ids=["2", "3-unequal"])
def test_all_spans_draw_a_trajectory_as_often_as_the_whole_lake(lake: Lake, strategy: Strategy, spans) -> None:
    fill(lake, LENGTHS, seal_every=2)
    view = view_of(lake, strategy)
    mass, count = strategy.mass(view.table, 8), 60_000
    drawn = sum(
        draws(
            SeededSampler(view, length=8, strategy=strategy, span=span, seed=seed), round(count * (span[1] - span[0]))
        )
        for seed, span in enumerate(spans)
    )
    assert drawn.sum() == count
    assert_drawn(drawn, mass / mass.sum())


def test_a_trajectory_on_a_border_is_shared_by_hand(lake: Lake) -> None:
    """Three files of one trajectory each, of the same mass: the one in the middle is half of each host's border."""
    fill(lake, [5, 5, 5], seal_every=1)
    view = view_of(lake, Strategy())
    order = np.argsort(view.file_places()[view.file_of[view.table["segment"]]])
    for seed, (span, expected) in enumerate(zip(HALVES, ([2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]), strict=True)):
        drawn = draws(SeededSampler(view, length=8, span=span, seed=seed), 20_000)[order]
        assert_drawn(drawn, np.array(expected))


@pytest.mark.system
def test_hosts_share_one_file_at_most_and_read_all(lake: Lake) -> None:
    written = fill(lake, LENGTHS * 6, seal_every=2)
    changes = {uid: {"reward": columns(np.random.default_rng(0), 3, SCHEMA)["reward"]} for uid in list(written)[::3]}
    derive(lake, changes, offset=0)
    view = view_of(lake, Strategy())
    assert bases(view.table).tolist() != view.table["segment"].tolist()  # overlays are at their bases' files
    bounds = np.linspace(0, 1, 5)
    read = [
        files_read(SeededSampler(view, length=8, span=span, seed=0), 20_000)
        for span in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    assert all(len(one & other) <= 1 for one, other in itertools.combinations(read, 2))
    assert set.union(*read) == set(view.file_of[bases(view.table)].tolist())
    assert max(map(len, read)) <= len(view.files) / 2


def test_priorities_move_between_spans_as_they_do_in_the_whole(lake: Lake) -> None:
    strategy = Strategy(per_alpha=1.0)
    fill(lake, LENGTHS, seal_every=2)
    view = view_of(lake, strategy)
    samplers = [SeededSampler(view, length=8, strategy=strategy, span=span, seed=i) for i, span in enumerate(HALVES)]
    for sampler in samplers:
        assert not sampler.is_empty
    rows = np.arange(len(LENGTHS))
    errors = 1.0 + rows
    for sampler in samplers:  # as on every rank; both change the one table to the same values
        view.table["measured"] = False
        sampler.prioritise(rows, errors)
    mass = strategy.mass(view.table, 8) * (errors + 1e-6)
    assert_drawn(sum(draws(sampler, 30_000) for sampler in samplers), mass / mass.sum())


@pytest.mark.system
def test_what_is_new_falls_to_hosts_without_moving_most_of_the_rest(lake: Lake) -> None:
    fill(lake, LENGTHS * 10, seal_every=2)
    view = view_of(lake, Strategy())
    sampler = SeededSampler(view, length=8, span=HALVES[0], seed=0)
    before = files_read(sampler, 30_000)
    fill(lake, LENGTHS * 10, seed=1, seal_every=2)
    view.refresh()
    after = files_read(sampler, 60_000)
    old = {file for file in after if file < 70}
    assert len(before ^ old) <= 20  # borders move by a part of the lake that shrinks with the number of files
    assert len(after) > 1.5 * len(before)


@pytest.mark.system
def test_hosts_agree_after_a_compaction(lake: Lake) -> None:
    """The order is that of the files, wherever they were listed first."""
    fill(lake, LENGTHS * 4, seal_every=1)
    view = view_of(lake, Strategy())
    compact(lake)
    view.refresh()
    fresh = view_of(Lake(lake.path), Strategy())
    for span in HALVES:
        one, other = (Counter(files_of(each, span)) for each in (view, fresh))
        assert one == other


def files_of(view: View, span: tuple[float, float]) -> list[str]:
    return sorted(view.files[file] for file in files_read(SeededSampler(view, length=8, span=span, seed=3), 20_000))


@pytest.mark.system
def test_windows_of_a_mixture_come_from_the_span_of_each_lake(lake: Lake, tmp_path) -> None:
    other = Lake.create(tmp_path / "other")
    fill(lake, LENGTHS * 2, seal_every=2)
    fill(other, LENGTHS, seed=1, seal_every=2)
    drawn = [np.zeros(len(LENGTHS) * 2), np.zeros(len(LENGTHS))]
    for span in HALVES:
        views = [View(Lake(each.path), SCHEMA.id) for each in (lake, other)]
        mixture = Mixture(
            [(views[0], Share(3.0)), (views[1], Share(1.0))], length=8, seed=4 if span[0] else 5, span=span
        )
        mixture.refresh(0)
        for update in range(300):
            batch = mixture.sample(40, update)
            for number in (0, 1):
                drawn[number] += np.bincount(batch.trajectory[batch.lake == number], minlength=len(drawn[number]))
    masses = [Strategy().mass(part.view.table, 8) for part in mixture.parts]
    expected = np.concatenate([0.75 * masses[0] / masses[0].sum(), 0.25 * masses[1] / masses[1].sum()])
    assert_drawn(np.concatenate(drawn).astype(np.int64), expected)


def test_the_whole_span_draws_what_it_drew_without_one(lake: Lake) -> None:
    fill(lake, LENGTHS, seal_every=2)
    view = view_of(lake, Strategy())
    rng = np.random.default_rng(7)
    expected = np.minimum(
        np.searchsorted(np.cumsum(mass := Strategy().mass(view.table, 8)), rng.random(50) * mass.sum(), "right"), 13
    )
    chosen, _, _ = SeededSampler(view, length=8, seed=7).draw(50)
    assert chosen.tolist() == expected.tolist()
