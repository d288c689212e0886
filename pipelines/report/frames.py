"""Frames of image observations as PNG files, written by hand: no library is needed for so little."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from pipelines.files.atomic import write_atomically

_GAP = 2  # pixels between frames
_SHADE = 128  # of the gaps
_CHANNELS = {1: 0, 3: 2, 4: 6}  # colour type of PNG by the number of channels


def is_image(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a step of such values is a picture: bytes of (H, W), (H, W, C) or (C, H, W), 8 pixels a side or more."""
    sides = [side for side in shape if side >= 8]
    return dtype == "uint8" and len(shape) in (2, 3) and len(sides) >= 2


def as_frames(values: np.ndarray) -> np.ndarray:
    """(T, H, W, 1 or 3) from steps of pictures. Of other numbers of channels (a stack of frames) the last is shown."""
    if values.ndim == 3:
        return values[..., None]
    if values.shape[-1] >= 8 and values.shape[1] < 8:
        values = np.moveaxis(values, 1, -1)
    return values if values.shape[-1] in (1, 3) else values[..., -1:]


def contact_sheet(frames: np.ndarray, *, most: int = 64, across: int = 16) -> np.ndarray:
    """(H', W', C): up to `most` of the `frames` (T, H, W, C), evenly spaced, the first and the last among them,
    `across` in a row.
    """
    shown = np.unique(np.linspace(0, len(frames) - 1, min(most, len(frames))).round().astype(int))
    _, height, width, channels = frames.shape
    columns = min(across, len(shown))
    rows = -(-len(shown) // columns)
    sheet = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), _SHADE, dtype=np.uint8)
    for place, number in enumerate(shown):
        y, x = (place // columns) * (height + _GAP), (place % columns) * (width + _GAP)
        sheet[y : y + height, x : x + width] = frames[number]
    return sheet


def png(image: np.ndarray) -> bytes:
    """A PNG file of `image` (H, W, C) uint8 with 1, 3 or 4 channels."""
    height, width, channels = image.shape
    lines = np.zeros((height, 1 + width * channels), dtype=np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_sheet(path: Path, values: np.ndarray) -> Path:
    """A contact sheet of the steps of an image column, at `path`. StageFailed when the disk refuses."""
    write_atomically(path, png(contact_sheet(as_frames(values))))
    return path
