"""Tables as lines of text, fast enough for queries of any size.

In a pipe, cells are never folded. On a terminal, text columns are folded to fit, the widest first; if they would become
too narrow to read, each row is shown as a block with one line per non-empty cell.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from amago_cli.render import escaping

_GAP = "  "
_LEAST = 14
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def render(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    show: Callable[[Any], str],
    title: str | None = None,
    width: int | None = None,
) -> Iterator[str]:
    """Yield the lines of a table; `show` formats a cell, `width` is that of the terminal (None: not a terminal)."""
    numeric = [
        bool(rows) and all(isinstance(row[place], int | float | None) for row in rows) for place in range(len(columns))
    ]
    columns = [escaping.line(name) for name in columns]
    texts = [[escaping.line(show(value)) for value in row] for row in rows]
    cells_of = zip(*texts, strict=True) if texts else [()] * len(columns)
    widths = [max(map(len, [name, *column])) for name, column in zip(columns, cells_of, strict=True)]
    bold, plain = _marks() if width is not None else ("", "")
    if title:
        yield f"{bold}{escaping.line(title)}{plain}"
    folded = _fold(columns, widths, numeric, width)
    if width is not None and folded is None:
        yield from _blocks(columns, texts, width)
        return
    yield bold + _line(columns, widths, numeric) + plain
    yield "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    for row in texts:
        if not folded or all(len(row[place]) <= widths[place] for place in folded):
            yield _line(row, widths, numeric)
            continue
        parts = [textwrap.wrap(text, widths[place]) if place in folded else [text] for place, text in enumerate(row)]
        for cells in zip_longest(*parts, fillvalue=""):
            yield _line(cells, widths, numeric)


def _blocks(columns: Sequence[str], texts: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield each row as its first cell and, below it, the others with their column names."""
    names = max(map(len, columns[1:]), default=0)
    indent = " " * (len(_GAP) + names + len(_GAP))
    bold, plain = _marks()
    for row in texts:
        yield f"{bold}{row[0]}{plain}"
        for name, text in zip(columns[1:], row[1:], strict=True):
            first = f"{_GAP}{name:<{names}}{_GAP}"
            if text:
                yield from textwrap.wrap(
                    text, max(width, len(indent) + _LEAST), initial_indent=first, subsequent_indent=indent
                )


def _marks() -> tuple[str, str]:
    """Return the escapes that start and end bold text; empty where the user wants none (no-color.org) or the terminal
    supports none."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return "", ""
    return _BOLD, _PLAIN


def cell(value: Any) -> str:
    """Format a value for people: numbers grouped and rounded."""
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
    """Format a value exactly: an id must not be grouped, the result of a query must not be rounded."""
    return "-" if value is None else str(value)


def plain(value: Any) -> Any:
    """Convert `value` to JSON types: numpy to Python, NaN and infinities to None, bytes to hexadecimal digits, unknown
    types to their string."""
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
    return value.hex() if isinstance(value, bytes) else str(value)


def _fold(
    columns: Sequence[str], widths: list[int], numeric: Sequence[bool], width: int | None
) -> frozenset[int] | None:
    """Narrow the widest text columns in place until the table fits, the first column only if the others are not enough.

    Return the narrowed columns; None if the table cannot be made to fit.
    """
    wordy = [place for place in range(len(widths)) if not numeric[place]]
    room = (width or 0) - len(_GAP) * (len(widths) - 1)
    if width is None or sum(widths) <= room or not wordy:
        return frozenset()
    for choice in (wordy[1:], wordy):
        rest = room - sum(size for place, size in enumerate(widths) if place not in choice)
        for level in range(rest, _LEAST - 1, -1):
            narrowed = {place: min(widths[place], max(level, len(columns[place]))) for place in choice}
            if sum(narrowed.values()) <= rest:
                folded = frozenset(place for place in choice if narrowed[place] < widths[place])
                for place in folded:
                    widths[place] = narrowed[place]
                return folded
    return None


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = (
        text.rjust(width) if right else text.ljust(width)
        for text, width, right in zip(cells, widths, numeric, strict=True)
    )
    return _GAP.join(padded).rstrip()
