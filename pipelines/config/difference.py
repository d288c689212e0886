"""How the settings of runs differ: from a recipe, and from each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Changes = dict[str, tuple[Any, Any]]
_MOST_KEYS = 20_000


def flattened(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables and lists of tables as one table of dotted keys; other lists stay whole.

    >>> flattened({"hidden": [8, 8], "stages": [{"stage": "train"}]})
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


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """Return the keys of two flat tables that differ, each with both values (None: not there).

    >>> changes({"a": 1, "b": 2}, {"a": 1, "b": 3})
    {'b': (2, 3)}
    """
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def describe_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], *, may_change: Callable[[str], bool]
) -> list[str]:
    """Return a line for each key of two flat tables that differs, except those that may change.

    >>> describe_changes({"train.steps": 5, "seed": 0}, {"train.steps": 9, "seed": 0}, may_change=lambda key: False)
    ['train.steps: 5 -> 9']
    """
    found = changes(before, after).items()
    return [f"{key}: {_format_value(old)} -> {_format_value(new)}" for key, (old, new) in found if not may_change(key)]


def _format_value(value: Any) -> str:
    return "(unset)" if value is None else repr(value)


def varying(settings: Sequence[Mapping[str, Any]], *, apart_from: Sequence[str] = ("seed",)) -> list[str]:
    """Return the keys, in order, that are not equal in all of the flat tables.

    >>> varying([{"seed": 1, "lr": 1e-3}, {"seed": 2, "lr": 1e-4}])
    ['lr']
    """
    keys = sorted({key for table in settings for key in table} - set(apart_from))
    return [key for key in keys if any(table.get(key) != settings[0].get(key) for table in settings[1:])]
