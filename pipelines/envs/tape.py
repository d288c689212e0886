"""Random draws for all actors, a step at a time, that parts of the actors may take at different times.

An actor's draws do not depend on whether the actors act together or in parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Row = TypeVar("Row")


class Tape(Generic[Row]):
    """Rows of `draw`, one for each step of all actors. `split` says how many actors each part has."""

    def __init__(self, draw: Callable[[], Row]) -> None:
        self._draw = draw
        self._rows: deque[Row] = deque()
        self.places: tuple[slice, ...] = ()
        self._ahead: list[int] = []

    def split(self, sizes: Sequence[int]) -> None:
        """Set the sizes of the parts. Call between steps, when all parts have taken the same number of rows."""
        assert not self._rows, "a part has yet to take a row that another has taken"
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.places = tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))
        self._ahead = [0] * len(sizes)

    def take(self, part: int | None = None) -> Row:
        """Return the row of the next step of all actors, or of `part`, whose place in it is `places[part]`."""
        if part is None:
            assert not self._rows, "a part has yet to take a row that another has taken"
            return self._draw()
        if self._ahead[part] == len(self._rows):
            self._rows.append(self._draw())
        row = self._rows[self._ahead[part]]
        self._ahead[part] += 1
        if min(self._ahead):
            self._rows.popleft()
            self._ahead = [ahead - 1 for ahead in self._ahead]
        return row
