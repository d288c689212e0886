"""Parquet and Arrow files whose rows are steps, read a piece at a time.

`source.columns` says which columns are meant: ours = theirs.

    obs, obs.NAME            an observation; "x, y, z" makes one of several columns, "v[0:3]" one of a part of a vector
    next_obs, next_obs.NAME  what the step led to (optional)
    action, reward           as they are called by default
    terminated, truncated    flags of a step (truncated may be missing)
    reset                    steps that led to a soft reset (optional)
    episode                  what is the same in all rows of a trajectory; by default uid, episode or episode_id ("":
                             none), and without one the flags end a trajectory

The rows of an episode are together, in order; an id that comes back within a file before its episode ended is refused.
Where next_obs is not what the next row has, a trajectory is cut; if that holds for most rows, each is a trajectory of
one step. `amago export --format parquet` needs none of this: it is recognised.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.files.malformed import reason
from pipelines.formats.base import EPISODE, Request, hash_files
from pipelines.formats.flat.arrays import find_slice, split_slice
from pipelines.formats.intake import (
    DecodedEpisodes,
    EpisodeValidator,
    infer_action_space,
    infer_space,
    match_spaces,
    read_flags,
)
from pipelines.formats.records import read_info, read_spaces
from pipelines.formats.tables.files import TRAJECTORIES, ArrowFiles, ParquetFiles, as_array, as_damage, find_files
from pipelines.formats.transitions import MOST_UNRELATED, Steps, describe_breaks, differ
from pipelines.lake.arrow import UNREADABLE
from pipelines.lake.schema import ACTION, LABEL, LOGP, OPTIONAL, RESET, REWARD, TERMINATED, TRUNCATED
from pipelines.lake.spaces import OBSERVATION, Space, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo

SPACES = b"amago_spaces"  # metadata of a file that we wrote
FLAGS = (TERMINATED, TRUNCATED, RESET)
_IDS = ("uid", "episode", "episode_id")
_FOLLOWING = f"next_{OBSERVATION}"

_SORT = (
    "sort the rows by episode and step, e.g. duckdb -c \"COPY (FROM 'in.parquet' ORDER BY episode, step) TO "
    "'out.parquet'\"; for unrelated transitions leave the ids out with --set 'source.columns.episode=\"\"'"
)

Block = dict[str, np.ndarray]


class TableImporter:
    """The importer of Parquet files; see the module."""

    form = "parquet"
    reader: ParquetFiles | ArrowFiles = ParquetFiles()
    needed: tuple[str, ...] = (ACTION, REWARD)

    def __init__(self, request: Request) -> None:
        self._settings, self._listener = request.settings, request.listener
        self._what = f"'{request.place}'"
        self._files = self._find(request)
        self.label = self._files[0].parent.name if len(self._files) > 1 else self._files[0].stem
        self.fingerprint = hash_files([], [(path.name, path.stat().st_size) for path in self._files])
        self.dropped = 0
        schema = self.reader.schema(self._files[0])
        own = (schema.metadata or {}).get(SPACES)
        self._own = own is not None
        self._arrival = self._own or self._settings.layout == "arrival"
        self._columns = self._find_columns(schema.names)
        self.labelled, self.logp = (self._own and name in schema.names for name in (LABEL, LOGP))
        self._columns |= {name: [name] for name in OPTIONAL if self._own and name in schema.names}
        for path in self._files[1:]:
            self._require_alike(schema, path)
        self._shapes = {
            name: tuple(json.loads((schema.field(columns[0]).metadata or {}).get(b"shape", b"null")) or ())
            for name, columns in self._columns.items()
            if columns[0] in schema.names and len(columns) == 1
        }
        self._records = self._read_records() if self._own else {}
        self.env = next((str(row.get("env") or "") for row in self._records.values()), "") or self.label
        self.steps: int | None = sum(self.reader.rows(path) for path in self._files)
        self.spaces = self._find_spaces(read_spaces(own, what=self._what) if own is not None else None, request.spaces)
        self._intake = EpisodeValidator(
            self.spaces,
            what=self._what,
            clip=self._settings.clip_actions,
            native=not self._own,
            labelled=self.labelled,
            logp=self.logp,
            listener=request.listener,
        )
        self._followed = [n for n in self.spaces.observation if _name_next(n) in self._columns and not self._arrival]
        self._unrelated = False  # whether rows have nothing to do with each other
        if not self._own:
            self._survey()

    def _find(self, request: Request) -> list[Path]:
        """List the files to read, in order."""
        return find_files(request.place, self.form)

    def _find_columns(self, names: list[str]) -> dict[str, list[str]]:
        """Map our names to columns of the files, which have `names`."""
        return map_columns(names, self._settings.columns, self.needed, what=self._what)

    def _survey(self) -> None:
        """Find out from the ids, flags and next observations whether the rows of an episode are together."""
        if EPISODE in self._columns:
            self._require_together()
        if not self._followed:
            return
        inside = breaks = 0
        last: Block = {}
        wanted = [EPISODE, TERMINATED, TRUNCATED, *self._followed, *map(_name_next, self._followed)]
        for block in self._blocks(wanted):
            rows = {name: np.concatenate([last[name], block[name]]) if last else block[name] for name in block}
            marks = self._find_ends_of_episodes(rows)[:-1]
            inside, breaks = inside + int((~marks).sum()), breaks + int((self._find_breaks(rows)[:-1] & ~marks).sum())
            last = {name: values[-1:] for name, values in rows.items()}
        self._unrelated = breaks > MOST_UNRELATED * inside
        if self._unrelated or breaks:
            self._listener(describe_breaks(self._what, breaks, inside, unrelated=self._unrelated))

    def _require_together(self) -> None:
        """Raise InputMissing if an id comes back within a file before its episode has ended."""
        for path in self._files:
            ended: dict[Any, bool] = {}
            current, over, row = None, False, 0
            for block in self._blocks([EPISODE, TERMINATED, TRUNCATED], files=[path]):
                ids, flags = block[EPISODE], self._join_flags(block)
                changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
                for start in ([] if len(ids) and ids[0] == current else [0]) + changes.tolist():
                    if start or current is not None:
                        ended[current] = bool(flags[start - 1]) if start else over
                    current = ids[start]
                    if not ended.get(current, True):
                        raise InputMissing(
                            f"'{path}': the rows of episode {current} are not together: it goes on at {row + start}",
                            hint=_SORT,
                        )
                over, row = bool(flags[-1]), row + len(ids)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _require_alike(self, first: pa.Schema, path: Path) -> None:
        """Raise InputMissing if columns of a file have other types than in the first."""
        other = self.reader.schema(path)
        wanted = dict.fromkeys(split_slice(part)[0] for parts in self._columns.values() for part in parts)
        unlike = [n for n in wanted if n not in other.names or not other.field(n).type.equals(first.field(n).type)]
        if unlike:
            differences = [f"{n}: {other.field(n).type if n in other.names else 'nothing'}" for n in unlike]
            raise InputMissing(
                f"'{path}' has other columns than '{self._files[0]}': {', '.join(differences)}",
                hint="take in files of one space at a time",
            )

    def _find_spaces(self, own: Spaces | None, wanted: Spaces | None) -> Spaces:
        head = next(self._blocks(), None)
        if head is None:
            raise InputMissing(f"{self._what} has no rows")
        observed = {name: values for name, values in head.items() if is_observation(name)}
        if wanted is not None:
            return match_spaces({name: values.shape[1:] for name, values in observed.items()}, wanted, what=self._what)
        if own is not None:
            return own
        observation: dict[str, Space] = {n: infer_space(v.shape[1:], v.dtype) for n, v in observed.items()}

        def find_largest() -> int:
            return max(int(block[ACTION].max()) for block in self._blocks([ACTION]))

        action = infer_action_space(head[ACTION], find_largest, self._settings, what=self._what)
        return Spaces(observation=observation, action=action)

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        self.dropped = 0
        number = 0
        held: Block = {}
        blocks = self._blocks()
        block = next(blocks, None)
        while block is not None:
            following = next(blocks, None)
            held = {name: np.concatenate([held[name], block[name]]) if held else block[name] for name in block}
            ends = self._find_ends(held, last=following is None)
            if len(ends):
                begin = np.concatenate([[0], ends[:-1]])
                skipped = max(start - number, 0)
                if skipped < len(ends):
                    batch = self._batch(held, begin[skipped:], ends[skipped:], first=number + skipped)
                    if batch is not None:
                        yield batch
                number += len(ends)
                held = {name: values[int(ends[-1]) :] for name, values in held.items()}
            block = following

    def _find_ends(self, held: Block, *, last: bool) -> np.ndarray:
        """Find the ends of complete trajectories; the last one is complete if no rows follow."""
        rows = len(held[REWARD])
        marks = np.zeros(rows, dtype=bool)
        if rows:
            marks = self._find_ends_of_episodes(held) | self._find_breaks(held) | self._unrelated
        if last and rows:
            marks[-1] = True
        ends = np.flatnonzero(marks) + 1
        if self._arrival:
            return ends
        longest, cut = self._settings.longest, [0, *ends.tolist()]
        # What is still open is cut only where a row follows: it says what the last step led to.
        tail = list(range(cut[-1] + longest, rows, longest))
        pieces = [at for a, b in itertools.pairwise(cut) for at in (*range(a + longest, b, longest), b)]
        return np.array(pieces + tail, dtype=np.int64)

    def _find_ends_of_episodes(self, rows: Block) -> np.ndarray:
        """Whether an episode ends in a row, (n,), by its flags, or because the next row has another id."""
        marks = self._join_flags(rows)
        if EPISODE in rows:
            if self._arrival:
                marks[:] = False
            marks[:-1] |= rows[EPISODE][1:] != rows[EPISODE][:-1]
        return marks

    def _join_flags(self, rows: Block) -> np.ndarray:
        count = len(next(iter(rows.values())))
        marks = np.zeros(count, dtype=bool)
        for name in (TERMINATED, TRUNCATED):
            if name in rows:
                marks |= rows[name]
        return marks

    def _find_breaks(self, rows: Block) -> np.ndarray:
        """Whether the next observation of a row differs, (n,), from the observation of the next row."""
        found = np.zeros(len(next(iter(rows.values()))), dtype=bool)
        for name in self._followed:
            found[:-1] |= differ(rows[_name_next(name)][:-1], rows[name][1:])
        return found

    def _batch(self, held: Block, begin: np.ndarray, end: np.ndarray, *, first: int) -> Trajectories | None:
        names = list(self.spaces.observation)
        if self._arrival:
            raw, usable = self._split_arrival(held, begin, end, names), end - begin > 1
            dropped = np.zeros(len(begin), dtype=bool)
        else:
            laid = self._lay_out(held, begin, end, names)
            raw, usable, dropped = laid.raw, laid.usable, laid.dropped
        self.dropped += int((~usable).sum())
        if raw is None:
            return None
        ids = held.get(EPISODE)
        infos = [
            self._info(first + int(i), None if ids is None else ids[int(begin[i])], bool(dropped[i]))
            for i in np.flatnonzero(usable)
        ]
        return Trajectories(self._intake.columns(raw, first=first), raw.rows, infos)

    def _split_arrival(
        self, held: Block, begin: np.ndarray, end: np.ndarray, names: list[str]
    ) -> DecodedEpisodes | None:
        """Split rows into trajectories of T + 1 rows, without those of a single row."""
        fine = end - begin > 1
        if not fine.any():
            return None
        chosen = np.concatenate([np.arange(a, b) for a, b in zip(begin[fine], end[fine], strict=True)])
        rows = (end - begin)[fine]
        later, not_last = np.ones((2, len(chosen)), dtype=bool)
        later[np.cumsum(rows) - rows] = False
        not_last[np.cumsum(rows) - 1] = False
        over, cut = (self._read_flag(held, name)[end[fine] - 1] for name in (TERMINATED, TRUNCATED))
        return DecodedEpisodes(
            rows=rows.tolist(),
            observation={name: held[name][chosen] for name in names},
            action=held[ACTION][chosen][later],
            reward=held[REWARD].reshape(-1)[chosen][later],
            terminated=over,
            truncated=cut | ~over,
            reset=self._read_flag(held, RESET)[chosen].astype(np.uint8),
            label=held[LABEL][chosen][not_last] if self.labelled else None,
            logp=held[LOGP][chosen][later] if self.logp else None,
        )

    def _lay_out(self, held: Block, begin: np.ndarray, end: np.ndarray, names: list[str]) -> Any:
        origin, stop = int(begin[0]), int(end[-1])
        over, cut = (self._read_flag(held, name)[end - 1] for name in (TERMINATED, TRUNCATED))
        after = np.minimum(end, len(held[REWARD]) - 1)
        ended = self._find_ends_of_episodes(held) | self._find_breaks(held) | self._unrelated
        continued = ~ended[end - 1] & (end < len(held[REWARD]))
        steps = Steps(
            begin=begin - origin,
            end=end - origin,
            terminated=over,
            truncated=cut,
            observation={name: held[name][origin:stop] for name in names},
            following={name: held[_name_next(name)][origin:stop] for name in names if _name_next(name) in held},
            after={name: held[name][after] for name in names},
            known=continued,
            action=held[ACTION][origin:stop],
            reward=held[REWARD].reshape(-1)[origin:stop],
            reset=self._read_flag(held, RESET)[origin:stop].astype(np.uint8),
        )
        return steps.lay_out(keep_terminated=self._settings.missing_final == "repeat")

    def _read_flag(self, held: Block, name: str) -> np.ndarray:
        return held[name] if name in held else np.zeros(len(held[REWARD]), dtype=bool)

    def _info(self, number: int, id: Any, dropped: bool) -> TrajectoryInfo:
        tags = {EPISODE: str(number)}
        if self._own:
            return read_info(self._records.get(str(id), {}), source=self.form, tags=tags)
        if id is not None:
            tags["id"] = str(id)
        if dropped:
            tags["final_observation"] = "last step dropped"
        return TrajectoryInfo(env=self.env, task=self._settings.task or self.label, source=self.form, tags=tags)

    def _blocks(self, only: list[str] | None = None, files: list[Path] | None = None) -> Iterator[Block]:
        """Yield the rows of all files (or of `files`) in order, by our names."""
        chosen = {name: parts for name, parts in self._columns.items() if only is None or name in only}
        wanted = list(dict.fromkeys(split_slice(part)[0] for parts in chosen.values() for part in parts))
        for path in files or self._files:
            row = 0
            try:
                for batch in self.reader.batches(path, wanted):
                    if EPISODE in chosen:
                        _require_ids(batch.column(chosen[EPISODE][0]), f"'{path}': '{chosen[EPISODE][0]}'", first=row)
                    row += batch.num_rows
                    if batch.num_rows:
                        block = {name: self._values(batch, name, parts) for name, parts in chosen.items()}
                        if only is None and REWARD not in block:
                            block[REWARD] = np.zeros(batch.num_rows, dtype=np.float32)
                        yield block
            except UNREADABLE as error:
                raise IntegrityError(f"'{path}' is damaged: {reason(error)}", hint="make or fetch it again") from error

    def _values(self, batch: pa.RecordBatch, name: str, parts: list[str]) -> np.ndarray:
        if name == EPISODE:
            return np.asarray(batch.column(parts[0]).to_numpy(zero_copy_only=False))
        if name in FLAGS:
            return read_flags(as_array(batch.column(parts[0])), parts[0], what=self._what)
        arrays = [self._part(batch, part) for part in parts]
        if len(arrays) > 1:
            return np.stack(arrays, axis=-1)
        return arrays[0].reshape(len(arrays[0]), *self._shapes[name]) if self._shapes.get(name) else arrays[0]

    def _part(self, batch: pa.RecordBatch, text: str) -> np.ndarray:
        name, bounds = split_slice(text)
        values = as_array(batch.column(name))
        return values if bounds is None else values[:, slice(*find_slice(bounds, values.shape, text, what=self._what))]

    def _read_records(self) -> Mapping[str, Mapping[str, Any]]:
        """Read what an export says of its trajectories, by uid."""
        path = self._files[0].parent / TRAJECTORIES
        if not path.is_file():
            text = f"'{path}' is missing: nothing is known of the trajectories' environment, task and seed"
            self._listener(Notice(text=text, level="warning"))
            return {}
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            return {row["uid"]: {**row, "tags": dict(row["tags"] or ())} for row in table.to_pylist()}
        except UNREADABLE as error:
            raise as_damage(path, error) from error


class ArrowImporter(TableImporter):
    """The importer of Arrow IPC files."""

    form = "arrow"
    reader = ArrowFiles()


def _require_ids(values: pa.Array, what: str, *, first: int) -> None:
    """Raise IntegrityError where an id of an episode is missing: such rows would be episodes of one row each."""
    missing = pc.is_null(values, nan_is_null=True)
    if (row := pc.index(missing, True).as_py()) >= 0:
        raise IntegrityError(f"{what} is missing at row {first + row:,}", hint="leave the row out, or say its episode")


def _name_next(name: str) -> str:
    return f"next_{name}"


def map_columns(
    names: Sequence[str], named: Mapping[str, str], needed: Sequence[str], *, what: str
) -> dict[str, list[str]]:
    """Map our names to columns of a table that has `names`, as `named` says first. InputMissing where one is not there,
    or where `needed` or an observation is not.
    """
    given = {name: [part.strip() for part in text.split(",")] for name, text in named.items() if text}
    observed = {name: [name] for name in names if is_observation(name)}
    after = {name: [name] for name in names if name.partition(".")[0] == _FOLLOWING}
    if any(map(is_observation, given)):
        observed = after = {}
    found = {**observed, **after, **{n: [n] for n in (ACTION, REWARD, *FLAGS) if n in names}, **given}
    if EPISODE not in named:
        found |= next(({EPISODE: [name]} for name in _IDS if name in names), {})
    problems = [f"'{part}'" for parts in found.values() for part in parts if split_slice(part)[0] not in names]
    problems += [f"'{name}'" for name in needed if name not in found]
    if not any(map(is_observation, found)):
        problems.append(f"'{OBSERVATION}'")
    if EPISODE not in found and TERMINATED not in found:
        problems.append(f"'{EPISODE}' or '{TERMINATED}'")
    if problems:
        raise InputMissing(
            f"{what} lacks {', '.join(dict.fromkeys(problems))}",
            hint=f"map its columns with source.columns; it has: {', '.join(names)}",
        )
    ours = (ACTION, REWARD, EPISODE, *FLAGS)
    unknown = [n for n in given if n not in ours and n.partition(".")[0] not in (OBSERVATION, _FOLLOWING)]
    if unknown:
        raise InputMissing(
            f"source.columns: unknown names: {', '.join(unknown)}",
            hint=f"known: {OBSERVATION}, {OBSERVATION}.NAME, {_FOLLOWING}, action, reward, episode, "
            "terminated, truncated, reset",
        )
    return found


def is_observation(name: str) -> bool:
    """Whether `name` is `obs` or `obs.NAME`."""
    return name.partition(".")[0] == OBSERVATION
