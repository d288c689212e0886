"""Bootstrap confidence intervals: percentiles of a mean over values drawn with replacement."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2_000
LEVEL = 0.95
_CHUNK = 2**22  # indices drawn at a time


def bootstrap_ci(
    values: np.ndarray, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Estimate (low, high) of the mean of `values` (E,), by the percentile bootstrap (Efron, 1979). The same seed gives
    the same interval. One value gives an interval of width 0, no value a ValueError.

    >>> bootstrap_ci(np.ones(10))
    (1.0, 1.0)
    """
    lower, upper = bootstrap_ci_columns(np.asarray(values)[:, None], level=level, resamples=resamples, seed=seed)
    return float(lower[0]), float(upper[0])


def bootstrap_ci_columns(
    values: np.ndarray, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate intervals (A,), (A,) of the column means of `values` (E, A); the columns of an episode are drawn
    together."""
    table = np.asarray(values, dtype=np.float64)
    count = len(table)
    if not count:
        raise ValueError("a confidence interval needs at least one value")
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, table.shape[1]))
    step = max(1, _CHUNK // count)
    for first in range(0, resamples, step):
        drawn = rng.integers(count, size=(min(step, resamples - first), count))
        # How often each episode was drawn: a matrix product is faster than gathering rows.
        rows = np.arange(len(drawn))[:, None] * count
        counts = np.bincount((drawn + rows).ravel(), minlength=len(drawn) * count).reshape(len(drawn), count)
        means[first : first + step] = counts @ table / count
    tail = (1 - level) / 2
    lower, upper = np.quantile(means, [tail, 1 - tail], axis=0)
    return lower, upper


def bootstrap_ci_of_strata(
    strata: Sequence[np.ndarray], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Estimate the bootstrap interval (low, high) of the mean over `strata` (e.g. games) of their means, with values
    drawn within each stratum.

    >>> bootstrap_ci_of_strata([np.ones(3), 3 * np.ones(5)])
    (2.0, 2.0)
    """
    rng = np.random.default_rng(seed)
    means = [rng.choice(values, size=(resamples, len(values))).mean(axis=1) for values in strata]
    tail = (1 - level) / 2
    lower, upper = np.quantile(np.mean(means, axis=0), [tail, 1 - tail])
    return float(lower), float(upper)


def compute_iqm(values: np.ndarray) -> float:
    """Compute the interquartile mean: the mean without the lowest and the highest quarter (each rounded down) of
    `values`.

    >>> compute_iqm(np.array([0.0, 1.0, 2.0, 3.0, 100.0]))
    2.0
    """
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def balance(strata: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Repeat the values of each stratum (n_i, ...) until all strata have as many, and so the same weight.

    >>> balance([np.array([1.0]), np.array([2.0, 3.0])])
    [array([1., 1.]), array([2., 3.])]
    """
    most = math.lcm(*map(len, strata))
    return [np.repeat(values, most // len(values), axis=0) for values in strata]


def bootstrap_ci_of_iqm(
    strata: Sequence[np.ndarray],
    *,
    balanced: bool = False,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Estimate the bootstrap interval (low, high) of the interquartile mean over all values of `strata` (e.g. runs by
    task), with values drawn within each stratum (Agarwal et al., 2021, arXiv 2108.13264). `balanced`: all strata have
    the same weight, as `balance` gives them.

    >>> bootstrap_ci_of_iqm([np.ones(3), np.ones(2)])
    (1.0, 1.0)
    """
    if not strata or not all(len(values) for values in strata):
        raise ValueError("a confidence interval needs at least one value in each stratum")
    rng = np.random.default_rng(seed)
    drawings = [rng.choice(values, size=(resamples, len(values))).T for values in strata]
    drawn = np.concatenate(balance(drawings) if balanced else drawings).T
    cut = drawn.shape[1] // 4
    means = np.sort(drawn, axis=1)[:, cut : drawn.shape[1] - cut].mean(axis=1)
    tail = (1 - level) / 2
    lower, upper = np.quantile(means, [tail, 1 - tail])
    return float(lower), float(upper)
