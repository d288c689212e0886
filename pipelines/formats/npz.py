"""Folders of NPZ files, a trajectory each, in the order of their names.

Ours (`amago export --format npz`): the step columns of T + 1 rows by name, and `trajectory`, JSON with what is known of
it and its spaces. AMAGO's own: `_OBS_KEY_*` of T + 1 rows, `actions`, `rews`, `dones` of T rows, `rl2s`, `goals`; there
an action is in [-1, 1] whatever the bounds of the environment, and a discrete one is one-hot. A name as AMAGO gives it,
`ENV_ID_TIME.npz`, says the environment, which in a set of several is the task too, and when the trajectory ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.files.atomic import write_atomically
from pipelines.files.malformed import explain_damage
from pipelines.formats.archive import NpzArchive
from pipelines.formats.base import BATCH_BYTES, EPISODE, Exported, Item, Request, hash_files
from pipelines.formats.intake import (
    DecodedEpisodes,
    EpisodeValidator,
    infer_action_space,
    infer_space,
    match_spaces,
    read_flags,
)
from pipelines.formats.records import as_json, read_info
from pipelines.lake.schema import ACTION, LABEL, LOGP, OPTIONAL, RESET, REWARD, TERMINATED, TRUNCATED
from pipelines.lake.spaces import OBSERVATION, Discrete, Space, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo

RECORD = "trajectory"
_THEIRS = "_OBS_KEY_"
_FILE_NAME = re.compile(r"(?P<env>[^_]+)_[0-9a-f]{8}_(?P<time>\d{1,12}(\.\d+)?)")
_BUFFER = ("fifo", "protected", "buffer")  # folders below that of a dataset of AMAGO
_NEEDED = ("actions", "rews", "dones")
_OURS = frozenset({ACTION, REWARD, TERMINATED, TRUNCATED, RESET, *OPTIONAL, RECORD})


@dataclass(frozen=True, kw_only=True)
class _File:
    """A trajectory as a file holds it: (T + 1, ...) observations, (T, ...) actions as stored, (T,) rewards."""

    observation: Mapping[str, np.ndarray]
    action: np.ndarray
    reward: np.ndarray
    terminated: bool
    truncated: bool
    reset: np.ndarray
    record: Mapping[str, Any] | None
    label: np.ndarray | None = None
    logp: np.ndarray | None = None

    @classmethod
    def of_ours(cls, values: Mapping[str, np.ndarray], path: Path) -> _File:
        missing = sorted(_OURS - {RECORD, *OPTIONAL} - values.keys())
        if missing:
            raise InputMissing(f"'{path}' lacks {', '.join(missing)}")
        record = json.loads(str(values[RECORD])) if RECORD in values else {}
        rows = {name: len(array) if array.ndim else 0 for name, array in values.items() if name != RECORD}
        if len(set(rows.values())) > 1 or not rows[REWARD]:
            shown = ", ".join(f"{name} {count}" for name, count in sorted(rows.items()))
            raise IntegrityError(f"'{path}' has columns of different lengths: {shown}", hint="fetch or make it again")
        ends = [read_flags(values[name], name, what=f"'{path}'") for name in (TERMINATED, TRUNCATED)]
        if (ends[0] | ends[1])[:-1].any():
            raise IntegrityError(f"'{path}' ends before its last row", hint="a file has one trajectory")
        return cls(
            observation={name: array for name, array in values.items() if name not in _OURS},
            action=values[ACTION][1:],
            reward=values[REWARD][1:],
            terminated=bool(ends[0][-1]),
            truncated=bool(ends[1][-1]),
            reset=values[RESET],
            record=record,
            label=values[LABEL][:-1] if LABEL in values else None,
            logp=values[LOGP][1:] if LOGP in values else None,
        )

    @classmethod
    def of_theirs(cls, values: Mapping[str, np.ndarray], path: Path) -> _File:
        missing = [name for name in _NEEDED if name not in values]
        observed = {name.removeprefix(_THEIRS): array for name, array in values.items() if name.startswith(_THEIRS)}
        if missing or not observed:
            lacking = ", ".join([*missing, *([f"{_THEIRS}*"] * (not observed))])
            hint = f"it has: {', '.join(sorted(values))}"
            if "observations" in values:
                hint = "flat arrays of many episodes are taken from one file: npz:FILE.npz"
            raise InputMissing(f"'{path}' lacks {lacking}", hint=hint)
        if values.get("goals") is not None and values["goals"].size:
            observed["goals"] = values["goals"]
        plain = list(observed) == ["observation"]
        action, over = values["actions"], read_flags(values["dones"], "dones", what=f"'{path}'")
        steps, reset = len(over), np.zeros(len(over) + 1, dtype=np.uint8)
        lengths = {len(action), len(values["rews"])} | {len(array) - 1 for array in observed.values()}
        if lengths != {steps}:
            raise IntegrityError(f"'{path}' has arrays of different lengths", hint="fetch or make it again")
        inputs = values.get("rl2s")
        width = int(np.prod(action.shape[1:], dtype=np.int64))
        if inputs is not None and inputs.ndim == 2 and inputs.shape[1] == width + 3:  # reset, reward, time, action
            reset[1:] = inputs[1:, 0] > 0.5
        return cls(
            observation={OBSERVATION if plain else f"{OBSERVATION}.{name}": array for name, array in observed.items()},
            action=action,
            reward=values["rews"].reshape(-1),
            terminated=bool(steps and over[-1]),
            truncated=False,
            reset=reset,
            record=None,
        )


class NpzImporter:
    """The importer of NPZ files; see the module."""

    def __init__(self, request: Request) -> None:
        folder = Path(request.place)
        if not folder.exists():
            raise InputMissing(f"no folder or file '{folder}'", hint="npz: takes a file, or the folder of several")
        self._settings, self._listener = request.settings, request.listener
        self._what = f"'{folder}'"
        self._files = sorted(folder.rglob("*.npz")) if folder.is_dir() else [folder]
        if not self._files:
            pickled = folder.is_dir() and any(folder.rglob("*.traj"))
            hint = (
                "AMAGO's .traj files are pickles: docs/migrating.md has a script that converts them"
                if pickled
                else None
            )
            raise InputMissing(f"{self._what} has no .npz files", hint=hint)
        place = folder.resolve()
        self.label = next((one.name for one in (place, *place.parents) if one.name not in _BUFFER), place.name)
        self.fingerprint = hash_files([], [(path.name, path.stat().st_size) for path in self._files])
        first = self._read(self._files[0])
        named = _FILE_NAME.fullmatch(self._files[0].stem)
        self.env = str((first.record or {}).get("env", "")) or (named["env"] if named else self.label)
        self.steps: int | None = None
        self.dropped = 0
        self._exported = first.record is not None
        self.labelled, self.logp = first.label is not None, first.logp is not None
        self.spaces = self._find_spaces(first, request.spaces)
        self._intake = EpisodeValidator(
            self.spaces,
            what=self._what,
            clip=self._settings.clip_actions,
            native=False,
            labelled=self.labelled,
            logp=self.logp,
            listener=request.listener,
        )
        self._one_hot = isinstance(self.spaces.action, Discrete) and not self._exported

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _find_spaces(self, first: _File, wanted: Spaces | None) -> Spaces:
        shapes = {name: values.shape[1:] for name, values in first.observation.items()}
        if first.record is not None and "spaces" in first.record:
            own = Spaces.from_json(first.record["spaces"])
            return own if wanted is None else match_spaces(shapes, wanted, what=self._what)
        if wanted is not None:
            return match_spaces(shapes, wanted, what=self._what)
        observation: dict[str, Space] = {
            name: infer_space(values.shape[1:], values.dtype) for name, values in first.observation.items()
        }
        action: Space
        if count := self._settings.num_actions or self._count_choices():
            action = Discrete(n=count)
        else:
            action = infer_action_space(first.action, None, self._settings, what=self._what)
        return Spaces(observation=observation, action=action)

    def _count_choices(self) -> int:
        """Count the choices if every action of every file is one-hot, else 0."""
        width = 0
        for path in self._files:
            with NpzArchive(path) as archive:
                actions = archive["actions"] if "actions" in archive else np.zeros(0)
            if actions.ndim != 2 or actions.shape[-1] < 2 or not _is_one_hot(actions).all():
                return 0
            width = int(actions.shape[-1])
        text = f"{self._what}: every action is one-hot, so it is read as one of {width} choices"
        self._listener(Notice(text=f"{text} (if it is {width} numbers, name the environment with --env)"))
        return width

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        held: list[tuple[int, _File]] = []
        size = self.dropped = 0
        for number in range(start, len(self._files)):
            file = self._read(self._files[number])
            if not len(file.reward):
                self.dropped += 1
                continue
            self._require_same_columns(number, file, self._files[number])
            held.append((number, file))
            size += sum(values.nbytes for values in file.observation.values())
            if size >= BATCH_BYTES:
                yield self._batch(held)
                held, size = [], 0
        if held:
            yield self._batch(held)

    def _require_same_columns(self, number: int, file: _File, path: Path) -> None:
        missing = [name for name in self.spaces.observation if name not in file.observation]
        for name, has, wanted in ((LABEL, file.label, self.labelled), (LOGP, file.logp, self.logp)):
            if (has is not None) != wanted:
                verb = "has no" if wanted else "has"
                raise InputMissing(f"'{path}' {verb} {OPTIONAL[name]}, unlike the files before it")
        more = [name for name in file.observation if name not in self.spaces.observation]
        if missing or more:
            differences = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has also {', '.join(more)}"] * bool(more)
            raise InputMissing(f"'{path}' has other observations than the files before it: {'; '.join(differences)}")
        if (file.record is not None) != self._exported:
            raise InputMissing(f"'{path}' is of another kind than the files before it")
        self._intake.require_shapes(number, file.observation, file.action)
        if self._one_hot and file.action.ndim == 2 and file.action.shape[1] > 1:
            fine = _is_one_hot(file.action)
            if not fine.all():
                raise InputMissing(
                    f"'{path}': the action of step {int(np.argmin(fine))} is not one-hot, and the environment's are "
                    f"{file.action.shape[1]} choices",
                    hint="name the environment it comes from with --env",
                )

    def _batch(self, held: list[tuple[int, _File]]) -> Trajectories:
        files = [file for _, file in held]
        over = np.array([file.terminated for file in files])
        action = np.concatenate([file.action for file in files])
        raw = DecodedEpisodes(
            rows=[len(file.reward) + 1 for file in files],
            observation={
                name: np.concatenate([file.observation[name] for file in files]) for name in self.spaces.observation
            },
            action=action.argmax(axis=-1) if self._one_hot and action.ndim > 1 and action.shape[1] > 1 else action,
            reward=np.concatenate([file.reward for file in files]),
            terminated=over,
            truncated=np.array([file.truncated for file in files]) | ~over,
            reset=np.concatenate([file.reset for file in files]),
            label=np.concatenate([file.label for file in files if file.label is not None]) if self.labelled else None,
            logp=np.concatenate([file.logp for file in files if file.logp is not None]) if self.logp else None,
        )
        columns = self._intake.columns(raw, first=held[0][0])
        return Trajectories(columns, raw.rows, [self._info(number, file) for number, file in held])

    def _info(self, number: int, file: _File) -> TrajectoryInfo:
        tags = {EPISODE: str(number), "file": self._files[number].name}
        if file.record is not None:
            return read_info(file.record, source="npz", tags=tags)
        named = _FILE_NAME.fullmatch(self._files[number].stem)
        if named is None:
            return TrajectoryInfo(env=self.label, task=self._settings.task or self.label, source="npz", tags=tags)
        task, ended = self._settings.task or named["env"], float(named["time"])
        return TrajectoryInfo(env=named["env"], task=task, t_start=ended, t_end=ended, source="npz", tags=tags)

    def _read(self, path: Path) -> _File:
        with NpzArchive(path) as archive:
            values = {name: archive[name] for name in archive.names()}
        with explain_damage(path, hint="fetch or make it again"):
            return (
                _File.of_ours(values, path) if RECORD in values or ACTION in values else _File.of_theirs(values, path)
            )


def _is_one_hot(actions: np.ndarray) -> np.ndarray:
    """Whether a row of (n, k) actions is one 1 and otherwise zeros, (n,)."""
    return np.asarray(((actions == 0) | (actions == 1)).all(axis=1) & (actions.sum(axis=1) == 1))


def is_flat(path: Path) -> bool:
    """Whether a file has flat arrays of many episodes, by names such as D4RL's, and not one trajectory."""
    if not path.is_file():
        return False
    with NpzArchive(path) as archive:
        names = set(archive.names())
    return not names & {RECORD, ACTION, "rews"} and not any(name.startswith(_THEIRS) for name in names)


def write(items: Iterable[Item], to: Path, about: Mapping[str, Any]) -> Exported:
    """Write a file for each trajectory, `UID.npz`, into the folder `to`; one that is there is not written again, unless
    it is of an episode in pieces, which may have grown."""
    trajectories = steps = written = size = 0
    for item in items:
        path = to / f"{item.uid}.npz"
        row = item.row()
        trajectories, steps = trajectories + 1, steps + row["length"]
        if not path.exists() or len(item.pieces) > 1:
            record = json.dumps({**as_json(row), "spaces": item.schema().spaces.to_json()})
            columns: dict[str, Any] = {**item.trajectory().columns, RECORD: np.array(record)}
            write_atomically(path, partial(np.savez_compressed, **columns))
            written += 1
        size += path.stat().st_size
    return Exported(trajectories=trajectories, steps=steps, written=written, bytes=size)
