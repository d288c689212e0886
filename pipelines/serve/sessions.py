"""Sessions that act with one policy. Each has a row of its memory, and simultaneous requests share a step."""

from __future__ import annotations

import asyncio
import heapq
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from pipelines.errors import AmagoError
from pipelines.files.malformed import MALFORMED
from pipelines.lake.spaces import zeros
from pipelines.serve.acting import RowPolicy

_BEGIN = "begin again: POST /sessions"
_GONE = "there is no such session: it ended or was idle, or the server was restarted"
_FAILURES: tuple[type[Exception], ...] = (AmagoError, *MALFORMED)


class Refused(Exception):
    """Refusal of a request, answered with an HTTP status, what is wrong, and what to do."""

    def __init__(self, status: int, error: str, hint: str = "") -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


@dataclass
class Session:
    """A client's episode in progress."""

    id: str
    row: int
    used: float
    acting: bool = False


@dataclass
class _Counters:
    """Counts since the server started."""

    begun: int = 0
    ended: int = 0
    expired: int = 0
    actions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    largest: int = 0
    responses: dict[int, int] = field(default_factory=dict)


@dataclass
class _Request:
    sessions: Sequence[Session]
    rows: np.ndarray
    columns: Mapping[str, np.ndarray]
    rewards: np.ndarray
    answer: asyncio.Future[np.ndarray]


class SessionPool:
    """At most `most` sessions of a policy, whose memories are one batch; a session unused for `idle_seconds` ends.

    All methods are called in one event loop. Steps are computed in a thread; requests that arrive meanwhile are the
    next step.
    """

    def __init__(self, policy: RowPolicy, *, most: int, idle_seconds: float) -> None:
        self.spaces, self.most, self.counters = policy.spaces, most, _Counters()
        self._policy, self._idle_seconds = policy, idle_seconds
        self._action = zeros(self.spaces.action, (most,))
        self._time = np.zeros(most, np.int64)
        self._sessions: dict[str, Session] = {}
        self._free = list(range(most))
        self._pending: list[_Request] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="act")

    @property
    def count(self) -> int:
        """The number of sessions."""
        return len(self._sessions)

    @property
    def waiting(self) -> int:
        """The number of sessions that wait for an action."""
        return sum(len(ask.rows) for ask in self._pending)

    def begin(self, count: int = 1) -> list[str]:
        """Begin sessions; return their ids. Refused if there would be too many."""
        if count > len(self._free):
            raise Refused(
                503,
                f"there are {self.count} of at most {self.most} sessions, {count} more do not fit",
                "end sessions that are done, or start the server with a larger --sessions",
            )
        made = [
            Session(id=secrets.token_urlsafe(12), row=heapq.heappop(self._free), used=time.monotonic())
            for _ in range(count)
        ]
        self._time[[session.row for session in made]] = 0
        self._sessions |= {session.id: session for session in made}
        self.counters.begun += count
        return [session.id for session in made]

    def find(self, ids: Sequence[str]) -> list[Session]:
        """Look up sessions. Refused for a session that is unknown, acting already, or named twice."""
        found = []
        for id in ids:
            session = self._sessions.get(id)
            if session is None:
                raise Refused(409, _GONE, _BEGIN)
            if session.acting:
                raise Refused(409, f"session '{id}' is acting already", "wait for its action before the next request")
            found.append(session)
        if len(set(ids)) < len(ids):
            raise Refused(422, "a session is named twice", "a session acts once in a request")
        return found

    def reset(self, sessions: Sequence[Session]) -> None:
        """Begin a new episode of each."""
        for session in sessions:
            session.used = time.monotonic()
            self._time[session.row] = 0

    def end(self, sessions: Sequence[Session]) -> None:
        """Close sessions; their rows of memory become free."""
        for session in sessions:
            del self._sessions[session.id]
            heapq.heappush(self._free, session.row)
        self.counters.ended += len(sessions)

    def expire(self) -> None:
        """End the sessions that have been idle for too long."""
        now = time.monotonic()
        idle = [each for each in self._sessions.values() if not each.acting and now - each.used > self._idle_seconds]
        self.end(idle)
        self.counters.expired += len(idle)

    async def act(
        self, sessions: Sequence[Session], columns: Mapping[str, np.ndarray], rewards: np.ndarray
    ) -> np.ndarray:
        """Choose actions (N, ...) for N sessions, in stored form; `rewards` are those of their previous actions.

        Refused if an episode has as many steps as the policy can distinguish, or if the step fails.
        """
        rows = np.array([session.row for session in sessions])
        most = self._policy.max_time
        if most is not None and (self._time[rows] >= most).any():
            raise Refused(409, f"an episode has more than the {most} steps that the policy can distinguish", "reset it")
        ask = _Request(sessions, rows, columns, rewards, asyncio.get_running_loop().create_future())
        for session in sessions:
            session.acting = True
        self._pending.append(ask)
        self._wake.set()
        return await ask.answer

    async def run(self) -> None:
        """Serve waiting requests, one batched step after another, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            asks, self._pending = self._pending, []
            if not asks:
                continue
            try:
                actions = await loop.run_in_executor(self._thread, self._step, asks)
            except _FAILURES as error:
                self._fail(asks, error)
                continue
            first, now = 0, time.monotonic()
            for ask in asks:
                for session in ask.sessions:
                    session.acting, session.used = False, now
                if not ask.answer.cancelled():  # a client may have gone meanwhile
                    ask.answer.set_result(actions[first : first + len(ask.rows)])
                first += len(ask.rows)

    def _fail(self, asks: Sequence[_Request], error: Exception) -> None:
        """End the sessions of a step that failed."""
        for ask in asks:
            self.end(ask.sessions)
            if not ask.answer.cancelled():
                text = f"the policy could not act: {type(error).__name__}"
                ask.answer.set_exception(Refused(500, text, _BEGIN))

    def close(self) -> None:
        """Release the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _step(self, asks: Sequence[_Request]) -> np.ndarray:
        """Act once for all requests; the actions are in their order.

        The policy takes rows in ascending order, so requests are sorted before the step and unsorted after it.
        """
        began = time.perf_counter()
        rows = np.concatenate([ask.rows for ask in asks])
        order = np.argsort(rows)
        columns = {name: np.concatenate([ask.columns[name] for ask in asks])[order] for name in self.spaces.observation}
        chosen = rows[order]
        at = self._time[chosen]
        rewards = np.where(at == 0, 0, np.concatenate([ask.rewards for ask in asks])[order]).astype(np.float32)
        before = self._action[chosen]
        before[at == 0] = 0
        actions = self._policy.act_for(chosen, columns, before, rewards, at)
        self._action[chosen] = actions
        self._time[chosen] += 1
        unsorted = np.empty_like(actions)
        unsorted[order] = actions
        counters = self.counters
        counters.actions += len(rows)
        counters.steps += 1
        counters.largest = max(counters.largest, len(rows))
        counters.step_seconds += time.perf_counter() - began
        return unsorted
