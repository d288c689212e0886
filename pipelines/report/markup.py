"""HTML that is safe by construction: text is escaped when it becomes part of an element."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

_VOID = frozenset({"img", "meta", "input"})
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Markup | None | Iterable["Child"]


def element(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """Build an element. Children that are plain strings are escaped; None is left out.

    Attributes that are None or False are left out, and True stands for the name alone. In names of attributes `_`
    becomes `-`, and a final one, as in `class_`, is dropped.

    >>> element("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    opening = f"<{name}"
    for key, value in attributes.items():
        if value is not None and value is not False:
            opening += f" {key.rstrip('_').replace('_', '-')}"
            opening += "" if value is True else f'="{_escape(str(value))}"'
    return Markup(f"{opening}>" if name in _VOID else f"{opening}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Concatenate children, nested ones in order; plain strings are escaped, None is left out."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(child if isinstance(child, Markup) else _escape(child))
        elif child is not None:
            parts.append(join(*child))
    return Markup("".join(parts))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str, numbers: bool = True) -> Markup:
    """Build a table that scrolls sideways where it is wider than the page. `numbers`: whether to align them right."""

    def cell(value: Any) -> Markup:
        if isinstance(value, Markup):
            return element("td", value)
        is_number = numbers and isinstance(value, int | float) and not isinstance(value, bool)
        return element("td", format_value(value), class_="number" if is_number else None)

    head = element("tr", (element("th", name, scope="col") for name in columns))
    body = (element("tr", map(cell, row)) for row in rows)
    inner = element("table", element("caption", caption), element("thead", head), element("tbody", body))
    return element("div", inner, class_="scroll", tabindex=0, role="group", aria_label=caption)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Build a list of names and values, without the pairs that have no value."""
    shown = (
        element("div", element("dt", name), element("dd", value)) for name, value in pairs if value not in (None, "")
    )
    return element("dl", shown, class_="facts")


def fold(title: str, *children: Child, open: bool = False) -> Markup:
    """Hide contents behind a title that opens them on a click."""
    return element("details", element("summary", title), *children, open=open)


def encode_json(value: Any) -> Markup:
    """Encode `value` as JSON for a <script> element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_UNSAFE))


@cache
def read_asset(name: str) -> str:
    """Read a text file of `report/assets`."""
    return (resources.files("pipelines.report") / "assets" / name).read_text(encoding="utf-8")


def hash_source(text: str) -> str:
    """Write the source expression by which a Content-Security-Policy admits this script or style alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def format_value(value: Any) -> str:
    """Format a value for a table: numbers rounded, None as a dash.

    >>> format_value(0.123456), format_value(1234567), format_value(None), format_value(float("nan"))
    ('0.1235', '1,234,567', '\N{EN DASH}', '\N{EN DASH}')
    """
    if value is None or value != value:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 and value == int(value) else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _escape(text: str) -> str:
    """Escape text, and replace what HTML and UTF-8 do not allow: control characters and lone surrogates."""
    return html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text))
