"""Published datasets of learning histories in HDF5: the steps of a learner from its first to its last, not cut into
episodes. XLand-100B and XLand-Trivial-20B (Nikulin et al. 2024, arXiv 2406.08973), Vintix (Polubarov et al. 2025,
arXiv 2501.19400) and Vintix II.

An XLand file has a group for each task, `0`, `1`, ..., with H histories of T steps each:

    states                uint8 (H, T, 5, 5): tile * 12 + colour of each cell of the view; becomes obs.cells as `xland`
                          has it, (25 * 2,) of tiles and colours
    actions, rewards      (H, T)
    dones                 (H, T): the episode ended with this step, by reaching the goal or by its time limit
    expert_actions        (H, T): what the final policy would do; becomes the label
    attrs                 env-id, benchmark-id and ruleset-id; the task is BENCHMARK/RULESET, as `xland` names it

A goal gives a positive reward and nothing else does, so an episode whose last reward is positive terminated.

A Vintix file is one history, in groups `FIRST-LAST` of up to 10,000 steps; a task is a folder of such files, beside
which FOLDER.json has its `task_name`.

    proprio_observation   (n, ...), action (n, ...), reward (n,)
    step_num              (n,): 0 where an episode begins
    demonstrator_action   (n, ...), Vintix II only: becomes the label

How a Vintix episode ended is not in the file. With a time limit (`source.horizon`, or that of `--env`), a shorter
episode terminated; without one, all are truncated.

Neither has the observation after the last step of an episode: see `source.missing_final`. Steps are read in blocks,
so that memory does not depend on the length of a history.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.files.json import read_object
from pipelines.formats.base import BATCH_BYTES, EPISODE, Request, as_tags, hash_files, require_file
from pipelines.formats.hdf5 import as_scalar, open_array, open_file, reading
from pipelines.formats.intake import EpisodeValidator, infer_space, make_action_box, match_spaces, read_flags
from pipelines.formats.transitions import Steps
from pipelines.lake.schema import ACTION, LABEL
from pipelines.lake.spaces import OBSERVATION, Discrete, MultiDiscrete, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo

# Of xminigrid from version 0.7 on, with which the datasets were made.
NUM_TILES, NUM_COLORS, NUM_ACTIONS = 13, 12, 6

_VIEW = (5, 5)
_ATTRIBUTES = ("env-id", "benchmark-id", "ruleset-id")
_LONGEST_TEXT = 200
_LARGEST_GROUP = 1 << 28  # bytes of a group of Vintix, which is read at once; published groups have 10,000 steps
_MOST_PACKED, _SPARE = 2_000, 1 << 26  # deflate packs 1,032 bytes into one at best
_SPAN = re.compile(r"(\d{1,15})-(\d{1,15})")


@dataclass(frozen=True, kw_only=True)
class _History:
    """A history of the dataset: its `name` within it, its `task`, and where it is kept."""

    name: str
    env: str
    task: str
    place: Any


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Consecutive steps (n,) of a history. `ends`: the episode ends with the step; `terminated`: in a terminal state.
    `label` is None where steps have none."""

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    ends: np.ndarray
    terminated: np.ndarray
    label: np.ndarray | None

    def select(self, steps: slice) -> _Block:
        """Take some of the steps."""
        return replace(self, **{name: values[steps] for name, values in self._columns()})

    def join(self, later: _Block) -> _Block:
        """Append the steps of `later`."""
        after = dict(later._columns())
        return replace(self, **{name: np.concatenate([values, after[name]]) for name, values in self._columns()})

    def _columns(self) -> list[tuple[str, Any]]:
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, values) for name, values in named if values is not None]


