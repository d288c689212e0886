"""Evaluations of a run: scores with their intervals, by update, environment steps and time.

A score belongs to an update and to a `Standard`: an environment with its parameters, a split of its tasks, a choice of
tasks, attempts at each, and a way to act. Only scores of one standard are compared. A run's settings say by which
standard it is scored (`RunScores.select`). Other evaluations stay in the run's directory, and are shown as such.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.files.json import parse_object
from pipelines.files.malformed import read_limited
from pipelines.runs.metrics import MetricColumns

DEFAULT_METRIC = "return_mean"
_MOST_FILES = 20_000
_MOST_BYTES = 16 << 20
_ERRORS = 2.0  # standard errors of the mean of random play that count as equal


@dataclass(frozen=True, kw_only=True)
class ScoreInterval:
    """A score and its 95% interval; without one, `low` and `high` are None."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def find(cls, metrics: Mapping[str, Any], metric: str) -> ScoreInterval | None:
        """Look up a metric with its interval; None if `metrics` do not have that number."""
        value = to_number(metrics.get(metric))
        if value is None:
            return None
        bounds = metrics.get(f"{metric.removesuffix('_mean')}_ci95")
        low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (None, None)
        return cls(value=value, low=to_number(low), high=to_number(high))


@dataclass(frozen=True, kw_only=True)
class Standard:
    """Everything that two scores must share to be comparable, apart from their updates.

    `env`: the environment and its parameters, as JSON with sorted keys. `tasks`: the SQL predicate that chose them,
    empty for those of the split. `greedy`: whether the most likely actions were taken, None if the report does not say.
    `attempts`: how often each episode was repeated. `memory`: whether the agent remembered an episode, or each attempt
    alone. `temperature`: the one at which actions were sampled.
    """

    env: str
    split: str
    tasks: str = ""
    greedy: bool | None = None
    attempts: int = 1
    memory: str = "episode"
    temperature: float = 1.0

    def __str__(self) -> str:
        """Describe it without the environment: `test tasks, sampled`."""
        which = f"tasks where {self.tasks}" if self.tasks else f"{self.split or 'all'} tasks"
        which += f", {self.attempts} times each" if self.attempts != 1 else ""
        which += ", memory cleared after each attempt" if self.memory == "attempt" else ""
        which = which if self.greedy is None else f"{which}, {name_mode(self.greedy)}"
        return which if self.temperature == 1 else f"{which} at temperature {self.temperature:g}"

    @staticmethod
    def name_env(env: Mapping[str, Any]) -> str:
        """Write settings of an environment as JSON such that equal settings give equal texts.

        TOML has no null and JSON one kind of number, so unset values are left out and 1.0 becomes 1.
        """

        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {str(key): plain(each) for key, each in value.items() if each is not None}
            if isinstance(value, list | tuple):
                return [plain(each) for each in value]
            return int(value) if isinstance(value, float) and value.is_integer() else value

        return json.dumps(plain(env), sort_keys=True, default=str)

    @staticmethod
    def count_attempts(settings: Mapping[str, Any]) -> int:
        """Look up how often each episode is played; 1 if settings of `[evaluate]` do not say so."""
        attempts = settings.get("attempts", 1)
        return attempts if isinstance(attempts, int) else 1

    @staticmethod
    def find_memory(settings: Mapping[str, Any]) -> str:
        """Look up how long the agent remembers; "episode" if settings of `[evaluate]` do not say so."""
        return "attempt" if settings.get("memory") == "attempt" else "episode"

    @staticmethod
    def find_temperature(settings: Mapping[str, Any]) -> float:
        """Look up the temperature of sampled actions; 1 if settings of `[evaluate]` do not have it."""
        found = to_number(settings.get("temperature"))
        return 1.0 if found is None else found


