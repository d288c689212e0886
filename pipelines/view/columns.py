"""What a column of the steps is shown as."""

from __future__ import annotations

import math
from typing import Any

from pipelines.lake.schema import Column, Schema
from pipelines.lake.spaces import LENGTH, Discrete, Ragged
from pipelines.report.frames import is_image

_LEAST_SIDE, _MOST_CELLS = 3, 4096  # of a drawn grid
PICTURES = ("image", "grid")


def describe(schema: Schema) -> list[dict[str, Any]]:
    """Return `name`, `role`, `dtype`, `shape`, `kind`, `size` and `choices` of the columns that can be shown.

    Kinds: `image` and `grid` are drawn; `text`; `discrete`, one of `choices` values; `scalar`; `vector`. The length of
    a text is shown by the text itself.
    """
    texts = {name for name, space in schema.spaces.observation.items() if isinstance(space, Ragged) and space.text}
    lengths = {f"{name}.{LENGTH}" for name in texts}
    return [_described(column, schema, texts) for column in schema.columns if column.name not in lengths]


def _described(column: Column, schema: Schema, texts: set[str]) -> dict[str, Any]:
    space = schema.spaces.action if column.role == "action" else schema.spaces.observation.get(column.name)
    choices = space.n if isinstance(space, Discrete) else None
    return {
        "name": column.name,
        "role": column.role,
        "dtype": column.dtype,
        "shape": list(column.shape),
        "size": math.prod(column.shape),
        "kind": "text" if column.name in texts else _kind(column, choices),
        "choices": choices,
        "wide": column.is_blob,
    }


def _kind(column: Column, choices: int | None) -> str:
    shape = column.shape
    if is_image(column.dtype, shape):
        return "image"
    if (
        len(shape) in (2, 3)
        and min(shape[:2]) >= _LEAST_SIDE
        and shape[0] * shape[1] <= _MOST_CELLS
        and not column.ragged
    ):
        return "grid"
    if choices is not None:
        return "discrete"
    return "scalar" if math.prod(shape) == 1 else "vector"
