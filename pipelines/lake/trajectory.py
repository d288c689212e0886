"""A row of the table `trajectories`: the facts about a trajectory as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, overload

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TrajectoryInfo:
    """The facts that the writer of a trajectory knows; the lake adds uid, segment, row0, length, return, crc and
    t_commit.

    A long episode may be stored in several trajectories, its pieces. They share `episode`, a text that no other
    episode has; `chunk` numbers them from 0, `first_step` is the time in the episode of a piece's row 0, and
    `continues` is true for every piece but the last. Row 0 of a later piece repeats the last row of the piece before. A
    trajectory that is a whole episode has the defaults.

    The episodes of an actor that holds its task, and of a policy that learns from them, are a history: `history` is
    COLLECTOR/ACTOR/TASK, `history_index` numbers its episodes from 0 in the order in which they were played, pieces of
    one episode alike. Both are None for any other trajectory.

    `policy_version` counts gradient updates of the policy that acted (0: untrained; -1: not a trained policy).
    `success`: whether the goal was reached (None if the task has none); `attempts`: success of each attempt of a
    multi-attempt task, in order. `seed`: of the environment's reset, or that of the collector if an episode has none of
    its own. `epsilon`: mean exploration rate. Times are seconds since the epoch.
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
    episode: str = ""
    chunk: int = 0
    first_step: int = 0
    continues: bool = False
    history: str | None = None
    history_index: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


class Infos(Sequence[TrajectoryInfo]):
    """The facts of several trajectories by columns: `each` has a value for each of them, `shared` all that they have in
    common; a field of floats may be an array. Indexing builds one info, which costs more than all columns of a batch.
    """

    def __init__(self, shared: TrajectoryInfo, each: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        self.shared, self.each = shared, each
        self._count = len(next(iter(each.values())))
        if any(len(values) != self._count for values in each.values()):
            raise ValueError(f"columns of {sorted({len(v) for v in each.values()})} trajectories given together")

    @classmethod
    def of(cls, infos: Sequence[TrajectoryInfo]) -> Infos:
        """Turn `infos` (at least one) into columns."""
        if isinstance(infos, Infos):
            return infos
        names = [info_field.name for info_field in fields(TrajectoryInfo)] if len(infos) > 1 else ["seed"]
        return cls(infos[0], {name: [getattr(info, name) for info in infos] for name in names})

    @classmethod
    def join(cls, several: Sequence[Infos]) -> Infos:
        """Concatenate. Fields that are not in `each` must be the same in all."""
        names = dict.fromkeys(name for infos in several for name in infos.each)
        joined: dict[str, Sequence[Any] | np.ndarray] = {}
        for name in names:
            columns = [
                infos.each[name] if name in infos.each else [getattr(infos.shared, name)] * len(infos)
                for infos in several
            ]
            are_arrays = all(isinstance(column, np.ndarray) for column in columns)
            joined[name] = np.concatenate(columns) if are_arrays else list(chain.from_iterable(columns))
        return cls(several[0].shared, joined)

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


@dataclass(frozen=True)
class Trajectory:
    """The step columns of T + 1 rows (see `pipelines.lake.schema`) and the info of a trajectory."""

    columns: Mapping[str, np.ndarray]
    info: TrajectoryInfo
    uid: str = ""

    @property
    def length(self) -> int:
        """T, the number of actions."""
        return len(self.columns["reward"]) - 1


@dataclass(frozen=True)
class Trajectories:
    """Several consecutive trajectories: `columns` hold the T + 1 rows of each, `rows` their numbers of rows."""

    columns: Mapping[str, np.ndarray]
    rows: Sequence[int]
    infos: Sequence[TrajectoryInfo]

    @classmethod
    def join(cls, several: Sequence[Trajectories]) -> Trajectories:
        """Concatenate trajectories of one schema; see `Infos.join`."""
        if len(several) == 1:
            return several[0]
        columns = {name: np.concatenate([each.columns[name] for each in several]) for name in several[0].columns}
        rows = [count for each in several for count in each.rows]
        return cls(columns, rows, Infos.join([Infos.of(each.infos) for each in several]))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(values.nbytes for values in self.columns.values())

    def __len__(self) -> int:
        return len(self.infos)

    def __iter__(self) -> Iterator[Trajectory]:
        """Yield each trajectory; their columns share memory."""
        start = 0
        for count, info in zip(self.rows, self.infos, strict=True):
            stop = start + count
            yield Trajectory({name: values[start:stop] for name, values in self.columns.items()}, info)
            start = stop
