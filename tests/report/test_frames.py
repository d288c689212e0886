from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.report.frames import as_frames, encode_png, is_image, make_sheet


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_another_reader_sees_the_same_pixels(tmp_path: Path, channels: int) -> None:
    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    (tmp_path / "x.png").write_bytes(encode_png(image))
    seen = np.asarray(Image.open(tmp_path / "x.png")).reshape(5, 7, -1)
    np.testing.assert_array_equal(seen, image)


def test_a_sheet_has_the_frames_in_rows_with_gaps() -> None:
    frames = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 3, 1), dtype=np.uint8)
    sheet = make_sheet(frames, across=3)
    assert sheet.shape == (4 + 2 + 4, 3 * 3 + 2 * 2, 1)
    for number, (y, x) in enumerate([(0, 0), (0, 5), (0, 10), (6, 0), (6, 5)]):
        assert (sheet[y : y + 4, x : x + 3] == number).all()
    assert (sheet[4:6] == 128).all()
    assert (sheet[6:, 10:] == 128).all()


def test_sheet_of_many_frames_has_the_first_and_the_last() -> None:
    frames = np.arange(100, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 1, 1), dtype=np.uint8)
    sheet = make_sheet(frames, most=4, across=8)
    assert sheet[0, ::3, 0].tolist() == [0, 33, 66, 99]


@pytest.mark.parametrize(
    ("shape", "shown"),
    [((64, 64, 3), (64, 64, 3)), ((84, 84, 4), (84, 84, 1)), ((3, 64, 64), (64, 64, 3)), ((20, 20), (20, 20, 1))],
)
def test_frames_of_all_layouts_of_pictures(shape: tuple[int, ...], shown: tuple[int, ...]) -> None:
    assert is_image("uint8", shape)
    values = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    frames = as_frames(values)
    assert frames.shape == (2, *shown)
    if shape == (84, 84, 4):
        np.testing.assert_array_equal(frames[..., 0], values[..., 3])
    if shape == (3, 64, 64):
        np.testing.assert_array_equal(frames[0, :, :, 1], values[0, 1])
    assert encode_png(make_sheet(frames)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (64, 64, 3)), ("uint8", (9, 9, 9, 9)), ("uint8", (4, 4)), ("uint8", (64,))]
)
def test_other_arrays_are_not_pictures(dtype: str, shape: tuple[int, ...]) -> None:
    assert not is_image(dtype, shape)
