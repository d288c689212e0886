"""Trajectories in HDF5 with arrays of their own: demonstrations of robomimic and LIBERO, replay buffers of d3rlpy.

robomimic and LIBERO have a group for each trajectory, `data/demo_0`, `data/demo_1`, ...

    obs/*                 T rows each, nested groups too; each becomes obs.NAME
    actions, rewards      T rows; without rewards they are 0
    dones                 optional: the last one says whether the trajectory terminated (earlier ones are not used)
    next_obs/*            optional: what each step led to; without it see `source.missing_final`
    data.attrs            env_args and problem_info, JSON: the environment's name, and the instruction as goal_text
    mask/*                optional: names of demonstrations; becomes the tag `mask`

`ReplayBuffer.dump` of d3rlpy 2 numbers the arrays of trajectory i:

    observations_i        T rows; for tuples of observations observations_i_0, observations_i_1, ...: obs.0, obs.1, ...
    actions_i, rewards_i  T rows; actions that are whole numbers are discrete
    terminated_i          whether the trajectory terminated; otherwise it was cut

`source.columns` chooses: `{"obs.eef" = "obs/robot0_eef_pos"}` takes that observation alone, `obs/object[0:3]` some
columns of one; action, reward and terminated name what is called otherwise.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.formats.base import BATCH_BYTES, EPISODE, Request, as_tags, hash_files
from pipelines.formats.flat.arrays import open_array, split_slice
from pipelines.formats.hdf5 import as_scalar, open_file, reading, walk_leaves
from pipelines.formats.intake import EpisodeValidator, infer_action_space, infer_space, match_spaces, read_flags
from pipelines.formats.transitions import Steps
from pipelines.lake.schema import ACTION, REWARD, TERMINATED
from pipelines.lake.spaces import OBSERVATION, Space, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo

_GROUP, _OBS, _NEXT = "data", "obs", "next_obs"
_LARGEST = 4 << 30  # bytes of one demonstration
_LONGEST_TEXT = 4_096
_NUMBER = re.compile(r"(\d+)$")
_D3RLPY = ("columns", "num_episodes", "version")
_D3RLPY_OBSERVATION = re.compile(r"observations_(\d{1,9})(?:_(\d{1,9}))?")


@dataclass(frozen=True, kw_only=True)
class _Demonstration:
    """One demonstration of T steps. `following`: the next observations, by column; empty where the file has none."""

    number: int
    name: str
    observation: Mapping[str, np.ndarray]
    following: Mapping[str, np.ndarray]
    action: np.ndarray
    reward: np.ndarray
    terminated: bool


def find_kind(file: Any) -> str | None:
    """Find out whether an open HDF5 file has trajectories as "robomimic" or "d3rlpy" keep them; None if neither."""
    group = file.get(_GROUP)
    if hasattr(group, "keys") and any("actions" in group[name] for name in group if hasattr(group[name], "keys")):
        return RobomimicImporter.source
    return D3rlpyImporter.source if all(name in file for name in _D3RLPY) else None


class _DemonstrationImporter(ABC):
    """An importer of trajectories that have arrays of their own; subclasses know how a file names them."""

    labelled = logp = False

    source: str
    names: Mapping[str, str]
    """The arrays of a trajectory."""

    def __init__(self, request: Request) -> None:
        self._settings, self._path = request.settings, Path(request.place)
        self._what = f"'{self._path}'"
        self.label = self._path.stem
        self.dropped = 0
        self.steps: int | None = None
        self._file = open_file(self._path)
        self.fingerprint = hash_files([self._path])
        try:
            with reading(self._path):
                self._open(request)
        except BaseException:
            self._file.close()
            raise
        self._intake = EpisodeValidator(
            self.spaces, what=self._what, clip=self._settings.clip_actions, listener=request.listener
        )

    def _open(self, request: Request) -> None:
        self.env, self._goal, self._masks = self.label, "", dict[str, list[str]]()
        self._names = self._find_names()
        self._arrays = {ours: self._settings.columns.get(ours, theirs) for ours, theirs in self.names.items()}
        first = self._open_group(self._names[0])
        self._places = self._choose_arrays(first)
        self._followed = _NEXT in first
        self._absent = {ours for ours in (REWARD, TERMINATED) if split_slice(self._arrays[ours])[0] not in first}
        self.spaces = self._find_spaces(self._read(0), request.spaces)
        for ours, assumed in ((REWARD, "rewards are 0"), (TERMINATED, "trajectories end truncated")):
            if ours in self._absent:
                text = f"{self._what} has no '{self._arrays[ours]}': {assumed}"
                request.listener(Notice(text=text, level="warning"))

    def close(self) -> None:
        self._file.close()

    @abstractmethod
    def _find_names(self) -> Sequence[str]:
        """Find the names of the trajectories, at least one, in order."""

    @abstractmethod
    def _open_group(self, name: str) -> Any:
        """Open the group of a trajectory's arrays."""

    @abstractmethod
    def _find_observations(self, first: Any) -> dict[str, str]:
        """Map all columns of observations to arrays of a trajectory."""

    def _choose_arrays(self, first: Any) -> dict[str, str]:
        """Map columns to arrays of a trajectory, as the user wants them."""
        given = {name: theirs for name, theirs in self._settings.columns.items() if name not in self.names}
        unknown = [name for name in given if name.partition(".")[0] != OBSERVATION]
        if unknown:
            raise InputMissing(
                f"source.columns: unknown names: {', '.join(unknown)}",
                hint=f"known: {OBSERVATION}, {OBSERVATION}.NAME, {', '.join(self.names)}",
            )
        return given or self._find_observations(first)

    def _find_spaces(self, first: _Demonstration, wanted: Spaces | None) -> Spaces:
        shapes = {name: values.shape[1:] for name, values in first.observation.items()}
        if wanted is not None:
            return match_spaces(shapes, wanted, what=self._what)
        observation: dict[str, Space] = {
            name: infer_space(values.shape[1:], values.dtype) for name, values in first.observation.items()
        }
        action = infer_action_space(first.action, self._find_largest, self._settings, what=self._what)
        return Spaces(observation=observation, action=action)

    def _find_largest(self) -> int:
        actions = (self._read(number).action for number in range(len(self._names)))
        return max((int(each.max()) for each in actions if each.size), default=0)

    def _read(self, number: int) -> _Demonstration:
        """Read the demonstration of this number. IntegrityError if its arrays do not agree."""
        name, group = self._names[number], self._open_group(self._names[number])
        inside = group.name.lstrip("/")
        found = {column: open_array(group, place, path=self._path) for column, place in self._places.items()}
        after = {
            column: open_array(group, place.replace(_OBS, _NEXT, 1), path=self._path)
            for column, place in self._places.items()
            if self._followed and place.startswith(f"{_OBS}/")
        }
        others = {
            ours: open_array(group, t, path=self._path) for ours, t in self._arrays.items() if ours not in self._absent
        }
        every: list[Any] = [*found.values(), *after.values(), *others.values()]
        size = sum(int(np.prod(values.shape, dtype=np.float64)) * values.dtype.itemsize for values in every)
        if size > _LARGEST:
            raise IntegrityError(f"{self._what}: '{inside}' has {size:,} bytes, more than {_LARGEST:,}")
        of_steps = [values for values in every if values.shape or values is not others.get(TERMINATED)]
        lengths = {
            values.name.rpartition(f"{name}/")[2].lstrip("/"): len(values) if values.shape else 0 for values in of_steps
        }
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{key} {length:,}" for key, length in lengths.items())
            raise IntegrityError(f"{self._what}: '{inside}' has arrays of different lengths: {listed}")
        steps = next(iter(lengths.values()))
        ended, dones = np.zeros(1, dtype=bool), others.get(TERMINATED)
        if steps and dones is not None:
            where = f"{inside}/{self._arrays[TERMINATED]}"
            ended = read_flags(np.atleast_1d(dones[()]), where, what=self._what)
        return _Demonstration(
            number=number,
            name=name,
            observation={column: np.asarray(values[()]) for column, values in found.items()},
            following={column: np.asarray(values[()]) for column, values in after.items()},
            action=np.asarray(others[ACTION][()]),
            reward=np.asarray(others[REWARD][()]).reshape(steps, -1) if REWARD in others else np.zeros((steps, 1)),
            terminated=bool(ended[-1]),
        )

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        self.dropped = 0
        held: list[_Demonstration] = []
        size = 0
        for number in range(start, len(self._names)):
            with reading(self._path):
                found = self._read(number)
            if not len(found.reward):
                self.dropped += 1
                continue
            self._intake.require_shapes(number, found.observation, found.action)
            if found.reward.shape[1] != 1:
                raise InputMissing(f"{self._what}: '{found.name}' has {found.reward.shape[1]} rewards a step, not one")
            held.append(found)
            size += sum(values.nbytes for values in (*found.observation.values(), *found.following.values()))
            if size >= BATCH_BYTES:
                yield from self._batch(held)
                held, size = [], 0
        if held:
            yield from self._batch(held)

    def _batch(self, held: list[_Demonstration]) -> Iterator[Trajectories]:
        end = np.cumsum([len(one.reward) for one in held])
        terminated = np.array([one.terminated for one in held])
        is_partial = len(held[0].following) < len(held[0].observation)
        steps = Steps(
            begin=np.concatenate([[0], end[:-1]]),
            end=end,
            terminated=terminated,
            truncated=~terminated,
            observation={name: np.concatenate([one.observation[name] for one in held]) for name in self._places},
            following={name: np.concatenate([one.following[name] for one in held]) for name in held[0].following},
            unsure=np.ones(len(held), dtype=bool) if is_partial and self._settings.missing_final == "drop" else None,
            action=np.concatenate([one.action for one in held]),
            reward=np.concatenate([one.reward for one in held]),
        )
        laid = steps.lay_out(keep_terminated=self._settings.missing_final == "repeat")
        self.dropped += int((~laid.usable).sum())
        if laid.raw is None:
            return
        columns = self._intake.columns(laid.raw, first=held[0].number)
        chosen = np.flatnonzero(laid.usable)
        yield Trajectories(columns, laid.raw.rows, [self._info(held[i], bool(laid.dropped[i])) for i in chosen])

    def _info(self, one: _Demonstration, dropped: bool) -> TrajectoryInfo:
        mask = ", ".join(self._masks.get(one.name, ()))
        name = "" if one.name == str(one.number) else one.name
        tags = as_tags({EPISODE: one.number, "demo": name, "mask": mask})
        if len(one.following) < len(one.observation):
            tags["final_observation"] = "last step dropped" if dropped else "repeated"
        return TrajectoryInfo(
            env=self.env,
            task=self._settings.task or self.label,
            goal_text=self._goal,
            source=self.source,
            tags=tags,
        )


