from __future__ import annotations

import pytest

from pipelines.events import Event, Notice, Progress
from pipelines.stages.forecast import Forecast, Work

# Two epochs of: collect 100 steps, train 10 updates; then 5 episodes.
WORKS = [
    Work(0, 0, "collect", 100),
    Work(0, 1, "train", 10),
    Work(1, 0, "collect", 100),
    Work(1, 1, "train", 10),
    Work(1, 2, "evaluate", 5),
]


class Chain:
    """A forecast with a clock that the test sets."""

    def __init__(self, works: list[Work] = WORKS, done: int = 0) -> None:
        self.now, self.events = 0.0, list[Event]()
        self.forecast = Forecast(works, epochs=2, done=done, clock=lambda: self.now)
        self.listen = self.forecast.listening(self.events.append)

    def report(self, stage: str, done: int, total: int, *, after: float) -> Progress:
        self.now += after
        self.listen(Progress(stage=stage, done=done, total=total, unit=""))
        event = self.events[-1]
        assert isinstance(event, Progress)
        return event


def test_the_epoch_is_added_to_progress_and_to_notices_of_a_stage() -> None:
    chain = Chain()
    assert chain.report("collect", 0, 100, after=0.0).stage == "epoch 1/2 collect"
    chain.listen(Notice(stage="collect", text="x"))
    chain.listen(Notice(text="y"))
    assert [event.stage for event in chain.events] == ["epoch 1/2 collect", "epoch 1/2 collect", ""]


def test_the_time_left_is_known_once_collect_and_train_have_a_cost() -> None:
    chain = Chain()
    chain.report("collect", 0, 100, after=0.0)
    begun = chain.report("collect", 50, 100, after=10.0)
    assert (begun.run_share, begun.run_seconds_left) == (0.1, None)  # half of the first of five
    chain.report("collect", 100, 100, after=10.0)
    chain.forecast.finish()
    chain.report("train", 0, 10, after=0.0)
    chain.report("train", 10, 10, after=40.0)
    chain.forecast.finish()
    second = chain.report("collect", 150, 200, after=10.0)
    assert second.run_seconds_left == pytest.approx(10.0 + 40.0)  # nothing is evaluated yet
    chain.now += 10.0
    chain.forecast.finish()
    chain.report("train", 10, 20, after=0.0)
    chain.now += 40.0
    chain.forecast.finish()
    chain.report("evaluate", 0, 5, after=0.0)
    last = chain.report("evaluate", 1, 5, after=5.0)
    assert last.run_seconds_left == pytest.approx(20.0)
    assert last.run_share == pytest.approx((20 + 40 + 20 + 40 + 5) / (20 + 40 + 20 + 40 + 25))


def test_an_entry_without_a_cost_of_its_own_borrows_that_of_another_of_its_stage() -> None:
    works = [Work(0, 0, "evaluate", 10), Work(0, 1, "evaluate", 30)]
    chain = Chain(works)
    chain.report("evaluate", 0, 10, after=0.0)
    chain.report("evaluate", 10, 10, after=10.0)
    chain.forecast.finish()
    assert chain.report("evaluate", 0, 30, after=0.0).run_seconds_left == pytest.approx(30.0)


def test_a_resumed_chain_counts_what_was_done_and_measures_only_what_it_does_itself() -> None:
    works = [Work(epoch, 0, "train", 10) for epoch in range(4)]
    chain = Chain(works, done=2)  # and half of the third
    chain.report("train", 25, 30, after=0.0)
    event = chain.report("train", 29, 30, after=8.0)
    assert event.run_seconds_left == pytest.approx(2.0 + 20.0)
    assert event.run_share == pytest.approx(29 / 40)
    chain.now += 2.0
    chain.forecast.finish()  # five updates in ten seconds
    assert chain.report("train", 30, 40, after=0.0).run_seconds_left == pytest.approx(20.0)


def test_a_stage_that_had_nothing_to_do_has_no_cost() -> None:
    chain = Chain([Work(0, 0, "train", 10), Work(1, 0, "train", 10)])
    chain.now = 1e-6
    chain.forecast.finish()
    chain.report("train", 10, 20, after=0.0)
    assert chain.report("train", 15, 20, after=5.0).run_seconds_left == pytest.approx(5.0)
