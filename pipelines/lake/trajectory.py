"""One row of the `trajectories` table: what is known of a trajectory as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, overload

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TrajectoryInfo:
    """What the writer of a trajectory says of it; the lake adds uid, segment, row0, length, return, crc and
    t_commit.

    `policy_version` counts gradient updates of the policy that acted (0: untrained; -1: no trained policy).
    `success`: whether the task's goal was reached (None where the task has none); `attempts`: success of each
    attempt of a multi-attempt task, in order. `seed`: with which the environment was reset, or that of the collector
    where an episode has none of its own. `epsilon`: mean exploration rate. Times are seconds since the
    epoch.
    """

    env: str = ""
    task: str = ""
    source: str = "rollout"
    policy_id: str = ""
    policy_version: int = -1
    collector: str = ""
    seed: int = 0
    success: bool | None = None
    attempts: tuple[bool, ...] = ()
    epsilon: float = 0.0
    goal_text: str = ""
    t_start: float = 0.0
    t_end: float = 0.0
    tags: Mapping[str, str] = field(default_factory=dict)


class Infos(Sequence[TrajectoryInfo]):
    """What is said of several trajectories, a column a field: `each` has a value for each of them, `shared` all that
    they have in common; of a field of floats it may be an array. One that is asked for is made then, which costs more
    than all of a batch's columns.
    """

    def __init__(self, shared: TrajectoryInfo, each: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        self.shared, self.each = shared, each
        self._count = len(next(iter(each.values())))
        if any(len(values) != self._count for values in each.values()):
            raise ValueError(f"columns of {sorted({len(v) for v in each.values()})} trajectories given together")

    @classmethod
    def of(cls, infos: Sequence[TrajectoryInfo]) -> Infos:
        """`infos` (one at least) as columns."""
        if isinstance(infos, Infos):
            return infos
        names = [info_field.name for info_field in fields(TrajectoryInfo)] if len(infos) > 1 else ["seed"]
        return cls(infos[0], {name: [getattr(info, name) for info in infos] for name in names})

    @classmethod
    def joined(cls, several: Sequence[Infos]) -> Infos:
        """All of them, in order. What is not in `each` must be the same in all."""
        names = dict.fromkeys(name for infos in several for name in infos.each)
        return cls(several[0].shared, {name: _end_to_end([infos._column(name) for infos in several]) for name in names})

    def _column(self, name: str) -> Sequence[Any] | np.ndarray:
        return self.each[name] if name in self.each else [getattr(self.shared, name)] * self._count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> TrajectoryInfo: ...
    @overload
    def __getitem__(self, place: slice) -> Infos: ...
    def __getitem__(self, place: int | slice) -> TrajectoryInfo | Infos:
        if isinstance(place, slice):
            return Infos(self.shared, {name: values[place] for name, values in self.each.items()})
        found = {name: values[place] for name, values in self.each.items()}
        chosen: dict[str, Any] = {
            n: value.item() if isinstance(value, np.generic) else value for n, value in found.items()
        }
        return replace(self.shared, **chosen)


def _end_to_end(columns: Sequence[Sequence[Any] | np.ndarray]) -> Sequence[Any] | np.ndarray:
    if all(isinstance(column, np.ndarray) for column in columns):
        return np.concatenate(columns)
    return list(chain.from_iterable(columns))


@dataclass(frozen=True)
class Trajectory:
    """Step columns of T + 1 rows (see `pipelines.lake.schema`) and what is known of the whole."""

    columns: Mapping[str, np.ndarray]
    info: TrajectoryInfo
    uid: str = ""

    @property
    def length(self) -> int:
        """T, the number of actions."""
        return len(self.columns["reward"]) - 1


@dataclass(frozen=True)
class Trajectories:
    """Several trajectories laid one after another: `columns` hold the T + 1 rows of each, `rows` says how many."""

    columns: Mapping[str, np.ndarray]
    rows: Sequence[int]
    infos: Sequence[TrajectoryInfo]

    @classmethod
    def joined(cls, several: Sequence[Trajectories]) -> Trajectories:
        """All of them, in order, of one schema; see `Infos.joined`."""
        if len(several) == 1:
            return several[0]
        columns = {name: np.concatenate([each.columns[name] for each in several]) for name in several[0].columns}
        rows = [count for each in several for count in each.rows]
        return cls(columns, rows, Infos.joined([Infos.of(each.infos) for each in several]))

    @property
    def nbytes(self) -> int:
        """Of all columns."""
        return sum(values.nbytes for values in self.columns.values())

    def __len__(self) -> int:
        return len(self.infos)

    def __iter__(self) -> Iterator[Trajectory]:
        """Each of them; their columns share the memory of all."""
        start = 0
        for count, info in zip(self.rows, self.infos, strict=True):
            stop = start + count
            yield Trajectory({name: values[start:stop] for name, values in self.columns.items()}, info)
            start = stop
