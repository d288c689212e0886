"""A run directory as one record, and what the run is doing, or how it ended: from its locks and from what its last
stage recorded.

Damaged and half-written files are left out and listed in `problems`, since one damaged file must not hide other runs.
Nothing that a file names is imported or opened.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipelines.config.changes import Changes, find_changes, flatten, is_in
from pipelines.config.load import read_toml
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.errors import AmagoError
from pipelines.files.json import parse_object
from pipelines.files.locks import LockHolder, find_holder
from pipelines.files.malformed import read_limited
from pipelines.runs.evaluations import (
    Evaluation,
    RandomPlay,
    RunScores,
    find_last_and_best,
    read_evaluations,
    to_number,
)
from pipelines.runs.metrics import POINTS, MetricColumns, read_last_line, read_metrics

_RunStatus = Literal["running", "finished", "interrupted", "failed"]
_LOCKS = ("run", "train", "collect")  # `run` holds all three
_OUTCOMES: Mapping[str, _RunStatus] = {"done": "finished", "interrupted": "interrupted", "failed": "failed"}
_KILLED = "it ended without a record, as after kill -9"
_LONGEST = 500
_MOST_BYTES = 16 << 20
_UPDATE = re.compile(r"\d{6,15}")
_NOT_SETTINGS = ("about", "expected", "profile", "seed", "size", "env.name")


def find_running(path: Path) -> tuple[str, LockHolder] | None:
    """Find the stage that a process is running in the run at `path`, and that process; None if there is none."""
    for stage in _LOCKS:
        if (found := find_holder(path / f".{stage}.lock")) is not None:
            return stage, found
    return None


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run. `stage` is the one that is running or ran last, `pid` and `host` are those of its process.

    `started` and `ended` are seconds since the epoch, None if unknown. `reason` says why it failed or was interrupted.
    """

    status: _RunStatus
    stage: str = ""
    pid: int | None = None
    host: str = ""
    started: float | None = None
    ended: float | None = None
    reason: str = ""

    @classmethod
    def read(cls, path: Path, record: Mapping[str, Any]) -> RunState:
        """Determine the state of the run at `path`, whose run.json is `record`: running, or how its last stage
        ended."""

        def text(value: Any) -> str:
            return value[:_LONGEST] if isinstance(value, str) else ""

        stages = record.get("stages")
        entries: dict[str, Mapping[str, Any]] = {"": {}}
        if isinstance(stages, Mapping):
            entries |= {str(name): entry for name, entry in stages.items() if isinstance(entry, Mapping)}
        stage, last = max(entries.items(), key=lambda item: cls._parse_time(item[1].get("time")) or 0.0)
        started = cls._parse_time(last.get("time"))
        if (now := find_running(path)) is not None:
            return replace(cls.running(*now), started=started)
        status = _OUTCOMES.get(text(last.get("status")), "interrupted")
        reason = text(last.get("error")) if status != "finished" else ""
        pid, hardware = last.get("pid"), record.get("hardware")
        return cls(
            status=status,
            stage=stage,
            pid=pid if isinstance(pid, int) else None,
            host=text(hardware.get("host")) if isinstance(hardware, Mapping) else "",
            started=started,
            ended=cls._parse_time(last.get("ended")),
            reason=reason or (_KILLED if status == "interrupted" and stage and "status" not in last else ""),
        )

    @classmethod
    def running(cls, stage: str, process: LockHolder) -> RunState:
        """Describe a run in which `process` runs `stage`."""
        return cls(status="running", stage=stage, pid=process.pid, host=process.host)

    @staticmethod
    def _parse_time(text: Any) -> float | None:
        """Parse a time as run.json has it, 2026-11-23T01:23:41+0000."""
        try:
            parsed = time.strptime(text, "%Y-%m-%dT%H:%M:%S%z")
            return float(calendar.timegm(parsed) - (parsed.tm_gmtoff or 0))
        except (TypeError, ValueError, OverflowError):
            return None


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run as its directory describes it.

    `record` is run.json, `progress` is progress.json, as plain data.
    """

    path: Path
    name: str
    state: RunState
    record: Mapping[str, Any] = field(repr=False)
    progress: Mapping[str, Any] = field(repr=False)
    damaged_records: tuple[str, ...] = ()

    @property
    def document(self) -> Mapping[str, Any]:
        """The settings as nested tables (config.toml); empty if it is damaged."""
        return self._config[0]

    @property
    def problems(self) -> tuple[str, ...]:
        """Which of the settings and records are damaged."""
        return (*self._config[1], *self.damaged_records)

    @cached_property
    def _config(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        try:
            return read_toml(self.path / "config.toml"), ()
        except AmagoError as error:
            return {}, (error.message,)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by dotted key, e.g. "train.learning_rate"; lists by index, e.g. "stages.0.stage"."""
        return flatten(self.document)

    @property
    def distinctive_settings(self) -> dict[str, Any]:
        """`settings`, but of a planned run the budget in place of those that were chosen for it: they follow from rates
        that every run measures again."""
        plan = self._recipe.get("plan")
        if not isinstance(plan, Mapping):
            return self.settings
        rows, budget = plan.get("choices"), plan.get("budget")
        found = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
        chosen = [str(row.get("setting")) for row in found if not row.get("given")]
        own = {key: value for key, value in self.settings.items() if not is_in(key, chosen)}
        return own | (flatten(budget) if isinstance(budget, Mapping) else {})

    @property
    def recipe(self) -> str:
        """The recipe's name, with its profile: "quickstart (smoke)"; empty for a run without a recipe."""
        name, profile = self._recipe.get("name"), self._recipe.get("profile")
        if not isinstance(name, str):
            return ""
        return f"{name} ({profile})" if profile and isinstance(profile, str) else name

    @property
    def parent(self) -> str:
        """The policy that a warm start began with, POLICY@UPDATE; empty if the first weights were random."""
        return self._name_policy("weights_from")

    @property
    def like(self) -> str:
        """The checkpoint whose trajectories the run was trained on, POLICY@UPDATE; empty if there is none."""
        return self._name_policy("like")

    def _name_policy(self, key: str) -> str:
        found = self.record.get(key)
        return f"{found.get('policy')}@{found.get('update')}" if isinstance(found, Mapping) else ""

    @cached_property
    def changed(self) -> Changes:
        """What differs from the recipe, or without one from the defaults: key -> (there, here). Not the seed."""
        recorded = self._recipe.get("changed")
        if isinstance(recorded, Mapping):
            pairs = {str(key): pair for key, pair in recorded.items() if isinstance(pair, list) and len(pair) == 2}
            return {key: (before, after) for key, (before, after) in pairs.items() if key not in _NOT_SETTINGS}
        defaults = flatten(Settings().model_dump(mode="json", exclude_none=True))
        found = find_changes(defaults, self.settings)
        return {key: pair for key, pair in found.items() if key not in _NOT_SETTINGS and not key.startswith("env.")}

    @property
    def is_planned(self) -> bool:
        """Whether settings were chosen by measuring, without a recipe."""
        return isinstance(self._recipe.get("plan"), Mapping)

    @property
    def planned_minutes(self) -> float | None:
        """The budget of a run without a recipe, in minutes; None if it has none, or one in steps."""
        plan = self._recipe.get("plan")
        budget = plan.get("budget") if isinstance(plan, Mapping) else None
        return to_number(budget.get("minutes")) if isinstance(budget, Mapping) else None

    @property
    def recorded_return(self) -> float | None:
        """The mean return of the dataset that a run without a recipe learned from; None if there is none."""
        plan = self._recipe.get("plan")
        data = plan.get("data") if isinstance(plan, Mapping) else None
        return to_number(data.get("return_mean")) if isinstance(data, Mapping) else None

    @property
    def random_play(self) -> RandomPlay | None:
        """The score of random play, if it was measured or is known exactly."""
        found = find_last_and_best(self.scores.final)
        return RandomPlay.find(self._recipe, found[0] if found else None)

    @property
    def env(self) -> str:
        value = self.record.get("env")
        value = value if isinstance(value, str) else self.settings.get("env.name")
        return value if isinstance(value, str) else ""

    @property
    def seed(self) -> int | None:
        value = self.record.get("seed")
        value = value if isinstance(value, int) else self.settings.get("seed")
        return value if isinstance(value, int) else None

    @cached_property
    def metrics(self) -> MetricColumns:
        """The lines of training, sampled if there are very many."""
        return read_metrics(self.path / "metrics.jsonl", points=POINTS)

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """All evaluations that can be read, in the order in which they were made."""
        return self._evaluations[0]

    @cached_property
    def scores(self) -> RunScores:
        """The evaluations by which the run is scored and compared."""
        return RunScores.select(self.evaluations, self.document)

    @property
    def damaged_evaluations(self) -> tuple[str, ...]:
        """Which evaluations cannot be read."""
        return self._evaluations[1]

    @cached_property
    def _evaluations(self) -> tuple[tuple[Evaluation, ...], tuple[str, ...]]:
        return read_evaluations(self.path / "evaluations", self.metrics)

    @cached_property
    def last_training(self) -> Mapping[str, Any]:
        """The last line of training; empty if there is none."""
        return read_last_line(self.path / "metrics.jsonl") or {}

    @property
    def updates(self) -> int | None:
        """Gradient updates done, as far as they are logged or in a checkpoint; an interruption saves one between lines
        of the log."""
        known = (_whole(self.last_training.get("update")) or self._count("train"), self._newest_checkpoint)
        return max((count for count in known if count is not None), default=None)

    @property
    def env_steps(self) -> int | None:
        """Environment steps in the lakes of the run, as far as they are logged."""
        counts = (_whole(self.last_training.get("env_steps")), self._count("collect"))
        return max((count for count in counts if count is not None), default=None)

    @property
    def share(self) -> float | None:
        """Share of the run's work that is done, 0 to 1; None if unknown."""
        return 1.0 if self.state.status == "finished" else to_number(self.progress.get("share"))

    @property
    def seconds_left(self) -> float | None:
        """Time that a running run still needs, by its own estimate; None if unknown."""
        return to_number(self.progress.get("seconds_left")) if self.state.status == "running" else None

    @property
    def _newest_checkpoint(self) -> int | None:
        names = (file.parent.name for file in (self.path / "checkpoints").glob("*/checkpoint.json"))
        return max((int(name) for name in names if _UPDATE.fullmatch(name)), default=None)

    def _count(self, stage: str) -> int | None:
        stages = self.progress.get("stages")
        entry = stages.get(stage) if isinstance(stages, Mapping) else None
        return _whole(entry.get("done")) if isinstance(entry, Mapping) else None

    @property
    def _recipe(self) -> Mapping[str, Any]:
        recipe = self.record.get("recipe")
        return recipe if isinstance(recipe, Mapping) else {}


def read_run(path: Path | str) -> StoredRun:
    """Read the run at `path`. InputMissing if there is none; damaged files of a run are reported in `problems`."""
    directory = RunDirectory.open(path)
    problems: list[str] = []

    def read(file: Path) -> dict[str, Any]:
        try:
            found = parse_object(read_limited(file, _MOST_BYTES))
        except FileNotFoundError:
            return {}
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
            return {}
        if found is None:
            problems.append(f"{file.name} is damaged")
        return found or {}

    record = read(directory.record_path)
    name = record.get("name")
    return StoredRun(
        path=directory.path,
        name=name if isinstance(name, str) and name else directory.path.resolve().name,
        state=RunState.read(directory.path, record),
        record=record,
        progress=read(directory.path / "progress.json"),
        damaged_records=tuple(problems),
    )


def _whole(value: Any) -> int | None:
    found = to_number(value)
    return None if found is None else int(found)
