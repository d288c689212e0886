from __future__ import annotations

import io
from dataclasses import replace

import pytest

from amago_cli.render.progress import Bar, Lines, reporter
from pipelines.events import Notice, Progress, duration


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


def shown(events: list[Progress]) -> list[str]:
    """What a terminal of 80 columns shows for each event, as if each came a second after the one before."""
    stream, now = Terminal(), [0.0]
    bar, frames = Bar(stream, clock=lambda: now[0]), []
    for now[0], event in enumerate(events):
        bar(event)
        bar._bar.refresh()
        frames.append(stream.getvalue().split("\r")[-1].rstrip())
    bar.close()
    return frames


def test_a_bar_fits_in_eighty_columns_and_counts_whole_updates() -> None:
    frames = shown([progress(done, 100, loss=0.123456, critic_loss=1234.5678) for done in (0, 5, 10)])
    for frame in frames:
        assert len(frame) <= 80
        assert len(frame.split("|")[1]) >= 10
    assert "5/100 updates, 19s left, 5.0/s, loss 0.123" in frames[1]


def test_a_bar_of_a_chain_is_of_the_whole_run() -> None:
    event = replace(progress(1400, 1500, loss=0.5), stage="epoch 15/40 train", run_share=0.37, run_seconds_left=250.0)
    assert "epoch 15/40 train  37% |" in shown([event])[0]
    assert "| 1,400/1,500 updates, 4m10s left" in shown([event])[0]
    unknown = replace(event, run_seconds_left=None)
    assert "| 1,401/1,500 updates, stage 1m39s left" in shown([unknown, replace(unknown, done=1401)])[1]


def test_a_bar_without_a_total_is_a_line_of_text() -> None:
    assert shown([progress(3, None), progress(7, None)])[1] == "train 7 updates, 4.0/s"


def test_a_line_of_a_chain_tells_of_the_whole_run() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = Lines(stream, clock=lambda: now[0])
    event = replace(progress(1400, 1500), stage="epoch 15/40 train", run_share=0.37, run_seconds_left=250.0)
    lines(event)
    now[0] = 30.0
    lines(replace(event, done=1430))
    assert stream.getvalue() == ("epoch 15/40 train: 1,430/1,500 updates, 1.0/s, whole run 37%, 4m10s left\n")


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
