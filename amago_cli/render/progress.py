"""Progress on stderr: a bar on a terminal, a line every 30 seconds elsewhere, nothing with -q."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from amago_cli.render import escaping
from pipelines.events import Event, Listener, Notice, Progress, Waiting, duration, silent

_LINE_SECONDS = 30.0
_COLUMNS = 80  # of a terminal of unknown size
_LEAST_BAR = 10  # columns of the bar itself


@contextmanager
def reporter(*, quiet: bool, verbose: bool = False, stream: TextIO | None = None) -> Iterator[Listener]:
    """Yield the listener for `stream` (default: stderr) and the user's options."""
    stream = stream or sys.stderr
    if quiet:
        yield silent
        return
    show: Bar | Lines = Bar(stream, verbose=verbose) if stream.isatty() else Lines(stream, verbose=verbose)
    try:
        yield show
    finally:
        show.close()


class Bar:
    """A tqdm bar of the stage, or in a chain of the whole run, with the stage's newest figures."""

    def __init__(self, stream: TextIO, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.verbose, self.pace = stream, verbose, _Pace(clock)
        self._bar: Any = None

    def __call__(self, event: Event) -> None:
        from tqdm import tqdm

        if isinstance(event, Notice):
            if text := _format_notice(event, self.verbose):
                tqdm.write(text, file=self.stream)
            return
        if isinstance(event, Waiting):
            return
        self.pace.see(event)
        if self._bar is None:
            size = {"dynamic_ncols": True} if _terminal_columns(self.stream) else {"ncols": _COLUMNS, "nrows": 24}
            self._bar = tqdm(total=1.0, bar_format=" ", file=self.stream, leave=False, miniters=0, **size)
        columns = _terminal_columns(self.stream) or _COLUMNS
        self._bar.bar_format = self._format(event, columns)
        self._bar.update((self._share(event) or 0.0) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _share(self, event: Progress) -> float | None:
        stage = event.done / event.total if event.total else None
        return event.run_share if event.run_share is not None else stage

    def _format(self, event: Progress, columns: int) -> str:
        """Write the bar's format: as many figures as fit beside `_LEAST_BAR` columns, the most important first."""
        share = self._share(event)
        parts = [f"{event.done:,}/{event.total:,} {event.unit}" if event.total else f"{event.done:,} {event.unit}"]
        parts += [left] if (left := self.pace.left(event)) else []
        parts += [rate] if (rate := self.pace.rate(event)) else []
        parts += [f"{name} {value:.3g}" for name, value in event.metrics.items()]
        bar = "" if share is None else f" {share:4.0%} |{{bar}}|"
        room = columns - 1 - len(event.stage) - (0 if share is None else len(f" {share:4.0%} ||") + _LEAST_BAR)
        text = ""
        for part in parts:
            more = f"{text}, {part}" if text else f" {part}"
            text = more if len(more) <= room else text
        stage, figures = (part.replace("{", "{{").replace("}", "}}") for part in (event.stage, text))
        return stage + bar + figures


class Lines:
    """At most one line per `interval` seconds: done, rate, time left, newest figures."""

    def __init__(
        self,
        stream: TextIO,
        *,
        verbose: bool = False,
        interval: float = _LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream, self.verbose, self.interval, self.clock, self.pace = stream, verbose, interval, clock, _Pace(clock)
        self._said = clock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            if text := _format_notice(event, self.verbose):
                print(text, file=self.stream, flush=True)
            return
        if isinstance(event, Waiting):
            return
        now = self.clock()
        self.pace.see(event)
        if now - self._said >= self.interval:
            self._said = now
            print(self._line(event), file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing to leave clean."""

    def _line(self, event: Progress) -> str:
        parts = [f"{event.stage}: {event.done:,}"]
        if event.total:
            parts[0] += f"/{event.total:,} {event.unit}"
            parts[0] += "" if event.run_share is not None else f" ({event.done / event.total:.0%})"
        else:
            parts[0] += f" {event.unit}"
        parts += [rate] if (rate := self.pace.rate(event)) else []
        parts += [f"whole run {event.run_share:.0%}"] if event.run_share is not None else []
        parts += [left] if (left := self.pace.left(event)) else []
        parts += [f"{name} {value:.3g}" for name, value in event.metrics.items()]
        return ", ".join(parts)


class _Pace:
    """Rate and time left of a stage, measured since its first event."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: tuple[tuple[str, int | None, str], float, int] | None = None

    def see(self, event: Progress) -> None:
        """Start over at the first event of a stage."""
        key = (event.stage, event.total, event.unit)
        if self._began is None or self._began[0] != key or event.done < self._began[2]:
            self._began = (key, self._clock(), event.done)

    def rate(self, event: Progress) -> str:
        """Format units per second; "" if not known yet."""
        rate = self._rate(event)
        return "" if rate <= 0 else f"{rate:,.1f}/s" if rate < 100 else f"{rate:,.0f}/s"

    def left(self, event: Progress) -> str:
        """Format the time left of the whole run, or of the stage while that of the run is unknown; "" if both are."""
        if event.run_seconds_left is not None:
            return f"{duration(event.run_seconds_left)} left"
        rate = self._rate(event)
        if not event.total or rate <= 0:
            return ""
        seconds = duration((event.total - event.done) / rate)
        return f"{seconds} left" if event.run_share is None else f"stage {seconds} left"

    def _rate(self, event: Progress) -> float:
        assert self._began is not None
        _, since, first = self._began
        now = self._clock()
        return (event.done - first) / (now - since) if now > since else 0.0


def _format_notice(notice: Notice, verbose: bool) -> str | None:
    """Format a notice; None when this user does not see it."""
    if notice.level == "debug":
        return escaping.lines(notice.text) if verbose else None  # tracebacks
    text = escaping.line(f"{notice.stage}: {notice.text}" if notice.stage else notice.text)
    return text if notice.level == "info" else f"{notice.level}: {text}"


def _terminal_columns(stream: TextIO) -> int:
    """Measure the width of the terminal; 0 if unknown."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 0
    return size.columns if min(size) > 0 else 0
