"""Aggregates of normalised scores over runs and tasks, as rliable has them (Agarwal et al., 2021, arXiv 2108.13264).

The interquartile mean and its interval are `pipelines.evaluation.statistics.iqm` and `bootstrap_ci_of_iqm`; here is the
performance profile. Strata are the runs of a task, R_i scores each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelines.evaluation.statistics import LEVEL, RESAMPLES


def performance_profile(
    strata: Sequence[np.ndarray], levels: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the share of runs whose score is above each level (L,), and its 95% bootstrap interval (L,), (L,), with
    runs drawn within each task. All tasks have the same weight.

    >>> share, low, high = performance_profile([np.array([0.2, 0.6])], np.array([0.0, 0.5, 0.6]))
    >>> share.tolist()
    [1.0, 0.5, 0.0]
    """
    if not strata or not all(len(scores) for scores in strata):
        raise ValueError("a profile needs at least one score of each task")
    above = [np.asarray(scores)[:, None] > levels for scores in strata]
    share = np.mean([each.mean(0) for each in above], axis=0)
    rng = np.random.default_rng(seed)
    counts = np.zeros((resamples, len(levels)))
    for each in above:
        counts += each[rng.integers(len(each), size=(resamples, len(each)))].mean(1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(counts / len(above), [tail, 1 - tail], axis=0)
    return share, low, high
