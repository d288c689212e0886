"""Which settings belong to a stage, and which of them may differ between invocations or entries of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pipelines.config.base import Change
from pipelines.config.settings import Settings

# Tables that determine a stage's result: a change in one of them makes it another experiment.
STAGE_TABLES: Mapping[str, tuple[str, ...]] = {
    "collect": ("env", "exploration", "collect", "lake", "source"),
    "train": ("size", "agent", "init", "train", "track"),
    "run": (
        "profile",
        "size",
        "env",
        "exploration",
        "agent",
        "init",
        "collect",
        "source",
        "lake",
        "relabel",
        "train",
        "track",
        "stages",
    ),
}
# In a chain, environments and model live through all epochs: only these keys may differ between entries.
STAGE_OVERRIDES: Mapping[str, frozenset[str]] = {
    "collect": frozenset({"steps", "policy", "greedy"}),
    "ingest": frozenset(),
    "train": frozenset({"steps", "lakes"}),
}


def find_mark(key: str) -> Change | None:
    """Find the mark of a dotted setting, or of the table that it is in."""
    model: Any = Settings
    for part in key.split("."):
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return None
        if (mark := next((each for each in field.metadata if isinstance(each, Change)), None)) is not None:
            return mark
        model = field.annotation
    return None


def keeps_scores(key: str) -> bool:
    """Return whether runs that differ in this setting can be ranked together."""
    return find_mark(key) is Change.PACING


def may_change(key: str, *, stage: str = "") -> bool:
    """Return whether a setting may change between two invocations of an experiment, or of one `stage` of it."""
    mark = find_mark(key)
    return mark in (Change.PACING, Change.TARGET) or (mark is Change.BEHAVIOUR and stage == "collect")
