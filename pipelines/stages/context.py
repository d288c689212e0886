"""Context length of the agent where `train.context_length` is "auto", and a warning where episodes are longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.config.settings import LONGEST_CONTEXT, Settings
from pipelines.events import Listener, Notice

_WITHOUT_MEMORY = ("feedforward", "identity")


def with_stored_window(settings: Settings, stored: Mapping[str, Any]) -> Settings:
    """Return `settings` with the window of the run that has begun, if it is `stored`, in place of "auto"."""
    begun = stored.get("train", {}).get("context_length")
    return _with_window(settings, begun) if isinstance(begun, int) else settings


def with_window(settings: Settings, horizon: int | None, listener: Listener) -> Settings:
    """Return `settings` with a number in place of "auto" for the window. `horizon`: most steps of an episode, None
    where it is not known. Where the window is shorter, the listener gets a warning with both numbers.
    """
    if horizon is None:
        return _with_window(settings, settings.train.resolved_context_length)
    least = settings.train.burn_in + 1
    settings = _with_window(settings, max(min(horizon, LONGEST_CONTEXT), least))
    window = settings.train.resolved_context_length
    if window < horizon and settings.agent.sequence.kind not in _WITHOUT_MEMORY:
        text = f"the agent's context is {window:,} steps (train.context_length), an episode takes up to {horizon:,}"
        text += ": what happened earlier than that cannot be remembered"
        listener(Notice(text=text, level="warning"))
    return settings


def _with_window(settings: Settings, window: int) -> Settings:
    if settings.train.context_length != "auto":
        return settings
    return settings.model_copy(update={"train": settings.train.model_copy(update={"context_length": window})})