class _HistoryImporter(ABC):
    """An importer of histories; subclasses know how a file keeps their steps."""

    logp = False
    source: str
    column: str
    """Of observations."""

    def __init__(self, request: Request) -> None:
        self._settings, self._place = request.settings, Path(request.place)
        if self._settings.columns:
            raise InputMissing(
                f"'{request.place}': source.columns does not apply to {self.source}: its names are fixed"
            )
        self._what = f"'{self._place}'"
        self.label = self._place.stem
        self.dropped = 0
        self.steps: int | None = None
        self._open: dict[Path, Any] = {}
        paths = [require_file(path) for path in self._find_files()]
        self.fingerprint = hash_files(paths)
        try:
            self._histories = self._list_histories(paths)
            if not self._histories:
                raise InputMissing(f"{self._what} has no histories", hint=f"see docs/offline.md for '{self.source}:'")
            self.env = self._histories[0].env
            self.labelled, self.spaces = self._find_spaces(request)
        except BaseException:
            self.close()
            raise
        self._intake = EpisodeValidator(
            self.spaces,
            what=self._what,
            clip=self._settings.clip_actions,
            labelled=self.labelled,
            listener=request.listener,
        )

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _find_files(self) -> list[Path]:
        return [self._place]

    def _file(self, path: Path) -> Any:
        """Open a file; no other stays open, as a folder may have thousands."""
        if path not in self._open:
            self.close()
            self._open[path] = open_file(path)
        return self._open[path]

    @abstractmethod
    def _list_histories(self, paths: Sequence[Path]) -> list[_History]:
        """List the histories in order."""

    @abstractmethod
    def _find_spaces(self, request: Request) -> tuple[bool, Spaces]:
        """Find out whether steps have labels, and their spaces."""

    @abstractmethod
    def _count_episodes(self, history: _History) -> int:
        """Count the episodes of a history, from its flags alone."""

    @abstractmethod
    def _read_blocks(self, history: _History) -> Iterator[_Block]:
        """Yield all steps of a history in order; the last one ends an episode."""

    def _require_plausible(self, arrays: Mapping[str, Any], path: Path, inside: str) -> None:
        """Raise IntegrityError where an array claims more than its compressed bytes could hold: reading it would take
        for ever."""
        for name, values in arrays.items():
            claimed = float(np.prod(values.shape, dtype=np.float64)) * values.dtype.itemsize
            if claimed > _MOST_PACKED * values.id.get_storage_size() + _SPARE:
                raise IntegrityError(
                    f"'{path}': '{inside}/{name}' claims {claimed:,.0f} bytes, more than the file holds of it",
                    hint="make or fetch it again",
                )

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        self.dropped = number = 0
        for history in self._histories:
            if number < start:
                with reading(self._place):
                    count = self._count_episodes(history)
                if number + count <= start:
                    number += count
                    continue
            index = 0
            held: _Block | None = None
            blocks = self._read_blocks(history)
            while True:
                with reading(self._place):
                    block = next(blocks, None)
                if block is None:
                    break
                self._require_shapes(block, number)
                held = block if held is None else held.join(block)
                ends = np.flatnonzero(held.ends) + 1
                edges = np.concatenate([[0], ends]).astype(np.int64)
                long = np.flatnonzero(np.diff(np.append(edges, len(held.ends))) > self._settings.longest)
                if len(long):
                    raise InputMissing(
                        f"{self._what}: episode {index + int(long[0])} of history '{history.name}' has more than "
                        f"{self._settings.longest:,} steps",
                        hint="set source.longest higher",
                    )
                skipped = min(max(start - number, 0), len(ends))
                if skipped < len(ends):
                    batch = self._batch(history, held, edges[skipped:], number + skipped, index + skipped)
                    if batch is not None:
                        yield batch
                number, index = number + len(ends), index + len(ends)
                held = held.select(slice(int(edges[-1]), None)) if edges[-1] < len(held.ends) else None

    def _require_shapes(self, block: _Block, number: int) -> None:
        self._intake.require_shapes(number, {self.column: block.observation}, block.action)
        if block.label is not None and block.label.shape != block.action.shape:
            raise InputMissing(
                f"{self._what}: '{LABEL}' has the shape {block.label.shape[1:]} in trajectory {number}, "
                f"'{ACTION}' {block.action.shape[1:]}"
            )

    def _batch(
        self, history: _History, held: _Block, edges: np.ndarray, number: int, index: int
    ) -> Trajectories | None:
        """Lay out the episodes of `held` between `edges`, of which the first has this `number` in the dataset and this
        `index` in its history; None if none has a usable step."""
        steps = held.select(slice(int(edges[0]), int(edges[-1])))
        begin, end = edges[:-1] - edges[0], edges[1:] - edges[0]
        terminated = steps.terminated[end - 1]
        laid = Steps(
            begin=begin,
            end=end,
            terminated=terminated,
            truncated=~terminated,
            observation={self.column: steps.observation},
            action=steps.action,
            reward=steps.reward,
            label=steps.label,
        ).lay_out(
            keep_terminated=self._settings.missing_final == "repeat",
        )
        self.dropped += int((~laid.usable).sum())
        if laid.raw is None:
            return None
        columns = self._intake.columns(laid.raw, first=number)
        infos = [
            replace(
                self._info(history, bool(terminated[i])),
                history=f"{self.label}/{history.name}/{history.task}",
                history_index=index + int(i),
                tags=as_tags(
                    {
                        EPISODE: number + int(i),
                        "final_observation": "last step dropped" if laid.dropped[i] else "repeated",
                    }
                ),
            )
            for i in np.flatnonzero(laid.usable)
        ]
        return Trajectories(columns, laid.raw.rows, infos)

    def _info(self, history: _History, terminated: bool) -> TrajectoryInfo:
        return TrajectoryInfo(env=history.env, task=self._settings.task or history.task, source=self.source)


