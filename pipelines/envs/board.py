"""Arrays that a process and its workers share: what goes into a step of some actors and what comes out of it.

The memory belongs to a file without a name, so that nothing is left of it when the last process that has it open ends,
however it ends.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np

from pipelines.envs.env import StepResult
from pipelines.lake.spaces import Spaces

_FLAGS = ("terminated", "truncated", "reset", "attempt_end", "success")
_ALIGNED = 64  # bytes: no two processes write to one line of a cache


class Board:
    """Arrays of `num_envs` actors, to be cut (`rows`) into those of each worker.

    `action`: what to do; `mask`: who begins an episode, after the one whose number is in `current`; `observation`,
    `reward` and `flags` (5, N): what a step brought; `begun`: first observations of those who began an episode.
    """

    def __init__(
        self,
        action: np.ndarray,
        mask: np.ndarray,
        current: np.ndarray,
        reward: np.ndarray,
        flags: np.ndarray,
        observation: dict[str, np.ndarray],
        begun: dict[str, np.ndarray],
    ) -> None:
        self.action, self.mask, self.current = action, mask, current
        self.reward, self.flags = reward, flags
        self.observation, self.begun = observation, begun

    def rows(self, where: slice) -> Board:
        """The same memory, of some of the actors."""
        return Board(
            self.action[where],
            self.mask[where],
            self.current[where],
            self.reward[where],
            self.flags[:, where],
            {name: column[where] for name, column in self.observation.items()},
            {name: column[where] for name, column in self.begun.items()},
        )

    def put(self, result: StepResult) -> None:
        """Write what a step brought."""
        for name, column in self.observation.items():
            column[:] = result.observation[name]
        self.reward[:] = result.reward
        for flag, name in zip(self.flags, _FLAGS, strict=True):
            flag[:] = getattr(result, name)

    def take(self) -> StepResult:
        """A copy of what a step brought."""
        flags = dict(zip(_FLAGS, self.flags.copy(), strict=True))
        observation = {name: column.copy() for name, column in self.observation.items()}
        return StepResult(observation=observation, reward=self.reward.copy(), **flags)


def boards(file: int, spaces: Spaces, sizes: Sequence[int]) -> list[Board]:
    """The boards of parts of `sizes` actors in `file`, which is made as long as they need."""
    length = _end([piece for size in sizes for piece in _pieces(spaces, size)])
    if os.fstat(file).st_size < length:
        os.ftruncate(file, length)
    memory, place, found = mmap.mmap(file, length), 0, []
    for size in sizes:
        arrays = []
        for shape, dtype in _pieces(spaces, size):
            count = math.prod(shape)
            arrays.append(np.frombuffer(memory, dtype, count, place).reshape(shape))
            place = _after(place, shape, dtype)
        names = list(spaces.observation)
        first, second = arrays[5 : 5 + len(names)], arrays[5 + len(names) :]
        observation, begun = dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True))
        action, mask, current, reward, flags = arrays[:5]
        found.append(Board(action, mask, current, reward, flags, observation, begun))
    return found


def nameless_file() -> int:
    """The descriptor of an empty file in memory where the system has such, else in the temporary directory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("amago", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pieces(spaces: Spaces, n: int) -> Iterator[tuple[tuple[int, ...], np.dtype]]:
    yield (n, *spaces.action.shape), np.dtype(spaces.action.dtype)
    yield (n,), np.dtype(bool)
    yield (n,), np.dtype(np.int64)
    yield (n,), np.dtype(np.float32)
    yield (len(_FLAGS), n), np.dtype(bool)
    for _ in range(2):
        for space in spaces.observation.values():
            yield (n, *space.shape), np.dtype(space.dtype)


def _after(place: int, shape: tuple[int, ...], dtype: np.dtype) -> int:
    return place + -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _end(pieces: Sequence[tuple[tuple[int, ...], np.dtype]]) -> int:
    place = 0
    for shape, dtype in pieces:
        place = _after(place, shape, dtype)
    return max(place, 1)
