"""What the engine says while it works. The view turns events into a bar, a line or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`done` of `total` (None: unknown) in `unit`; `metrics` are the newest figures worth showing."""

    stage: str
    done: int
    total: int | None
    unit: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A sentence for the user: `level` is "info" or "warning"."""

    text: str
    level: str = "info"


Event = Progress | Notice
Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """The listener that hears nothing."""
