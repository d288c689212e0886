"""Reading JSON that may be missing, cut short or not ours, where that is no reason to stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is none that can be read."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in the lines of `path`; lines that hold none are passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        found = parse_object(line)
        if found is not None:
            yield found


def parse_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is, None if it is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
