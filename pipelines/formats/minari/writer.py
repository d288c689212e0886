"""Trajectories as a dataset of Minari: `data/` as Minari 0.5 reads it, pictures as they are.

Its spaces are those of the environment that was played, with its bounds and texts, where that is registered with
gymnasium or the trajectories came from a dataset of Minari; then an episode has the seed of its reset, and the dataset
an `env_spec`, from which the environment can be made again. Elsewhere they are what the lake knows. Actions are as the
environment takes them. `infos` has `success`, where the lake knows it, soft resets (`reset`), and the columns that came
from another dataset's infos. `collect --from minari:DIR` gives the same trajectories again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.files.atomic import explain_errors, write_atomically
from pipelines.formats.base import Exported, Item
from pipelines.formats.flat.writer import CHECKED, GZIP, as_native, create_file, require_one_schema
from pipelines.formats.intake import is_plain
from pipelines.formats.minari import episodes as minari
from pipelines.formats.minari.reader import find_paths
from pipelines.formats.records import as_json
from pipelines.lake import collectors
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.spaces import LENGTH, Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space
from pipelines.lake.trajectory import Trajectory
from pipelines.registry import require_package

_PACKED_BYTES = 1 << 14  # of an array of one episode, from which it is worth compressing
MINARI_VERSION = "0.5.3"  # whose layout is written
_NAME = re.compile(r"[^-_\w]+")
_GYMNASIUM = {"gym": "gymnasium", "robotics": "gymnasium_robotics"}  # prefix -> the package that registers
_OURS = frozenset({"name", "source", "success_key", "max_length", "max_episode_steps"})
_TAGS = ("algorithm_name", "author", "author_email", "code_permalink", "description")


def write(items: Iterable[Item], to: Path, about: Mapping[str, Any]) -> Exported:
    """Write a dataset of Minari to `to`; `about` may have its `author` and `description`.

    InputMissing where the trajectories have different spaces, or without h5py.
    """
    require_package("h5py", "hdf5", "--format minari")
    folder = to / "data"
    with explain_errors(f"write '{folder}'"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / minari.METADATA).unlink(missing_ok=True)
    count = steps = 0
    known = _Known()
    form: _Form | None = None
    with create_file(folder / minari.FILE) as file:
        for item, schema in require_one_schema(items):
            trajectory, row = item.trajectory(), item.row()
            known.add(item, row)
            if form is None:
                form = _Form.of(schema, known.environment())
            form.write(file.create_group(f"episode_{count}"), count, trajectory, row)
            count, steps = count + 1, steps + trajectory.length
    assert form is not None
    size = (folder / minari.FILE).stat().st_size
    name = _NAME.sub("-", to.resolve().name).strip("-") or "dataset"
    metadata = {
        "total_episodes": count,
        "total_steps": steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(form.observation),
        "action_space": json.dumps(form.action),
        "dataset_id": name if re.search(r"-v\d+$", name) else f"{name}-v0",
        "minari_version": MINARI_VERSION,
        "dataset_size": round(size / 1e6, 1),
        minari.SPACES: json.dumps(form.schema.spaces.to_json()),
        minari.OUR_INFOS: json.dumps(form.infos),
        **known.metadata(about, count),
    }
    write_atomically(folder / minari.METADATA, json.dumps(metadata))
    return Exported(trajectories=count, steps=steps, written=count, bytes=size)


@dataclass
class _Known:
    """The common ground of trajectories: environments, policies and tags."""

    envs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    policies: set[str] = field(default_factory=set)
    tags: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in _TAGS})
    _collectors: Mapping[str, Mapping[str, Any]] | None = None

    def add(self, item: Item, row: Mapping[str, Any]) -> None:
        """Add another trajectory."""
        if self._collectors is None:
            self._collectors = collectors.read_all(item.reader.lake)
        env = (self._collectors.get(row["collector"]) or {}).get("env")
        settings = env if isinstance(env, Mapping) and env.get("name") == row["env"] else {"name": row["env"]}
        self.envs[json.dumps(settings, sort_keys=True, default=str)] = settings
        self.policies.add(str(row["policy_id"]))
        tags = dict(row["tags"] or ())
        for name, values in self.tags.items():
            values.add(tags.get(name, ""))

    def environment(self) -> Mapping[str, Any]:
        """Find `env_spec` and `observation_space`, if there is one environment and it is known."""
        return _describe_environment(next(iter(self.envs.values()))) if len(self.envs) == 1 else {}

    def metadata(self, about: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Write the metadata that name the environment and the origin of the data."""
        spec = self.environment().get("env_spec")
        found: dict[str, Any] = {name: next(iter(v)) for name, v in self.tags.items() if len(v) == 1 and v != {""}}
        found |= {name: about[name] for name in ("author", "description") if about.get(name)}
        if self.policies - {""}:
            found.setdefault("algorithm_name", ", ".join(sorted(self.policies - {""})))
        names = ", ".join(sorted({str(env.get("name")) for env in self.envs.values()}))
        where = f" where {about['where']}" if about.get("where") else ""
        found.setdefault("description", f"{count} episodes of {names}, exported by amago{where}")
        for name in ("author", "author_email"):
            if name in found:
                found[name] = [part.strip() for part in str(found[name]).split(",")]
        return found | ({"env_spec": spec} if spec else {})


