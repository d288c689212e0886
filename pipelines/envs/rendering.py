"""What an actor of any environment looks like: its own drawing, else the image that it observes, else its numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipelines.envs.drawing import BLUE, GREY, INK, PALE, SLATE, Canvas, as_picture, draw_blocks, draw_letters
from pipelines.envs.env import Env
from pipelines.envs.scenes import WIDTH
from pipelines.errors import StageFailed

_MOST_NUMBERS = 96
_HEIGHT = 240


def picture(env: Env, observation: Mapping[str, np.ndarray], actor: int = 0) -> np.ndarray:
    """Draw (H, W, 3) uint8: the environment's own picture, else the first image in the actor's row of `observation`,
    else the environment's text as a picture, else a bar for each number that is observed.
    """
    drawn = env.render("rgb_array", actor)
    if drawn is not None:
        drawn = np.asarray(drawn)
        if drawn.ndim != 3 or drawn.shape[2] < 3 or not drawn.size:
            raise StageFailed(
                f"environment '{env.spec.name}' draws an array of shape {drawn.shape}, not (height, width, 3)"
            )
        return (drawn if drawn.dtype == np.uint8 else np.clip(drawn, 0, 255).astype(np.uint8))[..., :3]
    rows = {name: np.asarray(column[actor]) for name, column in observation.items()}
    seen = next((image for row in rows.values() if (image := as_picture(row)) is not None), None)
    if seen is not None:
        return seen
    lines = env.render("ansi", actor)
    return _draw_bars(rows) if lines is None else _draw_text(str(lines))


def text(env: Env, observation: Mapping[str, np.ndarray], actor: int = 0, *, colors: bool = False) -> str:
    """Write the environment's own text, else its picture (see `picture`) in letters, or in blocks of 24-bit colour."""
    lines = env.render("ansi", actor)
    if lines is not None:
        return str(lines).rstrip("\n")
    shown = picture(env, observation, actor)
    return draw_blocks(shown) if colors else draw_letters(shown)


def _draw_text(lines: str) -> np.ndarray:
    rows = lines.rstrip("\n").split("\n")
    longest = max(max(map(len, rows)), 1)
    scale = max(min(WIDTH // (6 * longest), 4), 1)
    canvas = Canvas((9 * len(rows) + 6) * scale, max(6 * longest * scale + 12, WIDTH))
    for number, row in enumerate(rows):
        canvas.text(row, 6, (9 * number + 4) * scale, INK, scale=scale)
    return canvas.pixels


def _draw_bars(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Draw each number x as a bar from the middle, x / (1 + |x|) of the way up or down."""
    numbers = np.concatenate([np.zeros(0), *(row.astype(np.float64).ravel() for row in rows.values())])[:_MOST_NUMBERS]
    canvas, middle = Canvas(_HEIGHT, WIDTH), _HEIGHT / 2
    for at in (0.5, 1.0, 1.5):
        canvas.line(8, middle * at, WIDTH - 8, middle * at, 1, GREY if at == 1 else PALE)
    each = (WIDTH - 16) / max(len(numbers), 1)
    for place, number in enumerate(numbers.tolist()):
        left, tip = 8 + each * place, middle - (middle - 8) * number / (1 + abs(number))
        color = BLUE if number >= 0 else SLATE
        canvas.rectangle(left + each * 0.1, min(tip, middle), left + each * 0.9, max(tip, middle), color)
    return canvas.pixels
