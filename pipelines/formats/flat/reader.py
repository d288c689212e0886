"""Flat arrays over N steps, as D4RL's HDF5 files of all families have them, our own `export --format hdf5`, and NPZ
files of the same names.

    observations (N, ...), or a group of such   actions (N, ...)   rewards (N,) or (N, 1)   terminals, bool or float
    timeouts            optional: where an episode ends otherwise
    next_observations   optional: what each step led to
    resets              optional (ours): steps that led to a soft reset
    trajectories        optional (ours): what is known of each trajectory, as JSON
    infos/*, metadata/* infos may become observations; metadata of one line goes into tags

`flat.names` lists what other tools call them. `source.columns` names arrays that are called otherwise still, ours to
theirs: obs, obs.NAME, next_obs, action, reward, terminated, truncated, reset. An obs.NAME is a further observation, or
a part of the one there is: `{"obs.observation" = "observations[0:27]", "obs.desired_goal" = "infos/goal"}`.

Where episodes end: see `flat.episodes`. The last observation of one is in next_observations; without these it is in no
file. Then a truncated episode loses its last step, and ends with the observation of that step. Keep the last row of a
terminated episode: dropping it would drop the terminal reward. Its next observation is a copy and never used in a
target (`source.missing_final = "drop"` drops it too).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.formats.base import BATCH_BYTES, EPISODE, Request, as_tags, hash_files
from pipelines.formats.flat.arrays import open_array, open_flat, walk_leaves
from pipelines.formats.flat.datasets import find_file, find_time_limit, name_environment
from pipelines.formats.flat.episodes import Arrays, require_one_number
from pipelines.formats.flat.names import NAMES, Computed, Environments, FlatNames
from pipelines.formats.hdf5 import CHUNK_CACHE, as_scalar, reading
from pipelines.formats.intake import EpisodeValidator, infer_action_space, infer_space, match_spaces
from pipelines.formats.minari.reader import find_paths
from pipelines.formats.records import read_info, read_spaces
from pipelines.formats.transitions import Steps
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED
from pipelines.lake.spaces import OBSERVATION, Space, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo

_SCAN = 1 << 20  # actions read at a time
_LONGEST_TAG = 200
_MOST_PACKED, _SPARE = 2_000, 1 << 30  # deflate packs 1,032 bytes into one at best
_LARGEST_CACHE = 64 << 20  # of each array
SPACES = "amago_spaces"  # attribute of a file that we wrote


class FlatImporter:
    """The importer of flat arrays; see the module."""

    labelled = logp = False

    def __init__(self, request: Request) -> None:
        self._settings, self._kind = request.settings, request.kind
        self._path = find_file(request.place, request.listener)
        self._what = f"'{self._path}'"
        self.label = self._path.stem
        self.env = name_environment(self.label)
        self.dropped = 0
        self._file = open_flat(self._path, cache_bytes=CHUNK_CACHE)
        self._observations = FlatNames(self._file, {}).observations
        self.fingerprint = hash_files([self._path])
        try:
            with reading(self._path):
                self._arrays = self._open_arrays()
                chunked = [values for values in self._arrays.all() if values.chunks]
                largest = max((math.prod(each.chunks) * each.dtype.itemsize for each in chunked), default=0)
                if largest > CHUNK_CACHE:  # else a chunk would be unpacked for each block of it
                    self._file.close()
                    self._file = open_flat(self._path, cache_bytes=min(largest, _LARGEST_CACHE))
                    self._arrays = self._open_arrays()
                self.spaces = self._find_spaces(request.spaces)
                self._pieces = self._arrays.find_pieces(
                    request,
                    limit=find_time_limit(self.label) or request.horizon,
                    block_rows=self._count_block_rows(),
                    path=self._path,
                    exported=SPACES in self._file.attrs,
                )
                self._tags = self._read_metadata()
        except BaseException:
            self._file.close()
            raise
        self.steps: int | None = self._arrays.steps
        self._report_assumptions(request)
        self._intake = EpisodeValidator(
            self.spaces, what=self._what, clip=self._settings.clip_actions, listener=request.listener
        )

    def close(self) -> None:
        self._file.close()

    def _open_arrays(self) -> Arrays:
        file, path = self._file, self._path
        given = {ours: theirs for ours, theirs in self._settings.columns.items() if ours not in NAMES}
        names = FlatNames(file, self._settings.columns)
        unknown = [name for name in given if name.removeprefix("next_").partition(".")[0] != OBSERVATION]
        if unknown:
            raise InputMissing(
                f"source.columns: unknown names: {', '.join(unknown)}",
                hint=f"known: {OBSERVATION}, {OBSERVATION}.NAME, next_{OBSERVATION}, {', '.join(NAMES)}",
            )
        observed = any(not name.startswith("next_") for name in given)
        missing = names.list_missing()
        missing += [] if observed or self._observations in file else [self._observations]
        if missing:
            raise InputMissing(
                f"{self._what} lacks {', '.join(repr(name) for name in missing)}",
                hint=f"map its columns with source.columns; it has: {', '.join(sorted(file.keys())) or 'nothing'}",
            )
        action, beside = open_array(file, names[ACTION], path=path), False
        if TERMINATED in names:  # (N, E) of E environments that are stored side by side
            terminal = open_array(file, names[TERMINATED], path=path)
            side_by_side = len(action.shape) > 2 and tuple(action.shape[:2]) == tuple(terminal.shape)
            beside = side_by_side and int(terminal.shape[1]) > 0

        def read(name: str) -> Any:
            values = open_array(file, name, path=path)
            return Environments(values) if beside and tuple(values.shape[:2]) == tuple(action.shape[:2]) else values

        observation, following = self._open_observations(given, read)
        flags = names.find_flags(read, followed=bool(following), what=self._what)
        self._notes = flags.notes
        reward = Computed.zeros(REWARD, len(flags.terminal), "float32") if names.is_reward_free else read(names[REWARD])
        require_one_number(reward, path)
        found = Arrays(
            observation=observation,
            following=following,
            action=read(names[ACTION]),
            reward=reward,
            terminal=flags.terminal,
            timeout=flags.timeout,
            reset=read(names[RESET]) if RESET in names else None,
            records=open_array(file, "trajectories", path=path) if "trajectories" in file else None,
            closing=flags.closing,
            stride=len(action) if beside else 0,
        )
        sizes = {values.name.lstrip("/"): len(values) for values in found.all()}
        if len(set(sizes.values())) != 1:
            lengths = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            raise IntegrityError(f"{self._what} has arrays of different lengths: {lengths}", hint="fetch it again")
        if not found.steps:
            raise InputMissing(f"{self._what} has no steps")
        claimed = sum(math.prod(values.shape) * int(values.dtype.itemsize) for values in found.all())
        size = path.stat().st_size
        if claimed > _MOST_PACKED * size + _SPARE:
            raise IntegrityError(
                f"{self._what} claims {claimed:,} bytes of arrays, but has {size:,}", hint="make or fetch it again"
            )
        return found

    def _report_assumptions(self, request: Request) -> None:
        arrays = self._arrays
        for note in self._notes:
            request.listener(Notice(text=f"{self._what}: {note}", level="warning"))
        alone = [name for name in arrays.observation if name not in arrays.following]
        if arrays.following and alone and self._settings.missing_final == "repeat":
            text = f"{self._what}: of {', '.join(alone)} the value after an episode's last step is unknown: repeated"
            request.listener(Notice(text=text, level="warning"))

    def _open_observations(
        self, given: Mapping[str, str], read: Callable[[str], Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Open the observations and next observations by column; `given`: those of the settings."""
        observed = {name: theirs for name, theirs in given.items() if not name.startswith("next_")}
        observation, following = {}, {}
        for column, theirs in {**self._find_places(observed), **observed}.items():
            observation[column] = read(theirs)
            after = given.get(f"next_{column}")
            if after is None and theirs.startswith(self._observations):
                after = f"next_{theirs}"
                after = after if after.partition("[")[0] in self._file else None
            if after is not None:
                following[column] = read(after)
                if following[column].shape != observation[column].shape:
                    raise IntegrityError(
                        f"{self._what}: {after} has the shape {following[column].shape}, "
                        f"{theirs} {observation[column].shape}",
                        hint="make or fetch it again",
                    )
        return observation, following

    def _find_places(self, observed: Mapping[str, str]) -> dict[str, str]:
        """Map columns to the observation arrays of the file; none if the settings ask for parts of these."""
        if SPACES in self._file.attrs:
            own = read_spaces(self._file.attrs[SPACES], what=self._what)
            paths = find_paths(list(own.observation))
            return {column: "/".join([self._observations, *path]) for column, path in paths.items()}
        parts = any(theirs.partition("[")[0] == self._observations for theirs in observed.values())
        if parts or OBSERVATION in observed or self._observations not in self._file:
            return {}
        names = [name for name, _ in walk_leaves(self._file, self._observations, self._path)]
        if not (names or observed):
            raise InputMissing(f"'{self._path}': '{self._observations}' is a group without arrays")
        return {
            ".".join([OBSERVATION, *filter(None, name.split("/"))]): "/".join(filter(None, [self._observations, name]))
            for name in names
        }

    def _find_spaces(self, wanted: Spaces | None) -> Spaces:
        if SPACES in self._file.attrs:
            own = read_spaces(self._file.attrs[SPACES], what=self._what)
            return (
                own
                if wanted is None
                else match_spaces(
                    {name: space.shape for name, space in own.observation.items()}, wanted, what=self._what
                )
            )
        shapes = {name: values.shape[1:] for name, values in self._arrays.observation.items()}
        if wanted is not None:
            return match_spaces(shapes, wanted, what=self._what)
        observation: dict[str, Space] = {
            name: infer_space(values.shape[1:], values.dtype) for name, values in self._arrays.observation.items()
        }
        return Spaces(observation=observation, action=self._find_action_space())

    def _find_action_space(self) -> Space:
        action = self._arrays.action

        def find_largest() -> int:
            return max(int(action[at : at + _SCAN].max()) for at in range(0, len(action), _SCAN))

        return infer_action_space(action, find_largest, self._settings, what=self._what)

    def _read_metadata(self) -> dict[str, str]:
        if "metadata" not in self._file:
            return {}
        found = {}
        for name, values in walk_leaves(self._file, "metadata", self._path):
            if values.shape == () and len(text := str(as_scalar(values[()]))) <= _LONGEST_TAG:
                found[name.replace("/", ".")] = text
        return as_tags(found)

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        self.dropped = 0
        pieces, block = self._pieces, self._count_block_rows()
        number = start
        while number < len(pieces):
            begin = int(pieces.begin[number])
            after = int(np.searchsorted(pieces.end, max(begin + block, int(pieces.end[number])), side="right"))
            with reading(self._path):
                batch = self._batch(number, max(after, number + 1))
            if batch is not None:
                yield batch
            number = max(after, number + 1)

    def _count_block_rows(self) -> int:
        """Count the steps that are read at a time: about `BATCH_BYTES`, in whole chunks of the file."""
        values = list(self._arrays.all())
        chunk = max([array.chunks[0] for array in values if array.chunks] or [1])
        step = sum(array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64)) for array in values)
        wanted = max(BATCH_BYTES // max(step, 1), 1)
        return max(chunk * round(wanted / chunk), 1) if chunk <= 2 * wanted else wanted

    def _batch(self, first: int, last: int) -> Trajectories | None:
        """Read the trajectories [first, last); None if none of them has a step."""
        arrays, pieces = self._arrays, self._pieces
        origin, stop = int(pieces.begin[first]), int(pieces.end[last - 1])
        continued = pieces.continued[first:last]
        after = {}
        unfollowed = {name: values for name, values in arrays.observation.items() if name not in arrays.following}
        if continued.any() and unfollowed:
            next_rows = np.minimum(pieces.end[first:last], arrays.steps - 1)
            after = {name: np.stack([values[int(r)] for r in next_rows]) for name, values in unfollowed.items()}
        unsure = pieces.unsure[first:last]
        if unfollowed and self._settings.missing_final == "drop":
            unsure = unsure | ~continued
        steps = Steps(
            begin=pieces.begin[first:last] - origin,
            end=pieces.end[first:last] - origin,
            terminated=pieces.terminated[first:last],
            truncated=pieces.truncated[first:last] | self._find_both(first, last),
            observation={name: values[origin:stop] for name, values in arrays.observation.items()},
            following=self._read_following(first, last),
            after=after,
            known=continued if after else None,
            unsure=unsure,
            action=arrays.action[origin:stop],
            reward=arrays.reward[origin:stop],
            reset=None if arrays.reset is None else arrays.reset[origin:stop].reshape(-1),
        )
        laid = steps.lay_out(keep_terminated=self._settings.missing_final == "repeat")
        self.dropped += int((~laid.usable).sum())
        if laid.raw is None:
            return None
        columns = self._intake.columns(laid.raw, first=first)
        infos = [self._info(first + int(place), bool(laid.dropped[place])) for place in np.flatnonzero(laid.usable)]
        return Trajectories(columns, laid.raw.rows, infos)

    def _read_following(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Read the next observations of the trajectories [first, last); only of the last steps, if these were kept."""
        arrays, pieces = self._arrays, self._pieces
        origin, stop = int(pieces.begin[first]), int(pieces.end[last - 1])
        if pieces.after is None:
            return {name: values[origin:stop] for name, values in arrays.following.items()}
        found = {}
        for name, rows in pieces.after.items():
            found[name] = np.empty((stop - origin, *rows.shape[1:]), dtype=rows.dtype)
            found[name][pieces.end[first:last] - 1 - origin] = rows[first:last]
        return found

    def _find_both(self, first: int, last: int) -> np.ndarray:
        """Whether a trajectory was truncated as well as terminated, (k,), which only our own record can say."""
        records = self._arrays.records
        if records is None:
            return np.zeros(last - first, dtype=bool)
        return np.array(
            [bool(json.loads(as_scalar(text)).get("truncated")) for text in records[first:last]], dtype=bool
        )

    def _info(self, number: int, dropped: bool) -> TrajectoryInfo:
        tags = {**self._tags, EPISODE: str(number)}
        arrays = self._arrays
        if len(arrays.following) < len(arrays.observation) and not (arrays.closing or self._pieces.continued[number]):
            tags["final_observation"] = "last step dropped" if dropped else "repeated"
        if self._arrays.records is not None:
            return read_info(json.loads(as_scalar(self._arrays.records[number])), source=self._kind, tags=tags)
        return TrajectoryInfo(env=self.env, task=self._settings.task or self.label, source=self._kind, tags=tags)
