"""Videos are read back by their formats' own libraries."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest

from pipelines.errors import InputMissing
from pipelines.formats import video_writer
from pipelines.formats.video_writer import choose_suffix, write_video


def frames(count: int = 12, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """A bright square that moves over a dark ground."""
    shown = []
    for number in range(count):
        frame = np.full((height, width, 3), (20, 40, 60), dtype=np.uint8)
        frame[8:24, 4 * number : 4 * number + 16] = (240, 200, 40)
        shown.append(frame)
    return shown


@pytest.mark.parametrize("size", [(48, 64), (47, 63)])
def test_an_mp4_has_every_frame_in_order(tmp_path: Path, size: tuple[int, int]) -> None:
    av = pytest.importorskip("av", reason='PyAV is not installed: pip install "amago[video]"')
    written = frames(12, *size)
    path = write_video(tmp_path / "a.mp4", iter(written), fps=6)
    with av.open(io.BytesIO(path.read_bytes())) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert float(stream.average_rate) == 6
        read = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(read) == 12
    for one, other in zip(written, read, strict=True):
        assert other.shape == (size[0] + size[0] % 2, size[1] + size[1] % 2, 3)
        error = np.abs(one.astype(int) - other[: size[0], : size[1]])
        assert error.mean() < 6
        assert error[10:22].mean() < 12  # where the square is: frames are not in another order


@pytest.mark.parametrize("count", [1, 12])
def test_a_gif_has_every_frame_and_its_time(tmp_path: Path, count: int) -> None:
    pillow = pytest.importorskip("PIL.Image", reason='pillow is not installed: pip install "amago[video]"')
    written = frames(count)
    with pillow.open(write_video(tmp_path / "a.gif", iter(written), fps=5)) as picture:
        assert getattr(picture, "n_frames", 1) == count
        for number, frame in enumerate(written):
            picture.seek(number)
            assert np.abs(np.asarray(picture.convert("RGB")).astype(int) - frame).max() < 24
            assert count == 1 or picture.info["duration"] == 200


def test_frames_that_are_alike_stay_apart_in_a_gif(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason='pillow is not installed: pip install "amago[video]"')
    with pillow.open(write_video(tmp_path / "a.gif", [frames(1)[0]] * 5, fps=5)) as picture:
        durations = []
        for number in range(picture.n_frames):
            picture.seek(number)
            durations.append(picture.info["duration"])
    assert sum(durations) == 1000


def test_the_format_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = {"av", "PIL"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert video_writer.choose_suffix() == ".mp4"
    installed.remove("av")
    assert choose_suffix() == ".gif"
    installed.clear()
    with pytest.raises(InputMissing, match="neither of which is installed") as error:
        choose_suffix()
    assert error.value.hint == 'pip install "amago[video]"'
