"""Trajectories as HDF5 in D4RL's form: flat arrays of all N steps one after another.

`dataset.hdf5` has `observations`, `next_observations` (groups for several columns), `actions`, `rewards`, `terminals`,
`timeouts` and `resets`, and `trajectories`, JSON of the rows of the table `trajectories`. Only a step that is not
terminal is a timeout, as D4RL's readers expect. Actions are as the environment takes them, discrete values counted from
its own first one; actions that are stored otherwise are float64, so that nothing is lost. `collect --from hdf5:DIR`
gives the same trajectories again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.files.atomic import explain_errors, publish
from pipelines.formats.base import Exported, Item
from pipelines.formats.flat import reader as d4rl
from pipelines.formats.intake import restore_actions
from pipelines.formats.minari.reader import find_paths
from pipelines.formats.records import as_json
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete, Space
from pipelines.lake.trajectory import Trajectory
from pipelines.registry import require_package

_PENDING_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 18
GZIP = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
# Not for texts: HDF5 has no filters for them.
CHECKED = {"fletcher32": True}
# The first layout of HDF5 whose metadata have checksums; HDF5 1.10 (2016) and newer read it.
LAYOUT = ("v110", "v110")


def write(items: Iterable[Item], to: Path, about: Mapping[str, Any]) -> Exported:
    """Write `dataset.hdf5` into `to`. InputMissing where the trajectories have different spaces, or without h5py."""
    require_package("h5py", "hdf5", "--format hdf5")
    target = to / "dataset.hdf5"
    trajectories = steps = 0
    with create_file(target) as file:
        arrays: _Flat | None = None
        for item, schema in require_one_schema(items):
            if arrays is None:
                arrays = _Flat(file, schema)
            trajectory = item.trajectory()
            arrays.add(trajectory, as_json(item.row()))
            trajectories, steps = trajectories + 1, steps + trajectory.length
        if arrays is not None:
            arrays.flush()
    size = target.stat().st_size
    return Exported(trajectories=trajectories, steps=steps, written=trajectories, bytes=size)


class _Flat:
    """Growing datasets of one schema."""

    def __init__(self, file: Any, schema: Schema) -> None:
        import h5py

        self._schema = schema
        file.attrs[d4rl.SPACES] = json.dumps(schema.spaces.to_json())
        self._paths = {name: "/".join(path) for name, path in find_paths(list(schema.spaces.observation)).items()}
        self._pending: dict[str, list[np.ndarray]] = {}
        self._bytes = 0
        self._records: list[str] = []
        self._file = file
        text = h5py.string_dtype()
        self._texts = file.create_dataset("trajectories", (0,), maxshape=(None,), dtype=text, chunks=(1024,), **GZIP)

    def add(self, trajectory: Trajectory, record: Mapping[str, Any]) -> None:
        columns = trajectory.columns
        arrays: dict[str, np.ndarray] = {}
        for name, space in self._schema.spaces.observation.items():
            values, path = as_native(columns[name], space), self._paths[name]
            arrays["/".join(filter(None, ["observations", path]))] = values[:-1]
            arrays["/".join(filter(None, ["next_observations", path]))] = values[1:]
        arrays["actions"] = as_native(columns[ACTION], self._schema.spaces.action)[1:]
        arrays["rewards"] = columns[REWARD][1:]
        arrays["terminals"] = columns[TERMINATED][1:] != 0
        arrays["timeouts"] = (columns[TRUNCATED][1:] != 0) & ~arrays["terminals"]
        arrays["timeouts"][-1] = not arrays["terminals"][-1]
        arrays["resets"] = columns[RESET][1:]
        for name, values in arrays.items():
            self._pending.setdefault(name, []).append(values)
            self._bytes += values.nbytes
        self._records.append(json.dumps(record))
        if self._bytes >= _PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        for name, parts in self._pending.items():
            values = np.concatenate(parts)
            if name not in self._file:
                rows = max(_CHUNK_BYTES // max(values[:1].nbytes, 1), 1)
                shape = values.shape[1:]
                self._file.create_dataset(
                    name,
                    (0, *shape),
                    maxshape=(None, *shape),
                    dtype=values.dtype,
                    chunks=(rows, *shape),
                    **GZIP,
                    **CHECKED,
                )
            self._extend(self._file[name], values)
        if self._records:
            self._extend(self._texts, np.array(self._records, dtype=object))
        self._pending, self._bytes, self._records = {}, 0, []

    def _extend(self, dataset: Any, values: np.ndarray) -> None:
        start = len(dataset)
        dataset.resize(start + len(values), axis=0)
        dataset[start:] = values


def as_native(values: np.ndarray, space: Space) -> np.ndarray:
    """Convert stored values of a space to those of its environment."""
    if isinstance(space, Discrete | MultiDiscrete) and space.start is not None:
        return values + np.asarray(space.start, dtype=values.dtype)
    return restore_actions(values, space) if isinstance(space, Box) else values


def require_one_schema(items: Iterable[Item]) -> Iterator[tuple[Item, Schema]]:
    """Yield trajectories with their schema. InputMissing at the first of another schema."""
    first: Schema | None = None
    for item in items:
        schema = item.schema()
        if first is not None and schema.id != first.id:
            raise InputMissing(
                "these trajectories have different spaces, and such a file holds those of one",
                hint="choose some by --where, e.g. \"env = 'tmaze'\", or take --format parquet",
            )
        first = schema
        yield item, schema


@contextlib.contextmanager
def create_file(target: Path) -> Iterator[Any]:
    """Write a new HDF5 file, which is renamed to `target` once it is complete. StageFailed if the disk refuses."""
    import h5py

    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with explain_errors(f"write '{target}'"):
        try:
            with h5py.File(part, "w", libver=LAYOUT) as file:
                yield file
            publish(part, target)
        finally:
            part.unlink(missing_ok=True)
