"""Batches prepared by a background thread while the learner works: the same ones as without it.

Only one thread draws from the source at a time. The source's state before every batch is kept, so that batches that
were prepared but not consumed can be rolled back: at a checkpoint, and whenever the source changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from pipelines.data.batch import Batch

Request = tuple[int, int]  # number of windows of a batch; its update


class BatchSource(Protocol):
    """Source of batches."""

    @property
    def version(self) -> Any: ...
    def sample(self, batch_size: int, update: int) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class PreparedBatch:
    """A batch, or the error in its place, and the source's state before it."""

    state: dict[str, Any]
    content: Batch | BaseException


class Prefetch:
    """Iterator over the batches of `plan` in order, up to `ahead` of them prepared in advance (0: none).

    An error of the source is raised in place of its batch.
    """

    def __init__(self, source: BatchSource, plan: Iterator[Request], *, ahead: int) -> None:
        self._source, self._plan, self._ahead = source, plan, ahead
        self._prepared: deque[tuple[Request, Future[PreparedBatch]]] = deque()
        self._again: deque[Request] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if ahead else None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()
        if self._worker is not None:
            self._worker.shutdown()

    def next(self) -> Batch:
        """Return the next batch of the plan. StopIteration after the last."""
        if self._worker is None:
            return self._source.sample(*self._request())
        if not self._prepared:
            self._prepare(self._request())
        _, future = self._prepared.popleft()
        prepared = future.result()
        while len(self._prepared) < self._ahead:
            try:
                self._prepare(self._request())
            except StopIteration:
                break
        if isinstance(prepared.content, BaseException):
            raise prepared.content
        return prepared.content

    def settle(self) -> None:
        """Roll back batches that were not consumed: the source is as if they had not been drawn, and idle."""
        if not self._prepared:
            return
        prepared, self._prepared = self._prepared, deque()
        begun = [future.result().state for _, future in prepared if not future.cancel()]
        self._again.extendleft(request for request, _ in reversed(prepared))
        if begun:
            self._source.load_state_dict(begun[0])

    def changing(self, change: Callable[[], Any]) -> Any:
        """Call `change` while the source is idle and return its result; batches prepared before a change are drawn
        again."""
        self.wait()
        before = self._source.version
        result = change()
        if self._source.version != before:
            self.settle()
        return result

    def wait(self) -> None:
        """Wait until the source is idle."""
        for _, future in self._prepared:
            future.result()

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state after the consumed batches."""
        self.wait()
        return self._prepared[0][1].result().state if self._prepared else self._source.state_dict()

    def _request(self) -> Request:
        return self._again.popleft() if self._again else next(self._plan)

    def _prepare(self, request: Request) -> None:
        assert self._worker is not None
        self._prepared.append((request, self._worker.submit(self._work, request)))

    def _work(self, request: Request) -> PreparedBatch:
        state = self._source.state_dict()
        try:
            return PreparedBatch(state, self._source.sample(*request))
        except BaseException as error:
            return PreparedBatch(state, error)
