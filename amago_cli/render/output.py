"""Results on stdout, as text for people or as one JSON object for scripts."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TextIO, runtime_checkable

from amago_cli.invocation import Invocation
from amago_cli.render import escaping
from amago_cli.render.table import cell, plain, raw, render
from amago_cli.streams import carries_unicode

if TYPE_CHECKING:
    from pipelines.stages.result import Result

SCHEMA = "amago/1"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Result of a query."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text to print verbatim; `fields` hold its content for JSON. `then` is called once it is printed, e.g. to serve
    requests until a signal."""

    text: str
    status: str = "done"
    fields: Mapping[str, Any] = field(default_factory=dict)
    then: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """An open file whose bytes are the result."""

    file: BinaryIO


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as it is reported. The user or the machine caused an `expected` one, so it has no traceback."""

    kind: str
    message: str
    exit_code: int
    hint: str | None = None
    problems: Sequence[str] = ()
    expected: bool = True
    result: Any = None
    """Partial result of the stage, e.g. the scores that missed `--require`."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the command."""
        return self.exit_code in (129, 130, 143)


@runtime_checkable
class Played(Protocol):
    """A document that a terminal shows as an animation."""

    def play(self, stream: TextIO) -> None: ...


class TextOutput:
    """Tables and lines; with -q a stage that succeeded prints nothing."""

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation

    def show(self, outcome: Result | Rows | Document | FileContent) -> None:
        if isinstance(outcome, FileContent):
            outcome.file.seek(0)
            shutil.copyfileobj(outcome.file, sys.stdout.buffer)
        elif isinstance(outcome, Played) and sys.stdout.isatty():
            outcome.play(sys.stdout)
        elif isinstance(outcome, Document):
            text = escaping.lines(outcome.text)
            print(text, end="" if text.endswith("\n") else "\n")
        elif isinstance(outcome, Rows):
            _print_table(outcome.columns, outcome.rows, show=raw)
        else:
            self._result(outcome)

    def failure(self, failure: Failure) -> None:
        if failure.result is not None:
            self._result(failure.result)

    def _result(self, result: Result) -> None:
        from pipelines.events import duration

        acted = result.seconds > 0 or result.status == "skipped"
        if acted and self.invocation.quiet:
            return
        figures = {}
        for name, metric in result.metrics.items():
            value = plain(metric)
            # A count of 0, an empty list, or an option that was not given only says that something did not happen.
            # A mean of 0 is information.
            if isinstance(value, bool):
                is_nothing = acted and not value
            else:
                is_nothing = value == [] or (value == 0 and (isinstance(value, int) or name.endswith("_per_second")))
            if not is_nothing and (text := figure(value)) is not None:
                figures[name] = text
        if acted:
            place = result.run or result.lake
            took = duration(result.seconds) if result.seconds >= 60 else f"{result.seconds:.1f} s"
            done = "nothing to do" if result.status == "skipped" else f"{result.status} in {took}"
            print(escaping.line(f"{result.command}: {done}{f' -> {place}' if place else ''}"))
        width = max(map(len, figures), default=0)
        for name, text in figures.items():
            print(escaping.line(f"  {name:<{width}}  {text}"))
        for number, table in enumerate(result.tables):
            if figures or number:
                print()
            columns, rows = table.columns, table.rows
            if table.in_a_pipe and not sys.stdout.isatty():
                places = [table.columns.index(name) for name in table.in_a_pipe]
                columns, rows = table.in_a_pipe, [[row[place] for place in places] for row in table.rows]
            _print_table(columns, rows, show=cell, title=table.title)
        for path in result.outputs if result.status != "skipped" else ():
            print(escaping.line(f"  wrote {path}"))
        if result.remark:
            print(escaping.line(result.remark))


class JsonOutput:
    """One JSON object per call; `lake sql` prints a list of objects."""

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation

    def show(self, outcome: Result | Rows | Document) -> None:
        if isinstance(outcome, Rows):
            print(dumps([dict(zip(outcome.columns, row, strict=True)) for row in outcome.rows]))
        elif isinstance(outcome, Document):
            print(dumps(self._object(outcome.status, None) | dict(outcome.fields)))
        else:
            print(dumps(self._object(outcome.status, outcome)))

    def failure(self, failure: Failure) -> None:
        status = "interrupted" if failure.is_interrupted else "failed"
        error = {
            "type": failure.kind,
            "message": failure.message,
            "hint": failure.hint,
            "problems": list(failure.problems),
            "exit_code": failure.exit_code,
        }
        print(dumps(self._object(status, failure.result) | {"error": error}))

    def _object(self, status: str, result: Result | None) -> dict[str, Any]:
        def place(*places: Any) -> str | None:
            found = next((each for each in places if each), None)
            if found is None:
                return None
            from pipelines.errors import masked

            return masked(str(found))

        call = self.invocation
        return {
            "schema": SCHEMA,
            "command": call.command,
            "status": status,
            "run": place(result.run if result else None, call.run),
            "lake": place(result.lake if result else None, call.lake),
            "metrics": dict(result.metrics) if result else {},
            "outputs": list(result.outputs) if result else [],
            "seconds": round((result.seconds if result else 0) or call.seconds, 3),
        }


class CsvOutput(TextOutput):
    """Rows as comma-separated values; anything else as text."""

    def show(self, outcome: Result | Rows | Document | FileContent) -> None:
        if not isinstance(outcome, Rows):
            super().show(outcome)
            return
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(outcome.columns)
        for row in outcome.rows:
            cells = []
            for value in map(plain, row):
                is_missing = value is None or (isinstance(value, float) and not math.isfinite(value))
                cells.append("" if is_missing else value if isinstance(value, str | int | float) else dumps(value))
            writer.writerow(cells)


def output_of(invocation: Invocation) -> TextOutput | JsonOutput:
    """Choose the format of results that the call asked for."""
    if invocation.csv:
        return CsvOutput(invocation)
    return (JsonOutput if invocation.json else TextOutput)(invocation)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Encode `value` as strict JSON, on one line without `indent`: NaN and infinities become null, numpy values plain
    Python, anything else its string."""
    return json.dumps(plain(value), ensure_ascii=not carries_unicode(), allow_nan=False, indent=indent)


def figure(value: Any) -> str | None:
    """Format a metric as one short text; None for values that only a table or JSON can show."""
    value = plain(value)
    if value is None or isinstance(value, Mapping):
        return None
    if isinstance(value, list):
        if not value:
            return "none"
        short = len(value) <= 2 and all(isinstance(part, int | float) for part in value)
        return f"[{', '.join(cell(part) for part in value)}]" if short else None
    return cell(value)


def _print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    show: Callable[[Any], str],
    title: str | None = None,
) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in render(columns, rows, show=show, title=title, width=width):
        print(line)