class RobomimicImporter(_DemonstrationImporter):
    """The importer of robomimic's and LIBERO's demonstrations."""

    source = "robomimic"
    names: Mapping[str, str] = {ACTION: "actions", REWARD: "rewards", TERMINATED: "dones"}

    def _find_names(self) -> Sequence[str]:
        group = self._file.get(_GROUP)
        if not hasattr(group, "keys"):
            raise InputMissing(
                f"{self._what} has no group '{_GROUP}'", hint=f"it has: {', '.join(self._file) or 'nothing'}"
            )

        def find_order(name: str) -> tuple[int, str]:  # demo_2 before demo_10
            found = _NUMBER.search(name)
            return (int(found[1]) if found and len(found[1]) < 10 else 0), name

        names = sorted((name for name in group if hasattr(group[name], "keys")), key=find_order)
        if not names:
            raise InputMissing(f"{self._what} has no demonstrations in '{_GROUP}'")
        about = _parse_object(group.attrs.get("env_args"))
        self.env = str(about.get("env_name") or self.label)[:_LONGEST_TEXT]
        self._goal = str(_parse_object(group.attrs.get("problem_info")).get("language_instruction") or "")[
            :_LONGEST_TEXT
        ]
        self._masks = self._read_masks(len(names))
        return names

    def _open_group(self, name: str) -> Any:
        return self._file[_GROUP][name]

    def _find_observations(self, first: Any) -> dict[str, str]:
        if _OBS not in first:
            raise InputMissing(
                f"{self._what}: '{first.name.lstrip('/')}' lacks '{_OBS}'",
                hint="extract observations from its states with robomimic's dataset_states_to_obs.py",
            )
        return {
            f"{OBSERVATION}.{name.replace('/', '.')}": f"{_OBS}/{name}"
            for name, _ in walk_leaves(first[_OBS], self._path)
        }

    def _read_masks(self, count: int) -> dict[str, list[str]]:
        """Map each of the `count` demonstrations to the masks that name it."""
        found: dict[str, list[str]] = {}
        if not hasattr(self._file.get("mask"), "keys"):
            return found
        for name, values in walk_leaves(self._file["mask"], self._path):
            if len(values.shape) == 1 and len(values) <= count:
                for chosen in values[:]:
                    found.setdefault(str(as_scalar(chosen)), []).append(name)
        return found


