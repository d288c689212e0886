"""metrics.jsonl as columns of numbers, sampled evenly if the file is long.

A log of 100,000 lines has 150 MB or more, and a curve of 1,000 points needs 1,000 of its lines. These are found by
their offset, without reading the rest. Lines that cannot be parsed and values that are not numbers are skipped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipelines.files.json import parse_object
from pipelines.files.malformed import open_regular

POINTS = 1_000
_CHUNK_BYTES = 1 << 14
_LONGEST_LINE = 1 << 20
_MOST_COLUMNS = 1_000


@dataclass(frozen=True, kw_only=True)
class MetricColumns:
    """Lines of a log as columns (R,) of float64, in the order of the log; NaN where a line has no such number.

    Always there: `update`, `time` (seconds since the epoch), and `seconds`, the time that processes have worked on the
    run up to the line: pauses between them do not count. `sampled`: the log has more lines than these.
    """

    columns: dict[str, np.ndarray] = field(default_factory=dict)
    sampled: bool = False

    @property
    def rows(self) -> int:
        """Number of lines."""
        return len(self.columns["update"])

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Select the updates and the values of the lines that have the metric `name`."""
        values = self.columns.get(name, np.full(self.rows, np.nan))
        present = ~np.isnan(values)
        return self.columns["update"][present], values[present]

    def at(self, name: str, update: float) -> float | None:
        """Interpolate `name` linearly at an update; None if no line has it."""
        updates, values = self.series(name)
        if not len(updates):
            return None
        order = np.argsort(updates, kind="stable")
        return float(np.interp(update, updates[order], values[order]))


def read_metrics(
    path: Path, *, stage: str = "train", names: Sequence[str] | None = None, points: int | None = POINTS
) -> MetricColumns:
    """Read the lines of a stage in the log at `path`; empty if there is none.

    Args:
        path: metrics.jsonl of a run.
        stage: "train" or "evaluate".
        names: metrics to keep (None: all).
        points: number of lines to read of a log that has more than twice as many (None: all lines).
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size // 2 - _CHUNK_BYTES))
            chunk = file.read(_CHUNK_BYTES << 2)  # from the middle of the log, to estimate the length of its lines
            file.seek(0)
            line_bytes = max(len(chunk), 1) / max(chunk.count(b"\n"), 1)
            sampled = points is not None and size / line_bytes > 2 * points
            if sampled and points:
                lines = _sample(file, size, points, stage)
            else:
                parsed = (_parse(line, stage) for line in iter(lambda: file.readline(_LONGEST_LINE), b""))
                lines = (line for line in parsed if line is not None)
            return MetricColumns(columns=_columns(lines, names), sampled=sampled)
    except OSError:
        return MetricColumns(columns=_columns(iter(()), names))


def read_last_line(path: Path, *, stage: str = "train") -> dict[str, Any] | None:
    """Read the last line of a stage; None if it is not among the last 64 KiB of the log at `path`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - (_CHUNK_BYTES << 2)))
            for line in reversed(file.read().splitlines()):
                if (found := _parse(line, stage)) is not None:
                    return found
    except OSError:
        pass
    return None


def _parse(line: bytes, stage: str) -> dict[str, Any] | None:
    found = parse_object(line) if line.startswith(b"{") and len(line) <= _LONGEST_LINE else None
    if found is None or found.get("stage") != stage or _number(found.get("update")) is None:
        return None
    return found


def _sample(file: BinaryIO, size: int, points: int, stage: str) -> Iterator[dict[str, Any]]:
    """Yield the first line after each of `points` evenly spaced offsets, and the last line."""
    end = 0  # of the last line that was looked at
    for number in range(points):
        offset = size * number // points
        if offset < end:
            continue
        file.seek(max(offset - 1, 0))
        skipped = len(file.readline(_LONGEST_LINE)) if offset else 0
        end = max(offset - 1, 0) + skipped
        for _ in range(8):
            line = file.readline(_LONGEST_LINE)
            end += len(line)
            if (found := _parse(line, stage)) is not None:
                yield found
                break
    file.seek(max(end, size - (_CHUNK_BYTES << 2)))
    for line in reversed(file.read().splitlines()):
        if (found := _parse(line, stage)) is not None:
            yield found
            break


def _columns(lines: Iterator[dict[str, Any]], names: Sequence[str] | None) -> dict[str, np.ndarray]:
    wanted = None if names is None else {*names, "update", "time", "cpu_seconds"}
    values: dict[str, list[float]] = {"update": [], "time": [], "cpu_seconds": []}
    count = 0
    for line in lines:
        for name, value in line.items():
            number = _number(value)
            if number is None or (wanted is not None and name not in wanted):
                continue
            column = values.get(name)
            if column is None:
                if len(values) >= _MOST_COLUMNS:
                    continue
                column = values[name] = []
            column.extend([math.nan] * (count - len(column)))
            column.append(number)
        count += 1
    for column in values.values():
        column.extend([math.nan] * (count - len(column)))
    found = {name: np.array(column, np.float64) for name, column in values.items()}
    if not count:
        return found | {"seconds": np.zeros(0)}
    # Seconds since the first line, without pauses. Where the CPU time falls, another process has taken over: the time
    # since the line before is mostly a pause, and the new process has worked for at most its own CPU time.
    passed, cpu = np.diff(found["time"], prepend=found["time"][:1]), found["cpu_seconds"]
    passed = np.where(np.diff(cpu, prepend=cpu[:1]) < 0, np.minimum(passed, cpu), passed)
    return found | {"seconds": np.cumsum(np.maximum(np.nan_to_num(passed), 0.0))}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
