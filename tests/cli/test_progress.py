from __future__ import annotations

import io

import pytest

from amago_cli.progress import Bar, Lines, duration, reporter
from pipelines.events import Notice, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(done: int, total: int | None = 1000, **metrics: float) -> Progress:
    return Progress(stage="train", done=done, total=total, unit="updates", metrics=metrics)


def test_lines_come_every_thirty_seconds_with_rate_and_time_left() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = Lines(stream, clock=lambda: now[0])
    for second in range(0, 95):
        now[0] = float(second)
        lines(progress(100 + 5 * second, loss=0.5))
    assert stream.getvalue().splitlines() == [
        "train: 250/1,000 updates (25%), 5.0/s, 2m30s left, loss 0.5",
        "train: 400/1,000 updates (40%), 5.0/s, 2m00s left, loss 0.5",
        "train: 550/1,000 updates (55%), 5.0/s, 1m30s left, loss 0.5",
    ]


def test_an_unknown_total_has_no_time_left() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = Lines(stream, clock=lambda: now[0])
    lines(progress(0, None))
    now[0] = 30.0
    lines(progress(6000, None))
    assert stream.getvalue() == "train: 6,000 updates, 200/s\n"


def test_another_stage_begins_its_own_rate() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = Lines(stream, clock=lambda: now[0])
    lines(progress(900))
    now[0] = 40.0
    lines(Progress(stage="evaluate", done=0, total=10, unit="episodes"))
    assert stream.getvalue() == "evaluate: 0/10 episodes (0%)\n"


def test_a_terminal_gets_a_bar_and_no_lines() -> None:
    stream = Terminal()
    with reporter(quiet=False, stream=stream) as listener:
        listener(progress(0))
        listener(progress(500, loss=0.25))
        listener(Notice(text="resuming"))
    text = stream.getvalue()
    assert "train" in text
    assert "updates" in text
    assert "resuming" in text
    assert isinstance(listener, Bar)


def test_a_file_gets_lines_and_no_bar() -> None:
    stream = io.StringIO()
    with reporter(quiet=False, stream=stream) as listener:
        listener(progress(500))
        listener(Notice(text="odd", level="warning"))
    assert stream.getvalue() == "warning: odd\n"


def test_quiet_is_silent_everywhere() -> None:
    for stream in (io.StringIO(), Terminal()):
        with reporter(quiet=True, stream=stream) as listener:
            listener(progress(1))
            listener(Notice(text="odd", level="warning"))
        assert stream.getvalue() == ""


def test_details_are_for_verbose() -> None:
    for verbose, text in ((False, ""), (True, "epoch 1\n")):
        stream = io.StringIO()
        with reporter(quiet=False, verbose=verbose, stream=stream) as listener:
            listener(Notice(text="epoch 1", level="debug"))
        assert stream.getvalue() == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (95, "1m35s"), (7260, "2h01m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
