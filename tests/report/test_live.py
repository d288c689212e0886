from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.events import Event, Notice, Progress, Waiting
from pipelines.report import run_report
from pipelines.report.run_report import LivePage
from tests.runs.factory import make_run

PROGRESS = Progress(stage="train", done=1, total=2, unit="updates")


class Clock:
    """A clock that advances only when asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("cost", [0.01, 0.4, 5.0])
def test_pages_take_less_than_two_percent_of_a_run(tmp_path: Path, cost: float) -> None:
    clock, written = Clock(), []

    def write() -> None:
        written.append(clock.now)
        clock.now += cost

    with LivePage(tmp_path, lambda event: None).keep_fresh(clock=clock, write=write) as tell:
        while clock.now < 10_000:
            clock.now += 0.5
            tell(PROGRESS)
    assert len(written) >= 10_000 // (80 * max(cost, 0.3))
    assert len(written) * cost < 0.02 * clock.now


def test_events_are_passed_on_and_only_progress_writes_a_page(tmp_path: Path) -> None:
    clock, heard, written = Clock(), [], []
    clock.now = -1000.0
    with LivePage(tmp_path, heard.append).keep_fresh(clock=clock, write=lambda: written.append(1)) as tell:
        clock.now = 0.0
        tell(Notice(text="x"))
        assert not written
        tell(PROGRESS)
    assert [type(event) for event in heard] == [Notice, Progress]
    assert len(written) == 1


def test_a_page_that_fails_costs_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    heard: list[Event] = []
    run = make_run(tmp_path / "maze")
    (run / run_report.NAME).write_text("before")
    monkeypatch.setattr(run_report, "make_page", broken)
    assert LivePage(run, heard.append).write_final() == []
    LivePage(run, heard.append).write_stopped()
    assert [type(event) for event in heard] == [Notice, Waiting, Notice]
    assert "no room" in heard[0].text
    assert (run / run_report.NAME).read_text() == "before"


def test_a_run_that_never_had_a_page_gets_none_when_it_stops(tmp_path: Path) -> None:
    run = make_run(tmp_path / "maze")
    LivePage(run, lambda event: None).write_stopped()
    assert not (run / run_report.NAME).exists()


def test_a_page_says_how_far_a_run_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "maze", scores={10: 0.5})
    assert LivePage(run, lambda event: None).write_final() == [run / "report.html"]
    assert "finished" in (run / "report.html").read_text()
