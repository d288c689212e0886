from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.runs.stored import RunState, read_run
from tests.runs.factory import make_run


@pytest.mark.parametrize(
    ("recorded", "expected"), [("done", "finished"), ("failed", "failed"), ("interrupted", "interrupted")]
)
def test_the_state_is_what_the_last_stage_recorded(tmp_path: Path, recorded: str, expected: str) -> None:
    state = read_run(make_run(tmp_path / "run", status=recorded, error="no space")).state
    assert (state.status, state.stage, state.pid, state.host) == (expected, "run", 4, "gpu03")
    assert state.reason == ("" if expected == "finished" else "no space")
    assert state.ended is not None
    assert state.started is not None
    assert state.ended - state.started == 600


def test_a_run_without_an_outcome_was_killed(tmp_path: Path) -> None:
    state = read_run(make_run(tmp_path / "run", status=None)).state
    assert state.status == "interrupted"
    assert "kill -9" in state.reason


def test_the_newest_stage_counts() -> None:
    stages = {
        "collect": {"time": "2026-11-23T01:00:00+0000", "status": "failed"},
        "train": {"time": "2026-11-23T03:00:00+0200", "status": "done", "ended": "2026-11-23T01:00:05+0000"},
        "evaluate": {"time": "2026-11-23T02:30:00+0200", "status": "failed"},
    }
    state = RunState.read(Path("nowhere"), {"stages": stages})
    assert (state.stage, state.status) in (("train", "finished"), ("collect", "failed"))  # the same moment
    stages["train"]["time"] = "2026-11-23T03:00:01+0200"
    assert RunState.read(Path("nowhere"), {"stages": stages}).stage == "train"


def test_a_locked_run_is_running(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", status="failed")
    with RunDirectory(path).lock("train"):
        state = read_run(path).state
    assert (state.status, state.stage, state.pid, state.host) == ("running", "train", os.getpid(), socket.gethostname())
    assert read_run(path).state.status == "failed"


def test_a_lock_file_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (path / ".run.lock").write_text(f"pid 999999999 on {socket.gethostname()} since 01:00:00\n")
    assert read_run(path).state.status == "finished"


def test_looking_does_not_take_the_lock_away(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            read_run(path)

    thread = threading.Thread(target=look)
    with RunDirectory(path).lock("run"):
        pass
    (path / ".run.lock").write_text(f"pid 999999999 on {socket.gethostname()} since 01:00:00\n")
    thread.start()
    try:
        with RunDirectory(path).lock("run"):
            assert read_run(path).state.status == "running"
    finally:
        stop.set()
        thread.join()
