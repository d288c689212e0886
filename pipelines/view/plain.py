"""Values as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LETTERS = 20_000
_MOST_PARTS = 1000
_DEEPEST = 6


def plain(value: Any, depth: int = 0) -> Any:
    """Convert `value` to JSON types: NaN and infinities become None, unknown types their string.

    Texts, lists and nesting are cut: a value of a query can be of any size.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)  # JavaScript's numbers are float64
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _LETTERS else f"{value[:_LETTERS]}..."
    if depth == _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {str(key)[:_LETTERS]: plain(part, depth + 1) for key, part in list(value.items())[:_MOST_PARTS]}
    if isinstance(value, list | tuple):
        return [plain(part, depth + 1) for part in value[:_MOST_PARTS]]
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text[:_LETTERS]
