"""Comparison of runs: grouped by what differs except the seed, with the statistics of Agarwal et al. (2021, arXiv
2108.13264): interquartile means, probability of improvement, and stratified bootstrap intervals.

A group has a score for each run, of its latest evaluation by its own settings. Runs that are scored by different
standards (environments, also those of one name with other parameters, tasks, ways to act) are strata: values are drawn
within each, and only runs of one stratum are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipelines.config.changes import find_varying
from pipelines.errors import InputMissing, UsageError
from pipelines.evaluation.statistics import LEVEL, RESAMPLES, bootstrap_ci_of_iqm, bootstrap_ci_of_strata, compute_iqm
from pipelines.nearest import did_you_mean
from pipelines.runs.evaluations import (
    DEFAULT_METRIC,
    ScoreInterval,
    Standard,
    find_last_and_best,
    name_environments,
    select_curve,
)
from pipelines.runs.stored import StoredRun
from pipelines.runs.summary import format_setting

Statistic = Literal["iqm", "mean"]
Axis = Literal["updates", "steps", "seconds"]
# Settings that decide how a run is carried out, not what it does.
_NOT_COMPARED = (
    *("about", "expected", "seed", "report", "collect.workers", "collect.on_env_error", "collect.env_timeout_seconds"),
    *(f"train.{name}" for name in ("threads", "device", "prefetch", "compile", "refresh_seconds", "log_every")),
    *(f"train.{name}" for name in ("checkpoint_every", "keep_checkpoints", "verify")),
)
_MOST_POINTS = 200
_MOST_KEYS = 4
_CURVE_RESAMPLES = 500


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Runs that differ in their seed only.

    `settings` distinguish the group from others. `scores` are by stratum: the name of an environment, with what
    distinguishes it from others of that name. `strata` has the stratum of each run's path. `scored_on` describes the
    tasks and the way to act.
    """

    name: str
    settings: Mapping[str, Any]
    runs: tuple[StoredRun, ...]
    scores: Mapping[str, tuple[float, ...]]
    score: ScoreInterval | None
    strata: Mapping[Path, str] = field(default_factory=dict)
    scored_on: str = ""

    @property
    def unfinished(self) -> int:
        """Number of runs that are running, or ended before they were done."""
        return sum(run.state.status != "finished" for run in self.runs)

    def compute_curve(self, metric: str, axis: Axis, statistic: Statistic) -> GroupCurve:
        """Compute the learning curve: the statistic of the runs, interpolated between their evaluations. It ends where
        fewer than half of the runs have got."""
        lines: list[tuple[str, np.ndarray, np.ndarray]] = []
        standards: dict[str, None] = {}
        for run in self.runs:
            evaluations = select_curve(run.scores.curve, metric)
            standards |= dict.fromkeys(str(each.standard) for each in evaluations)
            points = sorted(
                (place, score.value)
                for each in evaluations
                if (place := {"updates": each.update, "steps": each.env_steps, "seconds": each.seconds}[axis])
                is not None
                and (score := each.score(metric)) is not None
            )
            if points:
                stratum = self.strata.get(run.path, run.env)
                lines.append((stratum, np.array([x for x, _ in points]), np.array([y for _, y in points])))
        found = GroupCurve(name=self.name, scored_on=" or ".join(standards))
        places = np.unique(np.concatenate([x for _, x, _ in lines])) if lines else np.zeros(0)
        if len(places) > _MOST_POINTS:
            places = np.linspace(places[0], places[-1], _MOST_POINTS)
        for place in places:
            at: dict[str, list[float]] = {}
            for env, x, y in lines:
                if x[0] <= place <= x[-1]:
                    at.setdefault(env, []).append(float(np.interp(place, x, y)))
            score = aggregate(at, statistic, _CURVE_RESAMPLES)
            if score is None or 2 * sum(map(len, at.values())) < len(lines):
                continue
            found.x.append(float(place))
            found.values.append(score.value)
            found.low.append(score.value if score.low is None else score.low)
            found.high.append(score.value if score.high is None else score.high)
        return found


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """Probability that a run of the group `better` scores higher than one of the group `than`."""

    better: str
    than: str
    probability: ScoreInterval


