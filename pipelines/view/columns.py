"""How a page shows a column of the steps: as an image, a grid, a text, or numbers."""

from __future__ import annotations

import math
from typing import Any

from pipelines.lake.schema import Schema
from pipelines.lake.spaces import LENGTH, Discrete, Ragged
from pipelines.report.frames import is_image

_LEAST_SIDE, _MOST_CELLS = 3, 4096  # of a drawn grid
PICTURES = ("image", "grid")


def describe(schema: Schema) -> list[dict[str, Any]]:
    """Describe the columns that can be shown: `name`, `role`, `dtype`, `shape`, `kind`, `size`, `choices`, `wide`.

    Kinds: `image` and `grid` are drawn; `text`; `discrete`, one of `choices` values; `scalar`; `vector`. The length of
    a text has no entry, since the text shows it.
    """
    texts = {name for name, space in schema.spaces.observation.items() if isinstance(space, Ragged) and space.text}
    lengths = {f"{name}.{LENGTH}" for name in texts}
    found = []
    for column in schema.columns:
        if column.name in lengths:
            continue
        space = (
            schema.spaces.action if column.role in ("action", "label") else schema.spaces.observation.get(column.name)
        )
        choices = space.n if isinstance(space, Discrete) else None
        shape, size = column.shape, math.prod(column.shape)
        is_plane = len(shape) in (2, 3) and min(shape[:2]) >= _LEAST_SIDE and shape[0] * shape[1] <= _MOST_CELLS
        if column.name in texts:
            kind = "text"
        elif is_image(column.dtype, shape):
            kind = "image"
        elif is_plane and not column.ragged:
            kind = "grid"
        elif choices is not None:
            kind = "discrete"
        else:
            kind = "scalar" if size == 1 else "vector"
        about = {"name": column.name, "role": column.role, "dtype": column.dtype, "shape": list(shape), "size": size}
        found.append({**about, "kind": kind, "choices": choices, "wide": column.is_blob})
    return found
