"""A run: a directory that records what was done, with which settings, and can be run again.

runs/NAME/  config.toml  run.json  metrics.jsonl  checkpoints/  evaluations/  videos/  lake/
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field

from pipelines.config.changes import STAGE_TABLES, describe_changes, flatten, may_change
from pipelines.config.load import read_toml
from pipelines.config.own_runs import OwnRun
from pipelines.config.places import is_run, refuse_scheme, suggest
from pipelines.config.policy_files import PolicySource, list_checkpoints
from pipelines.config.settings import Settings
from pipelines.errors import AmagoError, InputMissing, IntegrityError, Interrupted, UsageError, is_stop
from pipelines.files.atomic import explain_errors, remove_leftovers, write_atomically
from pipelines.files.json import Form, read_object
from pipelines.files.locks import hold_exclusively, hold_lock

_LONGEST_ERROR = 500
_TIME = "%Y-%m-%dT%H:%M:%S%z"
_VERSIONED = ("amago", "torch", "gymnasium", "numpy", "pyarrow", "duckdb", "pydantic")


class _LakeRecord(Form):
    """A lake that a run was trained on."""

    id: str
    lake: str
    weight: float
    last: float


class _BestRecord(Form):
    """The best checkpoint so far, by evaluations of one series, on tasks of one split."""

    update: int
    score: float
    by: str
    split: str = ""
    series: str = ""


class WeightsRecord(Form):
    """A policy that a run took: its name in lakes, and its update."""

    policy: str
    update: int


class RunRecord(Form):
    """Fields read from run.json."""

    name: str = ""
    id: str = ""
    stages: dict[str, dict[str, Any]] = Field(default_factory=dict)
    lakes: list[_LakeRecord] = Field(default_factory=list)
    best: _BestRecord | None = None
    weights_from: WeightsRecord | None = None
    reference: WeightsRecord | None = None
    like: WeightsRecord | None = None
    labelled: dict[str, str] = Field(default_factory=dict)


class RunDirectory:
    """Paths and records of the run at `path`; nothing is created until something is recorded."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.toml"
        self.record_path = self.path / "run.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.evaluations = self.path / "evaluations"
        self.tournaments = self.path / "tournaments"
        self.videos = self.path / "videos"
        self.track_path = self.path / "track.json"
        self.lake = self.path / "lake"
        self._id = secrets.token_hex(4)
        self._begun = ""  # the stage that this object recorded

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open the run at `path`; InputMissing if there is none."""
        run = cls(path)
        if not run.exists():
            what = "a run is a directory with config.toml, e.g. runs/cartpole"
            raise InputMissing(
                f"no run at '{path}'", hint=suggest(run.path, is_run, inside="it contains runs", otherwise=what)
            )
        return run

    def exists(self) -> bool:
        return is_run(self.path)

    def load_document(self) -> dict[str, Any]:
        """Load the stored configuration; empty if nothing is recorded yet. IntegrityError if it is damaged.

        Modules that it names by this user's choice may be imported from then on.
        """
        if not self.exists():
            return {}
        try:
            document = read_toml(self.config_path)
        except UsageError as error:
            raise IntegrityError(error.message, hint="restore it from a copy, or begin another run") from error
        OwnRun(self.path, document).grant()
        return document

    def load_record(self) -> dict[str, Any]:
        """Load run.json; empty if nothing is recorded yet. IntegrityError if it is damaged."""
        if not self.record_path.exists():
            return {}
        record = read_object(self.record_path, RunRecord)
        if record is not None:
            return record
        raise IntegrityError(
            f"'{self.record_path}' is damaged",
            hint="restore it from a copy, or remove it: the run then loses its history and counts its steps from 0",
        )

    @property
    def name(self) -> str:
        """The directory's name when the run began, even after a move."""
        name = self.load_record().get("name")
        return name if isinstance(name, str) else self.path.resolve().name

    @property
    def weights_from(self) -> str:
        """The policy that a warm start began with, POLICY@UPDATE; "" if the first weights were random."""
        return self._name_policy("weights_from")

    @property
    def reference(self) -> str:
        """The policy that the run's is held near, POLICY@UPDATE; "" if there is none."""
        return self._name_policy("reference")

    @property
    def like(self) -> str:
        """The checkpoint whose trajectories the run draws from, POLICY@UPDATE; "" if it draws from all."""
        return self._name_policy("like")

    def _name_policy(self, key: str) -> str:
        record = self.load_record().get(key)
        return f"{record['policy']}@{record['update']}" if record else ""

    @property
    def identity(self) -> str:
        """NAME-ID: the name of its trajectories and its policy in a lake that others may share. The id is drawn once,
        and final when something is recorded.
        """
        return f"{self.name}-{self.load_record().get('id', self._id)}"

    def refuse_changes(self, stage: str, settings: Settings, *, fresh: bool = False, undecided: bool = False) -> None:
        """Raise UsageError with a diff if the run already has this stage with other values, unless `fresh`.

        `stage` owns some tables (`STAGE_TABLES`); only those are compared. `undecided`: "auto" may yet become the
        number that the run has, and a number or a file of tasks their names.
        """
        if fresh:
            return
        source = settings.init.source
        if source and list_checkpoints(self.checkpoints) and not PolicySource(source).is_stored(self.load_document()):
            raise UsageError(
                f"run '{self.path}' has been trained already, and did not begin with '{source}'",
                hint="a warm start is for a new run: give another --run, or begin this one again with --fresh",
            )
        if stage not in self.load_record().get("stages", {}):
            return
        owned = (*STAGE_TABLES[stage], "seed")
        before, after = (
            flatten({key: value for key, value in document.items() if key in owned})
            for document in (self.load_document(), settings.document())
        )

        def is_free(key: str) -> bool:
            if undecided and self._may_become(after.get(key), before.get(key)):
                return True
            # An import has left the environment open, and with how many actors the run goes on.
            is_actors = key == "collect.actors" and before.get(key) == "auto"
            if stage == "collect" and (is_actors or (key.startswith("env.") and not before.get("env.name"))):
                return True
            return may_change(key, stage=stage)

        if changed := describe_changes(before, after, may_change=is_free):
            raise UsageError(
                f"the configuration of '{self.path}' differs from that of its last {stage}",
                hint="repeat it unchanged, start over with --fresh, or choose another --run",
                problems=tuple(changed),
            )

    @staticmethod
    def _may_become(given: Any, stored: Any) -> bool:
        """Check whether a value that is given may yet turn out to be the one that is stored."""
        if given == "auto":
            return isinstance(stored, int)
        if not isinstance(stored, list):
            return False
        named_in_a_file = isinstance(given, list) and len(given) == 1 and str(given[0]).endswith(".json")
        return named_in_a_file or (isinstance(given, int) and given == len(stored))

    def record(
        self, stage: str, settings: Settings, *, fresh: bool = False, recipe: Mapping[str, Any] | None = None
    ) -> None:
        """Write the resolved configuration and the circumstances; the tables of other stages stay as they are.

        `recipe`: which one the run follows, and how it differs. How the stage ends is recorded when the run's `lock` is
        released. UsageError as for `refuse_changes`.
        """
        with explain_errors(f"write '{self.path}'"):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._writing():
            self.refuse_changes(stage, settings, fresh=fresh)
            kept, record, document = self.load_document(), self.load_record(), settings.document()
            owned = {key: document[key] for key in (*STAGE_TABLES[stage], "seed") if key in document}
            # With a recipe of its own, nothing is left of what the run was before.
            merged = document if stage == "run" or recipe is not None else {**document, **kept, **owned}
            write_atomically(self.config_path, tomli_w.dumps(merged))
            done = {"argv": sys.argv, "time": time.strftime(_TIME), "pid": os.getpid()}
            stages = {**record.get("stages", {}), stage: done}
            if fresh and stage != "collect":  # these refer to deleted checkpoints
                gone = ("best", "labelled", "weights_from", "reference", "like")
                record = {key: value for key, value in record.items() if key not in gone}
            named = {"name": self.name, "id": record.get("id", self._id), "seed": settings.seed}
            named |= {"env": settings.env.name} | ({} if recipe is None else {"recipe": dict(recipe)})
            self._write_record({**record, **named, **_find_circumstances(), "stages": stages})
            OwnRun(self.path, merged).remember()
        self._begun = stage

    def _record_end(self, error: BaseException | None) -> None:
        """Record how the stage ended, if it was recorded as begun; without room on the disk, nothing."""
        if not self._begun:
            return
        end: dict[str, Any] = {"status": "done", "ended": time.strftime(_TIME)}
        if error is not None:
            is_interrupted = isinstance(error, Interrupted) or is_stop(error)
            end["status"] = "interrupted" if is_interrupted else "failed"
            end["error"] = (str(error) or type(error).__name__)[:_LONGEST_ERROR]
        with contextlib.suppress(AmagoError), self._writing():
            record = self.load_record()
            stages = record.get("stages", {})
            self._write_record({**record, "stages": {**stages, self._begun: {**stages.get(self._begun, {}), **end}}})
        self._begun = ""

    def update_record(self, **fields: Any) -> None:
        """Set top-level fields of run.json."""
        with self._writing():
            self._write_record({**self.load_record(), **fields})

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the record's lock: no other process changes it between our read and write, as stages of one run may
        overlap."""
        with explain_errors(f"write '{self.path}'"), hold_lock(self.path / ".record.lock"):
            yield

    def _write_record(self, record: Mapping[str, Any]) -> None:
        write_atomically(self.record_path, json.dumps(record, indent=1))

    @contextlib.contextmanager
    def lock(self, *stages: str) -> Iterator[None]:
        """Hold the run for `stages`; Locked (exit 75) names the holder and the time. UsageError for a place where a run
        cannot be: another store, the root directory, a lake."""
        refuse_scheme(self.path, what="a run is a directory")
        hint = "choose a directory of its own, e.g. runs/NAME"
        if self.path.resolve() == self.path.resolve().parent:
            raise UsageError(f"'{self.path}' is the root directory, not a place for a run", hint=hint)
        if (self.path / "lake.json").exists():
            raise UsageError(f"'{self.path}' is a lake, not a run", hint=f"{hint}; a lake is given by --lake")
        with contextlib.ExitStack() as held:
            for stage in stages:
                what = f"run '{self.path}' is in use by {stage}"
                held.enter_context(hold_exclusively(self.path / f".{stage}.lock", what=what))
            for directory in (self.path, self.evaluations):
                remove_leftovers(directory)
            try:
                yield
            except BaseException as error:
                self._record_end(error)
                raise
            self._record_end(None)


def _find_circumstances() -> dict[str, Any]:
    """Find the versions, the commit of the working directory if it is a git checkout, and the hardware, as far as this
    system says."""
    hardware = {"host": socket.gethostname(), "machine": platform.machine(), "cores": os.cpu_count()}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        hardware["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        if name := next(names, ""):
            hardware["cpu"] = name
    commit = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
        commit = done.stdout.strip() or None if done.returncode == 0 else None
    versions: dict[str, str | None] = dict.fromkeys(_VERSIONED)
    for name in _VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"versions": versions | {"python": platform.python_version()}, "git_commit": commit, "hardware": hardware}


def describe_process() -> dict[str, Any]:
    """Describe this process: `host`, `pid`, `argv`, `started` (seconds since the epoch: now) and versions."""
    facts = _find_circumstances()
    who = {"host": socket.gethostname(), "pid": os.getpid(), "argv": sys.argv, "started": time.time()}
    return who | {"versions": facts["versions"], "git_commit": facts["git_commit"]}
