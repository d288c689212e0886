"""tune: search for better settings with Optuna. A trial is a run of the recipe, which resumes by itself.

The study is a journal file beside the runs, so that no server is needed. A killed search goes on where it was: trials
that the journal has as running are the runs that were interrupted, and no trial is carried out twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config.base import Change
from pipelines.config.changes import find_mark
from pipelines.config.places import is_run
from pipelines.errors import IntegrityError, StageFailed
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files.atomic import write_atomically
from pipelines.files.checksums import Mismatch, checksum
from pipelines.files.json import Form, read_object
from pipelines.files.locks import hold_exclusively
from pipelines.files.malformed import explain_damage, read_limited
from pipelines.registry import require_package
from pipelines.runs.comparison import aggregate
from pipelines.runs.evaluations import DEFAULT_METRIC, ScoreInterval, find_last_and_best, select_curve
from pipelines.runs.stored import read_run
from pipelines.stages.result import Result, Table
from pipelines.stages.run_processes import EndedRun, PlannedRun, RunProcesses, make_failure
from pipelines.stages.search_space import Dimension
from pipelines.stages.shared_settings import RECORD, require_shared_settings

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

Values = Mapping[str, Any]
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0  # between looks for new evaluations
_SHOWN = 10
_STUDY, _SEAL = "study.log", "study.json"


class _Seal(Form):
    """Contents of study.json: of how many bytes of the journal it has the checksum."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to search: `settings` is the recipe's resolved document, `plan` makes the run of some values in a directory;
    a trial's seed is `seed`, a confirmation's seeds follow it."""

    directory: Path
    space: Sequence[Dimension]
    settings: Mapping[str, Any]
    plan: Callable[[Values, Path], PlannedRun]
    command: Sequence[str]
    seed: int = 0
    metric: str = DEFAULT_METRIC
    trials: int = 20
    jobs: int = 1
    prune: bool = True
    confirm: int = 3

    def open_study(self) -> Study:
        """Open the study, as far as its journal was written whole. This process has the directory's lock."""
        import warnings

        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = self.directory / _STUDY
        hint = "restore it from a copy, or choose another --run"
        for left in self.directory.glob("study.log.lock*"):  # of a process that was killed while it wrote
            with contextlib.suppress(OSError):
                left.unlink()
        if not os.path.lexists(path):
            self.seal()  # before Optuna writes: a kill in between leaves a journal that goes on from nothing
        with explain_damage(path, hint=hint), contextlib.suppress(FileNotFoundError):
            content = read_limited(path)
            seal = self.directory / _SEAL
            if not seal.exists():
                raise Mismatch(f"its checksum, '{seal.name}', is missing")
            sealed = read_object(seal, _Seal)
            if sealed is None or checksum(content[: sealed["bytes"]]) != sealed["sha256"]:
                raise Mismatch("it is not as it was written")
            if content and not content.endswith(b"\n"):  # a process was killed while it wrote
                with path.open("r+b") as file:
                    file.truncate(content.rfind(b"\n") + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            with explain_damage(path, optuna.exceptions.OptunaError, hint=hint):
                storage = JournalStorage(JournalFileBackend(str(path)))
                for known in storage.get_all_studies():
                    storage.get_all_trials(known._study_id, deepcopy=False)
            started = max(self.trials // 4, min(self.trials, 5))
            study = optuna.create_study(
                storage=storage,
                study_name="tune",
                direction="maximize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=4) if self.prune else optuna.pruners.NopPruner(),
            )
            # A resumed search must not draw what it has drawn: the stream depends on the number of trials.
            study.sampler = optuna.samplers.TPESampler(
                seed=self.seed + 1_000_003 * len(study.trials),
                n_startup_trials=min(started, 10),
                constant_liar=self.jobs > 1,
            )
        self.seal()
        return study

    def seal(self) -> None:
        """Record the length and the checksum of the journal as it is now, since a flipped digit of a score is still a
        number. What a process that was killed appended afterwards is read as far as it was written whole."""
        path = self.directory / _STUDY
        content = read_limited(path) if path.exists() else b""
        write_atomically(self.directory / _SEAL, json.dumps({"bytes": len(content), "sha256": checksum(content)}))

    def require_same(self) -> None:
        """Raise UsageError if trials of other settings, of another space or by another metric are in the directory:
        the best of all trials would be chosen among scores that cannot be compared."""
        if (self.directory / _STUDY).exists() and not (self.directory / RECORD).exists():
            raise IntegrityError(
                f"'{self.directory / RECORD}' is missing, so the settings of its trials are unknown",
                hint="restore it from a copy, or choose another --run",
            )
        space = {each.key: {**asdict(each), "choices": list(each.choices)} for each in self.space}
        require_shared_settings(
            self.directory,
            self.settings,
            varied=[each.key for each in self.space],
            may_change=lambda key: find_mark(key) is Change.PACING,
            also={"metric": self.metric, "space": space},
        )

    def place(self, number: int) -> Path:
        return self.directory / f"trial-{number:04d}"

    def find_best(self, study: Study) -> FrozenTrial:
        try:
            return study.best_trial
        except ValueError:
            raise StageFailed(
                f"none of the {len(study.trials)} trials has a score", hint=f"see '{self.directory / 'logs'}'"
            ) from None

    def read_values(self, trial: FrozenTrial) -> dict[str, Any]:
        return {each.key: each.read_stored(trial.params[each.key]) for each in self.space if each.key in trial.params}

    def confirm_best(self, values: Values, logs: Path, listener: Listener) -> list[float]:
        """Run the best settings with seeds that no trial used; return their scores."""
        seeds = range(self.seed + 1, self.seed + 1 + self.confirm)
        mark = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:8]
        folder = self.directory / f"best-{mark}"  # another best trial is confirmed in another place
        planned = [self.plan({**values, "seed": seed}, folder / f"seed-{seed}") for seed in seeds]
        waiting = [each for each in planned if not each.is_done]
        ended: list[EndedRun] = []
        with RunProcesses(self.command, jobs=self.jobs, logs=logs) as processes:
            while waiting or not processes.is_idle:
                while waiting and not processes.is_full:
                    processes.start(waiting.pop(0))
                ended += processes.take_ended()
                done = sum(each.is_done for each in planned) if ended else 0
                listener(Progress(stage="confirm", done=done, total=len(planned), unit="runs"))
                time.sleep(_POLL_SECONDS)
        if failed := [each for each in ended if each.code != 0]:
            raise make_failure(failed, len(planned), logs)
        scores = [read_score(each.path, self.metric) for each in planned]
        return [score for score in scores if score is not None]

    def tabulate(self, study: Study, score: ScoreInterval | None, count: int) -> list[Table]:
        """Tabulate the best trials, and the confirmation: the mean score of `count` runs with fresh seeds."""
        from optuna.trial import TrialState

        ranked = sorted(study.get_trials(states=(TrialState.COMPLETE,)), key=lambda trial: -(trial.value or 0.0))
        keys = [dimension.key for dimension in self.space]
        rows = []
        for trial in ranked[:_SHOWN]:
            values = self.read_values(trial)
            cells = [values.get(key) for key in keys]
            shown = (cell if isinstance(cell, int | float | str) else str(cell) for cell in cells)
            rows.append([f"trial-{trial.number:04d}", trial.value, *shown])
        found = [Table(title="best trials", columns=["trial", self.metric, *keys], rows=rows)]
        if score is not None:
            rows = [["the best trial (chosen, so biased upwards)", 1, study.best_trial.value, None, None]]
            rows.append(["the same settings, fresh seeds", count, score.value, score.low, score.high])
            columns = ("", "runs", f"mean of {self.metric}", "95% low", "95% high")
            found.append(Table(title="confirmation", columns=columns, rows=rows))
        return found


@dataclass(kw_only=True)
class _Trial:
    number: int
    id: int
    planned: PlannedRun
    reported: set[int] = field(default_factory=set)
    pruned: bool = False


def run(search: Search, *, listener: Listener = silent) -> Result:
    """Carry out the trials that are not done, then the best settings with fresh seeds.

    InputMissing without Optuna; UsageError if the directory has trials of other settings; StageFailed if every trial
    failed, or a run of the confirmation; Locked while another process tunes in this directory.
    """
    began = time.monotonic()
    require_package("optuna", "tune", "amago tune")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logs = search.directory / "logs"
    with hold_exclusively(search.directory / ".tune.lock", what=f"'{search.directory}' is in use by a search"):
        search.require_same()
        study = search.open_study()
        with RunProcesses(search.command, jobs=search.jobs, logs=logs) as processes:
            _Tuner(search, study, processes, listener).carry_out()
        best = search.find_best(study)
        confirmed = search.confirm_best(search.read_values(best), logs, listener)
    score = aggregate({"": confirmed}, "mean") if confirmed else None
    interval = None if score is None or score.low is None else [score.low, score.high]
    states = [trial.state.name.lower() for trial in study.trials]
    return Result(
        command="tune",
        run=search.directory,
        metrics={
            "trials": len(states),
            **{name: states.count(name) for name in ("complete", "pruned", "fail")},
            "best": {
                "trial": best.number,
                "run": str(search.place(best.number)),
                search.metric: best.value,
                "settings": search.read_values(best),
            },
            "confirmed": None if score is None else {"mean": score.value, "ci95": interval, "scores": confirmed},
        },
        tables=search.tabulate(study, score, len(confirmed)),
        seconds=time.monotonic() - began,
    )


class _Tuner:
    """The loop: start trials, report their evaluations, prune, and record how they end."""

    def __init__(self, search: Search, study: Study, processes: RunProcesses, listener: Listener) -> None:
        self._search, self._study, self._processes, self._listener = search, study, processes, listener
        self._going: list[_Trial] = []
        self._failed: list[EndedRun] = []
        self._looked = 0.0

    def carry_out(self) -> None:
        from optuna.trial import TrialState

        waiting = [self._resume(trial) for trial in self._study.get_trials(states=(TrialState.RUNNING,))]
        while True:
            done = self._done()
            while not self._processes.is_full and (waiting or done + len(self._going) < self._search.trials):
                self._begin(waiting.pop() if waiting else self._ask())
                done = self._done()
            for ended in self._processes.take_ended():
                self._end(ended)
                done += 1
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._looked = time.monotonic()
                for trial in self._going:
                    self._report(trial)
            self._listener(Progress(stage="tune", done=done, total=self._search.trials, unit="trials"))
            if self._processes.is_idle and not waiting and done >= self._search.trials:
                return
            time.sleep(_POLL_SECONDS)

    def _done(self) -> int:
        from optuna.trial import TrialState

        ends = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return len(self._study.get_trials(deepcopy=False, states=ends))

    def _ask(self) -> _Trial:
        """Begin a new trial with the settings that the sampler chose, written to the journal."""
        trial = self._study.ask()
        values = {dimension.key: dimension.choose(trial) for dimension in self._search.space}
        return self._plan(trial.number, trial._trial_id, values)

    def _resume(self, trial: FrozenTrial) -> _Trial:
        """Take up a trial that an earlier process left; one without all of its settings is given the rest."""
        import optuna

        live = optuna.trial.Trial(self._study, trial._trial_id)
        values = {dimension.key: dimension.choose(live) for dimension in self._search.space}
        found = self._plan(trial.number, trial._trial_id, values)
        found.reported = set(trial.intermediate_values)
        return found

    def _plan(self, number: int, identity: int, values: Values) -> _Trial:
        planned = self._search.plan({**values, "seed": self._search.seed}, self._search.place(number))
        return _Trial(number=number, id=identity, planned=planned)

    def _begin(self, trial: _Trial) -> None:
        self._going.append(trial)
        if trial.planned.is_done:  # it ended while nobody was there to record it
            self._end(EndedRun(planned=trial.planned, code=0))
        else:
            self._processes.start(trial.planned)

    def _report(self, trial: _Trial) -> None:
        """Report new evaluations of a trial, and stop it if it is not promising."""
        import optuna

        live = optuna.trial.Trial(self._study, trial.id)
        if not is_run(trial.planned.path):
            return
        for evaluation in select_curve(read_run(trial.planned.path).scores.curve, self._search.metric):
            score = evaluation.score(self._search.metric)
            if score is not None and evaluation.update not in trial.reported:
                live.report(score.value, evaluation.update)
                trial.reported.add(evaluation.update)
        if self._search.prune and trial.reported and not trial.pruned and live.should_prune():
            trial.pruned = True
            self._processes.stop(trial.planned)

    def _end(self, ended: EndedRun) -> None:
        """Record how a trial ended, in the journal."""
        from optuna.trial import TrialState

        trial = next(each for each in self._going if each.planned == ended.planned)
        self._going.remove(trial)
        name, score = trial.planned.path.name, read_score(trial.planned.path, self._search.metric)
        if ended.code == 0 and score is not None:
            self._study.tell(trial.number, score)
            text = f"{name} done, {self._search.metric} {score:.4g}"
        elif trial.pruned and ended.code in (0, 143):
            self._study.tell(trial.number, state=TrialState.PRUNED)
            text = f"{name} pruned at update {max(trial.reported)}"
        else:
            error = ended.error or f"no evaluation has the metric '{self._search.metric}'"
            ended = EndedRun(planned=ended.planned, code=ended.code or 1, error=error)
            self._study.tell(trial.number, state=TrialState.FAIL)
            self._failed.append(ended)
            text = f"{name} failed: {error}"
            if len(self._failed) >= 3 and not self._study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
                raise make_failure(self._failed, len(self._study.trials), self._search.directory / "logs")
        self._search.seal()
        self._listener(Notice(stage="tune", text=text))


def read_score(run: Path, metric: str) -> float | None:
    """Read the score of a trial, of its last evaluation by its own settings; None without one."""
    found = find_last_and_best(read_run(run).scores.final, metric) if is_run(run) else None
    score = found[0].score(metric) if found is not None else None
    return None if score is None else score.value
