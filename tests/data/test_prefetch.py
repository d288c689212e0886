"""Batches made ahead are the ones that would have been made; nothing is lost or left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.batch import Batch
from pipelines.data.prefetch import Prefetch, Request
from pipelines.errors import InputMissing
from tests.tiers import examples


class Counting:
    """A source whose batches say what it was asked for, and its version."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.version, self.fails_at = 0, fails_at
        self.threads: set[str] = set()
        self.requests: list[Request] = []
        self.drawing = threading.Lock()

    def sample(self, batch_size: int, update: int, micro_batch: int) -> Batch:
        assert self.drawing.acquire(blocking=False), "two threads draw at once"
        self.threads.add(threading.current_thread().name)
        self.requests.append((batch_size, update, micro_batch))
        time.sleep(0.0005)
        version = self.version
        self.drawing.release()
        if update == self.fails_at:
            raise InputMissing("nothing to draw from")
        return Batch(
            columns={"x": np.array([batch_size])},
            lengths=np.array([update]),
            start=np.array([micro_batch]),
            trajectory=np.array([version]),
        )


def plan(updates: int = 6) -> Iterator[Request]:
    return ((3, update, part) for update in range(updates) for part in range(2))


def take(batch: Batch, update: int) -> Batch:
    assert batch.lengths[0] == update
    return batch


def told(batch: Batch) -> tuple:
    assert batch.trajectory is not None
    return (*batch.columns["x"].tolist(), batch.lengths[0], batch.start[0], batch.trajectory[0])


@pytest.mark.system
@given(
    ahead=st.integers(0, 4),
    events=st.lists(st.sampled_from(["next", "next", "next", "wait", "change", "look", "stop"]), max_size=20),
)
@examples(40)
def test_batches_are_those_without_it(ahead: int, events: list[str]) -> None:
    """Against a source drawn from directly, through refreshes and restarts of the thread."""
    source, direct, updates = Counting(), Counting(), 8
    rest, requests = plan(updates), plan(updates)
    prefetch = Prefetch(source, rest, ahead=ahead, prepare=take)
    taken = 0

    def change() -> None:
        source.version += 1

    try:
        for event in events:
            if event == "next" and taken < 2 * updates:
                assert told(prefetch.next()) == told(direct.sample(*next(requests)))
                taken += 1
            elif event == "wait":
                prefetch.wait()
                assert not source.drawing.locked()
            elif event == "change":
                prefetch.changing(change)
                direct.version += 1
            elif event == "look":
                prefetch.changing(lambda: None)
            elif event == "stop":
                prefetch.__exit__(None, None, None)
                assert not source.drawing.locked()
                prefetch = Prefetch(source, plan_from(updates, taken), ahead=ahead, prepare=take)
    finally:
        prefetch.__exit__(None, None, None)


def plan_from(updates: int, taken: int) -> Iterator[Request]:
    requests = plan(updates)
    for _ in range(taken):
        next(requests)
    return requests


def test_the_next_batch_is_made_while_nobody_asks() -> None:
    source = Counting()
    with Prefetch(source, plan(), ahead=2, prepare=take) as prefetch:
        prefetch.next()
        prefetch.wait()
        assert source.requests == list(plan())[:3]
        assert all(name.startswith("prefetch") for name in source.threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_without_it_there_is_no_thread() -> None:
    source = Counting()
    with Prefetch(source, plan(), ahead=0, prepare=take) as prefetch:
        prefetch.next()
    assert source.threads == {threading.current_thread().name}


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_error_is_raised_where_its_batch_would_have_been(ahead: int) -> None:
    source = Counting(fails_at=1)
    with Prefetch(source, plan(), ahead=ahead, prepare=take) as prefetch:
        prefetch.next()
        prefetch.next()
        with pytest.raises(InputMissing, match="nothing to draw"):
            prefetch.next()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_the_plan_ends() -> None:
    with Prefetch(Counting(), plan(1), ahead=2, prepare=take) as prefetch:
        prefetch.next(), prefetch.next()
        with pytest.raises(StopIteration):
            prefetch.next()
