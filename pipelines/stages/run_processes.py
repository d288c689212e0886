"""Runs as processes of their own, several at a time: each is `amago run` with a directory, and resumes by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelines.config.places import is_run
from pipelines.errors import StageFailed
from pipelines.files.atomic import explain_errors
from pipelines.processes import end_process
from pipelines.runs.stored import read_run

_LOCKED = 75
_OUTPUT = ("--output", "json")
_STOP_SECONDS = 300.0  # to save a checkpoint
_RETRY_SECONDS, _RETRIES = 1.0, 60  # of a run whose last process is still ending
_LOG_BYTES = 1 << 20
_ERROR_BYTES = 4_000


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to carry out: `arguments` of the command line, which name its directory `path`."""

    path: Path
    arguments: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        """Whether the run has been carried out by this very command."""
        if not is_run(self.path):
            return False
        run = read_run(self.path)
        stages = run.record.get("stages")
        entry = stages.get("run") if isinstance(stages, dict) else None
        argv = entry.get("argv") if isinstance(entry, dict) else None
        return run.state.status == "finished" and isinstance(argv, list) and argv[1:] == [*self.arguments, *_OUTPUT]


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run whose process has ended, with its exit code; `error` says what went wrong, "" if nothing did."""

    planned: PlannedRun
    code: int
    error: str = ""


@dataclass(kw_only=True)
class _RunProcess:
    planned: PlannedRun
    process: subprocess.Popen[bytes]
    output: Path
    tries: int
    stopping: bool = False

    def read_error(self) -> str:
        """Read the message of the JSON object that a command printed; "" without one."""
        try:
            lines = self.output.read_text(errors="replace").strip().splitlines()
            found: Any = json.loads(lines[-1])["error"]
            problems = found.get("problems") or []
            return f"{found['message']}{': ' if problems else ''}{'; '.join(problems)}"[:_ERROR_BYTES]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return ""


class RunProcesses:
    """Processes of runs, at most `jobs` at a time. `command` starts amago; its output goes to files in `logs`.

    They stop, at their next safe point, when this ends.
    """

    def __init__(self, command: Sequence[str], *, jobs: int, logs: Path) -> None:
        self._command, self._jobs, self._logs = list(command), jobs, logs
        self._working: list[_RunProcess] = []
        self._later: list[tuple[float, PlannedRun, int]] = []

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._working:
            self._signal(each)
        deadline = time.monotonic() + _STOP_SECONDS
        for each in self._working:
            end_process(each.process, max(deadline - time.monotonic(), 0.1))
        self._working, self._later = [], []

    @property
    def is_full(self) -> bool:
        """Whether no other run can be started now."""
        return len(self._working) + len(self._later) >= self._jobs

    @property
    def is_idle(self) -> bool:
        """Whether no run is going on."""
        return not self._working and not self._later

    def start(self, planned: PlannedRun, *, tries: int = 0) -> None:
        """Start the process of a run."""
        with explain_errors(f"write '{self._logs}'"):
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self._logs / f"{planned.path.name}.log"
            if log.exists() and log.stat().st_size > _LOG_BYTES:
                log.unlink()
            output = self._logs / f"{planned.path.name}.json"
            threads = str(max((os.cpu_count() or 1) // self._jobs, 1))
            with log.open("ab") as errors, output.open("wb") as results:
                process = subprocess.Popen(
                    [*self._command, *planned.arguments, *_OUTPUT],
                    stdin=subprocess.DEVNULL,
                    stdout=results,
                    stderr=errors,
                    env={"OMP_NUM_THREADS": threads, **os.environ},
                    start_new_session=True,  # Ctrl-C reaches this process only, which then stops the others
                )
        self._working.append(_RunProcess(planned=planned, process=process, output=output, tries=tries))

    def stop(self, planned: PlannedRun) -> None:
        """Ask a run to stop at its next safe point."""
        for each in self._working:
            if each.planned == planned and not each.stopping:
                self._signal(each)
                each.stopping = True

    def take_ended(self) -> list[EndedRun]:
        """Collect the runs whose processes have ended since the last call."""
        for due, planned, tries in [each for each in self._later if each[0] <= time.monotonic()]:
            self._later.remove((due, planned, tries))
            self.start(planned, tries=tries)
        found = []
        for each in [each for each in self._working if each.process.poll() is not None]:
            self._working.remove(each)
            code = each.process.returncode
            if code == _LOCKED and each.tries < _RETRIES:
                self._later.append((time.monotonic() + _RETRY_SECONDS, each.planned, each.tries + 1))
                continue
            error = "" if code == 0 else each.read_error() or f"exit code {code}"
            found.append(EndedRun(planned=each.planned, code=code, error=error))
            with contextlib.suppress(OSError):
                each.output.unlink()
        return found

    @staticmethod
    def _signal(working: _RunProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            working.process.send_signal(signal.SIGTERM)


def make_failure(ended: Sequence[EndedRun], total: int, logs: Path) -> StageFailed:
    """Make the error that reports failed runs."""
    shown = f"{len(ended)} of {total} runs failed: '{ended[0].planned.path.name}': {ended[0].error}"
    return StageFailed(shown, hint=f"see '{logs}'; repeat the command to try them again")
