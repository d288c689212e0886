"""Manifests: what the footers of many segments say, in one file, so that a process that opens a large lake need not
read a footer from each of its files.

`manifests/<sha256[:32]>.manifest` is named by its content. A line of JSON, filled up with spaces to a multiple of 16
bytes, has `format`, `lake`, `segments` (for each its `id`, `bytes`, number of `trajectories` and the `header` of its
footer), `columns` and `bases`. The values of these columns follow, of all trajectories one after another, little-endian
and not compressed: see `_COLUMNS`. `row0` follows from the lengths, as trajectories fill their segments without gaps.

Segments are the truth. A manifest makes no segment live, and a segment that no manifest names is read itself. A
manifest is ignored if it is damaged, of another lake or of a newer format, and so is what it says of a segment that has
another size. Any of them can be deleted. Maintenance writes them from footers, and never reads one in place of a
footer, so that no error lasts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from pipelines.errors import AmagoError
from pipelines.files.atomic import explain_errors
from pipelines.files.checksums import checksum
from pipelines.files.json import Form
from pipelines.lake.arrow import UNREADABLE, map_file
from pipelines.lake.folders import parse_segment_name, segment_key
from pipelines.lake.footer import Bases, Footer, Places, SegmentHeader, is_header_of, read_footer
from pipelines.lake.storage import Storage

if TYPE_CHECKING:
    from pipelines.lake.log import Held
    from pipelines.lake.store import Lake

MANIFESTS = "manifests"
FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{32}\.manifest")
_MOST_BYTES = 1 << 30  # of a file
_ALIGNMENT = 16
# In this order, each as far as it is among the `columns`: episodes are missing where no trajectory is a piece of one,
# and bases where no segment is an overlay. `base` is a place in `bases`, the names of segments.
_COLUMNS = {
    "uid": np.dtype("S16"),
    "base_uid": np.dtype("S16"),
    "episode": np.dtype("<u8"),
    "base_offset": np.dtype("<i8"),
    "length": np.dtype("<u4"),
    "first_step": np.dtype("<u4"),
    "base": np.dtype("<u4"),
}
_PIECES, _BASES = ("episode", "first_step"), ("base_uid", "base_offset", "base")

# Segments that no manifest names yet, at which they are worth one. A thousand trajectories count as one more.
LEAST = 32
_FULL = 512  # likewise, in one manifest; one of less than half as many is written again together with new ones


class _Entry(Form):
    """A segment of a manifest."""

    id: str
    bytes: int = Field(ge=0, lt=2**63)
    trajectories: int = Field(ge=0, lt=2**32)
    header: SegmentHeader


class _ManifestHeader(Form):
    """The fields of a manifest's first line."""

    format: Literal[1]
    lake: str
    segments: list[_Entry]
    columns: list[str]
    bases: list[str]


@dataclass(frozen=True, eq=False)
class _Listed:
    """A segment of a manifest: its `entry` there, and its values of the `columns`; `bases`, names of segments."""

    entry: _Entry
    header: Mapping[str, Any]
    columns: Mapping[str, np.ndarray]
    bases: np.ndarray

    def make_footer(self) -> Footer | None:
        """Return the footer; None if it contradicts itself."""
        columns, overlay = self.columns, self.header["kind"] == "overlay"
        count = len(columns["uid"])
        rows = columns["length"].astype(np.int64) + 1
        ends = np.cumsum(rows)
        if int(rows.sum()) != self.header["rows"] or not is_header_of(self.entry.id, self.header):
            return None
        if overlay and (not columns.keys() >= {*_BASES} or (columns["base"] >= len(self.bases)).any()):
            return None
        episode = columns.get("episode")
        places = Places(
            uids=columns["uid"],
            row0=ends - rows,
            length=columns["length"],
            first_step=columns.get("first_step", np.zeros(count, np.uint32)),
            episode=episode if episode is not None and episode.any() else None,
            bases=Bases(self.bases[columns["base"]], columns["base_uid"], columns["base_offset"]) if overlay else None,
        )
        return Footer.of_places(self.header, self.entry.id, places)


