"""Reading JSON that may be missing, truncated or foreign, where that must not stop the caller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.files.malformed import read_limited


class Form(BaseModel):
    """Fields whose types are relied on; a record may have others, and lack those with a default."""

    model_config = ConfigDict(extra="allow", strict=True)


def read_object(path: Path, form: type[Form] | None = None) -> dict[str, Any] | None:
    """Read the JSON object in `path`; None if there is none that can be read, or that has fields of other types than
    `form`.
    """
    try:
        return parse_object(read_limited(path), form)
    except OSError:
        return None


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of `path`; lines that hold none are passed over."""
    try:
        lines = read_limited(path).splitlines()
    except OSError:
        return
    for line in lines:
        found = parse_object(line)
        if found is not None:
            yield found


def parse_object(text: bytes, form: type[Form] | None = None) -> dict[str, Any] | None:
    """Parse the JSON object that `text` is; None if it is none, or has fields of other types than `form`."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            return None
        if form is not None:
            form.model_validate(data)
    except (ValueError, RecursionError):
        return None
    return data


def fits(data: Any, form: type[Form]) -> bool:
    """Check whether the fields of `data` are of the types of `form`."""
    try:
        form.model_validate(data)
    except ValidationError:
        return False
    return True
