from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.errors import IntegrityError, Interrupted, Locked, StageFailed, UsageError


def test_a_record_can_be_run_again_and_names_the_run_for_good(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "a").record("collect", Settings(seed=3))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = RunDirectory(tmp_path / "b")
    assert Settings.model_validate(moved.load_document()) == Settings(seed=3)
    moved.record("collect", Settings(seed=3))
    assert moved.name == "a"
    assert RunDirectory(tmp_path / "new").name == "new"


def test_an_identity_is_permanent_and_distinguishes_runs_of_one_name(tmp_path: Path) -> None:
    one, other = RunDirectory(tmp_path / "x" / "a"), RunDirectory(tmp_path / "y" / "a")
    unrecorded = one.identity
    for run in (one, other):
        run.record("collect", Settings())
    assert one.identity == unrecorded != other.identity
    assert one.identity.startswith("a-")
    (tmp_path / "x" / "a").rename(tmp_path / "b")
    moved = RunDirectory(tmp_path / "b")
    moved.record("train", Settings(), fresh=True)
    assert moved.identity == unrecorded


def test_only_the_tables_of_a_stage_that_was_done_are_compared(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.record("collect", Settings())
    other = Settings.model_validate({"train": {"context_length": 7}})
    run.record("collect", other)
    run.record("train", other)
    with pytest.raises(UsageError) as refused:
        run.record("train", Settings())
    assert refused.value.problems == ("train.context_length: 7 -> 'auto'",)


def test_a_fresh_start_forgets_what_was_said_of_the_checkpoints(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.record("train", Settings())
    run.update_record(best={"update": 3, "score": 1.0, "by": "return_mean"}, labelled={"before": "x"})
    run.record("train", Settings())
    run.record("collect", Settings(), fresh=True)
    assert run.load_record().keys() >= {"best", "labelled"}
    run.record("train", Settings(), fresh=True)
    assert not run.load_record().keys() & {"best", "labelled"}


@pytest.mark.parametrize("text", ["{", "[]", '{"stages": 3}', "\0"])
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.record("train", Settings())
    run.record_path.write_text(text)
    with pytest.raises(IntegrityError, match=r"run.json' is damaged"):
        run.record("train", Settings())


def test_a_lock_says_who_and_leaves_nothing_where_nothing_was_done(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "a")
    with run.lock("run", "train"):
        with pytest.raises(Locked, match=f"in use by train, pid {os.getpid()}"), run.lock("train"):
            pass
        with run.lock("collect"):
            pass
    assert list(tmp_path.iterdir()) == []
    with run.lock("run"):
        run.record("run", Settings())
    assert json.loads(run.record_path.read_text())["name"] == "a"


def test_what_a_killed_process_was_writing_is_removed_at_the_next_start(tmp_path: Path) -> None:
    run, kill = RunDirectory(tmp_path / "a"), "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code = f"from pipelines.files import atomic; atomic.publish = lambda *_: exec({kill!r}); "
    code += f"from pathlib import Path; atomic.write_atomically(Path({str(run.path / 'run.json')!r}), 'x')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGKILL
    (leftover,) = run.path.iterdir()
    (run.path / ".mine.tmp").touch()
    with run.lock("train"):
        assert leftover.exists()  # somebody else may be about to publish it
    os.utime(leftover, (time.time() - 100, time.time() - 100))
    os.utime(run.path / ".mine.tmp", (0, 0))
    with run.lock("train"):
        assert not leftover.exists()
        assert (run.path / ".mine.tmp").exists()


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (None, "done", None),
        (Interrupted("stopped by SIGTERM", signal_number=15), "interrupted", "stopped by SIGTERM"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (StageFailed("no space left on the disk"), "failed", "no space left on the disk"),
        (RuntimeError("x" * 10_000), "failed", "x" * 500),
    ],
)
def test_the_record_says_how_a_stage_ended(
    tmp_path: Path, error: BaseException | None, status: str, text: str | None
) -> None:
    directory = RunDirectory(tmp_path / "run")

    def work() -> None:
        with directory.lock("train"):
            directory.record("train", Settings(), recipe={"name": "maze", "changed": {}})
            assert "status" not in directory.load_record()["stages"]["train"]
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    record = directory.load_record()
    assert record["recipe"]["name"] == "maze"
    assert (record["stages"]["train"]["status"], record["stages"]["train"].get("error")) == (status, text)


def test_a_stage_that_was_refused_leaves_the_outcome_of_the_last(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory.lock("train"):
        directory.record("train", Settings())
    with pytest.raises(UsageError), RunDirectory(tmp_path / "run").lock("train"):
        raise UsageError("the configuration differs")
    assert directory.load_record()["stages"]["train"]["status"] == "done"
    with pytest.raises(UsageError), RunDirectory(tmp_path / "new").lock("train"):
        raise UsageError("the configuration differs")
    assert not (tmp_path / "new").exists()
