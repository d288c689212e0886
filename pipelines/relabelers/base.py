"""What a relabeler is: a pure function from a trajectory to other columns for a stretch of it.

The result becomes an overlay: the base trajectory stays as it is, and only the columns named in `columns` are
stored anew, for the rows from `offset` to `offset + length`. A relabeler must say what would have been
recorded had the task been another one; it never invents observations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipelines.lake.trajectory import Trajectory
from pipelines.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Relabeled:
    """`columns`: the changed ones, `length` + 1 rows each; row 0 is row `offset` of the base. `length` in
    actions.
    """

    columns: Mapping[str, np.ndarray]
    length: int
    offset: int
    success: bool | None = None

    def apply(self, base: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The relabelled trajectory whole: the base's rows of this stretch with the changed columns in
        place.
        """
        rows = slice(self.offset, self.offset + self.length + 1)
        return {name: self.columns.get(name, column[rows]) for name, column in base.items()}


class Relabeler(Protocol):
    """`columns`: names of the columns that every result holds; `method`: what the lake records of how they
    came.
    """

    columns: tuple[str, ...]
    method: str

    def relabel(self, trajectory: Trajectory, rng: np.random.Generator) -> Relabeled | None:
        """Another task for `trajectory`, chosen with `rng`; None where there is nothing to choose from."""
        ...


RELABELERS = Registry("relabeler", {"hindsight": "pipelines.relabelers.hindsight:make"})


def make_relabeler(name: str, **options: Any) -> Relabeler:
    """The relabeler called `name` (built in, installed, or `module:attr`), made with `options`.

    UsageError for an unknown name or option.
    """
    return RELABELERS.get(name)(**options)


def generator_for(seed: int, uid: str, copy: int = 0) -> np.random.Generator:
    """The generator for one copy of one trajectory: independent of the order in which they are relabelled."""
    digest = hashlib.sha256(f"{seed}/{uid}/{copy}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))
