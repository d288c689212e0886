"""Which array of a flat file is what, by the names that tools give them.

    D4RL, CORL          observations, actions, rewards, next_observations, terminals, timeouts
    IQL and its heirs   masks (0 where the environment terminated) and dones_float or terminals (ends of trajectories)
    Stable-Baselines3   dones (timeouts among them), timeouts; (N, environments, ...) arrays
    imitation           obs, acts, next_obs, dones
    CleanRL, Gymnasium  terminations or terminated, truncations or truncated
    OGBench             observations, actions, terminals at the last row of each trajectory, which holds what the one
                        before it led to; `valids` is 0 there in its compact form; no rewards

A name in `source.columns` comes before all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.formats.intake import read_flags
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED

NAMES = {
    ACTION: ("actions", "acts"),
    REWARD: ("rewards",),
    TERMINATED: ("terminals", "terminations", "terminated", "dones"),
    TRUNCATED: ("timeouts", "truncations", "truncated"),
    RESET: ("resets",),
}
_OBSERVATIONS = ("observations", "obs")
_MASKS, _ENDS, _VALIDS, _DONES = "masks", "dones_float", "valids", "dones"


@dataclass(frozen=True, kw_only=True)
class FlatFlags:
    """Flags of the steps of a file; `closing`: the last row of a trajectory only observes what the one before it led
    to. `notes` say what was assumed.
    """

    terminal: Any
    timeout: Any
    closing: bool = False
    notes: tuple[str, ...] = ()


class Computed:
    """One value a step that follows from arrays of the file, computed when it is asked for."""

    chunks = None

    def __init__(self, name: str, shape: tuple[int, ...], compute: Callable[[Any], np.ndarray], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, np.dtype(dtype)
        self._compute = compute

    @classmethod
    def zeros(cls, name: str, length: int, dtype: str) -> Computed:
        """Make a value of 0 for each of `length` steps."""
        return cls(name, (length,), lambda rows: np.zeros(len(range(length)[rows]), dtype), dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        return self._compute(rows)


class Environments:
    """An array (N, E, ...) of E environments side by side as N * E rows, one environment after another."""

    chunks = None

    def __init__(self, base: Any) -> None:
        self._base = base
        self._rows, self._count = base.shape[:2]
        self.name, self.dtype = base.name, base.dtype
        self.shape = (self._rows * self._count, *base.shape[2:])

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Any) -> Any:
        if not isinstance(rows, slice):
            return self._base[rows % self._rows, rows // self._rows]
        start, stop, _ = rows.indices(len(self))
        parts = []
        for env in range(start // self._rows, max(-(-stop // self._rows), 1)):
            first, last = (min(max(at - env * self._rows, 0), self._rows) for at in (start, stop))
            parts.append(self._base[first:last, env])
        return np.concatenate(parts)


class FlatNames:
    """The names by which a file has its arrays: as `given`, else the first known one that is there, else D4RL's.

    `observations`: of the array or group of observations. `is_reward_free`: there are no rewards and only one kind of
    end, as in OGBench's files and demonstrations.
    """

    def __init__(self, file: Any, given: Mapping[str, str]) -> None:
        self._file, self._given = file, {ours: theirs for ours, theirs in given.items() if ours in NAMES}
        found = {ours: next((name for name in names if name in file), names[0]) for ours, names in NAMES.items()}
        self._names = found | self._given
        self.observations = next((name for name in _OBSERVATIONS if name in file), _OBSERVATIONS[0])
        knows_rewards = self[REWARD] != NAMES[REWARD][0] or REWARD in self
        self.is_reward_free = not knows_rewards and TERMINATED in self and TRUNCATED not in self

    def __getitem__(self, ours: str) -> str:
        return self._names[ours]

    def __contains__(self, ours: object) -> bool:
        return self._names.get(str(ours)) in self._file

    def list_missing(self) -> list[str]:
        """List required arrays that are missing."""
        needed = [ACTION] + [REWARD] * (not self.is_reward_free) + [TERMINATED]
        if _VALIDS in self._file or _MASKS in self._file:
            needed.remove(TERMINATED)
        return [self[name] for name in needed if name not in self and "[" not in self[name]]

    def find_flags(self, read: Callable[[str], Any], *, followed: bool, what: str) -> FlatFlags:
        """Find the flags; `followed` says that next observations are in the file.

        `read` returns the array of a name; `what` names the file in errors.
        """

        def negate(values: Any) -> Computed:
            def compute(rows: Any) -> np.ndarray:
                return ~read_flags(values[rows], values.name, what=what).reshape(np.shape(values[rows]))

            return Computed(values.name, values.shape, compute, "bool")

        def subtract(values: Any, others: Any) -> Computed:  # where the others are not set
            def compute(rows: Any) -> np.ndarray:
                chosen, excepted = (read_flags(one[rows], one.name, what=what) for one in (values, others))
                return (chosen & ~excepted).reshape(np.shape(values[rows]))

            return Computed(values.name, values.shape, compute, "bool")

        file = self._file
        timeout = read(self[TRUNCATED]) if TRUNCATED in self else None
        if TERMINATED in self._given or TRUNCATED in self._given:
            return FlatFlags(terminal=read(self[TERMINATED]), timeout=timeout)
        if _VALIDS in file and not followed:
            valids = read(_VALIDS)
            notes = ("rows whose 'valids' is 0 end a trajectory; it is not terminated",)
            none = Computed.zeros(TERMINATED, len(valids), "bool")
            return FlatFlags(terminal=none, timeout=negate(valids), closing=True, notes=notes)
        if _MASKS in file:
            ends = next((name for name in (_ENDS, self[TRUNCATED], self[TERMINATED]) if name in file), None)
            terminal = negate(read(_MASKS))
            return FlatFlags(terminal=terminal, timeout=None if ends is None else subtract(read(ends), terminal))
        terminal = read(self[TERMINATED])
        if self.is_reward_free:
            text = f"there are no rewards: they are 0, and '{self[TERMINATED]}' end a trajectory without terminating it"
            none = Computed.zeros(TERMINATED, len(terminal), "bool")
            return FlatFlags(terminal=none, timeout=terminal, closing=not followed, notes=(text,))
        if self[TERMINATED] != _DONES:
            return FlatFlags(terminal=terminal, timeout=timeout)
        if timeout is None:
            text = "'dones' are taken for terminations; name the time limits among them by source.columns.truncated"
            return FlatFlags(terminal=terminal, timeout=None, notes=(text,))
        return FlatFlags(terminal=subtract(terminal, timeout), timeout=timeout)