@dataclass(frozen=True, kw_only=True)
class GroupCurve:
    """Scores of a group by `x`, with their interval. `scored_on` describes the tasks and the way to act."""

    name: str
    scored_on: str = ""
    x: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


def group_runs(
    runs: Sequence[StoredRun],
    *,
    metric: str = DEFAULT_METRIC,
    statistic: Statistic = "iqm",
    by: Sequence[str] = (),
) -> list[RunGroup]:
    """Group runs by the settings `by`, or by all that differ but the seed, in the order in which the groups appear.

    If the environments differ and other settings do too, the environments are strata of each group. InputMissing if no
    run has the metric in an evaluation by its own settings; UsageError for a setting that none has.
    """
    if not runs:
        raise InputMissing("no runs to compare", hint="amago runs DIR lists the runs in a directory")
    _require_metric(runs, metric)
    every = [run.settings if by else run.distinctive_settings for run in runs]
    tables = [{key: value for key, value in table.items() if key not in _NOT_COMPARED} for table in every]
    keys = list(by) if by else find_varying(tables)
    known = {key for table in tables for key in table}
    for key in by:
        if key not in known:
            hint = did_you_mean(key, known, otherwise="amago settings lists them")
            raise UsageError(f"no setting '{key}' to group by", hint=hint)
    if not by and (other := [key for key in keys if not key.startswith("env.")]):
        keys = other
    members: dict[tuple[str, ...], list[int]] = {}
    for place, table in enumerate(tables):
        members.setdefault(tuple(repr(table.get(key)) for key in keys), []).append(place)
    named = keys if by else _choose_distinguishing(keys, tables, runs, len(members))
    scored = [find_last_and_best(run.scores.final, metric) for run in runs]
    last = [pair[0] if pair else None for pair in scored]
    strata = _name_strata([None if each is None else each.standard for each in last])
    groups = []
    for places in members.values():
        first, settings = runs[places[0]], {key: tables[places[0]].get(key) for key in named}
        name = ", ".join(f"{key}={format_setting(value)}" for key, value in settings.items())
        if not settings or len(settings) > _MOST_KEYS:
            name = first.recipe or first.env or first.name
        scores: dict[str, list[float]] = {}
        for place in places:
            evaluation = last[place]
            if evaluation is not None and (score := evaluation.score(metric)) is not None:
                scores.setdefault(strata[place], []).append(score.value)
        values = {stratum: tuple(each) for stratum, each in scores.items()}
        standards = [str(each.standard) for place in places if (each := last[place]) is not None]
        groups.append(
            RunGroup(
                name=name,
                settings=settings,
                runs=tuple(runs[place] for place in places),
                scores=values,
                score=aggregate(values, statistic),
                strata={runs[place].path: strata[place] for place in places},
                scored_on=" or ".join(dict.fromkeys(standards)),
            )
        )
    if len({group.name for group in groups}) < len(groups):
        return [replace(group, name=f"{group.name}: {group.runs[0].name}") for group in groups]
    return groups


def estimate_improvements(
    groups: Sequence[RunGroup], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Improvement]:
    """Estimate the probability of improvement of each group over each other, of those that have scores."""
    scored = [group for group in groups if group.scores]
    return [
        Improvement(
            better=first.name,
            than=second.name,
            probability=estimate_improvement(first.scores, second.scores, resamples, seed),
        )
        for first in scored
        for second in scored
        if first is not second and first.scores.keys() & second.scores.keys()
    ]


