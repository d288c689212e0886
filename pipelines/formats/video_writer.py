"""Videos of frames: MP4 (H.264) by PyAV, or a GIF by Pillow where PyAV is not installed."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.files.atomic import write_atomically

_QUALITY = {"crf": "18", "preset": "medium"}
_GIF_COLORS = 64


def choose_suffix() -> str:
    """Return the ending of the videos that can be written here: ".mp4" or ".gif". InputMissing if there is no encoder.

    >>> choose_suffix() in (".mp4", ".gif")
    True
    """
    for module, ending in (("av", ".mp4"), ("PIL", ".gif")):
        if importlib.util.find_spec(module) is not None:
            return ending
    raise InputMissing(
        "videos need av (for MP4) or pillow (for GIF), neither of which is installed", hint='pip install "amago[video]"'
    )


def write_video(path: Path, frames: Iterable[np.ndarray], fps: int) -> Path:
    """Write `frames`, (H, W, 3) uint8 all of the size of the first, to `path`, whose ending says in which format."""
    write = _gif if path.suffix == ".gif" else _mp4
    write_atomically(path, write(iter(frames), fps))
    return path


def as_gif(path: Path) -> bytes:
    """Return an MP4 file that was written here as a GIF of the same speed."""
    import av

    with av.open(str(path), "r", format="mp4") as container:
        stream = container.streams.video[0]
        fps = round(stream.average_rate or 1)
        return _gif((frame.to_ndarray(format="rgb24") for frame in container.decode(stream)), fps)


def _mp4(frames: Iterator[np.ndarray], fps: int) -> bytes:
    import av

    file, stream = io.BytesIO(), None
    with av.open(file, "w", format="mp4") as container:
        for frame in frames:
            even = np.pad(frame, [(0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)], mode="edge")
            if stream is None:
                stream = container.add_stream("libx264", rate=fps, options=_QUALITY)
                stream.height, stream.width = even.shape[:2]
                stream.pix_fmt = "yuv420p"  # all that browsers play
            for packet in stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode() if stream is not None else ():
            container.mux(packet)
    return file.getvalue()


def _gif(frames: Iterator[np.ndarray], fps: int) -> bytes:
    from PIL import Image

    def reduced(frame: np.ndarray) -> Any:
        return Image.fromarray(frame).quantize(_GIF_COLORS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)

    file = io.BytesIO()
    first = reduced(next(frames))
    milliseconds = max(round(1000 / fps / 10) * 10, 20)  # GIF counts hundredths
    # Frames are stored whole (disposal 1, no merging of equal ones): as many come out as went in.
    first.save(
        file, format="GIF", save_all=True, append_images=map(reduced, frames), duration=milliseconds, loop=0, disposal=1
    )
    return file.getvalue()
