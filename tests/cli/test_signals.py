from __future__ import annotations

import json
import os
import signal

import pytest

from amago_cli.app import main
from amago_cli.signals import interruptible
from pipelines.errors import Interrupted
from pipelines.events import Event, Notice, Progress

STEP = Progress(stage="collect", done=7, total=10, unit="steps")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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


def test_the_second_signal_has_its_default_action() -> None:
    with interruptible(lambda event: None):
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible(lambda event: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_call_that_is_stopped_before_its_stage_began_reports_it(monkeypatch, capsys, number, code) -> None:
    def slow(name: str) -> bool:
        os.kill(os.getpid(), number)
        raise AssertionError("stopped before")

    monkeypatch.setattr("amago_cli.configuration.file_safe", slow)
    before = signal.getsignal(number)
    assert main(["collect", "--env", "tmaze", "--output", "json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["status"] == "interrupted"
    assert shown["error"]["message"] == f"stopped by {number.name}"
    assert signal.getsignal(number) is before
