from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipelines.serve.acting import of_weights
from pipelines.serve.sessions import Refused, SessionPool
from tests.learning.factories import agent


def test_a_session_that_is_acting_does_not_expire() -> None:
    pool = SessionPool(of_weights(agent(), capacity=4, most=2), most=2, idle_seconds=-1.0)
    (session,) = pool.find(pool.begin())
    session.acting = True
    pool.expire()
    assert (pool.count, pool.counters.expired) == (1, 0)
    session.acting = False
    pool.expire()
    assert (pool.count, pool.counters.expired) == (0, 1)
    with pytest.raises(Refused, match="no such session"):
        pool.find([session.id])
    pool.close()


def test_a_new_session_sees_no_action_of_the_one_whose_place_it_has() -> None:
    async def first_actions() -> list[np.ndarray]:
        pool = SessionPool(of_weights(agent("box"), capacity=4, most=1), most=1, idle_seconds=60.0)
        acting = asyncio.create_task(pool.run())
        found = []
        for _ in range(2):
            sessions = pool.find(pool.begin())
            found.append(await pool.act(sessions, {"obs": np.ones((1, 3), np.float32)}, np.zeros(1, np.float32)))
            pool.end(sessions)
        acting.cancel()
        pool.close()
        return found

    first, second = asyncio.run(first_actions())
    assert first.any()
    np.testing.assert_array_equal(second, first)
