"""Pictures of steps as PNG files: images as they were seen, small arrays as grids of coloured cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipelines.errors import InputMissing, UsageError
from pipelines.report.frames import as_frames, encode_png, make_sheet
from pipelines.view.columns import PICTURES, describe
from pipelines.view.steps import StepReader, StoredTrajectory

_MOST_SIDE = 1024
_MOST_FRAMES = 64
_MOST_BYTES = 64 << 20
# Cells 0 to 15 of a grid: Okabe and Ito's colours, distinct for all kinds of colour vision, then lighter ones.
_PALETTE = np.array(
    [
        *((245, 245, 245), (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0), (86, 180, 233)),
        *((204, 121, 167), (240, 228, 66), (60, 60, 60), (140, 140, 140), (153, 203, 225), (246, 214, 150)),
        *((150, 215, 195), (240, 180, 150), (200, 225, 245), (235, 200, 220)),
    ],
    dtype=np.uint8,
)


@dataclass(frozen=True)
class Pictures:
    """Pictures of the steps of a trajectory of `length` actions; `draw` returns one, (H, W, C), of `frame_bytes`."""

    length: int
    frame_bytes: int
    draw: Callable[[int], np.ndarray]

    def frame(self, step: int, side: int = _MOST_SIDE) -> bytes:
        """Draw a step as PNG, reduced to at most `side` pixels a side."""
        return encode_png(_reduce(self.draw(min(max(step, 0), self.length)), side))

    def strip(self, start: int, stop: int, count: int, side: int) -> bytes:
        """Draw up to `count` evenly spaced steps of [start, stop) side by side, as PNG."""
        start = min(max(start, 0), self.length)
        stop = min(max(stop, start + 1), self.length + 1)
        count = max(1, min(count, _MOST_FRAMES, stop - start, _MOST_BYTES // max(self.frame_bytes, 1)))
        steps = np.linspace(start, stop - 1, count).round().astype(int).tolist()
        return encode_png(
            make_sheet(np.stack([_reduce(self.draw(step), side) for step in steps]), most=count, across=count)
        )


def find_pictures(reader: StepReader, found: StoredTrajectory, name: str) -> Pictures:
    """Find the pictures of an observation. InputMissing if it has none."""
    kind = next((column["kind"] for column in describe(found.schema) if column["name"] == name), None)
    if kind not in PICTURES:
        raise InputMissing(f"no pictures in column '{name}'")

    def draw(step: int) -> np.ndarray:
        values = reader.rows(found.uid, name, step, step + 1)
        return as_frames(values)[0] if kind == "image" else _draw_cells(values[0])

    return Pictures(found.length, found.schema.column(name).step_bytes, draw)


def _reduce(pixels: np.ndarray, side: int) -> np.ndarray:
    if not 1 <= side <= _MOST_SIDE:
        raise UsageError(f"a picture has from 1 to {_MOST_SIDE} pixels a side")
    height, width, channels = pixels.shape
    every = -(-max(height, width) // side)
    if every == 1:
        return pixels
    whole = np.pad(pixels, ((0, -height % every), (0, -width % every), (0, 0)), mode="edge")
    blocks = whole.reshape(len(whole) // every, every, -1, every, channels)
    return blocks.mean(axis=(1, 3), dtype=np.float32).round().astype(np.uint8)


def _draw_cells(values: np.ndarray) -> np.ndarray:
    """Draw an array as (H, W, 3): whole numbers in colours, others from dark to light. Of channels, the first."""
    plane = values[..., 0] if values.ndim == 3 else values
    numbers = np.nan_to_num(plane.astype(np.float64))
    if plane.dtype.kind in "biu":
        return _PALETTE[numbers.astype(int) % len(_PALETTE)]
    low, span = numbers.min(), np.ptp(numbers)
    shade = np.zeros_like(numbers) if span == 0 else (numbers - low) / span
    return np.repeat((40 + 210 * shade).astype(np.uint8)[..., None], 3, axis=-1)
