"""Frames of image observations as PNG files.

The encoder is written by hand: uncompressed scan lines, zlib and three chunks do not justify a dependency.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_GAP = 2  # pixels between frames
_SHADE = 128  # of the gaps
_CHANNELS = {1: 0, 3: 2, 4: 6}  # colour type of PNG by the number of channels


def is_image(dtype: str, shape: tuple[int, ...]) -> bool:
    """Decide whether one step is a picture: bytes (H, W), (H, W, C) or (C, H, W) of at least 8 pixels a side."""
    sides = [side for side in shape if side >= 8]
    return dtype == "uint8" and len(shape) in (2, 3) and len(sides) >= 2


def as_frames(values: np.ndarray) -> np.ndarray:
    """Convert steps of pictures to (T, H, W, 1 or 3). Of a stack of frames, keep the last one."""
    if values.ndim == 3:
        return values[..., None]
    if values.shape[-1] >= 8 and values.shape[1] < 8:
        values = np.moveaxis(values, 1, -1)
    return values if values.shape[-1] in (1, 3) else values[..., -1:]


def make_sheet(frames: np.ndarray, *, most: int = 64, across: int = 16) -> np.ndarray:
    """Lay out up to `most` of the `frames` (T, H, W, C), `across` in a row, as one picture (H', W', C).

    The frames are evenly spaced and include the first and the last.
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


def encode_png(image: np.ndarray) -> bytes:
    """Encode `image` (H, W, C), uint8 with 1, 3 or 4 channels, as a PNG file."""
    height, width, channels = image.shape
    lines = np.zeros((height, 1 + width * channels), dtype=np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content
