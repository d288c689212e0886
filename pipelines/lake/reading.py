"""Reading trajectories: by uid with overlays applied, many originals at a time, or a weighted sample; and episodes that
are stored in pieces, joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.errors import InputMissing, IntegrityError, StageFailed
from pipelines.events import Listener, silent
from pipelines.lake.footer import extract_info, hex_uids, read_footer, uid_array
from pipelines.lake.live import LiveTable, Segment
from pipelines.lake.schema import TRUNCATED
from pipelines.lake.segment import OpenSegments, SegmentFile
from pipelines.lake.trajectory import Trajectory
from pipelines.lake.uids import find_place, positions

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_T = TypeVar("_T")
_PIECES = "select episode, chunk, uid from trajectories where episode <> uid order by episode, chunk"
_ATTEMPTS = 5  # to open a segment that is rewritten and removed meanwhile


@dataclass(frozen=True)
class _Portion:
    """n trajectories of the segment `id`: their footer rows `table`, `uids` (n,) "S16", and the first row `row0` (n,)
    and number of rows `rows` (n,) of each in `file`, which stays readable if it is removed.
    """

    id: str
    file: SegmentFile
    table: pa.Table
    uids: np.ndarray
    row0: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.uids)

    def envs(self) -> tuple[list[str], np.ndarray]:
        """Return the names of environments, and the index (n,) of each trajectory's."""
        names = self.table["env"].combine_chunks().dictionary_encode()
        return names.dictionary.to_pylist(), names.indices.to_numpy()

    def only(self, which: np.ndarray) -> _Portion:
        """Select the trajectories at the ascending indices `which` (m,)."""
        if len(which) == len(self):
            return self
        table = self.table.take(pa.array(which))
        return replace(self, table=table, uids=self.uids[which], row0=self.row0[which], rows=self.rows[which])

    def chunks(self, names: Sequence[str], most: int) -> Iterator[_Portion]:
        """Yield consecutive parts with about `most` bytes of these columns, at least one trajectory each."""
        step_bytes = sum(c.step_bytes for c in self.file.schema_columns if c.name in names)
        ends = np.cumsum(self.rows * step_bytes)
        first = done = 0
        while first < len(ends):
            stop = max(first + 1, int(np.searchsorted(ends, done + most, side="right")))
            yield self.only(np.arange(first, stop))
            first, done = stop, int(ends[stop - 1])

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return columns (R, ...), trajectory after trajectory: views of the file where its rows are contiguous."""
        starts, stops = self.row0, self.row0 + self.rows
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        spans = list(zip(starts[[0, *breaks]].tolist(), stops[[*(breaks - 1), -1]].tolist(), strict=True))
        found = {}
        for name in names:
            values = self.file.columns.get(name)
            parts = [self.file.read_rows(name, a, b) if values is None else values[a:b] for a, b in spans]
            found[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found


class Reader:
    """Random access to the live trajectories of a lake. An unknown uid refreshes once before InputMissing.

    `verify`: compare the checksums of a file when it is first read.
    """

    def __init__(self, lake: Lake, *, listener: Listener = silent, verify: bool = False) -> None:
        self.lake = lake
        self.live = LiveTable(lake, listener)
        check = SegmentFile.require_sound if verify else None
        self._files = OpenSegments(lake, check=check, rows=self.live.listed_rows.get)
        self._rows: dict[str, dict[str, int]] = {}  # of open files: uid -> row of the footer's table
        self._known: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def refresh(self) -> None:
        """Pick up segments that were added, rewritten or removed."""
        before = len(self.live.segments)
        if self.live.refresh().changed or len(self.live.segments) > before:
            self._known = None

    def uids(self) -> list[str]:
        """Refresh, and return every live trajectory in the lake's order."""
        self.refresh()
        return [uid for segment in self.live.segments for uid in hex_uids(segment.uids)]

    def list_originals(self) -> list[Segment]:
        """List the segments whose trajectories do not derive from others."""
        return [segment for segment in self.live.segments if not segment.is_overlay]

    def list_derived(self) -> np.ndarray:
        """Collect the uids (n,) "S16" of derived trajectories, sorted."""
        overlays = [segment.uids for segment in self.live.segments if segment.is_overlay]
        return np.sort(np.concatenate([np.zeros(0, "S16"), *overlays]))

    def locate(self, uid: str) -> tuple[Segment, int]:
        """Find the segment of a trajectory and its index there."""
        found = self._find(uid)
        if found is None:
            self.refresh()
            found = self._find(uid)
        if found is None:
            raise InputMissing(f"lake '{self.lake.name}' has no trajectory {uid}")
        return found

    def _find(self, uid: str) -> tuple[Segment, int] | None:
        """Search sorted arrays, 24 bytes a trajectory, which are rebuilt when something changed."""
        if self._known is None:
            segments = self.live.segments
            uids = np.concatenate([np.zeros(0, "S16"), *(segment.uids for segment in segments)])
            first = np.cumsum([0, *(len(segment.uids) for segment in segments)])
            order = np.argsort(uids)
            self._known = uids[order], order, first
        uids, order, first = self._known
        place = find_place(uids, uid)
        if place is None:
            return None
        number = int(np.searchsorted(first, order[place], side="right")) - 1
        return self.live.segments[number], int(order[place] - first[number])

    def row(self, uid: str) -> Mapping[str, Any]:
        """Read the trajectory's row in the footer of its segment."""
        segment, _ = self.locate(uid)
        footer = self._file(segment.number).footer
        if segment.file not in self._rows:
            self._rows = {id: rows for id, rows in self._rows.items() if id in self._files}
            self._rows[segment.file] = {uid: i for i, uid in enumerate(hex_uids(footer.uids()))}
        place = self._rows[segment.file].get(uid)
        if place is None:
            raise self._miss(segment)
        return footer.trajectories.slice(place, 1).to_pylist()[0]

    @staticmethod
    def _miss(segment: Segment) -> IntegrityError:
        return IntegrityError(
            f"segment '{segment.file}' lacks trajectories that a manifest says are in it",
            hint="remove the folder manifests/ of the lake: it is written again",
        )

    def read(self, uid: str) -> Trajectory:
        """Read a copy of a trajectory. IntegrityError if its segment is damaged."""

        def read_whole() -> Trajectory:
            names = [column.name for column in self.lake.schema(self.locate(uid)[0].schema_id).columns]
            return Trajectory(columns=self._columns(uid, names), info=extract_info(self.row(uid)), uid=uid)

        return self._retry(read_whole)

    def read_columns(self, uid: str, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read copies of some columns of a trajectory. Errors as of `read`."""
        return self._retry(lambda: self._columns(uid, names))

    def _retry(self, read: Callable[[], _T]) -> _T:
        """Return what `read` does, a second time if a file was rewritten and swept since the last refresh."""
        try:
            return read()
        except FileNotFoundError:
            self.live.look_back()
            self.refresh()
            return read()

    def _columns(self, uid: str, names: Sequence[str]) -> dict[str, np.ndarray]:
        segment, place = self.locate(uid)
        rows = int(segment.length[place]) + 1
        own, start = self._file(segment.number), int(segment.row0[place])
        base, base_start = own, start
        if segment.bases is not None:
            base, base_start = self._file(int(segment.bases[0][place])), int(segment.bases[1][place])
        columns: dict[str, np.ndarray] = {}
        for name in names:
            file, row = (own, start) if name in segment.columns else (base, base_start)
            columns[name] = file.read_rows(name, row, row + rows)
        return columns

    def read_portion(self, number: int, uids: np.ndarray) -> _Portion | None:
        """Return those of `uids` that are live in segment `number`, in file order; None if none is."""
        for _ in range(_ATTEMPTS):
            segment = self.live.segments[number]
            live = uids[positions(segment.uids, uids) >= 0]
            if not len(live):
                return None
            try:
                file, footer = self._file(number), read_footer(self.lake.storage, segment.file)
            except FileNotFoundError:  # rewritten and swept since the last refresh
                self.live.look_back()
                self.refresh()
                continue
            places = np.sort(positions(footer.uids(), live))
            if places[0] < 0:
                raise self._miss(segment)
            table = footer.trajectories.take(pa.array(places))
            row0, rows = table["row0"].to_numpy(), table["length"].to_numpy() + 1
            return _Portion(segment.id, file, table, uid_array(table["uid"]), row0, rows)
        raise StageFailed(f"files of lake '{self.lake.name}' vanish while they are read", hint="repeat the command")

    def _file(self, number: int) -> SegmentFile:
        segment = self.live.segments[number]
        return self._files.open(segment.file, segment.schema_id)


def join_pieces(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join the step columns of consecutive pieces of an episode.

    Row 0 of a later piece repeats the last row of the one before, where the episode was not truncated.
    """
    joined = {name: np.concatenate([values, *(p[name][1:] for p in pieces[1:])]) for name, values in pieces[0].items()}
    if TRUNCATED in joined:
        ends = np.cumsum([len(piece[TRUNCATED]) - 1 for piece in pieces])[:-1]
        joined[TRUNCATED][ends] = 0
    return joined


def join_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rows of the table `trajectories` of consecutive pieces to that of their episode, whose uid is that of
    the first one. Fields that are not joined are those of the last one."""
    if len(rows) == 1:
        return dict(rows[0])
    first, last = rows[0], rows[-1]
    length = sum(row["length"] for row in rows)
    return {
        **last,
        **{name: first[name] for name in ("uid", "t_start", "base_uid", "base_offset", "chunk", "first_step")},
        "length": length,
        "return": sum(row["return"] for row in rows),
        "attempts": list(chain.from_iterable(row["attempts"] or () for row in rows)),
        "epsilon": sum(row["epsilon"] * row["length"] for row in rows) / length,
    }


def read_pieces(reader: Reader, uids: Sequence[str]) -> Trajectory:
    """Read consecutive pieces of an episode, joined. InputMissing if one is gone, IntegrityError if it is damaged."""
    pieces = [reader.read(uid) for uid in uids]
    if len(pieces) == 1:
        return pieces[0]
    info = extract_info(join_rows([reader.row(uid) for uid in uids]))
    return Trajectory(join_pieces([piece.columns for piece in pieces]), info, uid=uids[0])


def find_pieces(lake: Lake, *, listener: Listener = silent) -> dict[str, tuple[str, ...]]:
    """Return, for the uid of each piece in the lake, the uids of the consecutive pieces of its episode, itself among
    them. Trajectories that are whole episodes are not in it."""
    from pipelines.lake.sql.catalog import query

    found: dict[str, tuple[str, ...]] = {}
    run: list[str] = []
    before: tuple[str, int] | None = None
    for episode, chunk, uid in query(lake, _PIECES, listener=listener)[1]:
        if before != (episode, chunk - 1):  # another episode, or a piece is missing
            found.update(dict.fromkeys(run, tuple(run)))
            run = []
        run.append(uid)
        before = episode, chunk
    found.update(dict.fromkeys(run, tuple(run)))
    return found


def group_by_episode(lake: Lake, uids: Iterable[str], *, listener: Listener = silent) -> list[tuple[str, ...]]:
    """Return the uids of the pieces of every episode to which one of `uids` belongs, in the order of these."""
    pieces = find_pieces(lake, listener=listener)
    return list(dict.fromkeys(pieces.get(uid, (uid,)) for uid in uids))


def read(lake: Lake, uid: str) -> Trajectory:
    """Read one trajectory. InputMissing if the lake does not have it."""
    return Reader(lake).read(uid)


def trajectories(lake: Lake, where: str | None = None, *, listener: Listener = silent) -> Iterator[Trajectory]:
    """Yield the trajectories that are live now, except those that expire meanwhile; `where` is a SQL predicate over the
    table `trajectories`.
    """
    reader = Reader(lake, listener=listener)
    uids = reader.uids()
    if where is not None:
        from pipelines.lake.sql.selection import select

        chosen = set(hex_uids(select(lake, where, listener=listener).uids))
        uids = [uid for uid in uids if uid in chosen]
    for uid in uids:
        try:
            trajectory = reader.read(uid)
        except InputMissing:
            continue
        yield trajectory


@dataclass(frozen=True)
class SampledTrajectory:
    """A trajectory and its row of the table `trajectories`, in which `uid` and `base_uid` are 32 hex digits."""

    trajectory: Trajectory
    row: Mapping[str, Any]
    schema_id: str


def draw(
    lake: Lake,
    k: int,
    *,
    where: str = "",
    weight: str = "",
    seed: int = 0,
    pieces: Mapping[str, Sequence[str]] = MappingProxyType({}),
    listener: Listener = silent,
) -> list[str]:
    """Return the uids of `k` different trajectories (or of all, if there are fewer), drawn in proportion to `weight`
    (empty: uniformly) from those that match `where` (empty: all). Those that are `pieces` of an episode are drawn as
    the first of them, by the largest of their weights.

    The draw depends on the seed and the trajectories only, not on the files that hold them. UsageError for wrong SQL,
    InputMissing if nothing matches.
    """
    if where.strip() or weight.strip():
        from pipelines.lake.sql.selection import select

        chosen = select(lake, where, weight, listener=listener)
        uids, weights = chosen.uids[chosen.weights > 0], chosen.weights[chosen.weights > 0]
    else:
        live = LiveTable(lake, listener)
        live.refresh()
        uids = np.sort(np.concatenate([np.zeros(0, "S16"), *(segment.uids for segment in live.segments)]))
        weights = np.ones(len(uids))
    if not len(uids):
        what = "no trajectory that matches" if where.strip() or weight.strip() else "no trajectories"
        raise InputMissing(f"lake '{lake.name}' has {what}")
    if pieces:
        heads = np.array([bytes.fromhex(pieces.get(uid, (uid,))[0]) for uid in hex_uids(uids)], "S16")
        uids, places = np.unique(heads, return_inverse=True)
        own, weights = weights, np.zeros(len(uids))
        np.maximum.at(weights, places, own)
    rng = np.random.default_rng(seed)
    weights = weights / weights.max()  # whose sum may be infinite
    places = rng.choice(len(uids), size=min(k, len(uids)), replace=False, p=weights / weights.sum())
    return hex_uids(uids[places])


def sample(
    lake: Lake,
    k: int,
    *,
    where: str = "",
    weight: str = "",
    seed: int = 0,
    whole: bool = False,
    listener: Listener = silent,
) -> Iterator[SampledTrajectory]:
    """Yield the trajectories that `draw` chooses; if `whole`, episodes, their pieces joined. IntegrityError for a
    damaged segment."""
    pieces = find_pieces(lake, listener=listener) if whole else {}
    uids = draw(lake, k, where=where, weight=weight, seed=seed, pieces=pieces, listener=listener)
    reader = Reader(lake, listener=listener)
    for group in (pieces.get(uid, (uid,)) for uid in uids):
        uid, trajectory = group[0], read_pieces(reader, group)
        row = join_rows([reader.row(piece) for piece in group])
        row |= {"uid": uid, "base_uid": row["base_uid"].hex() if row["base_uid"] else None}
        schema_id = reader.locate(uid)[0].schema_id
        yield SampledTrajectory(trajectory, {**row, "tags": dict(row["tags"] or ())}, schema_id)
