"""The settings that tuning may choose, and from what: a TOML file with a table for each.

[train.learning_rate]
low = 1e-5
high = 1e-3
log = true

[agent.sequence.num_layers]     # whole numbers
low = 1
high = 4

[train.batch_size]
choices = [16, 32, 64]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config.load import read_toml
from pipelines.errors import UsageError

_KEYS = {"low", "high", "log", "step", "choices"}


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A setting to choose: one of `choices`, or from `low` to `high`, both included; whole numbers if both are."""

    key: str
    low: float | int = 0
    high: float | int = 0
    log: bool = False
    step: float | int | None = None
    choices: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def examples(self) -> list[Any]:
        """List values to check the setting with: every choice, or the ends."""
        return list(self.choices) or [self.low, self.high]

    def choose(self, trial: Any) -> Any:
        """Let an Optuna trial choose. Choices that are lists are offered as JSON, as Optuna only stores scalars."""
        if self.choices:
            return json.loads(trial.suggest_categorical(self.key, [json.dumps(choice) for choice in self.choices]))
        if self.whole:
            return trial.suggest_int(self.key, self.low, self.high, log=self.log, step=self.step or 1)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log, step=self.step)

    def read_stored(self, value: Any) -> Any:
        """Decode the value that a trial recorded for this setting."""
        return json.loads(value) if self.choices else value

    @classmethod
    def read(cls, key: str, table: Any, problems: list[str]) -> Dimension | None:
        before = len(problems)
        if not isinstance(table, Mapping):
            problems.append(f"{key}: a table with low and high, or with choices, is expected")
            return None
        if unknown := sorted(table.keys() - _KEYS):
            problems.append(f"{key}: unknown {', '.join(unknown)}; known: {', '.join(sorted(_KEYS))}")
        if "choices" in table:
            choices = table["choices"]
            if not isinstance(choices, list) or not choices or table.keys() & {"low", "high", "log", "step"}:
                problems.append(f"{key}: choices is a list of values, without low and high")
                return None
            return cls(key=key, choices=tuple(choices)) if len(problems) == before else None
        low, high, log, step = table.get("low"), table.get("high"), table.get("log", False), table.get("step")
        if not _is_number(low) or not _is_number(high) or low >= high:  # type: ignore[operator]
            problems.append(f"{key}: low and high must be numbers, low below high")
        elif not isinstance(log, bool) or (log and (low <= 0 or step is not None)):  # type: ignore[operator]
            problems.append(f"{key}: log needs a low above 0, and no step")
        elif step is not None and (not _is_number(step) or step <= 0):
            problems.append(f"{key}: step must be a number above 0")
        if len(problems) > before:
            return None
        assert low is not None
        assert high is not None
        return cls(key=key, low=low, high=high, log=log, step=step)


def read_space(path: Path) -> list[Dimension]:
    """Read the dimensions in the file at `path`. UsageError lists every problem."""
    problems: list[str] = []
    found = [
        dimension
        for key, table in _list_tables(read_toml(path), "")
        if (dimension := Dimension.read(key, table, problems)) is not None
    ]
    if not found and not problems:
        problems.append("there is no table such as [train.learning_rate]")
    if problems:
        raise UsageError(f"cannot use the search space '{path}'", problems=tuple(problems))
    return found


def _list_tables(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping) and not _KEYS & {
            name for name, part in value.items() if not isinstance(part, Mapping)
        }:
            yield from _list_tables(value, key)
        else:
            yield key, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) != float("inf")