class Manifests:
    """The manifests of a lake, for a reader: `load` reads them all, `find` answers from them, `clear` forgets them."""

    def __init__(self, storage: Storage, lake_id: str) -> None:
        self._storage, self._lake_id = storage, lake_id
        self._listed: dict[str, _Listed] = {}

    def load(self) -> None:
        """Read the manifests. What cannot be read is left out. StageFailed if the storage cannot list them."""
        names = list_manifests(self._storage)
        self._storage.prefetch(f"{MANIFESTS}/{name}" for name in names)
        for name in names:
            self._listed.update((each.entry.id, each) for each in _read(self._storage, name, self._lake_id))

    def clear(self) -> None:
        self._listed.clear()

    def names(self, id: str) -> bool:
        """Return whether a manifest has a segment of this id."""
        return id in self._listed

    def find(self, id: str) -> Footer | None:
        """Return what a manifest says of a segment; None if there is none, or the segment has another size."""
        found = self._listed.get(id)
        with contextlib.suppress(OSError):  # reading the segment shows why
            if found is not None and self._storage.size(segment_key(id)) == found.entry.bytes:
                return found.make_footer()
        return None


def list_manifests(storage: Storage) -> list[str]:
    """List the names of the files. StageFailed if the storage fails."""
    with explain_errors(f"list '{storage.url(MANIFESTS)}'"):
        return sorted(filter(_NAME.fullmatch, storage.names(MANIFESTS)))


def _read(storage: Storage, name: str, lake_id: str) -> list[_Listed]:
    """Read a manifest: the segments in it, none if it cannot be used."""
    key = f"{MANIFESTS}/{name}"
    try:
        # Columns are views of the mapped file, which are copied where they are kept.
        content = map_file(storage.fetch(key), scattered=False)
        if len(content) > _MOST_BYTES or checksum(memoryview(content))[:32] != name.partition(".")[0]:
            raise ValueError("it is not what was written")
        return _decode(content, lake_id)
    except UNREADABLE:
        with contextlib.suppress(OSError):
            storage.forget(key)  # this host's copy may be what is damaged
        return []


def _decode(content: bytes | mmap, lake_id: str) -> list[_Listed]:
    """Decode a manifest. One of UNREADABLE if it is none of this lake."""
    end = content.find(b"\n") + 1
    data = json.loads(content[:end])
    header = _ManifestHeader.model_validate(data)
    if header.lake != lake_id:
        raise ValueError("it belongs to another lake")
    count, columns = sum(entry.trajectories for entry in header.segments), {}
    for column, dtype in _COLUMNS.items():
        if column in header.columns:
            columns[column] = np.frombuffer(content, dtype, count, end) if count else np.zeros(0, dtype)
            end += count * dtype.itemsize
    if end != len(content) or not {"uid", "length"} <= {*header.columns} <= _COLUMNS.keys():
        raise ValueError("it has other columns")
    found, first, names = [], 0, np.array(header.bases, dtype=object)
    for entry, each in zip(header.segments, data["segments"], strict=True):
        last = first + entry.trajectories
        own = {column: values[first:last] for column, values in columns.items()}
        found.append(_Listed(entry, each["header"], own, names))
        first = last
    return found


def encode(lake_id: str, segments: Sequence[tuple[str, int, Footer]]) -> bytes:
    """Encode what footers say; `segments`: id, size in bytes and footer of each, which must satisfy `is_listable`."""
    places = [footer.places for _, _, footer in segments]
    counts = [len(each.uids) for each in places]
    bases: dict[str, int] = {}

    def join(name: str, take: Callable[[Places], np.ndarray | None]) -> np.ndarray:
        """Join the values of all segments, 0 for those of one that has none."""
        dtype, parts = _COLUMNS[name], map(take, places)
        filled = [np.zeros(n, dtype) if part is None else part for n, part in zip(counts, parts, strict=True)]
        return np.concatenate([np.zeros(0, dtype), *filled]).astype(dtype)

    def number(each: Places) -> np.ndarray | None:
        return None if each.bases is None else np.array([bases.setdefault(s, len(bases)) for s in each.bases.segment])

    columns = {"uid": join("uid", lambda each: each.uids), "length": join("length", lambda each: each.length)}
    columns["episode"] = join("episode", lambda each: each.episode)
    columns["first_step"] = join("first_step", lambda each: each.first_step)
    if not (columns["episode"].any() or columns["first_step"].any()):
        del columns["episode"], columns["first_step"]
    if any(each.bases is not None for each in places):
        columns["base"] = join("base", number)
        columns["base_uid"] = join("base_uid", lambda each: each.bases and each.bases.uid)
        columns["base_offset"] = join("base_offset", lambda each: each.bases and each.bases.offset)
    header = {
        "format": FORMAT,
        "lake": lake_id,
        "segments": [
            {"id": id, "bytes": size, "trajectories": count, "header": dict(footer.header)}
            for (id, size, footer), count in zip(segments, counts, strict=True)
        ],
        "columns": [name for name in _COLUMNS if name in columns],
        "bases": list(bases),
    }
    text = json.dumps(header).encode()
    line = text + b" " * (-(len(text) + 1) % _ALIGNMENT) + b"\n"
    return b"".join([line, *(columns[name].tobytes() for name in _COLUMNS if name in columns)])


