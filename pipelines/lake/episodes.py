"""Episodes that are stored in pieces: finding the pieces of an episode, and joining them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.events import Listener, silent
from pipelines.lake.footer import info_of
from pipelines.lake.overlays import EpisodePiece, OverlayBatch
from pipelines.lake.schema import TRUNCATED
from pipelines.lake.sql.catalog import query
from pipelines.lake.trajectory import Trajectory

if TYPE_CHECKING:
    from pipelines.lake.reading import Reader
    from pipelines.lake.store import Lake

_PIECES = "select episode, chunk, uid from trajectories where episode <> uid order by episode, chunk"


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
    info = info_of(join_rows([reader.row(uid) for uid in uids]))
    return Trajectory(join_pieces([piece.columns for piece in pieces]), info, uid=uids[0])


def find_pieces(lake: Lake, *, listener: Listener = silent) -> dict[str, tuple[str, ...]]:
    """Return, for the uid of each piece in the lake, the uids of the consecutive pieces of its episode, itself among
    them. Trajectories that are whole episodes are not in it."""
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


def split_versions(
    versions: OverlayBatch, lengths: Sequence[np.ndarray], names: Sequence[str], first_steps: Sequence[int]
) -> tuple[np.ndarray, OverlayBatch]:
    """Split versions of joined episodes into versions of their pieces.

    Of each episode given: `lengths`, the actions of its pieces; `first_steps`, the time of its first row; `names`, what
    to call a version of it that covers several pieces. Returns for each part (m,) the number of its piece in the
    episode, and the parts, whose `place` is still that of the episode and whose `offset` is in the piece.
    """
    which, begins, rows, numbers, offsets, pieces = [], [], [], [], [], []
    for version, (place, offset, count) in enumerate(
        zip(versions.place.tolist(), versions.offset.tolist(), versions.rows.tolist(), strict=True)
    ):
        ends = np.cumsum(lengths[place])
        starts, last = ends - lengths[place], offset + count - 1
        inside = np.flatnonzero((starts < last) & (ends > offset)).tolist()
        for chunk, number in enumerate(inside):
            first, stop = max(offset, int(starts[number])), min(last, int(ends[number]))
            which.append(version)
            begins.append(first - offset)
            rows.append(stop - first + 1)
            numbers.append(number)
            offsets.append(first - int(starts[number]))
            # A version that begins later than its episode begins at time 0.
            time = first_steps[place] + first if offset == 0 else first - offset
            known = {"episode": names[place], "chunk": chunk} if len(inside) > 1 else {}
            pieces.append(EpisodePiece(first_step=time, continues=chunk + 1 < len(inside), **known))
    found = versions.part(*(np.array(each, dtype=np.int64) for each in (which, begins, rows)))
    goes_on = np.array([piece.continues for piece in pieces], dtype=bool)
    columns = dict(found.columns)
    if TRUNCATED in columns:
        columns[TRUNCATED][(found.first + found.rows - 1)[goes_on]] = 1
    success = None if found.success is None else np.where(goes_on, -1, found.success).astype(np.int8)
    offset = np.array(offsets, dtype=np.int64)
    return np.array(numbers, dtype=np.int64), replace(
        found, columns=columns, success=success, offset=offset, pieces=pieces
    )
