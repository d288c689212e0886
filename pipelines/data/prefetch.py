"""Batches drawn and prepared by a background thread while the learner works: the same ones as without it.

Only one thread draws from the source at a time. A batch is a function of its request and of what the source draws from,
so batches prepared before the source changes are dropped and drawn again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from pipelines.data.batch import Batch

Prepared = TypeVar("Prepared")
Request = tuple[int, int, int]  # number of windows of a batch; its update; its micro-batch


class _BatchSource(Protocol):
    """What batches are drawn from. Batches prepared at an earlier `version` are drawn again."""

    @property
    def version(self) -> Any: ...
    def sample(self, batch_size: int, update: int, micro_batch: int) -> Batch: ...


class Prefetch(Generic[Prepared]):
    """Iterator over the batches of `plan` in order, up to `ahead` of them prepared in advance (0: none); `prepare` gets
    a batch and its update.

    An error of the source is raised in place of its batch.
    """

    def __init__(
        self,
        source: _BatchSource,
        plan: Iterator[Request],
        *,
        ahead: int,
        prepare: Callable[[Batch, int], Prepared],
    ) -> None:
        self._source, self._plan, self._ahead, self._make = source, plan, ahead, prepare
        self._prepared: deque[tuple[Request, Future[Prepared]]] = deque()
        self._again: deque[Request] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if ahead else None

    def __enter__(self) -> Prefetch[Prepared]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()
        if self._worker is not None:
            self._worker.shutdown()

    def next(self) -> Prepared:
        """Return the next batch of the plan. StopIteration after the last."""
        if self._worker is None:
            return self._draw(*self._request())
        if not self._prepared:
            self._prepare(self._request())
        _, future = self._prepared.popleft()
        wait((future,))
        while len(self._prepared) < self._ahead:
            try:
                self._prepare(self._request())
            except StopIteration:
                break
        return future.result()

    def changing(self, change: Callable[[], Any]) -> Any:
        """Call `change` while the source is idle and return its result; batches prepared before a change are drawn
        again."""
        self.wait()
        before = self._source.version
        result = change()
        if self._source.version != before:
            self._drop()
        return result

    def wait(self) -> None:
        """Wait until the source is idle."""
        wait([future for _, future in self._prepared])

    def _drop(self) -> None:
        """Drop batches that were not consumed, and wait until the source is idle; their requests come again."""
        prepared, self._prepared = self._prepared, deque()
        wait([future for _, future in prepared if not future.cancel()])
        self._again.extendleft(request for request, _ in reversed(prepared))

    def _request(self) -> Request:
        return self._again.popleft() if self._again else next(self._plan)

    def _prepare(self, request: Request) -> None:
        assert self._worker is not None
        self._prepared.append((request, self._worker.submit(self._draw, *request)))

    def _draw(self, size: int, update: int, micro_batch: int) -> Prepared:
        return self._make(self._source.sample(size, update, micro_batch), update)