def name_mode(greedy: bool) -> str:
    """Name a way to act.

    >>> name_mode(True), name_mode(False)
    ('greedy', 'sampled')
    """
    return "greedy" if greedy else "sampled"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One file of `evaluations/`.

    `series` is the same for evaluations with the same settings, which form a curve. `env_steps` and `seconds` (time
    spent on the run) are those at the checkpoint's update, None if the log does not say. `default_greedy`: whether an
    agent with these actions acts greedily where nobody chose.
    """

    path: Path
    series: str
    update: int
    time: float | None
    env: str
    split: str
    label: str
    standard: Standard
    default_greedy: bool | None = None
    settings: Mapping[str, Any] = field(repr=False)
    metrics: Mapping[str, Any] = field(repr=False)
    known: Mapping[str, Any] = field(repr=False)
    env_steps: float | None = None
    seconds: float | None = None

    @classmethod
    def read(cls, path: Path, metrics: MetricColumns | None) -> Evaluation | None:
        """Read a file of `evaluations/`; None if it is damaged."""
        try:
            report = parse_object(read_limited(path, _MOST_BYTES))
        except OSError:
            return None
        if report is None:
            return None
        update, figures = report.get("update"), report.get("metrics")
        if isinstance(update, bool) or not isinstance(update, int) or not isinstance(figures, dict):
            return None
        if not 0 <= update < 1 << 53:
            return None
        env, settings, known = (as_table(report.get(name)) for name in ("env", "settings", "known"))
        greedy, default = settings.get("greedy"), report.get("default_greedy")
        split = _text(settings.get("split"))
        head, _, tail = path.stem.rpartition("-")
        return cls(
            path=path,
            series=tail if head else path.stem,
            update=update,
            time=to_number(report.get("time")),
            env=_text(env.get("name")),
            split=split,
            label=_text(settings.get("label")),
            standard=Standard(
                env=Standard.name_env(env),
                split=split,
                tasks=_text(settings.get("tasks")),
                greedy=greedy if isinstance(greedy, bool) else None,
                attempts=Standard.count_attempts(settings),
                memory=Standard.find_memory(settings),
                temperature=Standard.find_temperature(settings),
            ),
            default_greedy=default if isinstance(default, bool) else None,
            settings=settings,
            metrics=figures,
            known=known,
            env_steps=metrics.at("env_steps", update) if metrics else None,
            seconds=metrics.at("seconds", update) if metrics else None,
        )

    def score(self, metric: str = DEFAULT_METRIC) -> ScoreInterval | None:
        """Look up a metric with its interval; None if the evaluation does not have that number."""
        return ScoreInterval.find(self.metrics, metric)

    def attempts(self, kind: str = "success") -> list[ScoreInterval]:
        """List `success` or `return` by attempt; empty if there are no attempts or it is not known for each."""
        entries = self.metrics.get("per_attempt")
        listed = entries if isinstance(entries, list) else []
        found = [ScoreInterval.find(entry, f"{kind}_mean") if isinstance(entry, Mapping) else None for entry in listed]
        return [] if None in found else [score for score in found if score is not None]

    def known_attempts(self, who: str, kind: str = "success") -> list[float]:
        """List what is known exactly of `random` or `optimal` play by attempt; empty if nothing is."""
        table = self.known.get(who)
        values = table.get(kind) if isinstance(table, Mapping) else None
        found = [to_number(value) for value in values] if isinstance(values, list) else []
        return [] if None in found else [value for value in found if value is not None]


@dataclass(frozen=True, kw_only=True)
class RandomPlay:
    """Mean return of random play, which a run should exceed: its standard error, and the number of episodes (0: known
    exactly). It is measured when a run without a recipe begins, or known."""

    return_mean: float
    return_error: float = 0.0
    episodes: int = 0

    def __str__(self) -> str:
        return f"{self.return_mean:.4g}" + (f" ({self.episodes:,} episodes)" if self.episodes else "")

    @classmethod
    def find(cls, recipe: Mapping[str, Any], evaluation: Evaluation | None = None) -> RandomPlay | None:
        """Look up the score of random play: measured by the plan in a run's `recipe`, or known to an `evaluation`.

        None if neither has it.
        """
        plan = recipe.get("plan")
        measured = plan.get("measured") if isinstance(plan, Mapping) else None
        if isinstance(measured, Mapping) and (mean := to_number(measured.get("return_mean"))) is not None:
            error, episodes = to_number(measured.get("return_error")), to_number(measured.get("episodes"))
            return cls(return_mean=mean, return_error=error or 0.0, episodes=int(episodes or 0))
        known = evaluation.known.get("random") if evaluation is not None else None
        exact = to_number(known.get("return")) if isinstance(known, Mapping) else None
        return None if exact is None else cls(return_mean=exact)

    def compare(self, evaluation: Evaluation) -> str:
        """Compare the interval of an evaluation's return with random play: "below", "equal" if they overlap, or "" if
        it is above."""
        score = evaluation.score()
        if score is None:
            return ""
        low = score.value if score.low is None else score.low
        high = score.value if score.high is None else score.high
        margin = _ERRORS * self.return_error
        if high < self.return_mean - margin:
            return "below"
        return "equal" if low <= self.return_mean + margin else ""


def read_evaluations(
    folder: Path, metrics: MetricColumns | None = None
) -> tuple[tuple[Evaluation, ...], tuple[str, ...]]:
    """Read the evaluations in `folder`, in the order in which they were made, and list the files that are damaged.

    The `metrics` of the run say how many environment steps and seconds it had taken by then.
    """
    found, problems = [], []
    try:
        paths = sorted(folder.glob("*.json"))[:_MOST_FILES]
    except OSError:
        paths = []
    for path in paths:
        if path.name.startswith("."):
            continue
        evaluation = Evaluation.read(path, metrics)
        if evaluation is None:
            problems.append(f"evaluations/{path.name} is damaged")
        else:
            found.append(evaluation)
    return tuple(sorted(found, key=lambda each: (each.time or 0.0, each.update))), tuple(problems)


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """The evaluations of a run that count, in the order in which they were made.

    `final` has those of the standard by which the run is scored, `curve` those of any of the run's evaluation stages:
    a chain chooses its best checkpoint on training tasks and is scored on others.
    """

    final: tuple[Evaluation, ...] = ()
    curve: tuple[Evaluation, ...] = ()

    @classmethod
    def select(cls, evaluations: Sequence[Evaluation], document: Mapping[str, Any]) -> RunScores:
        """Select the evaluations that count from those of the run with the settings `document`.

        A run is scored as its last evaluation stage evaluates or, without one, as its table `[evaluate]` says. A run
        that names no environment, such as one trained on somebody's dataset, has that of its first evaluation.
        """

        def is_made_by(wanted: Mapping[str, Any], evaluation: Evaluation, splits: Sequence[str]) -> bool:
            """Decide whether settings `wanted` of `[evaluate]` ask for an evaluation of this standard.

            `splits` are those that "auto" allows. A report that does not say how its agent acted counts for either way.
            """
            standard, split, greedy = evaluation.standard, wanted.get("split", "auto"), wanted.get("greedy", "auto")
            chosen = greedy if isinstance(greedy, bool) else evaluation.default_greedy
            return (
                standard.tasks == _text(wanted.get("tasks"))
                and standard.attempts == Standard.count_attempts(wanted)
                and standard.memory == Standard.find_memory(wanted)
                and standard.temperature == Standard.find_temperature(wanted)
                and standard.split in (splits if split == "auto" else (split,))
                and (standard.greedy == chosen or None in (standard.greedy, chosen))
            )

        def is_of_stage(entry: Mapping[str, Any], evaluation: Evaluation) -> bool:
            counts = ("seed", "episodes")
            alike = all(
                evaluation.settings.get(key, entry.get(key)) == entry.get(key) for key in counts if key in entry
            )
            return alike and is_made_by(entry, evaluation, ("train", "test"))

        env = as_table(document.get("env"))
        own = Standard.name_env(env) if env.get("name") else evaluations[0].standard.env if evaluations else ""
        base = as_table(document.get("evaluate"))
        stages = document.get("stages")
        entries = [
            {**base, **entry}
            for entry in (stages if isinstance(stages, list | tuple) else ())
            if isinstance(entry, Mapping) and entry.get("stage") == "evaluate"
        ]
        here = [each for each in evaluations if each.standard.env == own]
        final = tuple(each for each in here if is_made_by(entries[-1] if entries else base, each, ("test",)))
        made = [each for each in here if any(is_of_stage(entry, each) for entry in entries)]
        return cls(final=final, curve=tuple(made) if entries else final)


def select_curve(evaluations: Sequence[Evaluation], metric: str = DEFAULT_METRIC) -> list[Evaluation]:
    """Select the evaluations that form a learning curve, by update.

    They have the settings with which most checkpoints were evaluated, the newest such if there are several.
    """
    scored = [each for each in evaluations if each.score(metric) is not None]
    updates: dict[str, set[int]] = {}
    for each in scored:
        updates.setdefault(each.series, set()).add(each.update)
    newest = {each.series: place for place, each in enumerate(scored)}
    if not updates:
        return []
    chosen = max(updates, key=lambda series: (len(updates[series]), newest[series]))
    by_update = {each.update: each for each in scored if each.series == chosen}
    return [by_update[update] for update in sorted(by_update)]


def find_last_and_best(
    evaluations: Sequence[Evaluation], metric: str = DEFAULT_METRIC
) -> tuple[Evaluation, Evaluation] | None:
    """Find the newest evaluation of the latest update that has the metric, and the best one of the same standard.

    None if no evaluation has the metric.
    """
    scored = [(each, score.value) for each in evaluations if (score := each.score(metric)) is not None]
    if not scored:
        return None
    last = max(enumerate(scored), key=lambda item: (item[1][0].update, item[0]))[1][0]
    alike = [(each, value) for each, value in scored if each.standard == last.standard]
    return last, max(alike, key=lambda item: item[1])[0]


def name_environments(standards: Sequence[Standard]) -> dict[str, str]:
    """Name each `Standard.env`: by the environment's name, with the parameters that distinguish it from its namesakes.

    >>> long, short = '{"corridor": 20, "name": "tmaze"}', '{"corridor": 5, "name": "tmaze"}'
    >>> name_environments([Standard(env=long, split="test"), Standard(env=short, split="test")])[short]
    'tmaze corridor=5'
    """
    tables: dict[str, Mapping[str, Any]]
    tables = {standard.env: as_table(json.loads(standard.env or "{}")) for standard in standards}
    named: dict[str, list[Mapping[str, Any]]] = {}
    for table in tables.values():
        named.setdefault(_text(table.get("name")), []).append(table)
    found = {}
    for env, table in tables.items():
        alike = named[_text(table.get("name"))]
        keys = sorted({key for each_table in alike for key in each_table})
        differing = [key for key in keys if len({json.dumps(each.get(key), sort_keys=True) for each in alike}) > 1]
        values = {key: "unset" if (value := table.get(key)) is None else value for key in differing}
        parts = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items()]
        found[env] = " ".join([_text(table.get("name")), *parts])
    return found


def to_number(value: Any) -> float | None:
    """Convert a finite number of a JSON file to a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def as_table(value: Any) -> Mapping[str, Any]:
    """Return a table of a JSON file; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:1_000] if isinstance(value, str) else ""