def is_listable(footer: Footer) -> bool:
    """Return whether a manifest can say what a footer says: its trajectories follow each other, from the first row to
    the last. Writers make no others."""
    rows = footer.trajectories["length"].to_numpy() + 1
    ends = np.cumsum(rows)
    bases = footer.places.bases
    return bool(
        rows.sum() == footer.header["rows"]
        and np.array_equal(footer.places.row0, ends - rows)
        and rows.max(initial=0) < 2**32
        and (bases is None or all(isinstance(name, str) for name in bases.segment))
    )


class ManifestWriter:
    """Keeps the manifests of a lake up to date, for its maintainer."""

    def __init__(self, lake: Lake) -> None:
        self._storage, self._lake_id = lake.storage, lake.id
        self._unlistable: set[str] = set()
        self._named: set[str] = set()  # segments that manifests name, as of the last update

    def update(self, live: Mapping[str, int], held: Held, *, forget: bool = False) -> None:
        """Write manifests where there is something new, and remove those that are of little use; under the lease
        `held`. `live`: segments that count, with their numbers of trajectories. `forget`: what is not live must not be
        named any more.

        A manifest is only a help: if the disk is full, or a segment cannot be read, there is one less.
        """
        if not (forget or _measure(live, live.keys() - self._named - self._unlistable) >= LEAST):
            return
        with contextlib.suppress(OSError):
            self._update(live, held, forget)

    def _update(self, live: Mapping[str, int], held: Held, forget: bool) -> None:
        kept: set[str] = set()
        again: set[str] = set()
        stale = []
        for name in list_manifests(self._storage):
            ids = {each.entry.id for each in _read(self._storage, name, self._lake_id)}
            own = ids & live.keys() - kept
            if 2 * _measure(live, own) >= _FULL and not (forget and len(own) < len(ids)):
                kept |= own
            else:
                stale.append(name)
                again |= own
        new = live.keys() - kept - again - self._unlistable
        self._named = kept | again
        if not forget and _measure(live, new) < LEAST:
            return
        for group in _group((new | again) - kept, live):
            footers = []
            for id in group:
                held()
                try:
                    footer, size = read_footer(self._storage, id), self._storage.size(segment_key(id))
                    listable = is_listable(footer)
                except (FileNotFoundError, AmagoError):
                    listable = False
                if listable:  # without the table, which takes five times the memory
                    footers.append((id, size, Footer.of_places(footer.header, footer.path, footer.places)))
                else:
                    self._unlistable.add(id)
            content = encode(self._lake_id, footers)
            held()
            key = f"{MANIFESTS}/{checksum(content)[:32]}.manifest"
            self._storage.write(key, content)
            stale = [name for name in stale if not key.endswith(name)]
            self._named |= set(group)
        held()
        self._storage.remove(*(f"{MANIFESTS}/{name}" for name in stale))


def _measure(live: Mapping[str, int], ids: Iterable[str]) -> float:
    """Return how long it takes to read the footers of segments, in those of small ones."""
    return sum(1 + live[id] / 1024 for id in ids)


def _group(ids: Iterable[str], live: Mapping[str, int]) -> Iterator[list[str]]:
    """Divide segments among manifests, overlays apart."""
    for _, alike in itertools.groupby(sorted(ids, key=lambda id: (_is_overlay(id), id)), _is_overlay):
        group: list[str] = []
        size = 0.0
        for id in alike:
            group.append(id)
            size += _measure(live, [id])
            if size >= _FULL:
                yield group
                group, size = [], 0.0
        if group:
            yield group


def _is_overlay(id: str) -> bool:
    return parse_segment_name(id)[2]
