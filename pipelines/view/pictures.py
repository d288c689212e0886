"""Pictures of steps as PNG files: images as they were seen, small arrays as grids of coloured cells."""

from __future__ import annotations

import numpy as np

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.schema import Column
from pipelines.report.frames import as_frames, contact_sheet, png
from pipelines.view.columns import PICTURES, describe
from pipelines.view.steps import StepReader, StoredTrajectory

MOST_SIDE = 1024
MOST_FRAMES = 64
_MOST_BYTES = 64 << 20
# Cells 0 to 15 of a grid: Okabe and Ito's colours, told apart by all, then lighter ones.
_PALETTE = np.array(
    [
        *((245, 245, 245), (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0), (86, 180, 233)),
        *((204, 121, 167), (240, 228, 66), (60, 60, 60), (140, 140, 140), (153, 203, 225), (246, 214, 150)),
        *((150, 215, 195), (240, 180, 150), (200, 225, 245), (235, 200, 220)),
    ],
    dtype=np.uint8,
)


def frame(reader: StepReader, found: StoredTrajectory, name: str, step: int, side: int = MOST_SIDE) -> bytes:
    """Return the observation `name` at a step, reduced to at most `side` pixels a side."""
    step = min(max(step, 0), found.length)
    return png(_drawn(reader, found, _column(found, name), [step], side)[0])


def strip(
    reader: StepReader, found: StoredTrajectory, name: str, start: int, stop: int, count: int, side: int
) -> bytes:
    """Return up to `count` evenly spaced frames of the steps [start, stop) side by side."""
    column = _column(found, name)
    start = min(max(start, 0), found.length)
    stop = min(max(stop, start + 1), found.length + 1)
    count = max(1, min(count, MOST_FRAMES, stop - start, _MOST_BYTES // max(column.step_bytes, 1)))
    steps = np.linspace(start, stop - 1, count).round().astype(int).tolist()
    return png(contact_sheet(_drawn(reader, found, column, steps, side), most=count, across=count))


def _column(found: StoredTrajectory, name: str) -> Column:
    kinds = {column["name"]: column["kind"] for column in describe(found.schema)}
    if kinds.get(name) not in PICTURES:
        raise InputMissing(f"no pictures in column '{name}'")
    return found.schema.column(name)


def _drawn(reader: StepReader, found: StoredTrajectory, column: Column, steps: list[int], side: int) -> np.ndarray:
    """Return (n, H, W, C)."""
    if not 1 <= side <= MOST_SIDE:
        raise UsageError(f"a picture has from 1 to {MOST_SIDE} pixels a side")
    is_image = next(c["kind"] for c in describe(found.schema) if c["name"] == column.name) == "image"
    drawn = []
    for step in steps:
        values = reader.rows(found.uid, column.name, step, step + 1)
        pixels = as_frames(values)[0] if is_image else _cells(values[0])
        every = -(-max(pixels.shape[:2]) // side)
        drawn.append(np.ascontiguousarray(pixels[::every, ::every]))
    return np.stack(drawn)


def _cells(values: np.ndarray) -> np.ndarray:
    """Return (H, W, 3): whole numbers in colours, others from dark to light. Of several channels the first."""
    plane = values[..., 0] if values.ndim == 3 else values
    numbers = np.nan_to_num(plane.astype(np.float64))
    if plane.dtype.kind in "biu":
        return _PALETTE[numbers.astype(int) % len(_PALETTE)]
    low, span = numbers.min(), np.ptp(numbers)
    shade = np.zeros_like(numbers) if span == 0 else (numbers - low) / span
    return np.repeat((40 + 210 * shade).astype(np.uint8)[..., None], 3, axis=-1)
