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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import InputMissing, IntegrityError
from pipelines.files.malformed import reason
from pipelines.formats.base import EPISODE, Request, fingerprint
from pipelines.formats.flat.arrays import part_of, within
from pipelines.formats.intake import Intake, Raw, action_box, agreed, flags, inferred
from pipelines.formats.minari.arrow import flat_values
from pipelines.formats.records import info_of, spaces_of
from pipelines.formats.tables.columns import FLAGS, columns_of, is_observation
from pipelines.formats.tables.files import TRAJECTORIES, ArrowFiles, ParquetFiles, find_files, unreadable
from pipelines.formats.transitions import MOST_UNRELATED, Steps, breaks_notice, differ, lay, unrelated_notice
from pipelines.lake.arrow import UNREADABLE
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED
from pipelines.lake.spaces import Discrete, MultiDiscrete, Space, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo

SPACES = b"amago_spaces"  # metadata of a file that we wrote

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
        self.fingerprint = fingerprint([], [(path.name, path.stat().st_size) for path in self._files])
        self.dropped = 0
        schema = self.reader.schema(self._files[0])
        own = (schema.metadata or {}).get(SPACES)
        self._own = own is not None
        self._arrival = self._own or self._settings.layout == "arrival"
        self._columns = self._find_columns(schema.names)
        for path in self._files[1:]:
            self._require_alike(schema, path)
        self._shapes = {
            name: tuple(json.loads((schema.field(columns[0]).metadata or {}).get(b"shape", b"null")) or ())
            for name, columns in self._columns.items()
            if columns[0] in schema.names and len(columns) == 1
        }
        self._records = self._own_records() if self._own else {}
        self.env = next((str(row.get("env") or "") for row in self._records.values()), "") or self.label
        self.steps: int | None = sum(self.reader.rows(path) for path in self._files)
        self.spaces = self._spaces(spaces_of(own, what=self._what) if own is not None else None, request.spaces)
        self._intake = Intake(
            self.spaces,
            what=self._what,
            clip=self._settings.clip_actions,
            native=not self._own,
            listener=request.listener,
        )
        self._followed = [n for n in self.spaces.observation if _next(n) in self._columns and not self._arrival]
        self._unrelated = False  # whether rows have nothing to do with each other
        if not self._own:
            self._survey()

    def _find(self, request: Request) -> list[Path]:
        """List the files to read, in order."""
        return find_files(request.place, self.form)

    def _find_columns(self, names: list[str]) -> dict[str, list[str]]:
        """Map our names to columns of the files, which have `names`."""
        return columns_of(names, self._settings.columns, self.needed, what=self._what)

    def _survey(self) -> None:
        """Find out from the ids, flags and next observations whether the rows of an episode are together."""
        if EPISODE in self._columns:
            self._require_together()
        if not self._followed:
            return
        inside = breaks = 0
        last: Block = {}
        wanted = [EPISODE, TERMINATED, TRUNCATED, *self._followed, *map(_next, self._followed)]
        for block in self._blocks(wanted):
            rows = {name: np.concatenate([last[name], block[name]]) if last else block[name] for name in block}
            marks = self._marked(rows)[:-1]
            inside, breaks = inside + int((~marks).sum()), breaks + int((self._broken(rows)[:-1] & ~marks).sum())
            last = {name: values[-1:] for name, values in rows.items()}
        self._unrelated = breaks > MOST_UNRELATED * inside
        if self._unrelated or breaks:
            notice = unrelated_notice if self._unrelated else breaks_notice
            self._listener(notice(self._what, breaks, inside))

    def _require_together(self) -> None:
        """Raise InputMissing if an id comes back within a file before its episode has ended."""
        for path in self._files:
            ended: dict[Any, bool] = {}
            current, over, row = None, False, 0
            for block in self._blocks([EPISODE, TERMINATED, TRUNCATED], files=[path]):
                ids, flags = block[EPISODE], self._flagged(block)
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
        wanted = dict.fromkeys(part_of(part)[0] for parts in self._columns.values() for part in parts)
        unlike = [n for n in wanted if n not in other.names or not other.field(n).type.equals(first.field(n).type)]
        if unlike:
            differences = [f"{n}: {other.field(n).type if n in other.names else 'nothing'}" for n in unlike]
            raise InputMissing(
                f"'{path}' has other columns than '{self._files[0]}': {', '.join(differences)}",
                hint="take in files of one space at a time",
            )

    def _spaces(self, own: Spaces | None, wanted: Spaces | None) -> Spaces:
        head = next(self._blocks(), None)
        if head is None:
            raise InputMissing(f"{self._what} has no rows")
        observed = {name: values for name, values in head.items() if is_observation(name)}
        if wanted is not None:
            return agreed({name: values.shape[1:] for name, values in observed.items()}, wanted, what=self._what)
        if own is not None:
            return own
        observation: dict[str, Space] = {n: inferred(v.shape[1:], v.dtype) for n, v in observed.items()}
        action = head[ACTION]
        if action.dtype.kind not in "iu":
            return Spaces(observation=observation, action=action_box(action.shape[1:], self._settings, what=self._what))
        size = int(np.prod(action.shape[1:], dtype=np.int64))
        count = self._settings.num_actions or 1 + max(int(b[ACTION].max()) for b in self._blocks([ACTION]))
        return Spaces(
            observation=observation,
            action=Discrete(n=max(count, 1)) if size == 1 else MultiDiscrete(nvec=(count,) * size),
        )

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        self.dropped = 0
        number, held = 0, _empty()
        blocks = self._blocks()
        block = next(blocks, None)
        while block is not None:
            following = next(blocks, None)
            held = {name: np.concatenate([held[name], block[name]]) if held else block[name] for name in block}
            ends = self._ends(held, last=following is None)
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

    def _ends(self, held: Block, *, last: bool) -> np.ndarray:
        """Return the ends of complete trajectories; the last one is complete if no rows follow."""
        rows = len(held[REWARD])
        marks = np.zeros(rows, dtype=bool)
        if rows:
            marks = self._marked(held) | self._broken(held) | self._unrelated
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

    def _marked(self, rows: Block) -> np.ndarray:
        """Return (n,): whether an episode ends here by its flags, or because the next row has another id."""
        marks = self._flagged(rows)
        if EPISODE in rows:
            if self._arrival:
                marks[:] = False
            marks[:-1] |= rows[EPISODE][1:] != rows[EPISODE][:-1]
        return marks

    def _flagged(self, rows: Block) -> np.ndarray:
        count = len(next(iter(rows.values())))
        marks = np.zeros(count, dtype=bool)
        for name in (TERMINATED, TRUNCATED):
            if name in rows:
                marks |= rows[name]
        return marks

    def _broken(self, rows: Block) -> np.ndarray:
        """Return (n,): whether the next observation of a row differs from the observation of the next row."""
        found = np.zeros(len(next(iter(rows.values()))), dtype=bool)
        for name in self._followed:
            found[:-1] |= differ(rows[_next(name)][:-1], rows[name][1:])
        return found

    def _batch(self, held: Block, begin: np.ndarray, end: np.ndarray, *, first: int) -> Trajectories | None:
        names = list(self.spaces.observation)
        if self._arrival:
            raw, usable = self._arrived(held, begin, end, names), end - begin > 1
            dropped = np.zeros(len(begin), dtype=bool)
        else:
            laid = self._laid(held, begin, end, names)
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

    def _arrived(self, held: Block, begin: np.ndarray, end: np.ndarray, names: list[str]) -> Raw | None:
        """Split rows into trajectories of T + 1 rows, without those of a single row."""
        fine = end - begin > 1
        if not fine.any():
            return None
        chosen = np.concatenate([np.arange(a, b) for a, b in zip(begin[fine], end[fine], strict=True)])
        rows = (end - begin)[fine]
        later = np.ones(len(chosen), dtype=bool)
        later[np.cumsum(rows) - rows] = False
        over, cut = (self._flag(held, name)[end[fine] - 1] for name in (TERMINATED, TRUNCATED))
        return Raw(
            rows=rows.tolist(),
            observation={name: held[name][chosen] for name in names},
            action=held[ACTION][chosen][later],
            reward=held[REWARD].reshape(-1)[chosen][later],
            terminated=over,
            truncated=cut | ~over,
            reset=self._flag(held, RESET)[chosen].astype(np.uint8),
        )

    def _laid(self, held: Block, begin: np.ndarray, end: np.ndarray, names: list[str]) -> Any:
        origin, stop = int(begin[0]), int(end[-1])
        over, cut = (self._flag(held, name)[end - 1] for name in (TERMINATED, TRUNCATED))
        after = np.minimum(end, len(held[REWARD]) - 1)
        ended = self._marked(held) | self._broken(held) | self._unrelated
        continued = ~ended[end - 1] & (end < len(held[REWARD]))
        steps = Steps(
            begin=begin - origin,
            end=end - origin,
            terminated=over,
            truncated=cut,
            observation={name: held[name][origin:stop] for name in names},
            following={name: held[_next(name)][origin:stop] for name in names if _next(name) in held},
            after={name: held[name][after] for name in names},
            known=continued,
            action=held[ACTION][origin:stop],
            reward=held[REWARD].reshape(-1)[origin:stop],
            reset=self._flag(held, RESET)[origin:stop].astype(np.uint8),
        )
        return lay(steps, keep_terminated=self._settings.missing_final == "repeat")

    def _flag(self, held: Block, name: str) -> np.ndarray:
        return held[name] if name in held else np.zeros(len(held[REWARD]), dtype=bool)

    def _info(self, number: int, id: Any, dropped: bool) -> TrajectoryInfo:
        tags = {EPISODE: str(number)}
        if self._own:
            return info_of(self._records.get(str(id), {}), source=self.form, tags=tags)
        if id is not None:
            tags["id"] = str(id)
        if dropped:
            tags["final_observation"] = "last step dropped"
        return TrajectoryInfo(env=self.env, task=self._settings.task or self.label, source=self.form, tags=tags)

    def _blocks(self, only: list[str] | None = None, files: list[Path] | None = None) -> Iterator[Block]:
        """Yield the rows of all files (or of `files`) in order, by our names."""
        chosen = {name: parts for name, parts in self._columns.items() if only is None or name in only}
        wanted = list(dict.fromkeys(part_of(part)[0] for parts in chosen.values() for part in parts))
        for path in files or self._files:
            try:
                for batch in self.reader.batches(path, wanted):
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
            return flags(flat_values(batch.column(parts[0])), parts[0], what=self._what)
        arrays = [self._part(batch, part) for part in parts]
        if len(arrays) > 1:
            return np.stack(arrays, axis=-1)
        return arrays[0].reshape(len(arrays[0]), *self._shapes[name]) if self._shapes.get(name) else arrays[0]

    def _part(self, batch: pa.RecordBatch, text: str) -> np.ndarray:
        name, bounds = part_of(text)
        values = flat_values(batch.column(name))
        return values if bounds is None else values[:, slice(*within(bounds, values.shape, text, what=self._what))]

    def _own_records(self) -> Mapping[str, Mapping[str, Any]]:
        """Read what an export says of its trajectories, by uid."""
        path = self._files[0].parent / TRAJECTORIES
        if not path.is_file():
            return {}
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            return {row["uid"]: {**row, "tags": dict(row["tags"] or ())} for row in table.to_pylist()}
        except UNREADABLE as error:
            raise unreadable(path, error) from error


class ArrowImporter(TableImporter):
    """The importer of Arrow IPC files."""

    form = "arrow"
    reader = ArrowFiles()


def _next(name: str) -> str:
    return f"next_{name}"


def _empty() -> Block:
    return {}
