"""How often which trajectory is drawn, against the exact expectation."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.sampler import ERROR_STEP, MIN_PRIORITY
from pipelines.data.strategy import Strategy
from pipelines.data.view import View
from pipelines.lake.store import Lake
from tests.data.seeded import SeededSampler
from tests.lake.factories import SCHEMA, fill
from tests.tiers import examples

LENGTHS, WINDOW, DRAWS = [3, 8, 20, 33, 12, 5, 40], 8, 40_000
TASKS = [0, 1, 2, 0, 1, 2, 0]  # as `fill` gives them
WEIGHTS = [1.0, 0.5, 2.0, 0.0, 1.0, 3.0, 0.25]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake.create(tmp_path / "lake")
    fill(lake, LENGTHS, seal_every=2)
    return lake


def sampler_of(lake: Lake, strategy: Strategy, *, weights: list[float] | None = None, seed: int = 3) -> SeededSampler:
    view = View(lake, SCHEMA.id, extra=strategy.extra)
    view.refresh()
    if weights is not None:
        view.set_weights(np.array(weights))
    return SeededSampler(view, length=WINDOW, seed=seed, strategy=strategy)


# Windows of 8 steps, by hand. A trajectory that fits is one; a longer one of T steps has T + 7 windows that touch it,
# and each of its steps is in 8 of them; where only whole windows count, T / 8 of them hold as many steps as it has.
WINDOWS = {
    "uniform": {3: "1", 5: "1", 8: "1", 10: "17/8", 12: "19/8", 20: "27/8", 33: "40/8", 40: "47/8"},
    "full": {3: "1", 5: "1", 8: "1", 10: "10/8", 12: "12/8", 20: "20/8", 33: "33/8", 40: "40/8"},
}


def windows_of(length: int, placement: str) -> Fraction:
    if length in WINDOWS[placement]:
        return Fraction(WINDOWS[placement][length])
    return Fraction(max(length + (WINDOW - 1) * (placement == "uniform") * (length > WINDOW), WINDOW), WINDOW)


def places(length: int, placement: str) -> list[tuple[int, int]]:
    """Steps [start, stop) of every window, each as likely; one more than once is there more than once."""
    if length <= WINDOW:
        return [(0, length)]
    if placement == "full":
        return [(start, start + WINDOW) for start in range(length - WINDOW + 1)]
    return [(max(s, 0), min(s + WINDOW, length)) for s in range(1 - WINDOW, length)]


def shares(strategy: Strategy, weights: list[float], lengths: list[int], tasks: list[int]) -> list[Fraction]:
    """Exact probabilities, by the words of the strategy."""
    masses = []
    for i, length in enumerate(lengths):
        mass = Fraction(weights[i])
        if strategy.weighting == "timestep":
            mass *= windows_of(length, strategy.placement)
        elif strategy.weighting == "task":
            own = [k for k in range(len(lengths)) if tasks[k] == tasks[i] and weights[k]]
            offered = sum(windows_of(lengths[k], strategy.placement) for k in own) or 1
            mass *= windows_of(length, strategy.placement) / offered
        if strategy.half_life:
            mass *= Fraction(0.5 ** (sum(lengths[i + 1 :]) / strategy.half_life))
        masses.append(mass)
    return [mass / sum(masses) for mass in masses]


def assert_drawn(counts: list[int], expected: list[float]) -> None:
    """Chi-square of the counts within four standard deviations; what has no probability has no count."""
    total = sum(counts)
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    cells = [(count, p * total) for count, p in zip(counts, expected, strict=True) if p]
    statistic, freedom = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * max(freedom, 1)), (counts, expected)


@pytest.mark.parametrize("weighting", ["timestep", "trajectory", "task"])
@pytest.mark.parametrize("placement", ["uniform", "full"])
@pytest.mark.parametrize("half_life", [0.0, 40.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighed"])
def test_trajectories_are_drawn_by_their_exact_shares(lake: Lake, weighting, placement, half_life, weights) -> None:
    strategy = Strategy(weighting=weighting, placement=placement, half_life=half_life)
    sampler = sampler_of(lake, strategy, weights=weights)
    expected = [float(p) for p in shares(strategy, weights or [1.0] * 7, LENGTHS, TASKS)]
    chosen, start, stop = sampler.draw(DRAWS)
    assert_drawn(np.bincount(chosen, minlength=7).tolist(), expected)
    cells: Counter[tuple[int, int, int]] = Counter()
    for k, length in enumerate(LENGTHS):
        for place in (spots := places(length, placement)):
            cells[k, *place] += expected[k] / len(spots)
    seen = Counter(zip(chosen.tolist(), start.tolist(), stop.tolist(), strict=True))
    assert set(seen) <= set(cells)
    assert_drawn([seen[cell] for cell in cells], list(cells.values()))


def appearances(sampler: SeededSampler, draws: int = DRAWS) -> list[np.ndarray]:
    """How often each step of each trajectory is in a window."""
    table = sampler.view.table
    counts = [np.zeros(length) for length in table["length"].tolist()]
    for k, start, stop in zip(*(part.tolist() for part in sampler.draw(draws)), strict=True):
        counts[k][start:stop] += 1
    return counts


@pytest.mark.parametrize("weighting", ["timestep", "task"])
def test_every_step_appears_equally_often_whatever_its_place_and_the_length(lake: Lake, weighting) -> None:
    """First and last steps too: a terminal reward counts as often as any. 121 steps in 8 x 19.25 windows' mass; tasks
    have 46, 27 and 48 steps, and a third of the draws each."""
    counts = appearances(sampler_of(lake, Strategy(weighting=weighting)))
    mass = {
        "timestep": [DRAWS / (3 + (27 + 40 + 19 + 47) / 8)] * 7,
        "task": [DRAWS / 3 / {0: 1 + 40 / 8 + 47 / 8, 1: 1 + 19 / 8, 2: 27 / 8 + 1}[task] for task in TASKS],
    }[weighting]
    for steps, each in zip(counts, mass, strict=True):
        assert np.abs(steps - each).max() < 6 * np.sqrt(each)


def test_whole_windows_favour_no_length_but_the_middle(tmp_path: Path) -> None:
    """A trajectory of ten windows and one of less than one: as often, on average; the very ends once in T - L + 1."""
    lake = Lake.create(tmp_path / "lake")
    fill(lake, [80, 6])
    long, short = appearances(sampler_of(lake, Strategy(placement="full")))
    assert long.mean() == pytest.approx(DRAWS / 11, rel=0.03)
    assert short.mean() == pytest.approx(DRAWS / 11, rel=0.06)
    assert long[0] == pytest.approx(DRAWS * 10 / 11 / 73, rel=0.2)
    assert long[40] == pytest.approx(DRAWS * 10 / 11 * 8 / 73, rel=0.1)


def test_every_task_has_the_same_share(lake: Lake) -> None:
    strategy = Strategy(weighting="task")
    chosen, *_ = sampler_of(lake, strategy, weights=[1, 0, 1, 1, 1, 1, 1]).draw(DRAWS)
    assert_drawn(np.bincount(np.array(TASKS)[chosen]).tolist(), [1 / 3] * 3)


def test_what_is_half_a_life_older_is_drawn_half_as_often(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "even")
    fill(lake, [10] * 4)
    chosen, *_ = sampler_of(lake, Strategy(half_life=10.0)).draw(DRAWS)
    assert_drawn(np.bincount(chosen).tolist(), [1 / 15, 2 / 15, 4 / 15, 8 / 15])


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    data=st.data(),
    weighting=st.sampled_from(["timestep", "trajectory", "task"]),
    placement=st.sampled_from(["uniform", "full"]),
    half_life=st.sampled_from([0.0, 0.5, 17.0, 1e6]),
)
@examples(80)
def test_the_mass_is_the_product_of_its_parts(lengths, data, weighting, placement, half_life) -> None:
    strategy = Strategy(weighting=weighting, placement=placement, half_life=half_life)
    tasks = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(lengths), max_size=len(lengths)))
    table = np.zeros(len(lengths), dtype=[("length", "u4"), ("weight", "f4"), ("task", "u4")])
    table["length"], table["weight"], table["task"] = lengths, weights, tasks
    mass = strategy.mass(table, WINDOW)
    if not any(weights):
        assert not mass.any()
        return
    newest = max(i for i, weight in enumerate(weights) if weight)
    assert mass[newest] > 0  # however old
    if half_life < 1:
        return  # most shares are too small for a fraction of floats
    expected = [float(p) for p in shares(strategy, weights, lengths, tasks)]
    np.testing.assert_allclose(mass / mass.sum(), expected, rtol=1e-9, atol=1e-300)


PRIORITISED = Strategy(per_alpha=0.6, per_beta=0.4)
ERRORS = {0: 4.0, 2: 0.5, 4: 9.0, 6: 0.01}


def test_draws_follow_priorities_and_the_new_have_the_highest(lake: Lake) -> None:
    sampler = sampler_of(lake, PRIORITISED, weights=WEIGHTS)
    sampler.draw(1)
    sampler.prioritise(np.array(list(ERRORS)), np.array(list(ERRORS.values())))
    fill(lake, [10], seed=1)
    sampler.view.refresh()
    priority = np.array([1.0] * 7 + [9.0])  # not measured yet: the highest when they came
    for k, error in ERRORS.items():
        priority[k] = error
    windows = np.array([float(windows_of(length, "uniform")) for length in [*LENGTHS, 10]])
    mass = np.array([*WEIGHTS, 1.0]) * windows * priority**0.6
    chosen, *_ = sampler.draw(DRAWS)
    assert_drawn(np.bincount(chosen, minlength=8).tolist(), (mass / mass.sum()).tolist())


def test_a_priority_is_a_moving_average_of_the_windows_errors(lake: Lake) -> None:
    sampler = sampler_of(lake, PRIORITISED)
    sampler.draw(1)
    sampler.prioritise(np.array([2, 5, 2]), np.array([1.0, 3.0, 2.0]))
    assert sampler.view.table["priority"][[2, 5]] == pytest.approx([1.5 + MIN_PRIORITY, 3.0 + MIN_PRIORITY])
    sampler.prioritise(np.array([2]), np.array([4.0]))
    assert sampler.view.table["priority"][2] == pytest.approx(1.5 + ERROR_STEP * 2.5, abs=2 * MIN_PRIORITY)
    assert sampler.view.table["measured"].tolist() == [False, False, True, False, False, True, False]


def test_windows_without_an_error_leave_priorities_alone(lake: Lake) -> None:
    """NaN is that of a window of which no step counts in the loss."""
    sampler = sampler_of(lake, PRIORITISED)
    sampler.draw(1)
    sampler.prioritise(np.array([2, 5, 2]), np.array([1.0, np.nan, np.nan]))
    sampler.prioritise(np.array([3]), np.array([np.nan]))
    assert sampler.view.table["priority"][2] == pytest.approx(1.0 + MIN_PRIORITY)
    assert sampler.view.table["measured"].tolist() == [False, False, True, False, False, False, False]
    sampler.draw(1)


def test_importance_undoes_the_priorities_in_expectation(lake: Lake) -> None:
    """With beta 1, importance times probability is in proportion to the shares without priorities."""
    strategy = Strategy(weighting="task", per_alpha=0.6, per_beta=1.0)
    sampler = sampler_of(lake, strategy, weights=WEIGHTS)
    sampler.draw(1)
    sampler.prioritise(np.array(list(ERRORS)), np.array(list(ERRORS.values())))
    batch = sampler.sample(4000)
    assert batch.importance is not None
    assert batch.trajectory is not None
    weights = batch.importance / batch.importance.max()
    importance = {k: float(w) for k, w in zip(batch.trajectory, weights, strict=True)}
    priority = sampler.view.table["priority"].astype(float)
    least = min(priority[k] for k in importance)
    assert importance == pytest.approx({k: (priority[k] / least) ** -0.6 for k in importance})
    chances = sampler._tree.weights / sampler._tree.total
    corrected = np.array([chances[k] * importance[k] for k in sorted(importance)])
    plain = np.array([float(p) for p in shares(strategy, WEIGHTS, LENGTHS, TASKS)])[sorted(importance)]
    np.testing.assert_allclose(corrected / corrected.sum(), plain / plain.sum(), rtol=1e-6)


def test_importance_follows_its_exponent(lake: Lake) -> None:
    sampler = sampler_of(lake, PRIORITISED)
    sampler.draw(1)
    sampler.prioritise(np.array([0, 1]), np.array([4.0, 0.5]))
    batch = sampler.sample(2000)
    assert batch.importance is not None
    priority = sampler.view.table["priority"][batch.trajectory].astype(float)
    np.testing.assert_allclose(
        batch.importance / batch.importance.max(), (priority / priority.min()) ** (-0.6 * 0.4), rtol=1e-6
    )


def test_changed_priorities_change_the_tree_as_a_new_one(lake: Lake) -> None:
    one, two = sampler_of(lake, PRIORITISED), sampler_of(lake, PRIORITISED)
    one.draw(5), two.draw(5)
    rng = np.random.default_rng(0)
    for _ in range(10):
        rows, errors = rng.integers(0, 7, 5), rng.random(5)
        one.prioritise(rows, errors)
        two.prioritise(rows, errors)
        two.view.set_weights(np.ones(7))  # everything is weighed again
        np.testing.assert_array_equal(one.draw(50), two.draw(50))