@dataclass(frozen=True)
class _Form:
    """The layout of trajectories of one schema: Minari's spaces, and for each column its path and dtype (None: as it
    is; `str`: a text). `seeds`: the environment can be reset with the seed of an episode.
    `infos`: columns that are written to `infos`.
    """

    schema: Schema
    observation: Mapping[str, Any]
    action: Mapping[str, Any]
    columns: Mapping[str, tuple[str, Any]]
    seeds: bool
    infos: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: Schema, environment: Mapping[str, Any]) -> _Form:
        """Take the environment's spaces where they are those of the schema, else what the schema knows of them."""
        infos = dict(environment.get(minari.INFOS) or {})
        spaces = {name: space for name, space in schema.spaces.observation.items() if name not in infos}
        seeds = bool(environment.get("env_spec"))
        lengths = {f"{name}.{LENGTH}" for name, space in spaces.items() if isinstance(space, Ragged)}
        paths = find_paths([name for name in spaces if name not in lengths])
        action = _convert(schema.spaces.action, action=True)
        found = environment.get("observation_space") or {}
        leaves: dict[str, Mapping[str, Any]] = {}  # {} where the environment's spaces have no such part
        for name, path in paths.items():
            space = found
            for key in path:
                space = (space.get("subspaces") or {}).get(key, {}) if space.get("type") == "Dict" else {}
            leaves[name] = space
        if len(leaves) == _count_leaves(found) and all(_is_same(leaf, spaces[name]) for name, leaf in leaves.items()):
            columns: dict[str, tuple[str, Any]] = {}
            for name, path in paths.items():
                kind, dtype = leaves[name].get("type"), leaves[name].get("dtype")
                stored = np.dtype(dtype) if kind in ("Box", "Discrete", "MultiDiscrete") else None
                columns[name] = "/".join(path), str if kind == "Text" else stored
            return cls(schema, found, action, columns, seeds, infos)
        own = find_paths(list(spaces))
        columns = {name: ("/".join(path), None) for name, path in own.items()}
        return cls(schema, _convert_all(spaces), action, columns, seeds, infos)

    def write(self, group: Any, number: int, trajectory: Trajectory, row: Mapping[str, Any]) -> None:
        """Write an episode."""
        import h5py

        columns, spaces = trajectory.columns, self.schema.spaces
        resets = np.flatnonzero(columns[RESET]).tolist()
        group.attrs["id"], group.attrs["total_steps"] = number, trajectory.length
        if self.seeds:
            group.attrs["seed"] = int(row["seed"])
        group.attrs[minari.RECORD] = json.dumps({**as_json(row), "resets": resets})
        for name, (path, dtype) in self.columns.items():
            values = as_native(columns[name], spaces.observation[name])
            if dtype is str:
                rows = zip(values.tolist(), columns[f"{name}.{LENGTH}"].tolist(), strict=True)
                texts = ["".join(map(chr, row[:length])) for row, length in rows]
                place = "/".join(filter(None, ["observations", path]))
                group.create_dataset(place, data=texts, dtype=h5py.string_dtype())
            else:
                values = values if dtype is None else values.astype(dtype, copy=False)
                _put(group, "/".join(filter(None, ["observations", path])), values)
        _put(group, "actions", as_native(columns[ACTION], spaces.action)[1:])
        _put(group, "rewards", columns[REWARD][1:].astype(np.float64))
        _put(group, "terminations", columns[TERMINATED][1:] != 0)
        cut = columns[TRUNCATED][1:] != 0
        cut[-1] |= not columns[TERMINATED][-1]
        _put(group, "truncations", cut)
        infos = group.create_group(minari.INFOS)
        for name, path in self.infos.items():
            _put(infos, path, columns[name])
        if columns[RESET].any():
            _put(infos, "reset", columns[RESET] != 0)
        if row["success"] is not None:  # of every row, as Minari has them: it holds at the end
            _put(infos, "success", (np.arange(trajectory.length + 1) == trajectory.length) & bool(row["success"]))


