"""Drawing, measured: areas by their formulas, pixels at places worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.envs.drawing import BLUE, INK, WHITE, Canvas, as_picture, draw_blocks, draw_letters, enlarge, letters
from pipelines.envs.scenes import GridScene

BLACK = (0, 0, 0)


def area(canvas: Canvas) -> float:
    """Return how many pixels are white, on black; partly covered ones count in part."""
    return canvas.pixels[..., 0].sum() / 255


@pytest.mark.parametrize("center", [(30.0, 30.0), (30.5, 29.25)])
def test_discs_rings_lines_and_triangles_have_their_areas(center: tuple[float, float]) -> None:
    canvas = Canvas(60, 60, BLACK)
    canvas.disc(*center, 20, WHITE)
    assert area(canvas) == pytest.approx(np.pi * 20**2, rel=0.01)
    canvas = Canvas(60, 60, BLACK)
    canvas.ring(*center, 20, 4, WHITE)
    assert area(canvas) == pytest.approx(np.pi * (22**2 - 18**2), rel=0.01)
    canvas = Canvas(60, 60, BLACK)
    canvas.line(10, 10, 40, 50, 6, WHITE)
    assert area(canvas) == pytest.approx(50 * 6 + np.pi * 3**2, rel=0.02)
    canvas = Canvas(60, 60, BLACK)
    canvas.triangle((5, 5), (55, 15), (15, 50), color=WHITE)
    assert area(canvas) == pytest.approx(abs(50 * 45 - 10 * 10) / 2, rel=0.02)
    canvas = Canvas(60, 60, BLACK)
    canvas.rectangle(10, 20, 30, 25, WHITE)
    assert area(canvas) == 100


def test_what_is_off_the_canvas_is_cut_off() -> None:
    canvas = Canvas(20, 30, BLACK)
    for x, y in ((-50, 5), (200, 5), (5, -50), (5, 200)):
        canvas.disc(x, y, 8, WHITE)
    assert area(canvas) == 0
    canvas.disc(0, 0, 10, WHITE)
    assert area(canvas) == pytest.approx(np.pi * 10**2 / 4, rel=0.02)


def test_letters_are_upright_and_apart() -> None:
    shape = letters("L1")
    assert shape[:, 0].all()  # the stem of the L
    assert shape[-1, :5].all()  # its foot
    assert not shape[:, 5].any()
    assert shape[:, 6 + 2].all()  # the stem of the 1
    assert letters("é").tolist() == letters("?").tolist()
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789":
        assert letters(letter).any(axis=1).sum() == 7, letter
    known = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.,:/=%()#_?!<>*'[]"
    assert len({letters(letter).tobytes() for letter in known}) == len(known)


def test_the_agent_of_a_grid_is_drawn_in_its_cell() -> None:
    scene = GridScene(rows=["...", ".#.", "..G"], agent=(0, 2))
    picture = scene.picture()
    side = picture.shape[0] // 3
    assert picture.shape == (3 * side, 3 * side, 3)
    blue = (picture == BLUE).all(-1)
    rows, columns = np.nonzero(blue)
    assert (rows.max() // side, columns.min() // side) == (0, 2)
    assert blue.sum() > 0.2 * side**2
    assert scene.text() == "..@\n.#.\n..G"


def test_of_a_large_grid_the_part_around_the_agent_is_drawn() -> None:
    rows = ["." * 100 for _ in range(100)]
    shapes = {GridScene(rows=rows, agent=(place, place)).picture().shape for place in (0, 50, 99)}
    assert len(shapes) == 1
    for place in (0, 50, 99):
        text = GridScene(rows=rows, agent=(place, place)).text()
        assert text.count("@") == 1


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((84, 84, 3), (84, 84, 3)),
        ((3, 64, 48), (64, 48, 3)),
        ((84, 84), (84, 84, 3)),
        ((84, 84, 4), (84, 84, 3)),
        ((84, 84, 12), (84, 84, 3)),
        ((7, 7, 3), None),
        ((10,), None),
    ],
)
def test_an_observed_image_is_recognised(shape: tuple[int, ...], found: tuple[int, ...] | None) -> None:
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    picture = as_picture(values)
    assert (picture is None) == (found is None)
    if picture is not None:
        assert picture.shape == found
        last = -3 if shape[-1] % 3 == 0 else -1
        plane = values[0] if shape[0] == 3 else values if values.ndim == 2 else values[..., last]
        np.testing.assert_array_equal(picture[..., 0], plane)
    assert as_picture(values.astype(np.float32)) is None


def test_pictures_as_text_keep_their_proportions() -> None:
    picture = np.zeros((80, 160, 3), dtype=np.uint8)
    picture[:40, :80] = 255
    lines = draw_letters(picture, width=40).split("\n")
    assert len(lines) == 10
    assert all(line == "@" * 20 for line in lines[:5])
    assert not any(lines[5:])
    blocks = draw_blocks(picture, width=40).split("\n")
    assert len(blocks) == 10
    assert all(line.count("▀") == 40 and line.endswith("\x1b[0m") for line in blocks)
    assert blocks[0].startswith("\x1b[38;2;255;255;255;48;2;255;255;255m")


def test_small_pictures_are_enlarged_by_whole_pixels() -> None:
    picture = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    large = enlarge(picture, 8)
    assert large.shape == (6, 9, 3)
    np.testing.assert_array_equal(large[1::3, 1::3], picture)
    assert enlarge(large, 8) is large


def test_captions_use_the_ink_that_they_are_given() -> None:
    canvas = Canvas(20, 40, WHITE)
    canvas.text("I", 4, 4, INK, scale=2)
    assert (canvas.pixels[4:6, 6:12] == INK).all()  # the upper serif: three pixels, twice as large
