"""The columns of a step, identified by a hash of their meaning.

"Arrival" convention: a trajectory of T actions has T + 1 rows. Row t holds the observation o_t and what led to it: the
executed action a_{t-1} and reward r_t (zeros in row 0), `terminated`, `truncated` (set in the last row only) and
`reset` (1 where a soft reset returned the agent to the start within the rollout). In a labelled lake, row t also holds
a `label`: the action that another policy would have taken at o_t, such as an expert. The last row of an episode has
none (zeros), as no action follows. In a lake with `logp`, row t also holds the log-probability with which the collector
took a_{t-1}, exploration included (zero in row 0).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipelines.lake.spaces import Ragged, Spaces

ACTION, REWARD, LABEL, LOGP = "action", "reward", "label", "logp"
OPTIONAL = {LABEL: "labels", LOGP: "logp"}  # columns that collect.NAME adds, and what messages call them
TERMINATED, TRUNCATED, RESET = "terminated", "truncated", "reset"
_BLOB_BYTES = 1024  # a column at least this wide per step is stored compressed


@dataclass(frozen=True, kw_only=True)
class Column:
    """One value per step: numpy `dtype`, `shape` of one step, `role` (observation, action, reward, flag, label,
    logp). A `ragged` column is padded with zeros and therefore always compressed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    ragged: bool = False

    @property
    def step_bytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * math.prod(self.shape))

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype on disk. Booleans take a byte each: Arrow packs its own into bits, which cannot be mapped."""
        dtype = np.dtype(self.dtype)
        return np.dtype("uint8") if dtype == np.bool_ else dtype

    @property
    def is_blob(self) -> bool:
        return self.ragged or self.step_bytes >= _BLOB_BYTES

    def as_stored(self, values: np.ndarray) -> np.ndarray:
        """Convert `values` to a C-contiguous array of the dtype on disk."""
        dtype = self.stored_dtype
        return np.ascontiguousarray(values.view(dtype) if values.dtype == np.bool_ else values, dtype=dtype)


def digest(data: Any) -> str:
    """Return the id of a schema given as JSON: the first 16 hex digits of the SHA-256 of its canonical form."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Schema:
    """The step columns of an environment's spaces, with labels if they are `labelled`, and with the actions'
    log-probabilities if they have `logp`. Equal columns have equal ids."""

    spaces: Spaces
    labelled: bool = False
    logp: bool = False

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        observation = [
            Column(
                name=name,
                dtype=space.dtype,
                shape=space.shape,
                role="observation",
                ragged=isinstance(space, Ragged),
            )
            for name, space in self.spaces.observation.items()
        ]
        action = self.spaces.action
        return (
            *observation,
            Column(name=ACTION, dtype=action.dtype, shape=action.shape, role="action"),
            Column(name=REWARD, dtype="float32", shape=(), role="reward"),
            *(Column(name=n, dtype="uint8", shape=(), role="flag") for n in (TERMINATED, TRUNCATED, RESET)),
            *([Column(name=LABEL, dtype=action.dtype, shape=action.shape, role="label")] if self.labelled else []),
            *([Column(name=LOGP, dtype="float32", shape=(), role="logp")] if self.logp else []),
        )

    @cached_property
    def id(self) -> str:
        return digest(self.to_json())

    @property
    def step_bytes(self) -> int:
        return sum(column.step_bytes for column in self.columns)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def to_json(self) -> dict[str, Any]:
        return {"spaces": self.spaces.to_json()} | {
            "columns": [[c.name, c.dtype, list(c.shape), c.role] for c in self.columns]
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        roles = {role for *_, role in data["columns"]}
        return cls(Spaces.from_json(data["spaces"]), labelled="label" in roles, logp="logp" in roles)

    @property
    def optional(self) -> list[str]:
        """The optional columns that it has."""
        return [name for name, has in ((LABEL, self.labelled), (LOGP, self.logp)) if has]

    def find_difference(self, other: Schema) -> str | None:
        """Find an optional column that only one of the two has; None if both have the same ones."""
        return next((name for name in OPTIONAL if (name in self.optional) != (name in other.optional)), None)

    def empty(self, rows: int) -> dict[str, np.ndarray]:
        """Make zeroed step columns of `rows` rows."""
        return {c.name: np.zeros((rows, *c.shape), dtype=c.dtype) for c in self.columns}
