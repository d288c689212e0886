"""Pictures, read by Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest

from pipelines.errors import InputMissing, UsageError
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.store import Lake
from pipelines.view import pictures
from pipelines.view.steps import StepReader
from tests.view.lakes import episode, put

Image = pytest.importorskip("PIL.Image")


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


def test_an_image_is_drawn_pixel_by_pixel(lake: Lake) -> None:
    values = episode(5)
    reader, uid = StepReader(lake), put(lake, values)
    drawn = pixels(pictures.find_pictures(reader, reader.find(uid), "obs.image").frame(3))
    np.testing.assert_array_equal(drawn, values["obs.image"][3])


def test_a_step_beyond_the_end_is_the_last_one(lake: Lake) -> None:
    values = episode(5)
    reader, uid = StepReader(lake), put(lake, values)
    drawn = pixels(pictures.find_pictures(reader, reader.find(uid), "obs.image").frame(10**9))
    np.testing.assert_array_equal(drawn, values["obs.image"][5])


def test_large_images_are_reduced(lake: Lake) -> None:
    values = episode(5)
    reader, uid = StepReader(lake), put(lake, values)
    drawn = pixels(pictures.find_pictures(reader, reader.find(uid), "obs.image").frame(3, side=8))
    blocks = values["obs.image"][3].reshape(6, 2, 8, 2, 3).astype(float)
    np.testing.assert_allclose(drawn, blocks.mean(axis=(1, 3)), atol=0.51)


def test_equal_cells_of_a_grid_have_equal_colours_in_every_step(lake: Lake) -> None:
    values = episode(5)
    reader, uid = StepReader(lake), put(lake, values)
    colours: dict[int, tuple[int, ...]] = {}
    for step in range(6):
        drawn = pixels(pictures.find_pictures(reader, reader.find(uid), "obs.grid").frame(step))
        for number, colour in zip(
            values["obs.grid"][step].ravel().tolist(), drawn.reshape(-1, 3).tolist(), strict=True
        ):
            assert colours.setdefault(number, tuple(colour)) == tuple(colour)
    assert len(set(colours.values())) == len(colours)


def test_a_strip_has_evenly_spaced_frames(lake: Lake) -> None:
    values = episode(20)
    reader, uid = StepReader(lake), put(lake, values)
    drawn = pixels(pictures.find_pictures(reader, reader.find(uid), "obs.image").strip(0, 21, 3, 64))
    assert drawn.shape == (12, 3 * 16 + 2 * 2, 3)
    for place, step in enumerate((0, 10, 20)):
        np.testing.assert_array_equal(drawn[:, place * 18 : place * 18 + 16], values["obs.image"][step])


@pytest.mark.system
def test_a_strip_of_huge_frames_has_few(lake: Lake) -> None:
    huge = Schema(Spaces(observation={"obs": Box(shape=(3000, 4000, 3), dtype="uint8")}, action=Discrete(n=2)))
    reader, uid = StepReader(lake), put(lake, huge.empty(2), schema=huge)
    drawn = pixels(pictures.find_pictures(reader, reader.find(uid), "obs").strip(0, 2, 64, 96))
    assert drawn.shape[1] == 1 * 96  # 36 MB a frame: one is within 64 MB


def test_other_columns_have_no_pictures(lake: Lake) -> None:
    reader, uid = StepReader(lake), put(lake, episode(5))
    for name in ("obs.many", "nothing"):
        with pytest.raises(InputMissing, match="no pictures"):
            pictures.find_pictures(reader, reader.find(uid), name)
    with pytest.raises(UsageError, match="pixels"):
        pictures.find_pictures(reader, reader.find(uid), "obs.image").frame(0, side=10**6)