def estimate_improvement(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> ScoreInterval:
    """Estimate the probability that a score of `first` is higher than one of `second`; a tie counts half.

    It is the mean over the environments that both have, with a stratified bootstrap interval unless each has one run.

    >>> estimate_improvement({"maze": [1, 2, 3]}, {"maze": [0, 2, 2]}).value
    0.6666666666666666
    """
    rng = np.random.default_rng(seed)
    shared = sorted(first.keys() & second.keys())
    value, drawn = 0.0, np.zeros(resamples)
    for env in shared:
        ours, theirs = np.asarray(first[env], float), np.asarray(second[env], float)
        wins = (ours[:, None] > theirs[None, :]) + 0.5 * (ours[:, None] == theirs[None, :])  # (runs, runs)
        value += float(wins.mean()) / len(shared)
        rows = rng.integers(len(ours), size=(resamples, len(ours)))
        columns = rng.integers(len(theirs), size=(resamples, len(theirs)))
        drawn += wins[rows[:, :, None], columns[:, None, :]].mean(axis=(1, 2)) / len(shared)
    if all(len(first[env]) == len(second[env]) == 1 for env in shared):
        return ScoreInterval(value=value)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return ScoreInterval(value=value, low=float(low), high=float(high))


def aggregate(
    scores: Mapping[str, Sequence[float]], statistic: Statistic = "iqm", resamples: int = RESAMPLES
) -> ScoreInterval | None:
    """Compute the statistic over the scores of all environments; None without scores.

    It has an interval where an environment has two runs or more.

    >>> aggregate({"maze": [0, 1, 2, 3, 100]}).value
    2.0
    """
    strata = [np.asarray(values, float) for values in scores.values() if len(values)]
    if not strata:
        return None
    interval: Callable[..., tuple[float, float]]
    if statistic == "iqm":
        value, interval = compute_iqm(np.concatenate(strata)), bootstrap_ci_of_iqm
    else:
        value, interval = float(np.mean([values.mean() for values in strata])), bootstrap_ci_of_strata
    if all(len(values) == 1 for values in strata):
        return ScoreInterval(value=value)
    low, high = interval(strata, resamples=resamples)
    return ScoreInterval(value=value, low=low, high=high)


def compute_curves(
    groups: Sequence[RunGroup], *, metric: str = DEFAULT_METRIC, axis: Axis = "updates", statistic: Statistic = "iqm"
) -> list[GroupCurve]:
    """Compute the learning curve of each group that has evaluations."""
    return [found for group in groups if (found := group.compute_curve(metric, axis, statistic)).x]


def _name_strata(standards: Sequence[Standard | None]) -> list[str]:
    """Name the stratum of each standard: the environment, with tasks and way to act where these differ within it."""
    known = [standard for standard in standards if standard is not None]
    envs = name_environments(known)
    alike = {env: {str(each) for each in known if each.env == env} for env in envs}
    return [
        ""
        if standard is None
        else envs[standard.env]
        if len(alike[standard.env]) == 1
        else f"{envs[standard.env]}, {standard}"
        for standard in standards
    ]


def _choose_distinguishing(
    keys: Sequence[str], tables: Sequence[Mapping[str, Any]], runs: Sequence[StoredRun], count: int
) -> list[str]:
    """Choose as few keys as distinguish the `count` groups.

    The size comes before the settings that it stands for, and settings that were changed come before others.
    """
    changed = {key for run in runs for key in run.changed}
    chosen: list[str] = []
    parts = 1
    for key in sorted(keys, key=lambda key: (key != "size", key not in changed, key)):
        finer = len({tuple(repr(table.get(each)) for each in (*chosen, key)) for table in tables})
        if finer > parts:
            chosen, parts = [*chosen, key], finer
        if parts == count:
            break
    return chosen


def _require_metric(runs: Sequence[StoredRun], metric: str) -> None:
    """Raise InputMissing, with what there is, if no run is scored by the metric."""
    known: dict[str, None] = {}
    for run in runs:
        for evaluation in run.scores.final:
            if evaluation.score(metric) is not None:
                return
            known |= dict.fromkeys(name for name in evaluation.metrics if evaluation.score(name) is not None)
    if not known:
        others = sum(len(run.evaluations) for run in runs)
        why = f": their {others} are of other environments, tasks or ways to act" if others else ""
        raise InputMissing(
            f"none of these runs has an evaluation by its own settings{why}", hint="amago evaluate RUN makes one"
        )
    hint = did_you_mean(metric, known, otherwise=f"known: {', '.join(sorted(known))}")
    raise InputMissing(f"no evaluation of these runs has the metric '{metric}'", hint=hint)
