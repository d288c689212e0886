"""Scenes: the state of one actor, as a picture and as text. `GridScene` draws worlds of square cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
_TILES = {*_LETTERS.values(), *ON_ICE.values()}


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
    """Cells as one letter each, in rows. `tiles` names the picture of a letter, a method of `_Tile`; others are goals
    that the letter numbers.

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
        drawn = np.stack([_Tile.draw(name, side) for name in names.values()])
        cells = np.array([[number[letter] for letter in line[left : left + width]] for line in self.rows])
        tiled = drawn[cells[top : top + height]].swapaxes(1, 2)
        canvas = Canvas(0, 0)
        canvas.pixels = np.ascontiguousarray(tiled.reshape(height * side, width * side, 3))
        x, y = (self.agent[1] - left + 0.5) * side, (self.agent[0] - top + 0.5) * side
        canvas.disc(x, y, side * 0.36, WHITE)
        canvas.disc(x, y, side * 0.31, BLUE)
        for eye in (-0.11, 0.11):
            canvas.disc(x + eye * side, y - 0.06 * side, side * 0.06, WHITE)
        if self.carries:
            getattr(_Tile(canvas, side * 0.45, x + side * 0.05, y - side * 0.48), self.carries)()
        return canvas.pixels

    def _window(self) -> tuple[int, int, int, int]:
        """Find the first row and column that are shown, and how many."""
        sizes = len(self.rows), len(self.rows[0])
        counts = [min(size, _MOST_CELLS) for size in sizes]
        firsts = [
            int(np.clip(place - count // 2, 0, size - count))
            for place, count, size in zip(self.agent, counts, sizes, strict=True)
        ]
        return firsts[0], firsts[1], counts[0], counts[1]


@dataclass(frozen=True, kw_only=True)
class LetterScene:
    """Cells of a board as one letter each, in rows; "." is an empty one. X and O are drawn, other letters written."""

    rows: Sequence[str]

    def text(self) -> str:
        return "\n".join(self.rows)

    def picture(self) -> np.ndarray:
        side = int(np.clip(WIDTH // max(len(self.rows), len(self.rows[0])), *_SIDES))
        canvas = Canvas(len(self.rows) * side, len(self.rows[0]) * side, PALE)
        for row, line in enumerate(self.rows):
            for column, letter in enumerate(line):
                tile = _Tile(canvas, side, column * side, row * side)
                tile.floor()
                x, y = (column + 0.5) * side, (row + 0.5) * side
                width = max(side * 0.09, 1)
                if letter == "X":
                    for slope in (-0.26 * side, 0.26 * side):
                        canvas.line(x - 0.26 * side, y - slope, x + 0.26 * side, y + slope, width, BLUE)
                elif letter == "O":
                    canvas.ring(x, y, side * 0.3, width, AMBER)
                elif letter != ".":
                    canvas.text(letter, x, y, INK, scale=max(round(side / 16), 1), middle=True)
        return canvas.pixels


class _Tile:
    """One cell of a canvas: a square of `side` pixels whose top left corner is (`x`, `y`). Places within it are shares
    of the side."""

    def __init__(self, canvas: Canvas, side: float, x: float = 0, y: float = 0) -> None:
        self.canvas, self.side, self.x, self.y = canvas, side, x, y

    @classmethod
    @lru_cache(maxsize=512)
    def draw(cls, name: str, side: int) -> np.ndarray:
        """Draw a tile by name (`_TILES`), or the number `name`: (side, side, 3)."""
        tile = cls(Canvas(side, side, PAPER), side)
        if name in _TILES:
            getattr(tile, name)()
        else:
            tile.number(name)
        tile.canvas.pixels.setflags(write=False)
        return tile.canvas.pixels

    def _fill(self, color: tuple[int, int, int], less: float = 0) -> None:
        """Fill the cell, but for `less` pixels at the right and at the bottom."""
        self.canvas.rectangle(self.x, self.y, self.x + self.side - less, self.y + self.side - less, color)

    def _rectangle(self, left: float, top: float, right: float, bottom: float, color: tuple[int, int, int]) -> None:
        self.canvas.rectangle(*self._point(left, top), *self._point(right, bottom), color)

    def _disc(self, x: float, y: float, radius: float, color: tuple[int, int, int]) -> None:
        self.canvas.disc(*self._point(x, y), radius, color)

    def _line(self, x0: float, y0: float, x1: float, y1: float, width: float, color: tuple[int, int, int]) -> None:
        self.canvas.line(*self._point(x0, y0), *self._point(x1, y1), width, color)

    def _point(self, x: float, y: float) -> tuple[float, float]:
        return self.x + self.side * x, self.y + self.side * y

    def floor(self) -> None:
        self._fill(PALE)
        self._fill(PAPER, less=1)

    def wall(self) -> None:
        self._fill(SLATE)
        bottom, height = self.y + self.side, max(self.side * 0.12, 1)
        self.canvas.rectangle(self.x, bottom - height, self.x + self.side, bottom, INK)

    def ice(self) -> None:
        self._fill(SKY)
        self._fill((224, 242, 254), less=1)
        self._line(0.2, 0.35, 0.4, 0.2, self.side * 0.03, WHITE)

    def hole(self) -> None:
        self.ice()
        self._disc(0.5, 0.5, self.side * 0.38, (96, 145, 220))
        self._disc(0.5, 0.53, self.side * 0.33, WATER)

    def start(self) -> None:
        self.floor()
        self.canvas.ring(*self._point(0.5, 0.5), self.side * 0.36, max(self.side * 0.05, 1), GREY)

    def goal(self) -> None:
        self._fill((220, 252, 231), less=1)
        self._line(0.34, 0.16, 0.34, 0.84, max(self.side * 0.06, 1), INK)
        self.canvas.triangle(self._point(0.34, 0.16), self._point(0.34, 0.56), self._point(0.78, 0.36), color=GREEN)

    def small_key(self) -> None:
        width = max(self.side * 0.1, 1.2)
        self.canvas.ring(*self._point(0.3, 0.5), self.side * 0.15, width, AMBER)
        self._line(0.45, 0.5, 0.82, 0.5, width, AMBER)
        for tooth in (0.68, 0.8):
            self._line(tooth, 0.5, tooth, 0.64, width, AMBER)

    def key(self) -> None:
        self.floor()
        self.small_key()

    def door(self) -> None:
        self.floor()
        self._rectangle(0.22, 0.1, 0.78, 0.92, (120, 53, 15))
        self._rectangle(0.28, 0.16, 0.72, 0.92, (180, 83, 9))
        self._disc(0.63, 0.55, max(self.side * 0.05, 1), GOLD)

    def done(self) -> None:
        self.floor()
        self._disc(0.5, 0.5, self.side * 0.34, (187, 247, 208))
        for x0, y0, x1, y1 in ((0.34, 0.52, 0.45, 0.64), (0.45, 0.64, 0.68, 0.38)):
            self._line(x0, y0, x1, y1, max(self.side * 0.07, 1), GREEN)

    def number(self, digit: str) -> None:
        self.floor()
        self._disc(0.5, 0.5, self.side * 0.38, GREEN)
        self.canvas.text(digit, *self._point(0.5, 0.5), WHITE, scale=max(round(self.side / 16), 1), middle=True)

    def up(self, tip: float = 0.15, tail: float = 0.85) -> None:
        self.floor()
        wing = (tip + tail) / 2
        self._line(0.5, tail, 0.5, wing, max(self.side * 0.12, 1), AMBER)
        corners = (self._point(across, wing) for across in (0.26, 0.74))
        self.canvas.triangle(self._point(0.5, tip), *corners, color=AMBER)

    def down(self) -> None:
        self.up(tip=0.85, tail=0.15)


def split_rows(cells: np.ndarray, size: int) -> list[str]:
    """Split (size * size,) letters into rows of text.

    >>> split_rows(np.array(list("ab.#")), 2)
    ['ab', '.#']
    """
    line = "".join(cells.tolist())
    return [line[start : start + size] for start in range(0, len(line), size)]