class XLandImporter(_HistoryImporter):
    """The importer of XLand-100B and XLand-Trivial-20B."""

    source = "xland"
    column = "obs.cells"
    arrays = ("states", "actions", "rewards", "dones", "expert_actions")

    def _list_histories(self, paths: Sequence[Path]) -> list[_History]:
        file, found, steps = self._file(paths[0]), [], 0
        with reading(paths[0]):
            missing = next((str(task) for task in range(len(file)) if str(task) not in file), None)
            if missing is not None:
                raise InputMissing(
                    f"{self._what}: '{missing}' is missing: its {len(file):,} groups are not numbered from 0",
                    hint=f"it has: {', '.join(sorted(file)[:8])}",
                )
            for number in range(len(file)):
                group = file[str(number)]
                about = [as_scalar(group.attrs.get(name)) for name in _ATTRIBUTES]
                if not all(isinstance(value, str | int) and len(str(value)) <= _LONGEST_TEXT for value in about):
                    raise InputMissing(f"{self._what}: group '{number}' lacks the attributes {', '.join(_ATTRIBUTES)}")
                env, benchmark, ruleset = map(str, about)
                histories, length = self._open_group(number)[0]["dones"].shape
                steps += histories * length
                found += [
                    _History(name=f"{number}.{i}", env=env, task=f"{benchmark}/{ruleset}", place=(number, i))
                    for i in range(histories)
                ]
        self.steps = steps
        return found

    def _open_group(self, number: int) -> tuple[dict[str, Any], int]:
        """Open the arrays of a task, and count the steps of its histories. IntegrityError if they do not agree."""
        path = self._place
        group = self._file(path)[str(number)]
        arrays = {name: open_array(group, name, path=path) for name in self.arrays}
        self._require_plausible(arrays, path, str(number))
        shape = tuple(arrays["dones"].shape)
        wrong = [
            f"{name} {tuple(values.shape)}"
            for name, values in arrays.items()
            if tuple(values.shape) != (shape + _VIEW if name == "states" else shape) or len(shape) != 2
        ]
        if wrong:
            raise IntegrityError(
                f"{self._what}: group '{number}' has arrays of different shapes: dones {shape}, {', '.join(wrong)}",
                hint="states are (H, T, 5, 5), all others (H, T)",
            )
        return arrays, int(shape[1])

    def _find_spaces(self, request: Request) -> tuple[bool, Spaces]:
        cells = MultiDiscrete(nvec=(NUM_TILES, NUM_COLORS) * (_VIEW[0] * _VIEW[1]))
        own = Spaces(observation={self.column: cells}, action=Discrete(n=NUM_ACTIONS))
        if request.spaces is None:
            return True, own
        return True, match_spaces({self.column: cells.shape}, request.spaces, what=self._what)

    def _count_episodes(self, history: _History) -> int:
        arrays, length = self._open_group(history.place[0])
        dones = self._read_dones(arrays, history, slice(0, length))
        return int(dones.sum()) + (length > 0 and not dones[-1])

    def _read_dones(self, arrays: Mapping[str, Any], history: _History, steps: slice) -> np.ndarray:
        number, row = history.place
        return read_flags(arrays["dones"][row, steps], f"{number}/dones", what=self._what, first=steps.start)

    def _read_blocks(self, history: _History) -> Iterator[_Block]:
        number, row = history.place
        arrays, length = self._open_group(number)
        chunk = (arrays["states"].chunks or (1, 4096))[1]
        # Chunks are compressed: a block of whole ones unpacks each of them once.
        rows = max(chunk * (BATCH_BYTES // (4 * 2 * _VIEW[0] * _VIEW[1] * chunk)), min(chunk, 1 << 16))
        for at in range(0, length, rows):
            steps = slice(at, min(at + rows, length))
            read = {name: np.asarray(arrays[name][row, steps]) for name in self.arrays}
            if read["states"].dtype.kind not in "iu" or read["rewards"].dtype.kind not in "biuf":
                wrong = "states" if read["states"].dtype.kind not in "iu" else "rewards"
                raise InputMissing(f"{self._what}: '{number}/{wrong}' holds {read[wrong].dtype}")
            ends = self._read_dones(arrays, history, steps)
            if steps.stop == length:
                ends[-1] = True
            yield _Block(
                observation=np.stack(np.divmod(read["states"], NUM_COLORS), axis=-1).reshape(len(ends), -1),
                action=read["actions"],
                reward=read["rewards"],
                ends=ends,
                terminated=read["rewards"] > 0,
                label=read["expert_actions"],
            )

    def _info(self, history: _History, terminated: bool) -> TrajectoryInfo:
        return replace(super()._info(history, terminated), success=terminated)


class VintixImporter(_HistoryImporter):
    """The importer of Vintix and Vintix II: a history, or the folder of a task."""

    source = "vintix"
    column = OBSERVATION
    arrays = ("proprio_observation", "action", "reward", "step_num")
    demonstrator = "demonstrator_action"

    def _find_files(self) -> list[Path]:
        if not self._place.is_dir():
            return [self._place]
        found = sorted(path for path in self._place.iterdir() if path.suffix in (".h5", ".hdf5"))
        if not found:
            inside = sorted({path.parent.name for path in self._place.glob("*/*.h5")})
            hint = f"name the folder of one task: {', '.join(inside[:4])}" if inside else "check the path"
            raise InputMissing(f"'{self._place}' has no HDF5 files", hint=hint)
        return found

    def _list_histories(self, paths: Sequence[Path]) -> list[_History]:
        folder = self._place if self._place.is_dir() else self._place.parent
        named = (read_object(folder / f"{folder.name}.json") or {}).get("task_name")
        task = named if isinstance(named, str) and 0 < len(named) <= _LONGEST_TEXT else self._place.stem
        return [_History(name=path.stem, env=task, task=task, place=path) for path in paths]

    def _find_spaces(self, request: Request) -> tuple[bool, Spaces]:
        path = self._histories[0].place
        with reading(path):
            [first, *_] = self._find_groups(path)
            labelled = self.demonstrator in self._file(path)[first[0]]
            arrays = self._open_group(path, first, labelled=labelled)
        observation, action = arrays["proprio_observation"], arrays["action"]
        self._limit = self._settings.horizon if self._settings.horizon != "auto" else request.horizon
        if self._limit is None:
            text = f"{self._what} does not say how episodes ended, and no time limit is known (source.horizon)"
            request.listener(Notice(text=f"{text}: all are taken as truncated", level="warning"))
        shapes = {self.column: observation.shape[1:]}
        if request.spaces is not None:
            return labelled, match_spaces(shapes, request.spaces, what=self._what)
        space = infer_space(observation.shape[1:], observation.dtype)
        acts = make_action_box(action.shape[1:], self._settings, what=self._what)
        return labelled, Spaces(observation={self.column: space}, action=acts)

    def _find_groups(self, path: Path) -> list[tuple[str, int, int]]:
        """Find the groups of a history with their first and last steps, in order. IntegrityError where steps are
        missing between them."""
        file, found = self._file(path), []
        for name in file:
            span = _SPAN.fullmatch(name)
            if span is None:
                raise InputMissing(
                    f"'{path}': '{name}' is not a group of Vintix, FIRST-LAST",
                    hint=f"it has: {', '.join(list(file)[:8])}",
                )
            found.append((name, int(span[1]), int(span[2])))
        found.sort(key=lambda group: group[1])
        if not found:
            raise InputMissing(f"'{path}' has no steps")
        following = 0
        for name, first, last in found:
            if first != following or last < first:
                raise IntegrityError(
                    f"'{path}': group '{name}' should begin with step {following:,}", hint="make or fetch it again"
                )
            following = last + 1
        return found

    def _open_group(self, path: Path, group: tuple[str, int, int], *, labelled: bool) -> dict[str, Any]:
        """Open the arrays of a group. IntegrityError unless they have the steps that its name says."""
        name, first, last = group
        wanted = (*self.arrays, *([self.demonstrator] if labelled else []))
        arrays = {array: open_array(self._file(path)[name], array, path=path) for array in wanted}
        self._require_plausible(arrays, path, name)
        steps = last - first + 1
        wrong = [f"{key} {len(v) if v.shape else 0:,}" for key, v in arrays.items() if v.shape[:1] != (steps,)]
        size = sum(int(np.prod(v.shape, dtype=np.float64)) * v.dtype.itemsize for v in arrays.values())
        if wrong or size > _LARGEST_GROUP:
            text = f"should have {steps:,} steps: {', '.join(wrong)}"
            if not wrong:
                text = f"has {size:,} bytes, more than {_LARGEST_GROUP:,}"
            raise IntegrityError(f"'{path}': group '{name}' {text}", hint="make or fetch it again")
        return arrays

    def _read_numbers(self, path: Path, groups: Sequence[tuple[str, int, int]]) -> Iterator[np.ndarray]:
        """Yield `step_num` of each group. IntegrityError where it neither goes on nor begins again."""
        before: int | None = None
        for group in groups:
            values = np.asarray(self._open_group(path, group, labelled=False)["step_num"][()]).reshape(-1)
            if values.dtype.kind not in "iu":
                raise InputMissing(f"'{path}': '{group[0]}/step_num' holds {values.dtype}, not integers")
            expected = np.concatenate([[-1 if before is None else before], values[:-1]]).astype(np.int64) + 1
            wrong = (values != 0) & (values != expected)
            if wrong.any():
                at = int(wrong.argmax())
                raise IntegrityError(
                    f"'{path}': '{group[0]}/step_num' is {values[at]} at step {group[1] + at:,}, "
                    f"{expected[at]} or 0 expected: steps are missing",
                    hint="make or fetch it again",
                )
            before = int(values[-1])
            yield values

    def _count_episodes(self, history: _History) -> int:
        path = history.place
        return sum(int((values == 0).sum()) for values in self._read_numbers(path, self._find_groups(path)))

    def _read_blocks(self, history: _History) -> Iterator[_Block]:
        path = history.place
        groups = self._find_groups(path)
        numbers = self._read_numbers(path, groups)
        number = next(numbers)
        for group in groups:
            following = next(numbers, None)
            arrays = self._open_group(path, group, labelled=self.labelled)
            read = {name: np.asarray(values[()]) for name, values in arrays.items() if name != "step_num"}
            if read["reward"].size != len(number):
                shape = read["reward"].shape
                raise InputMissing(f"'{path}': '{group[0]}/reward' has the shape {shape}, not one a step")
            ends = np.append(number[1:] == 0, following is None or following[0] == 0)
            terminated = np.zeros(len(ends), dtype=bool)
            if self._limit is not None:
                terminated = ends & ((number + 1 < self._limit) if self._limit else True)
            if following is None:
                terminated[-1] = False  # the data ends here, whether the episode did or not
            yield _Block(
                observation=read["proprio_observation"],
                action=read["action"],
                reward=read["reward"].reshape(-1),
                ends=ends,
                terminated=terminated,
                label=read.get(self.demonstrator),
            )
            if following is not None:
                number = following


def find_kind(file: Any) -> str | None:
    """Find out whether an open HDF5 file has histories as "xland" or "vintix" keep them; None if neither."""
    name = next(iter(file), None)
    group: Any = None if name is None else file[name]
    if not hasattr(group, "keys"):
        return None
    if all(array in group for array in XLandImporter.arrays):
        return XLandImporter.source
    return VintixImporter.source if all(array in group for array in VintixImporter.arrays) else None
