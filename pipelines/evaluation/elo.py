"""Elo ratings of players from the outcomes of their games.

The model is Bradley and Terry's: player i beats j with probability 1 / (1 + 10^((E_j - E_i) / 400)), and a draw counts
as half a win of each. The ratings E maximise the likelihood of all games together with one more drawn game in every
pairing that was played, without which a player that has won all of its games would have no finite rating. Their mean is
0. Intervals are percentiles of the ratings of games that are drawn with replacement within each pairing.

P players, B draws of games.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipelines.evaluation.statistics import LEVEL

METHOD = (
    "maximum likelihood of the Bradley-Terry model with draws as half wins and one more drawn game in every pairing; "
    "mean 0; 95% intervals by bootstrap within pairings"
)
_RESAMPLES = 1_000
_PER_NAT = 400 / math.log(10)
_MOST_STEPS, _LARGEST_STEP, _SMALL_STEP = 200, 1.0, 1e-10  # of Newton's method, in natural units


@dataclass(frozen=True, kw_only=True)
class Ratings:
    """Elo of P players, with 95% intervals: arrays (P,)."""

    elo: np.ndarray
    low: np.ndarray
    high: np.ndarray


def rate(players: int, outcomes: Mapping[tuple[int, int], np.ndarray], *, seed: int = 0) -> Ratings:
    """Rate players by the `outcomes` of the games of each pairing (i, j): 1 if i won, 0.5 for a draw, 0 if j did.

    >>> rate(2, {(0, 1): np.array([1.0, 1.0, 0.0])}).elo.round(1).tolist()
    [44.4, -44.4]
    """
    rng = np.random.default_rng(seed)
    points = np.zeros((1 + _RESAMPLES, players, players))  # of the player of the row against that of the column
    games = np.zeros((players, players))
    for (i, j), scored in outcomes.items():
        count = len(scored)
        drawn = scored[rng.integers(count, size=(_RESAMPLES, count))].sum(axis=1)
        won = np.concatenate([[scored.sum()], drawn])
        points[:, i, j] += won
        points[:, j, i] += count - won
        games[i, j] += count
        games[j, i] += count
    extra = (games > 0).astype(float)
    ratings = _PER_NAT * fit(points + extra / 2, games + extra)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(ratings[1:], [tail, 1 - tail], axis=0)
    return Ratings(elo=ratings[0], low=np.minimum(low, ratings[0]), high=np.maximum(high, ratings[0]))


def fit(points: np.ndarray, games: np.ndarray) -> np.ndarray:
    """Maximise the likelihood of `points` (B, P, P) scored in `games` (P, P) by Newton's method; return the ratings
    (B, P) in natural units, with mean 0. Games must connect all players, directly or through others."""
    players = len(games)
    found = np.zeros((len(points), players))
    for _ in range(_MOST_STEPS):
        expected = 1 / (1 + np.exp(found[:, None, :] - found[:, :, None]))
        slope = (points - games * expected).sum(axis=2)
        weight = games * expected * (1 - expected)
        curvature = weight.sum(axis=2)[:, :, None] * np.eye(players) - weight
        # A constant added to all ratings changes nothing; a term of the curvature's size keeps their mean at 0.
        curvature += np.trace(curvature, axis1=1, axis2=2)[:, None, None] / players**2
        step = np.linalg.solve(curvature, slope[:, :, None])[:, :, 0]
        largest = np.abs(step).max(axis=1, keepdims=True, initial=0)
        found += step * np.minimum(1, _LARGEST_STEP / np.maximum(largest, _LARGEST_STEP))
        if largest.max(initial=0) < _SMALL_STEP:
            break
    return found
