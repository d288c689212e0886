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

from pipelines.formats.intake import flags
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
class _Flags:
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


def observations_name(file: Any) -> str:
    """Return the name of the array or group of observations."""
    return next((name for name in _OBSERVATIONS if name in file), _OBSERVATIONS[0])


def names_in(file: Any, given: Mapping[str, str]) -> dict[str, str]:
    """Map our names to the file's: as `given`, else the first known name that is there, else D4RL's."""
    found = {ours: next((name for name in names if name in file), names[0]) for ours, names in NAMES.items()}
    return found | {ours: theirs for ours, theirs in given.items() if ours in NAMES}


def lacking(file: Any, names: Mapping[str, str]) -> list[str]:
    """List required arrays that are missing."""
    needed = [ACTION] + [REWARD] * (not is_reward_free(file, names)) + [TERMINATED]
    if _VALIDS in file or _MASKS in file:
        needed.remove(TERMINATED)
    return [names[name] for name in needed if names[name] not in file and "[" not in names[name]]


def is_reward_free(file: Any, names: Mapping[str, str]) -> bool:
    """Return whether a file has no rewards and only one kind of end, as OGBench's files and demonstrations."""
    known = names[REWARD] != NAMES[REWARD][0] or names[REWARD] in file
    return not known and names[TERMINATED] in file and names[TRUNCATED] not in file


def zeros(name: str, length: int, dtype: str) -> Computed:
    """Return a value of 0 for each of `length` steps."""
    return Computed(name, (length,), lambda rows: np.zeros(len(range(length)[rows]), dtype), dtype)


def environments(actions: Any, terminal: Any) -> int:
    """Return the number E of environments that are stored side by side, (N, E, ...); 0 if each row is a step."""
    side_by_side = len(actions.shape) > 2 and tuple(actions.shape[:2]) == tuple(terminal.shape)
    return int(terminal.shape[1]) if side_by_side else 0


def flags_of(
    file: Any,
    names: Mapping[str, str],
    given: Mapping[str, str],
    *,
    followed: bool,
    read: Callable[[str], Any],
    what: str,
) -> _Flags:
    """Find the flags; `given` are the names of the settings, `followed` says that next observations are in the file.

    `read` returns the array of a name; `what` names the file in errors.
    """
    timeout = read(names[TRUNCATED]) if names[TRUNCATED] in file else None
    if TERMINATED in given or TRUNCATED in given:
        return _Flags(terminal=read(names[TERMINATED]), timeout=timeout)
    if _VALIDS in file and not followed:
        valids = read(_VALIDS)
        notes = ("rows whose 'valids' is 0 end a trajectory; it is not terminated",)
        return _Flags(
            terminal=zeros(TERMINATED, len(valids), "bool"), timeout=_not(valids, what), closing=True, notes=notes
        )
    if _MASKS in file:
        ends = next((name for name in (_ENDS, names[TRUNCATED], names[TERMINATED]) if name in file), None)
        terminal = _not(read(_MASKS), what)
        return _Flags(terminal=terminal, timeout=None if ends is None else _without(read(ends), terminal, what))
    terminal = read(names[TERMINATED])
    if is_reward_free(file, names):
        text = f"there are no rewards: they are 0, and '{names[TERMINATED]}' end a trajectory without terminating it"
        return _Flags(
            terminal=zeros(TERMINATED, len(terminal), "bool"), timeout=terminal, closing=not followed, notes=(text,)
        )
    if names[TERMINATED] != _DONES:
        return _Flags(terminal=terminal, timeout=timeout)
    if timeout is None:
        text = "'dones' are taken for terminations; name the time limits among them by source.columns.truncated"
        return _Flags(terminal=terminal, timeout=None, notes=(text,))
    return _Flags(terminal=_without(terminal, timeout, what), timeout=timeout)


def _not(values: Any, what: str) -> Computed:
    def compute(rows: Any) -> np.ndarray:
        return ~flags(values[rows], values.name, what=what).reshape(np.shape(values[rows]))

    return Computed(values.name, values.shape, compute, "bool")


def _without(values: Any, others: Any, what: str) -> Computed:
    """Return `values` where `others` are not set."""

    def compute(rows: Any) -> np.ndarray:
        chosen, excepted = (flags(one[rows], one.name, what=what) for one in (values, others))
        return (chosen & ~excepted).reshape(np.shape(values[rows]))

    return Computed(values.name, values.shape, compute, "bool")
