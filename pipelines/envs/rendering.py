"""What an actor of any environment looks like: its own drawing, else the image that it observes, else its numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipelines.envs.drawing import BLUE, GREY, INK, PALE, SLATE, Canvas, as_picture, in_blocks, in_letters
from pipelines.envs.env import Env
from pipelines.envs.scenes import WIDTH
from pipelines.errors import StageFailed

_MOST_NUMBERS = 96
_HEIGHT = 240


def picture(env: Env, observation: Mapping[str, np.ndarray], actor: int = 0) -> np.ndarray:
    """Return (H, W, 3) uint8: the environment's own picture, else the first image in the actor's row of `observation`,
    else the environment's text as a picture, else a bar for each number that is observed.
    """
    drawn = env.render("rgb_array", actor)
    if drawn is not None:
        return _checked(np.asarray(drawn), env.spec.name)
    rows = {name: np.asarray(column[actor]) for name, column in observation.items()}
    seen = next((image for row in rows.values() if (image := as_picture(row)) is not None), None)
    if seen is not None:
        return seen
    lines = env.render("ansi", actor)
    return _bars(rows) if lines is None else _written(str(lines))


def text(env: Env, observation: Mapping[str, np.ndarray], actor: int = 0, *, colors: bool = False) -> str:
    """Return the environment's own text, else its picture (see `picture`) in letters, or in blocks of 24-bit colour."""
    lines = env.render("ansi", actor)
    if lines is not None:
        return str(lines).rstrip("\n")
    shown = picture(env, observation, actor)
    return in_blocks(shown) if colors else in_letters(shown)


def _checked(drawn: np.ndarray, name: str) -> np.ndarray:
    if drawn.ndim != 3 or drawn.shape[2] < 3 or not drawn.size:
        raise StageFailed(f"environment '{name}' draws an array of shape {drawn.shape}, not (height, width, 3)")
    if drawn.dtype != np.uint8:
        drawn = np.clip(drawn, 0, 255).astype(np.uint8)
    return drawn[..., :3]


def _written(lines: str) -> np.ndarray:
    rows = lines.rstrip("\n").split("\n")
    longest = max(max(map(len, rows)), 1)
    scale = max(min(WIDTH // (6 * longest), 4), 1)
    canvas = Canvas((9 * len(rows) + 6) * scale, max(6 * longest * scale + 12, WIDTH))
    for number, row in enumerate(rows):
        canvas.text(row, 6, (9 * number + 4) * scale, INK, scale=scale)
    return canvas.pixels


def _bars(rows: Mapping[str, np.ndarray]) -> np.ndarray:
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
