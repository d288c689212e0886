"""Scenes: the state of one actor, as a picture and as text. `GridScene` draws worlds of square cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from pipelines.envs.drawing import AMBER, BLUE, GOLD, GREEN, GREY, INK, PALE, PAPER, SKY, SLATE, WATER, WHITE, Canvas

WIDTH = 480  # pixels of a picture, about
_MOST_CELLS = 31  # on a side; of larger grids the part around the agent is drawn
_SIDES = (8, 120)  # pixels of a cell

_LETTERS: Mapping[str, str] = {
    ".": "floor",
    "#": "wall",
    "S": "start",
    "G": "goal",
    "K": "key",
    "D": "door",
    "*": "done",
    "^": "up",
    "v": "down",
}
"""The usual letters of a grid."""
ON_ICE: Mapping[str, str] = {**_LETTERS, ".": "ice", "#": "hole"}


class Scene(Protocol):
    """What can be drawn of one actor."""

    def picture(self) -> np.ndarray:
        """Return (H, W, 3) uint8, of the same size throughout an episode."""
        ...

    def text(self) -> str:
        """Return a few lines of plain text."""
        ...


@dataclass(frozen=True, kw_only=True)
class GridScene:
    """Cells as one letter each, in rows. `tiles` names the picture of a letter, one of `_TILES`; others are goals that
    the letter numbers.

    The agent, at (row, column), is "@"; `carries` names the tile that it holds, `note` is added to the text.
    """

    rows: Sequence[str]
    agent: tuple[int, int]
    tiles: Mapping[str, str] = field(default_factory=lambda: _LETTERS)
    carries: str = ""
    note: str = ""

    def text(self) -> str:
        row, column = self.agent
        top, left, height, width = self._window()
        lines = [line[left : left + width] for line in self.rows[top : top + height]]
        row, column = row - top, column - left
        lines[row] = lines[row][:column] + "@" + lines[row][column + 1 :]
        return "\n".join([*lines, self.note] if self.note else lines)

    def picture(self) -> np.ndarray:
        top, left, height, width = self._window()
        side = int(np.clip(WIDTH // max(width, height), *_SIDES))
        names = {letter: self.tiles.get(letter, letter) for line in self.rows for letter in line}
        number = {letter: place for place, letter in enumerate(names)}
        drawn = np.stack([_tile(name, side) for name in names.values()])
        cells = np.array([[number[letter] for letter in line[left : left + width]] for line in self.rows])
        tiled = drawn[cells[top : top + height]].swapaxes(1, 2)
        canvas = Canvas(0, 0)
        canvas.pixels = np.ascontiguousarray(tiled.reshape(height * side, width * side, 3))
        x, y = (self.agent[1] - left + 0.5) * side, (self.agent[0] - top + 0.5) * side
        _draw_agent(canvas, x, y, side)
        if self.carries:
            _TILES[self.carries](canvas, side * 0.45, x + side * 0.05, y - side * 0.48)
        return canvas.pixels

    def _window(self) -> tuple[int, int, int, int]:
        """Return the first row and column that are shown, and how many."""
        sizes = len(self.rows), len(self.rows[0])
        counts = [min(size, _MOST_CELLS) for size in sizes]
        firsts = [
            int(np.clip(place - count // 2, 0, size - count))
            for place, count, size in zip(self.agent, counts, sizes, strict=True)
        ]
        return firsts[0], firsts[1], counts[0], counts[1]


def _draw_agent(canvas: Canvas, x: float, y: float, side: int) -> None:
    canvas.disc(x, y, side * 0.36, WHITE)
    canvas.disc(x, y, side * 0.31, BLUE)
    for eye in (-0.11, 0.11):
        canvas.disc(x + eye * side, y - 0.06 * side, side * 0.06, WHITE)


@lru_cache(maxsize=512)
def _tile(name: str, side: int) -> np.ndarray:
    canvas = Canvas(side, side, PAPER)
    _TILES.get(name, partial(_numbered, number=name))(canvas, side)
    canvas.pixels.setflags(write=False)
    return canvas.pixels


def _floor(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    canvas.rectangle(x, y, x + side, y + side, PALE)
    canvas.rectangle(x, y, x + side - 1, y + side - 1, PAPER)


def _wall(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    canvas.rectangle(x, y, x + side, y + side, SLATE)
    canvas.rectangle(x, y + side - max(side * 0.12, 1), x + side, y + side, INK)


def _ice(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    canvas.rectangle(x, y, x + side, y + side, SKY)
    canvas.rectangle(x, y, x + side - 1, y + side - 1, (224, 242, 254))
    canvas.line(x + side * 0.2, y + side * 0.35, x + side * 0.4, y + side * 0.2, side * 0.03, WHITE)


def _hole(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    _ice(canvas, side, x, y)
    canvas.disc(x + side / 2, y + side / 2, side * 0.38, (96, 145, 220))
    canvas.disc(x + side / 2, y + side * 0.53, side * 0.33, WATER)


def _start(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    _floor(canvas, side, x, y)
    canvas.ring(x + side / 2, y + side / 2, side * 0.36, max(side * 0.05, 1), GREY)


def _flag(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    at = [(x + side * 0.34, y + side * top) for top in (0.16, 0.56)]
    canvas.line(*at[0], at[0][0], y + side * 0.84, max(side * 0.06, 1), INK)
    canvas.triangle(at[0], at[1], (x + side * 0.78, y + side * 0.36), color=GREEN)


def _goal(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    canvas.rectangle(x, y, x + side - 1, y + side - 1, (220, 252, 231))
    _flag(canvas, side, x, y)


def _key(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    width = max(side * 0.1, 1.2)
    canvas.ring(x + side * 0.3, y + side * 0.5, side * 0.15, width, AMBER)
    canvas.line(x + side * 0.45, y + side * 0.5, x + side * 0.82, y + side * 0.5, width, AMBER)
    for tooth in (0.68, 0.8):
        canvas.line(x + side * tooth, y + side * 0.5, x + side * tooth, y + side * 0.64, width, AMBER)


def _key_on_floor(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    _floor(canvas, side, x, y)
    _key(canvas, side, x, y)


def _door(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    _floor(canvas, side, x, y)
    canvas.rectangle(x + side * 0.22, y + side * 0.1, x + side * 0.78, y + side * 0.92, (120, 53, 15))
    canvas.rectangle(x + side * 0.28, y + side * 0.16, x + side * 0.72, y + side * 0.92, (180, 83, 9))
    canvas.disc(x + side * 0.63, y + side * 0.55, max(side * 0.05, 1), GOLD)


def _done(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    _floor(canvas, side, x, y)
    canvas.disc(x + side / 2, y + side / 2, side * 0.34, (187, 247, 208))
    for x0, y0, x1, y1 in ((0.34, 0.52, 0.45, 0.64), (0.45, 0.64, 0.68, 0.38)):
        canvas.line(x + side * x0, y + side * y0, x + side * x1, y + side * y1, max(side * 0.07, 1), GREEN)


def _numbered(canvas: Canvas, side: float, x: float = 0, y: float = 0, *, number: str) -> None:
    _floor(canvas, side, x, y)
    canvas.disc(x + side / 2, y + side / 2, side * 0.38, GREEN)
    canvas.text(number, x + side / 2, y + side / 2, WHITE, scale=max(round(side / 16), 1), middle=True)


def _arrow(canvas: Canvas, side: float, x: float, y: float, tip: float, tail: float) -> None:
    _floor(canvas, side, x, y)
    wing = (tip + tail) / 2
    canvas.line(x + side / 2, y + side * tail, x + side / 2, y + side * wing, max(side * 0.12, 1), AMBER)
    corners = ((x + side * across, y + side * wing) for across in (0.26, 0.74))
    canvas.triangle((x + side / 2, y + side * tip), *corners, color=AMBER)


def _up(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    _arrow(canvas, side, x, y, 0.15, 0.85)


def _down(canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
    _arrow(canvas, side, x, y, 0.85, 0.15)


_TILES: Mapping[str, Callable[..., None]] = {
    "floor": _floor,
    "wall": _wall,
    "ice": _ice,
    "hole": _hole,
    "start": _start,
    "goal": _goal,
    "key": _key_on_floor,
    "small key": _key,
    "door": _door,
    "done": _done,
    "up": _up,
    "down": _down,
}


def rows_of(cells: np.ndarray, size: int) -> list[str]:
    """Return (size * size,) letters as rows of text.

    >>> rows_of(np.array(list("ab.#")), 2)
    ['ab', '.#']
    """
    line = "".join(cells.tolist())
    return [line[start : start + size] for start in range(0, len(line), size)]
