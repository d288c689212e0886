from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from amago_cli.app import main
from amago_cli.signals import interruptible
from pipelines.errors import Interrupted
from pipelines.events import Event, Notice, Progress, Waiting
from pipelines.lake.store import Lake
from tests.cli.conftest import Amago
from tests.lake.factories import fill

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """As in a terminal, whatever started the tests: in the background of a shell, or under nohup, some are ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


STEP = Progress(stage="collect", done=7, total=10, unit="steps")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_stops_at_the_next_progress(number: int, code: int) -> None:
    heard: list[Event] = []
    with interruptible(heard.append) as listener:
        listener(STEP)
        os.kill(os.getpid(), number)
        listener(Notice(text="not a safe point"))
        with pytest.raises(Interrupted, match=r"collect interrupted by SIG\w+ at 7 steps") as caught:
            listener(STEP)
    assert caught.value.exit_code == code
    assert len(heard) == 3


@pytest.mark.parametrize(("unit", "hint"), [("updates", "to resume"), ("games", "plays the games again")])
def test_the_hint_says_whether_the_work_is_resumed(unit: str, hint: str) -> None:
    event = Progress(stage="any", done=1, total=2, unit=unit)
    with interruptible(lambda event: None) as listener:
        listener(event)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            listener(event)
    assert hint in str(caught.value.hint)


def test_the_first_signal_stops_what_is_waited_for() -> None:
    with interruptible(lambda event: None) as listener:
        listener(Waiting(what="an answer"))
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="interrupted by SIGINT while waiting for an answer"):
            listener(Waiting(what="an answer"))


def test_the_first_signal_says_what_is_waited_for(capfd) -> None:
    with interruptible(lambda event: None) as listener:
        listener(Waiting(what="a \x1b[31mstep", stoppable=False))
        os.kill(os.getpid(), signal.SIGINT)
        for what in ("a \x1b[31mstep", "actor 3", "actor 3"):
            listener(Waiting(what=what, stoppable=False))
        with pytest.raises(Interrupted, match="at 7 steps"):
            listener(STEP)
    said = capfd.readouterr().err
    assert said.strip().splitlines() == [
        "stopping at the next safe point, after a \\u001b[31mstep; repeat to stop at once",
        "waiting for actor 3",
    ]


def test_a_signal_stops_an_expression_of_a_relabelling(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    fill(lake, [3])
    endless = (
        "reward:levenshtein(repeat('a', 300000 + t), repeat('b', 300000))"  # for minutes, which nothing interrupts
    )
    command = [sys.executable, "-m", "amago_cli", "relabel", "--from-lake", str(lake.path), "--with", endless]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        while not (helpers := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert "stopping at the next safe point" in process.stderr.read()
    assert not any(Path(f"/proc/{helper}").exists() for helper in helpers)


def test_the_first_signal_says_which_environment_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "amago_cli", "collect", "--env", "tests.envs.breaking:Walk", "--actors", "2"]
    # Into a lake alone, nothing is measured first.
    command += ["-s", "env.fault=hang", "-s", "env.at=1", "--workers", "1", "--lake", str(tmp_path / "lake")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not (tmp_path / "lake" / "lake.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = ""
        while "environment 'tests.envs.breaking:Walk', actors 0 to 0 and 1 to 1 (worker process" not in said:
            said = process.stderr.readline()
            assert said
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT


def test_the_second_signal_has_its_default_action() -> None:
    with interruptible(lambda event: None):
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_what_is_done_before_it_could_stop_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with interruptible(lambda event: None):
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.splitlines()[-1] == "done before it could stop"


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible(lambda event: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_call_that_is_stopped_before_its_stage_began_reports_it(monkeypatch, capsys, number, code) -> None:
    def slow(name: str) -> bool:
        os.kill(os.getpid(), number)
        raise AssertionError("stopped before")

    monkeypatch.setattr("pipelines.stages.library.name_default_run", slow)
    before = signal.getsignal(number)
    assert main(["collect", "--env", "tmaze", "--output", "json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["status"] == "interrupted"
    assert shown["error"]["message"] == f"stopped by {number.name}"
    assert signal.getsignal(number) is before


def test_what_was_started_with_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(lambda event: None) as listener:
            os.kill(os.getpid(), signal.SIGHUP)
            listener(STEP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_training_whose_terminal_is_closed_saves_a_checkpoint(amago: Amago, small: Path) -> None:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "amago_cli", "train", "--from-lake", "small", "--steps", "1000000"]
    command += ["--set", "train.checkpoint_every=1000000", "--set", "train.log_every=1"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inside)
    saved = set(os.listdir(small / "checkpoints"))
    seen = b""
    while b"updates" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait() == 129
    assert set(os.listdir(small / "checkpoints")) > saved


def test_a_signal_says_which_step_it_waits_for(capfd: pytest.CaptureFixture[str]) -> None:
    with interruptible(lambda event: None) as listener:
        listener(Progress(stage="train", done=3, total=9, unit="updates"))
        signal.raise_signal(signal.SIGINT)
        listener(Notice(text="nothing"))
        with pytest.raises(Interrupted, match="train interrupted by SIGINT at 4 updates"):
            listener(Progress(stage="train", done=4, total=9, unit="updates"))
        listener(Waiting(what="checkpoint 4 to be written", stoppable=False))
    said = capfd.readouterr().err.split("\n")
    assert "stopping at the next safe point, after the update in progress; repeat to stop at once" in said
    assert "waiting for checkpoint 4 to be written" in said
