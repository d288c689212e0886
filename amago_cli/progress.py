"""The story on stderr: a bar on a terminal, a line every 30 seconds elsewhere, nothing with -q."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from amago_cli import escaping
from pipelines.events import Event, Listener, Notice, Progress, silent

LINE_SECONDS = 30.0


class Closing(Protocol):
    """A listener that leaves the terminal clean."""

    def __call__(self, event: Event) -> None: ...
    def close(self) -> None: ...


@contextmanager
def reporter(*, quiet: bool, verbose: bool = False, stream: TextIO | None = None) -> Iterator[Listener]:
    """The listener that suits `stream` (stderr) and the user's wish."""
    stream = stream or sys.stderr
    if quiet:
        yield silent
        return
    show: Closing = Bar(stream, verbose=verbose) if stream.isatty() else Lines(stream, verbose=verbose)
    try:
        yield show
    finally:
        show.close()


class Bar:
    """One tqdm bar at a time, with rate, time left and the newest figures."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self.stream, self.verbose = stream, verbose
        self._bar: Any = None
        self._key: tuple[str, int | None, str] | None = None

    def __call__(self, event: Event) -> None:
        from tqdm import tqdm

        if isinstance(event, Notice):
            if text := worded(event, self.verbose):
                tqdm.write(text, file=self.stream)
            return
        key = (event.stage, event.total, event.unit)
        if key != self._key or event.done < self._bar.n:
            self.close()
            self._key = key
            self._bar = tqdm(
                desc=event.stage,
                total=event.total,
                initial=event.done,
                unit=f" {event.unit}",
                file=self.stream,
                **_shape(self.stream),
                leave=False,
                unit_scale=True,
                smoothing=0.1,
            )
        if event.metrics:
            self._bar.set_postfix_str(_figures(event.metrics), refresh=False)
        self._bar.update(event.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = self._key = None


class Lines:
    """A line at most every `interval` seconds: done, rate, time left, the newest figures."""

    def __init__(
        self,
        stream: TextIO,
        *,
        verbose: bool = False,
        interval: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream, self.verbose, self.interval, self.clock = stream, verbose, interval, clock
        self._said = clock()
        self._began: tuple[tuple[str, int | None, str], float, int] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            if text := worded(event, self.verbose):
                print(text, file=self.stream, flush=True)
            return
        now = self.clock()
        key = (event.stage, event.total, event.unit)
        if self._began is None or self._began[0] != key or event.done < self._began[2]:
            self._began = (key, now, event.done)
        if now - self._said >= self.interval:
            self._said = now
            print(self._line(event, now), file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing to leave clean."""

    def _line(self, event: Progress, now: float) -> str:
        assert self._began is not None
        _, since, first = self._began
        rate = (event.done - first) / (now - since) if now > since else 0.0
        parts = [f"{event.stage}: {event.done:,}"]
        if event.total:
            parts[0] += f"/{event.total:,} {event.unit} ({event.done / event.total:.0%})"
        else:
            parts[0] += f" {event.unit}"
        if rate > 0:
            parts.append(f"{rate:,.1f}/s" if rate < 100 else f"{rate:,.0f}/s")
            if event.total:
                parts.append(f"{duration((event.total - event.done) / rate)} left")
        if event.metrics:
            parts.append(_figures(event.metrics))
        return ", ".join(parts)


def worded(notice: Notice, verbose: bool) -> str | None:
    """How a notice reads; None when it is not for this user."""
    if notice.level == "debug":
        return escaping.lines(notice.text) if verbose else None  # tracebacks
    text = escaping.line(notice.text)
    return text if notice.level == "info" else f"{notice.level}: {text}"


def duration(seconds: float) -> str:
    """`95` -> "1m35s"."""
    whole = round(max(seconds, 0))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _shape(stream: TextIO) -> dict[str, Any]:
    """How wide a bar is: as the terminal, also after a resize; 80 columns where a terminal does not know its size."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return {"ncols": 80, "nrows": 24}
    return {"dynamic_ncols": True} if min(size) > 0 else {"ncols": 80, "nrows": 24}


def _figures(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in metrics.items())
