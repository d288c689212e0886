"""Random numbers that depend on their purpose, not on the order of calls.

Every draw is a hash of (seed, split, scope, episode, stream, counter). Episode number k therefore has the
same task whatever the policy does and however many actors run: two policies evaluated on episodes 0..n-1 are
evaluated on the same tasks. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA
2014), applied twice.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

Row = TypeVar("Row")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFT_STREAM = np.uint64(40)
_TO_UNIT = 2.0**-53


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser to a uint64 array: a bijection whose output bits each depend on all input bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit(bits: np.ndarray) -> np.ndarray:
    """Convert uint64 to float64 in [0, 1), using the upper 53 bits."""
    return (bits >> np.uint64(11)) * _TO_UNIT


class Draws:
    """The draws of one environment. `episode` (m,) int; `stream` names a purpose; `counter` broadcasts
    against it.
    """

    def __init__(self, seed: int, split: str, scope: str) -> None:
        digest = hashlib.sha256(f"{seed}/{split}/{scope}".encode()).digest()
        self._key = np.frombuffer(digest[:8], dtype="<u8")

    def bits(self, episode: np.ndarray, stream: np.ndarray | int, counter: np.ndarray | int = 0) -> np.ndarray:
        """Draw uint64, in the shape that the arguments broadcast to."""
        purpose = (np.atleast_1d(stream) + 1).astype(np.uint64) << _SHIFT_STREAM
        place = np.asarray(counter, dtype=np.uint64) + purpose
        return mix(mix(self._key + np.asarray(episode).astype(np.uint64) * _GOLDEN) + place * _GOLDEN)

    def uniform(self, episode: np.ndarray, stream: np.ndarray | int, counter: np.ndarray | int = 0) -> np.ndarray:
        """Draw float64 in [0, 1)."""
        return unit(self.bits(episode, stream, counter))

    def integers(
        self, episode: np.ndarray, stream: int, high: int | np.ndarray, counter: np.ndarray | int = 0
    ) -> np.ndarray:
        """Draw int64 in [0, high)."""
        return (self.uniform(episode, stream, counter) * high).astype(np.int64)

    def permutations(self, episode: np.ndarray, stream: int, n: int) -> np.ndarray:
        """Draw (m, n) int64: a random order of 0..n-1 for each episode."""
        return np.argsort(self.uniform(episode[:, None], stream, np.arange(n)), axis=1)

    def shuffle(self, values: Sequence[str], stream: int) -> tuple[str, ...]:
        """Draw an order of `values`, the same for all episodes."""
        order = self.permutations(np.zeros(1, dtype=np.int64), stream, len(values))[0]
        return tuple(values[place] for place in order.tolist())


class SharedDraws(Generic[Row]):
    """Rows of `draw`, one for each step of all actors, which parts of the actors may take at different times.

    An actor's draws are the same whether the actors act together or in parts. `split` says how many actors each part
    has.
    """

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
        """Take the row of the next step of all actors, or of `part`, whose place in it is `places[part]`."""
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


BANDS, EVERY, _TEST_BAND = 30, 5, 2  # of the bands of a number from 0 to 1, every fifth is for tests


def bands_of(split: str) -> np.ndarray:
    """List the bands of one side of the split."""
    band = np.arange(BANDS)
    return band[(band % EVERY == _TEST_BAND) == (split == "test")]


def spread(share: np.ndarray, split: str) -> np.ndarray:
    """Map `share` in [0, 1) to [0, 1), uniform over the bands of one side.

    >>> spread(np.array([0.0, 0.5]), "test").round(3).tolist()
    [0.067, 0.567]
    """
    bands = bands_of(split)
    place, inside = np.divmod(np.asarray(share) * len(bands), 1.0)
    return (bands[place.astype(np.int64)] + inside) / BANDS