class D3rlpyImporter(_DemonstrationImporter):
    """The importer of d3rlpy's replay buffers."""

    source = "d3rlpy"
    names: Mapping[str, str] = {ACTION: "actions", REWARD: "rewards", TERMINATED: "terminated"}

    def _find_names(self) -> Sequence[str]:
        found = [match for name in self._file if (match := _D3RLPY_OBSERVATION.fullmatch(name))]
        numbers = sorted({int(match[1]) for match in found})
        said = open_array(self._file, "num_episodes", path=self._path)
        counted = said.shape == () and said.dtype.kind in "iu" and int(said[()]) == len(numbers)
        if not counted or numbers != list(range(len(numbers))):
            raise IntegrityError(
                f"{self._what}: num_episodes does not agree with the {len(numbers):,} trajectories in it",
                hint="write it again with ReplayBuffer.dump",
            )
        if not numbers:
            raise InputMissing(f"{self._what} has no trajectories")
        self._parts = sorted(int(match[2]) for match in found if match[2] and int(match[1]) == 0)
        return [str(number) for number in numbers]

    def _open_group(self, name: str) -> Any:
        return _NumberedArrays(self._file, name)

    def _find_observations(self, first: Any) -> dict[str, str]:
        parts = {f"{OBSERVATION}.{part}": f"observations_{part}" for part in self._parts}
        return parts or {OBSERVATION: "observations"}


class _NumberedArrays:
    """The arrays of one trajectory of d3rlpy, as a group: `actions` is the array `actions_7` of the file."""

    def __init__(self, file: Any, number: str) -> None:
        self._file, self._number = file, number
        self.name = f"trajectory {number}"

    def _place(self, name: str) -> str:
        kind, _, part = name.partition("_")
        return f"{kind}_{self._number}_{part}" if part else f"{kind}_{self._number}"

    def __contains__(self, name: str) -> bool:
        return self._place(name) in self._file

    def get(self, name: str, **how: Any) -> Any:
        return self._file.get(self._place(name), **how)

    def keys(self) -> list[str]:
        known = ("observations", *D3rlpyImporter.names.values())
        return [name for name in known if name in self]


def _parse_object(text: Any) -> Mapping[str, Any]:
    """Parse an attribute that is a JSON object; return {} for anything else."""
    try:
        found = json.loads(str(as_scalar(text))) if text is not None else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
