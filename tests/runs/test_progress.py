from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pipelines.errors import Interrupted
from pipelines.events import Event, Progress
from pipelines.runs.progress import record_progress
from pipelines.runs.stored import read_run
from tests.runs.factory import make_run


def event(stage: str, done: int, total: int | None, **fields: float) -> Progress:
    return Progress(stage=stage, done=done, total=total, unit="updates", **fields)  # type: ignore[arg-type]


def test_the_last_progress_of_each_stage_is_kept(tmp_path: Path) -> None:
    heard: list[Event] = []
    with record_progress(tmp_path, heard.append, every=3600) as tell:
        tell(event("epoch 1/5 collect", 300, 300, run_share=0.1))
        tell(event("epoch 1/5 train", 20, 40, run_share=0.4, run_seconds_left=71.0))
    found = json.loads((tmp_path / "progress.json").read_text())
    assert (found["share"], found["seconds_left"]) == (0.4, 71.0)
    assert found["stages"]["collect"]["done"] == 300
    assert found["stages"]["train"] == {"done": 20, "total": 40, "unit": "updates"}
    assert len(heard) == 2


def test_progress_is_written_while_a_stage_runs_and_before_a_stop(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        raise Interrupted("stopped")

    with pytest.raises(Interrupted), record_progress(tmp_path, stop, every=0.0) as tell:
        tell(event("train", 5, 10))
    assert json.loads((tmp_path / "progress.json").read_text())["share"] == 0.5


def test_a_stage_alone_estimates_from_its_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with record_progress(tmp_path, lambda _: None, every=3600) as tell:
        tell(event("train", 100, 400))
        tell(event("train", 200, 400))  # 10 s later: 10 a second
    assert json.loads((tmp_path / "progress.json").read_text())["seconds_left"] == 20.0


def test_counts_of_earlier_processes_stay(tmp_path: Path) -> None:
    for stage in ("collect", "train"):
        with record_progress(tmp_path, lambda _: None) as tell:
            tell(event(stage, 7, None))
    assert json.loads((tmp_path / "progress.json").read_text())["stages"].keys() == {"collect", "train"}


def test_a_disk_that_refuses_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "progress.json").mkdir()
    with record_progress(tmp_path, lambda _: None, every=0.0) as tell:
        tell(event("train", 1, 2))


def test_a_run_without_a_log_has_the_counts_of_its_progress(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", lines=0, status=None)
    stages = {"collect": {"done": 300}, "train": {"done": 12}}
    (path / "progress.json").write_text(json.dumps({"share": 0.25, "seconds_left": 5, "stages": stages}))
    run = read_run(path)
    assert (run.share, run.seconds_left, run.updates, run.env_steps) == (0.25, None, 12, 300)
    (path / "progress.json").write_text('{"share": "x", "stages": [3]}')
    assert read_run(path).share is None
