"""Quantities as people write them: 7d, 12h, 500MB, 2GiB, 1e6, 100k."""

from __future__ import annotations

import re

import typer

_LARGEST = 2**63 - 1
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_MULTIPLES = {"": 1} | {letter: 1000**power for power, letter in enumerate("kmg", 1)}
_NUMBER = re.compile(r"(-?[\d_]+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([a-zA-Z]?)")
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_seconds(text: str) -> float:
    """Parse `90`, `90s`, `15m`, `12h`, `7d`, `2w` as seconds."""
    return _parsed(text, _SECONDS | {"": 1}, "an age such as 90s, 12h or 7d")


def parse_size(text: str) -> int:
    """Parse `1000`, `500MB`, `2GiB` as bytes."""
    return round(_parsed(text, _BYTES, "a size such as 500MB or 2GiB"))


def parse_count(text: str) -> int:
    """Parse `20000`, `20_000`, `1e6`, `100k`, `1.5M` as a whole number."""
    from decimal import Decimal, InvalidOperation  # takes as long to import as half of typer

    found = _NUMBER.fullmatch(text.strip())
    try:
        number = Decimal(found[1]) * _MULTIPLES[found[2].lower()] if found else None
    except (InvalidOperation, KeyError):
        number = None
    if number is None or number != number.to_integral_value():
        raise typer.BadParameter(f"'{text}' is not a whole number such as 20000, 1e6 or 100k")
    if abs(number) > _LARGEST:
        raise typer.BadParameter(f"'{text}' is more than 2^63 - 1, the largest number that is taken")
    return int(number)


def parse_positive(text: str) -> int:
    """Parse a `parse_count` of at least 1."""
    if (number := parse_count(text)) < 1:
        raise typer.BadParameter(f"'{text}' is not at least 1")
    return number


def _parsed(text: str, units: dict[str, int], expected: str) -> float:
    found = _FORM.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        raise typer.BadParameter(f"'{text}' is not {expected}")
    return float(found[1]) * units[found[2].lower()]
