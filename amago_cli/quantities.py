"""Amounts as people write them: 7d, 12h, 500MB, 2GiB."""

from __future__ import annotations

import re

import typer

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def seconds(text: str) -> float:
    """`90`, `90s`, `15m`, `12h`, `7d`, `2w` as seconds."""
    return _parsed(text, _SECONDS | {"": 1}, "an age such as 90s, 12h or 7d")


def size(text: str) -> int:
    """`1000`, `500MB`, `2GiB` as bytes."""
    return round(_parsed(text, _BYTES, "a size such as 500MB or 2GiB"))


def _parsed(text: str, units: dict[str, int], expected: str) -> float:
    found = _FORM.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        raise typer.BadParameter(f"'{text}' is not {expected}")
    return float(found[1]) * units[found[2].lower()]
