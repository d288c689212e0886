"""Tic-tac-toe and connect four for one game, cell by cell, and perfect play of the former by plain minimax."""

from __future__ import annotations

from functools import cache

FREE = "."
MARKS = "XO"


class Board:
    """Rows of letters; `drops`: marks fall to the bottom of a column. `rewards` are of both seats, once it is over."""

    def __init__(self, rows: int, columns: int, length: int, *, drops: bool) -> None:
        self.cells = [[FREE] * columns for _ in range(rows)]
        self.length, self.drops, self.seat = length, drops, 0
        self.over, self.rewards = False, [0, 0]

    def legal(self) -> list[int]:
        if self.drops:
            return [column for column, mark in enumerate(self.cells[0]) if mark == FREE]
        columns = len(self.cells[0])
        return [i for i in range(len(self.cells) * columns) if self.cells[i // columns][i % columns] == FREE]

    def play(self, action: int) -> None:
        seat, self.seat = self.seat, 1 - self.seat
        if action not in self.legal():
            self.over, self.rewards[seat] = True, -1
            return
        row, column = divmod(action, len(self.cells[0]))
        if self.drops:
            column = action
            row = max(r for r in range(len(self.cells)) if self.cells[r][column] == FREE)
        self.cells[row][column] = MARKS[seat]
        if any(self._reaches(row, column, *step) for step in ((0, 1), (1, 0), (1, 1), (1, -1))):
            self.over, self.rewards[seat], self.rewards[1 - seat] = True, 1, -1
        elif not self.legal():
            self.over = True

    def _reaches(self, row: int, column: int, down: int, right: int) -> bool:
        """Whether the line through a cell has enough marks in a row."""
        count = 1
        for sign in (1, -1):
            r, c = row + sign * down, column + sign * right
            while (
                0 <= r < len(self.cells) and 0 <= c < len(self.cells[0]) and self.cells[r][c] == self.cells[row][column]
            ):
                count, r, c = count + 1, r + sign * down, c + sign * right
        return count >= self.length


LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def wins(cells: str, mark: str) -> bool:
    return any(all(cells[int(i)] == mark for i in line) for line in LINES)


@cache
def value(cells: str, mark: str) -> int:
    """What `mark`, which is to move, gets at most from a position of tic-tac-toe: 1, 0 or -1."""
    other = MARKS[1 - MARKS.index(mark)]
    if wins(cells, other):
        return -1
    if FREE not in cells:
        return 0
    return max(-value(after, other) for after in moves(cells, mark).values())


def moves(cells: str, mark: str) -> dict[int, str]:
    """The positions that the moves of `mark` lead to."""
    return {i: cells[:i] + mark + cells[i + 1 :] for i in range(9) if cells[i] == FREE}
