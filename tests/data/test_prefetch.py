"""Batches made ahead are the ones that would have been made; nothing is lost or left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.batch import Batch
from pipelines.data.prefetch import Prefetch
from pipelines.errors import InputMissing
from tests.tiers import examples


class Counting:
    """A source whose batches say what it was asked for, its random stream and its version."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.rng, self.version, self.fails_at = np.random.default_rng(0), 0, fails_at
        self.threads: set[str] = set()
        self.drawing = threading.Lock()

    def sample(self, batch_size: int, update: int) -> Batch:
        assert self.drawing.acquire(blocking=False), "two threads draw at once"
        self.threads.add(threading.current_thread().name)
        time.sleep(0.0005)
        values = self.rng.random(batch_size)
        self.drawing.release()
        if update == self.fails_at:
            raise InputMissing("nothing to draw from")
        return Batch(
            columns={"x": values},
            lengths=np.array([update]),
            start=np.array([batch_size]),
            trajectory=np.array([self.version]),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


def plan(updates: int = 6) -> Iterator[tuple[int, int]]:
    return ((3, update) for update in range(updates) for _ in range(2))


def told(batch: Batch) -> tuple:
    assert batch.trajectory is not None
    return (*batch.columns["x"].tolist(), batch.lengths[0], batch.start[0], batch.trajectory[0])


@given(
    ahead=st.integers(0, 4),
    events=st.lists(st.sampled_from(["next", "next", "next", "state", "change", "look", "stop"]), max_size=20),
)
@examples(40)
def test_batches_and_states_are_those_without_it(ahead: int, events: list[str]) -> None:
    """Against a source drawn from directly, through refreshes, checkpoints and restarts of the thread."""
    source, direct, updates = Counting(), Counting(), 8
    rest, requests = plan(updates), plan(updates)
    prefetch = Prefetch(source, rest, ahead=ahead)
    taken = 0

    def change() -> None:
        source.version += 1

    try:
        for event in events:
            if event == "next" and taken < 2 * updates:
                assert told(prefetch.next()) == told(direct.sample(*next(requests)))
                taken += 1
            elif event == "state":
                assert prefetch.state_dict() == direct.state_dict()
            elif event == "change":
                prefetch.changing(change)
                direct.version += 1
            elif event == "look":
                prefetch.changing(lambda: None)
            elif event == "stop":
                prefetch.__exit__(None, None, None)
                assert source.state_dict() == direct.state_dict()
                prefetch = Prefetch(source, plan_from(updates, taken), ahead=ahead)
    finally:
        prefetch.__exit__(None, None, None)
    assert source.state_dict() == direct.state_dict()


def plan_from(updates: int, taken: int) -> Iterator[tuple[int, int]]:
    requests = plan(updates)
    for _ in range(taken):
        next(requests)
    return requests


def test_the_next_batch_is_made_while_nobody_asks() -> None:
    source = Counting()
    with Prefetch(source, plan(), ahead=2) as prefetch:
        prefetch.next()
        prefetch.wait()
        expected = np.random.default_rng(0)
        expected.random(9)
        assert source.state_dict()["rng"] == expected.bit_generator.state
        assert all(name.startswith("prefetch") for name in source.threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_without_it_there_is_no_thread() -> None:
    source = Counting()
    with Prefetch(source, plan(), ahead=0) as prefetch:
        prefetch.next()
    assert source.threads == {threading.current_thread().name}


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_error_is_raised_where_its_batch_would_have_been(ahead: int) -> None:
    source = Counting(fails_at=1)
    with Prefetch(source, plan(), ahead=ahead) as prefetch:
        prefetch.next()
        prefetch.next()
        with pytest.raises(InputMissing, match="nothing to draw"):
            prefetch.next()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_the_plan_ends() -> None:
    with Prefetch(Counting(), plan(1), ahead=2) as prefetch:
        prefetch.next(), prefetch.next()
        with pytest.raises(StopIteration):
            prefetch.next()
