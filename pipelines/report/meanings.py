"""What metrics mean, and in which order they are shown."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import NamedTuple


class Meaning(NamedTuple):
    """Names of metrics (`auxiliary_loss_*`: with any ending) and what they mean, with code in backticks."""

    names: tuple[str, ...]
    meaning: str


@cache
def meanings() -> tuple[Meaning, ...]:
    """Return all metrics of training."""
    text = (resources.files("pipelines.report") / "metrics.toml").read_text(encoding="utf-8")
    return tuple(Meaning(tuple(entry["names"]), entry["meaning"]) for entry in tomllib.loads(text)["metric"])


def meaning_of(metric: str) -> str:
    """Return what a metric means; empty for one that is not listed, e.g. that of an agent of the user's own."""
    place = _place(metric)
    return meanings()[place].meaning if place is not None else ""


def ordered(metrics: Iterable[str]) -> list[str]:
    """Return metrics as they are listed; those that are not listed come last, by name."""
    last = len(meanings())
    return sorted(metrics, key=lambda metric: (place if (place := _place(metric)) is not None else last, metric))


def _place(metric: str) -> int | None:
    for place, (names, _) in enumerate(meanings()):
        if any(metric == name or (name.endswith("*") and metric.startswith(name[:-1])) for name in names):
            return place
    return None
