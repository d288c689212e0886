"""What the engine says while it works. The view turns events into a bar, a line or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`done` of `total` (None: unknown) in `unit`; `metrics` are the newest figures worth showing.

    In a chain `run_share` is the share of the whole run that is done, and `run_seconds_left` the time it still needs,
    once that can be estimated.
    """

    stage: str
    done: int
    total: int | None
    unit: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    run_share: float | None = None
    run_seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A sentence for the user: `level` is "info", "warning", or "debug" (shown on request). `stage`: what it is about,
    shown before it."""

    text: str
    level: str = "info"
    stage: str = ""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The engine waits for `what`; repeated while it does. The listener may raise to stop it, if it is `stoppable`."""

    what: str
    stoppable: bool = True


Event = Progress | Notice | Waiting
Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """The listener that hears nothing."""


def duration(seconds: float) -> str:
    """Whole seconds in the form that people read.

    >>> duration(95)
    '1m35s'
    """
    whole = round(max(seconds, 0))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def wait_for(look: Callable[[], T | None], what: str, listener: Listener) -> T:
    """Return what `look` finds, once it finds something; waiting is reported and can be interrupted."""
    began, reported = time.monotonic(), False
    while (found := look()) is None:
        if not reported:
            listener(Notice(text=f"waiting for {what}"))
            reported = True
        listener(Progress(stage="wait", done=int(time.monotonic() - began), total=None, unit="s"))
        time.sleep(POLL_SECONDS)
    return found
