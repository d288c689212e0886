"""Tables as lines of text, fast enough for a query of any size.

A pipe gets whole cells however wide; on a terminal the widest column of text is folded to fit.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_GAP = "  "
_LEAST = 16
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def render(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    show: Callable[[Any], str],
    title: str | None = None,
    width: int | None = None,
) -> Iterator[str]:
    """The lines of a table; `show` words a cell, `width` is the terminal's (None: not a terminal)."""
    numeric = [
        bool(rows) and all(isinstance(row[place], int | float | None) for row in rows) for place in range(len(columns))
    ]
    texts = [[show(value).replace("\n", " ") for value in row] for row in rows]
    widths = [max(map(len, [name, *column])) for name, column in zip(columns, _turned(texts, columns), strict=True)]
    bold, plain = (_BOLD, _PLAIN) if width is not None else ("", "")
    folded = _fold(widths, numeric, width)
    if title:
        yield f"{bold}{title}{plain}"
    yield bold + _line(columns, widths, numeric) + plain
    yield "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    for row in texts:
        if folded is None or len(row[folded]) <= widths[folded]:
            yield _line(row, widths, numeric)
            continue
        for number, part in enumerate(textwrap.wrap(row[folded], widths[folded])):
            cells = [part if place == folded else "" if number else text for place, text in enumerate(row)]
            yield _line(cells, widths, numeric)


def cell(value: Any) -> str:
    """A value for a reader: numbers grouped and rounded."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.4g}"
    return str(value)


def raw(value: Any) -> str:
    """A value as it is: an id must not be grouped, a query's figure not be rounded."""
    return "-" if value is None else str(value)


def plain(value: Any) -> Any:
    """`value` in JSON's terms: numpy becomes Python, NaN and infinities None, the unknown its text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    return str(value)


def _turned(texts: Sequence[Sequence[str]], columns: Sequence[str]) -> list[Sequence[str]]:
    return list(zip(*texts, strict=True)) if texts else [() for _ in columns]


def _fold(widths: list[int], numeric: Sequence[bool], width: int | None) -> int | None:
    """Narrow the widest column of text in place until the table fits; its number, or None when it fits already."""
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width if width is not None else 0
    wordy = [place for place in range(len(widths)) if not numeric[place]]
    if excess <= 0 or not wordy:
        return None
    widest = max(wordy, key=lambda place: widths[place])
    widths[widest] = max(_LEAST, widths[widest] - excess)
    return widest


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = (
        text.rjust(width) if right else text.ljust(width)
        for text, width, right in zip(cells, widths, numeric, strict=True)
    )
    return _GAP.join(padded).rstrip()
