"""Elo ratings against closed forms, a second algorithm, and what intervals should do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelines.evaluation.elo import fit, rate


def outcomes(wins: int, draws: int, losses: int) -> np.ndarray:
    return np.repeat([1.0, 0.5, 0.0], [wins, draws, losses])


def ascend(points: np.ndarray, games: np.ndarray) -> np.ndarray:
    """The same maximum by Hunter's minorisation, in units of Elo with mean 0."""
    strength = np.ones(len(games))
    for _ in range(20_000):
        sums = strength[:, None] + strength[None, :]
        strength = points.sum(axis=1) / (games / sums).sum(axis=1)
        strength /= np.exp(np.log(strength).mean())
    return 400 * np.log10(strength)


@pytest.mark.parametrize(("wins", "draws", "losses"), [(7, 0, 3), (0, 10, 0), (10, 0, 0), (3, 4, 13), (0, 0, 400)])
def test_two_players_have_the_rating_of_their_score(wins: int, draws: int, losses: int) -> None:
    """10^(difference / 400) is the ratio of their points, each with half a point more."""
    found = rate(2, {(0, 1): outcomes(wins, draws, losses)})
    points = wins + draws / 2 + 0.5, losses + draws / 2 + 0.5
    difference = 400 * math.log10(points[0] / points[1])
    np.testing.assert_allclose(found.elo, [difference / 2, -difference / 2], atol=1e-6)


def test_many_players_have_the_ratings_of_another_algorithm() -> None:
    rng, count = np.random.default_rng(0), 6
    played = {(i, j): rng.choice([0, 0.5, 1], size=20 + i) for i in range(count) for j in range(i + 1, count)}
    points, games = np.zeros((2, count, count))
    for (i, j), scored in played.items():
        points[i, j], points[j, i] = scored.sum() + 0.5, (1 - scored).sum() + 0.5
        games[i, j] = games[j, i] = len(scored) + 1
    np.testing.assert_allclose(rate(count, played).elo, ascend(points, games), atol=1e-4)


def test_a_champion_of_many_games_has_a_finite_rating() -> None:
    """Newton's method does not run away where the likelihood is nearly flat."""
    played = {(i, j): np.ones(2_000) for i in range(5) for j in range(i + 1, 5)}
    found = rate(5, played)
    assert np.isfinite(found.elo).all()
    assert (np.diff(found.elo) < 0).all()
    expected = 1 / (1 + 10 ** ((found.elo[None, :] - found.elo[:, None]) / 400))
    np.fill_diagonal(expected, 0)
    points = np.triu(np.full((5, 5), 2_000.5), 1) + np.tril(np.full((5, 5), 0.5), -1)
    np.testing.assert_allclose((2_001 * expected).sum(axis=1), points.sum(axis=1), rtol=1e-9)


def test_players_who_did_not_meet_are_compared_through_others() -> None:
    found = rate(3, {(0, 1): outcomes(30, 0, 10), (1, 2): outcomes(30, 0, 10)}).elo
    step = 400 * math.log10(30.5 / 10.5)
    np.testing.assert_allclose(found, [step, 0, -step], atol=1e-6)


@pytest.mark.system
def test_intervals_contain_the_truth_about_as_often_as_they_say() -> None:
    rng, truth, hits, trials = np.random.default_rng(1), np.array([120.0, -20.0, -100.0]), 0, 60
    for _ in range(trials):
        played = {}
        for i, j in ((0, 1), (0, 2), (1, 2)):
            chance = 1 / (1 + 10 ** ((truth[j] - truth[i]) / 400))
            played[i, j] = (rng.random(200) < chance).astype(float)
        found = rate(3, played)
        hits += int(((found.low <= truth) & (truth <= found.high)).sum())
    assert 0.88 <= hits / (3 * trials) <= 1.0


def test_intervals_are_of_the_seed_and_narrower_with_more_games() -> None:
    few, many = ({(0, 1): outcomes(6 * k, k, 4 * k)} for k in (7, 175))
    first, again, *others = (rate(2, few, seed=seed) for seed in (1, 1, 2, 3, 4))
    np.testing.assert_array_equal(first.low, again.low)
    assert any((first.low != other.low).any() for other in others)
    assert (rate(2, many).high - rate(2, many).low).max() < (first.high - first.low).min() / 3


def test_a_batch_is_fitted_as_each_alone() -> None:
    rng = np.random.default_rng(0)
    games = np.full((3, 3), 10.0) - 10 * np.eye(3)
    points = rng.uniform(1, 9, (4, 3, 3))
    points = np.triu(points, 1)
    points = points + np.tril(10 - points.swapaxes(1, 2), -1)
    batch = fit(points, games)
    for one, expected in zip(points, batch, strict=True):
        np.testing.assert_allclose(fit(one[None], games)[0], expected, atol=1e-9)
    np.testing.assert_allclose(batch.mean(axis=1), 0, atol=1e-9)
