"""Trajectories as HDF5: flat arrays as D4RL has them, or a dataset of Minari.

hdf5: `dataset.hdf5` with `observations`, `next_observations` (groups for several columns), `actions`, `rewards`,
`terminals`, `timeouts` and `resets` of all N steps one after another, and `trajectories`, JSON of the rows of the table
`trajectories`. minari: `data/` as Minari 0.5 reads it, pictures as they are. In both, actions are as the environment
takes them, discrete values counted from its own first one; actions that are stored otherwise are float64 there, so that
nothing is lost. `collect --from d4rl:DIR` and `minari:DIR` give the same trajectories again.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.config.atomic import explained, publish, write_atomically
from pipelines.errors import InputMissing
from pipelines.export.items import Exported, Item, plain
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from pipelines.lake.trajectory import Trajectory
from pipelines.sources import d4rl, minari
from pipelines.sources.base import require
from pipelines.sources.intake import is_plain, native
from pipelines.sources.minari import own_paths
from pipelines.sources.minari_hdf5 import FILE

_PENDING_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 18
_PACKED_BYTES = 1 << 14  # of an array of one episode, from which it is worth compressing
_GZIP = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
MINARI_VERSION = "0.5.3"  # whose layout is written
_NAME = re.compile(r"[^-_\w]+")


def flat(items: Iterable[Item], to: Path) -> Exported:
    """`dataset.hdf5` in `to`. InputMissing where the trajectories have different spaces, or without h5py."""
    require("h5py", "hdf5", "--format hdf5")
    target = to / "dataset.hdf5"
    trajectories = steps = 0
    with _written(target) as file:
        arrays: _Flat | None = None
        for item, schema in _of_one_schema(items):
            if arrays is None:
                arrays = _Flat(file, schema)
            trajectory = item.trajectory()
            arrays.add(trajectory, plain(item.row()))
            trajectories, steps = trajectories + 1, steps + trajectory.length
        if arrays is not None:
            arrays.flush()
    size = target.stat().st_size
    return Exported(trajectories=trajectories, steps=steps, written=trajectories, bytes=size)


def minari_dataset(items: Iterable[Item], to: Path) -> Exported:
    """A dataset of Minari in `to`. Errors as `flat`."""
    require("h5py", "hdf5", "--format minari")
    folder = to / "data"
    with explained(f"write '{folder}'"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / minari.METADATA).unlink(missing_ok=True)
    count = steps = 0
    envs: set[str] = set()
    first: Schema | None = None
    with _written(folder / FILE) as file:
        for item, schema in _of_one_schema(items):
            first = schema
            trajectory, row = item.trajectory(), item.row()
            _write_episode(file.create_group(f"episode_{count}"), count, trajectory, row, schema)
            count, steps = count + 1, steps + trajectory.length
            envs.add(row["env"])
    assert first is not None
    size = (folder / FILE).stat().st_size
    metadata = {
        "total_episodes": count,
        "total_steps": steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(_observation_space(first)),
        "action_space": json.dumps(_space(first.spaces.action, action=True)),
        "dataset_id": _dataset_id(to),
        "minari_version": MINARI_VERSION,
        "dataset_size": round(size / 1e6, 1),
        minari.SPACES: json.dumps(first.spaces.to_json()),
        **_env_spec(envs),
    }
    write_atomically(folder / minari.METADATA, json.dumps(metadata))
    return Exported(trajectories=count, steps=steps, written=count, bytes=size)


class _Flat:
    """Growing datasets of one schema."""

    def __init__(self, file: Any, schema: Schema) -> None:
        import h5py

        self._schema = schema
        file.attrs[d4rl.SPACES] = json.dumps(schema.spaces.to_json())
        self._paths = {name: "/".join(path) for name, path in own_paths(list(schema.spaces.observation)).items()}
        self._pending: dict[str, list[np.ndarray]] = {}
        self._bytes = 0
        self._records: list[str] = []
        self._file = file
        text = h5py.string_dtype()
        self._texts = file.create_dataset("trajectories", (0,), maxshape=(None,), dtype=text, chunks=(1024,), **_GZIP)

    def add(self, trajectory: Trajectory, record: Mapping[str, Any]) -> None:
        columns = trajectory.columns
        arrays: dict[str, np.ndarray] = {}
        for name, space in self._schema.spaces.observation.items():
            values, path = outward(columns[name], space), self._paths[name]
            arrays["/".join(filter(None, ["observations", path]))] = values[:-1]
            arrays["/".join(filter(None, ["next_observations", path]))] = values[1:]
        arrays["actions"] = outward(columns[ACTION], self._schema.spaces.action)[1:]
        arrays["rewards"] = columns[REWARD][1:]
        arrays["terminals"] = columns[TERMINATED][1:] != 0
        arrays["timeouts"] = columns[TRUNCATED][1:] != 0
        arrays["timeouts"][-1] |= not arrays["terminals"][-1]
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
                    name, (0, *shape), maxshape=(None, *shape), dtype=values.dtype, chunks=(rows, *shape), **_GZIP
                )
            _extend(self._file[name], values)
        if self._records:
            _extend(self._texts, np.array(self._records, dtype=object))
        self._pending, self._bytes, self._records = {}, 0, []


def _extend(dataset: Any, values: np.ndarray) -> None:
    start = len(dataset)
    dataset.resize(start + len(values), axis=0)
    dataset[start:] = values


def _write_episode(group: Any, number: int, trajectory: Trajectory, row: Mapping[str, Any], schema: Schema) -> None:
    columns, spaces = trajectory.columns, schema.spaces
    resets = np.flatnonzero(columns[RESET]).tolist()
    group.attrs["id"], group.attrs["total_steps"] = number, trajectory.length
    group.attrs["seed"] = int(row["seed"])
    group.attrs[minari.RECORD] = json.dumps({**plain(row), "resets": resets})
    for name, path in own_paths(list(spaces.observation)).items():
        _put(group, "/".join(["observations", *path]), outward(columns[name], spaces.observation[name]))
    _put(group, "actions", outward(columns[ACTION], spaces.action)[1:])
    _put(group, "rewards", columns[REWARD][1:].astype(np.float64))
    _put(group, "terminations", columns[TERMINATED][1:] != 0)
    cut = columns[TRUNCATED][1:] != 0
    cut[-1] |= not columns[TERMINATED][-1]
    _put(group, "truncations", cut)
    group.create_group("infos")


def _put(group: Any, name: str, values: np.ndarray) -> None:
    packed = values.nbytes >= _PACKED_BYTES
    group.create_dataset(name, data=values, **(_GZIP | {"chunks": True} if packed else {}))


def outward(values: np.ndarray, space: Space) -> np.ndarray:
    """Stored values of a space as its environment has them."""
    if isinstance(space, Discrete | MultiDiscrete) and space.start is not None:
        return values + np.asarray(space.start, dtype=values.dtype)
    return native(values, space) if isinstance(space, Box) else values


def _of_one_schema(items: Iterable[Item]) -> Iterator[tuple[Item, Schema]]:
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
def _written(target: Path) -> Iterator[Any]:
    """A new HDF5 file that has its name once it is whole. StageFailed where the disk refuses."""
    import h5py

    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with explained(f"write '{target}'"):
        try:
            with h5py.File(part, "w") as file:
                yield file
            publish(part, target)
        finally:
            part.unlink(missing_ok=True)


def _observation_space(schema: Schema) -> dict[str, Any]:
    tree: dict[str, Any] = {"type": "Dict", "subspaces": {}}
    for name, path in own_paths(list(schema.spaces.observation)).items():
        space = _space(schema.spaces.observation[name])
        if not path:
            return space
        node = tree
        for key in path[:-1]:
            node = node["subspaces"].setdefault(key, {"type": "Dict", "subspaces": {}})
        node["subspaces"][path[-1]] = space
    return tree


def _space(space: Space, *, action: bool = False) -> dict[str, Any]:
    """A space as Minari writes gymnasium's."""
    if isinstance(space, Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": space.start, "n": space.n}
    if isinstance(space, MultiDiscrete):
        start = list(space.start or (0,) * len(space.nvec))
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": list(space.nvec), "start": start}
    if isinstance(space, MultiBinary):
        return {"type": "MultiBinary", "n": space.n}
    dtype = np.dtype(space.dtype)
    if dtype == np.bool_:
        dtype = np.dtype("uint8")
    limits: tuple[Any, Any] = (-np.inf, np.inf)
    if dtype.kind in "iu":
        limits = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if action and isinstance(space, Box) and space.low is not None and space.high is not None:
        low, high = (np.array(bound).reshape(space.shape) for bound in (space.low, space.high))
        dtype = dtype if is_plain(space) else np.dtype("float64")
    else:
        low, high = (np.full(space.shape, limit) for limit in limits)
    return {
        "type": "Box",
        "dtype": str(dtype),
        "shape": list(space.shape),
        "low": low.tolist(),
        "high": high.tolist(),
    }


def _dataset_id(to: Path) -> str:
    name = _NAME.sub("-", to.resolve().name).strip("-") or "dataset"
    return name if re.search(r"-v\d+$", name) else f"{name}-v0"


def _env_spec(envs: set[str]) -> dict[str, str]:
    """What recovers the environment, where it is one of gymnasium's."""
    (env,) = envs if len(envs) == 1 else ("",)
    if not env.startswith("gym:"):
        return {}
    import gymnasium

    try:
        return {"env_spec": gymnasium.spec(env.removeprefix("gym:")).to_json()}
    except (gymnasium.error.Error, TypeError, ModuleNotFoundError):
        return {}  # of a package that is not here, or with arguments that JSON cannot hold
