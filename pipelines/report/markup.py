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
    """Return an element; strings that are not `Markup` are escaped, None is left out.

    Attributes that are None or False are left out, True stands for its name; `_` becomes `-`, a final one is dropped.

    >>> element("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    opening = f"<{name}{''.join(_attribute(*item) for item in attributes.items())}>"
    return Markup(opening if name in _VOID else f"{opening}{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Return children one after the other."""
    return Markup("".join(_child(child) for child in children))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str, numbers: bool = True) -> Markup:
    """Return a table that scrolls sideways where it is wider than the page; numbers are aligned right."""
    head = element("tr", (element("th", name, scope="col") for name in columns))
    body = (element("tr", (_cell(cell, numbers) for cell in row)) for row in rows)
    inner = element("table", element("caption", caption), element("thead", head), element("tbody", body))
    return element("div", inner, class_="scroll", tabindex=0, role="group", aria_label=caption)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Return a list of names and values; pairs without a value are left out."""
    shown = (
        element("div", element("dt", name), element("dd", value)) for name, value in pairs if value not in (None, "")
    )
    return element("dl", shown, class_="facts")


def folded(title: str, *children: Child, open: bool = False) -> Markup:
    """Return contents that open on a click."""
    return element("details", element("summary", title), *children, open=open)


def script_data(value: Any) -> Markup:
    """Encode `value` as JSON for a <script> element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_UNSAFE))


@cache
def asset(name: str) -> str:
    """Return the text of a file of `report/assets`."""
    return (resources.files("pipelines.report") / "assets" / name).read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """Return the source of a Content-Security-Policy that admits this script or style alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(_printable(child))
    return "".join(_child(each) for each in child)


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(_printable(str(value)))}"'


def _cell(cell: Any, numbers: bool) -> Markup:
    if isinstance(cell, Markup):
        return element("td", cell)
    is_number = numbers and isinstance(cell, int | float) and not isinstance(cell, bool)
    return element("td", shown(cell), class_="number" if is_number else None)


def shown(value: Any) -> str:
    """Format a value for a table: numbers short, None as a dash.

    >>> shown(0.123456), shown(1234567), shown(None), shown(float("nan"))
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


def _printable(text: str) -> str:
    """Replace control characters, which HTML does not allow, and lone surrogates, which no encoding has."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