def _put(group: Any, name: str, values: np.ndarray) -> None:
    packed = values.nbytes >= _PACKED_BYTES
    # Only chunks have checksums. A small array is one chunk, whose index this layout keeps in a few bytes.
    chunks = True if packed else tuple(max(size, 1) for size in values.shape)
    group.create_dataset(name, data=values, chunks=chunks, **CHECKED, **(GZIP if packed else {}))


def _count_leaves(space: Mapping[str, Any]) -> int:
    if space.get("type") == "Dict":
        return sum(map(_count_leaves, space["subspaces"].values()))
    return 1


def _is_same(theirs: Mapping[str, Any], ours: Space) -> bool:
    """Whether values of a space of the lake are values of one of Minari's."""
    kind = theirs.get("type")
    if isinstance(ours, Ragged):
        return kind == "Text"
    if isinstance(ours, Box):
        return kind == "Box" and tuple(theirs["shape"]) == tuple(ours.shape)
    if isinstance(ours, Discrete):
        return kind == "Discrete" and (theirs["n"], theirs.get("start", 0)) == (ours.n, ours.start)
    if isinstance(ours, MultiDiscrete):
        start = np.zeros(len(ours.nvec)) if ours.start is None else np.array(ours.start)
        same = kind == "MultiDiscrete" and np.array_equal(np.ravel(theirs["nvec"]), ours.nvec)
        return bool(same and np.array_equal(np.ravel(theirs.get("start", np.zeros(len(ours.nvec)))), start))
    return kind == "MultiBinary" and int(np.prod(theirs["n"])) == ours.n


def _convert_all(spaces: Mapping[str, Space]) -> dict[str, Any]:
    tree: dict[str, Any] = {"type": "Dict", "subspaces": {}}
    for name, path in find_paths(list(spaces)).items():
        space = _convert(spaces[name])
        if not path:
            return space
        node = tree
        for key in path[:-1]:
            node = node["subspaces"].setdefault(key, {"type": "Dict", "subspaces": {}})
        node["subspaces"][path[-1]] = space
    return tree


def _convert(space: Space, *, action: bool = False) -> dict[str, Any]:
    """Convert a space of the lake to Minari's JSON."""
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


def _describe_environment(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the environment of a collector's settings: `env_spec`, a text, and `observation_space`; {} where
    gymnasium does not know it.

    What a dataset of Minari said of its own is repeated. Nothing is imported that the settings name.
    """
    source = settings.get("source")
    if isinstance(source, Mapping):
        return dict(source.get("described") or {})
    prefix, _, name = str(settings.get("name", "")).partition(":")
    params = {key: value for key, value in settings.items() if key not in _OURS and value is not None}
    if prefix not in _GYMNASIUM or ":" in name or any(":" in v for v in params.values() if isinstance(v, str)):
        return {}
    import gymnasium

    try:
        if prefix == "robotics":
            import gymnasium_robotics

            gymnasium.register_envs(gymnasium_robotics)
        kwargs = params | ({"max_episode_steps": limit} if (limit := settings.get("max_episode_steps")) else {})
        env = gymnasium.make(name, disable_env_checker=True, **kwargs)
    except Exception:  # whatever a package that is not here, or an environment, raises
        return {}
    try:
        spec = env.spec.to_json() if env.spec is not None else ""
        return {"env_spec": spec, "observation_space": _convert_gymnasium(env.observation_space)}
    except (TypeError, ValueError, gymnasium.error.Error):
        return {}  # arguments that JSON cannot hold
    finally:
        env.close()


def _convert_gymnasium(space: Any) -> dict[str, Any]:
    """Convert a space of gymnasium to Minari's JSON; {} for a kind that Minari does not know."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {key: _convert_gymnasium(member) for key, member in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        low, high = space.low.tolist(), space.high.tolist()
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), "low": low, "high": high}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec.tolist(), space.start.tolist()
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), "nvec": nvec, "start": start}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": json.loads(json.dumps(space.n, default=int))}
    if isinstance(space, spaces.Text):
        limits = {"max_length": space.max_length, "min_length": space.min_length}
        return {"type": "Text", **limits, "charset": space.characters}
    return {}
