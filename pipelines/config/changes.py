"""How the settings of runs differ, and which may: the settings that a stage reads, those that determine its result, and
those that may change between invocations or entries of a chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from pipelines.config.base import Change
from pipelines.config.settings import Settings
from pipelines.errors import UsageError

Changes = dict[str, tuple[Any, Any]]
_MOST_KEYS = 20_000
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
# Tables and keys that a stage reads. Only what a call gives by itself must be among them: a file or a stored
# configuration describes all stages of a run.
_READ: Mapping[str, tuple[str, ...]] = {
    "collect": ("env", "exploration", "collect", "lake", "source", "seed", "agent.action_mask", "train.threads"),
    "relabel": ("relabel", "seed"),
    "train": ("size", "agent", "init", "train", "track", "env", "seed"),
    "evaluate": ("env", "evaluate", "collect", "agent", "track", "train.threads"),
    "export": ("export", "evaluate", "env", "collect", "agent", "train.threads"),
}
# An import writes segments as a collector does, and nothing else of [collect] concerns it.
_OF_IMPORTS = ("collect.seal_seconds",)


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


def may_change(key: str, *, stage: str = "") -> bool:
    """Check whether a setting may change between two invocations of an experiment, or of one `stage` of it."""
    mark = find_mark(key)
    return mark in (Change.PACING, Change.TARGET) or (mark is Change.BEHAVIOUR and stage == "collect")


def refuse_unused(stage: str, keys: Collection[str]) -> None:
    """Raise UsageError if `stage` would ignore one of the dotted `keys`."""
    unused = [key for key in keys if key != "profile" and not is_in(key, _READ[stage])]
    if unused:
        read = ", ".join(f"[{name}]" if "." not in name else name for name in _READ[stage])
        raise UsageError(
            f"amago {stage} does not use {', '.join(unused)}",
            hint=f"it uses {read}; only a new run records other settings, for its other stages",
        )


def imports_source(source: str, *, is_typed: bool, acting: Sequence[str]) -> bool:
    """Decide whether a collect imports `source` instead of playing: unless options about acting were typed.

    `source` is "" where neither the call nor its run has one; `acting` are the options about acting, as they were
    typed. UsageError if this call asks for both.
    """
    if is_typed and acting:
        raise UsageError(
            f"{', '.join(acting)} and --from exclude each other", hint="a dataset is imported without acting"
        )
    return bool(source) and not acting


def list_acting_keys(keys: Collection[str]) -> list[str]:
    """Select the dotted `keys` that an import would ignore."""
    tables = ("collect", "exploration", "agent", "train")
    return [key for key in keys if is_in(key, tables) and key not in _OF_IMPORTS]


def is_in(key: str, tables: Collection[str]) -> bool:
    """Check whether a dotted key is one of `tables`, or in one of them."""
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def flatten(document: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables and lists of tables into one table of dotted keys; other lists stay whole.

    >>> flatten({"hidden": [8, 8], "stages": [{"stage": "train"}]})
    {'hidden': [8, 8], 'stages.0.stage': 'train'}
    """
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting and len(flat) < _MOST_KEYS:  # a foreign document may be of any size
        prefix, value = waiting.pop()
        if isinstance(value, Mapping):
            items = [(str(key), part) for key, part in value.items()]
        elif isinstance(value, list | tuple) and (not value or any(isinstance(part, Mapping) for part in value)):
            items = [(str(place), part) for place, part in enumerate(value)]
        else:
            flat[prefix] = list(value) if isinstance(value, tuple) else value
            continue
        waiting += reversed([(f"{prefix}.{key}" if prefix else key, part) for key, part in items])
    return flat


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """Find the keys of two flat tables that differ, each with both values (None: not there).

    >>> find_changes({"a": 1, "b": 2}, {"a": 1, "b": 3})
    {'b': (2, 3)}
    """
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def describe_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], *, may_change: Callable[[str], bool]
) -> list[str]:
    """Write a line for each key of two flat tables that differs, except those that may change.

    >>> describe_changes({"train.steps": 5, "seed": 0}, {"train.steps": 9, "seed": 0}, may_change=lambda key: False)
    ['train.steps: 5 -> 9']
    """
    lines = []
    for key, values in find_changes(before, after).items():
        if not may_change(key):
            old, new = ("(unset)" if value is None else repr(value) for value in values)
            lines.append(f"{key}: {old} -> {new}")
    return lines


def find_varying(settings: Sequence[Mapping[str, Any]], *, apart_from: Sequence[str] = ("seed",)) -> list[str]:
    """Find the keys, in order, that are not equal in all of the flat tables.

    >>> find_varying([{"seed": 1, "lr": 1e-3}, {"seed": 2, "lr": 1e-4}])
    ['lr']
    """
    keys = sorted({key for table in settings for key in table} - set(apart_from))
    return [key for key in keys if any(table.get(key) != settings[0].get(key) for table in settings[1:])]
