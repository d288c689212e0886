"""A segment's footer: a description of its content that is read without reading the columns.

Arrow's file footer carries three texts. `amago` is a JSON object: format, kind ("steps" or "overlay"), schema id,
writer, commit time, rows, CRC32 of every column. `trajectories` is the table of trajectories, an Arrow stream
compressed by zstd and encoded as base64 (footer values must be text for other readers of the format). `crc` is the
CRC32 of both, in hex.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipelines.errors import InputMissing, IntegrityError, StorageError
from pipelines.files.json import Form, fits, parse_object
from pipelines.lake.arrow import UNREADABLE
from pipelines.lake.folders import is_rewritten, parse_segment_name, segment_key
from pipelines.lake.storage import Storage
from pipelines.lake.trajectory import TrajectoryInfo

FORMAT = 1
_text = pa.string()
TRAJECTORIES = pa.schema(
    [
        ("uid", pa.binary(16)),
        ("row0", pa.int64()),
        ("length", pa.int64()),
        ("env", _text),
        ("task", _text),
        ("source", _text),
        ("policy_id", _text),
        ("policy_version", pa.int64()),
        ("collector", _text),
        ("seed", pa.int64()),
        ("return", pa.float64()),
        ("success", pa.bool_()),
        ("attempts", pa.list_(pa.bool_())),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("epsilon", pa.float64()),
        ("goal_text", _text),
        ("t_start", pa.float64()),
        ("t_end", pa.float64()),
        ("episode", _text),
        ("chunk", pa.int64()),
        ("first_step", pa.int64()),
        ("continues", pa.bool_()),
        ("history", _text),
        ("history_index", pa.int64()),
        ("base_uid", pa.binary(16)),
        ("base_segment", _text),
        ("base_offset", pa.int64()),
        ("relabel_method", _text),
        ("crc", pa.uint32()),
        ("tags", pa.map_(_text, _text)),
        ("t_commit", pa.float64()),
    ]
)
_TAIL = 1 << 14  # enough for the footer of a segment of a few hundred trajectories
_MERGED_TAIL = 1 << 17  # and for that of a segment merged from some dozens
_END = struct.Struct("<i6s")  # an Arrow file ends with the length of its footer and these six letters
_INFO = frozenset(TrajectoryInfo.__dataclass_fields__)


_Place = Annotated[int, Field(ge=0, lt=2**48)]


class SegmentHeader(Form):
    """The fields that are read from a segment's header."""

    format: Literal[1]
    kind: Literal["steps", "overlay"]
    schema_id: str = Field(alias="schema", pattern="^[0-9a-f]{16}$")
    writer: str
    sequence: int = Field(ge=-1, lt=2**63)
    t_commit: Annotated[float, Field(allow_inf_nan=False)]
    rows: int = Field(ge=0, lt=2**48)
    columns: dict[str, Annotated[int, Field(ge=0, lt=2**32)] | None]
    trajectories_bytes: int = Field(ge=0, lt=2**40)
    replaces: dict[str, Annotated[list[_Place], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)


class Bases(NamedTuple):
    """What n trajectories of an overlay derive from: `segment` (n,) names, `uid` (n,) "S16", `offset` (n,) int64, the
    row of the base that is their row 0."""

    segment: np.ndarray
    uid: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True, eq=False)
class Places:
    """What decides which of n trajectories of a segment are live, and where they are: `uids` (n,) "S16", `row0` (n,)
    int64, `length` and `first_step` (n,) u4; `episode` as of `Footer.episodes`; of an overlay, `bases`."""

    uids: np.ndarray
    row0: np.ndarray
    length: np.ndarray
    first_step: np.ndarray
    episode: np.ndarray | None = None
    bases: Bases | None = None

    def part(self, first: int, count: int) -> Places:
        """Select `count` trajectories from `first` on, without copying."""
        rows = slice(first, first + count)
        return Places(
            uids=self.uids[rows],
            row0=self.row0[rows],
            length=self.length[rows],
            first_step=self.first_step[rows],
            episode=None if self.episode is None else self.episode[rows],
            bases=None if self.bases is None else Bases(*(values[rows] for values in self.bases)),
        )


@dataclass(frozen=True)
class Footer:
    """A decoded footer. `header` is the JSON object; `trajectories` the table by `TRAJECTORIES`, decoded on first use
    (IntegrityError if damaged), in which a null `t_commit` is replaced by the segment's own.
    """

    header: Mapping[str, Any]
    packed: bytes
    path: str

    @cached_property
    def trajectories(self) -> pa.Table:
        try:
            stream = pa.decompress(base64.b64decode(self.packed), self.header["trajectories_bytes"], "zstd")
            table = pa.ipc.open_stream(stream).read_all()
            if not table.schema.equals(TRAJECTORIES):
                raise ValueError("its trajectories do not have the columns of trajectories")
            table.validate(full=True)
            if any(table[name].null_count for name in ("uid", "row0", "length")):
                raise ValueError("a trajectory has no uid, place or length")
            row0, length = table["row0"].to_numpy(), table["length"].to_numpy()
            if len(row0) and not (
                row0.min() >= 0 and length.min() >= 0 and (length < self.header["rows"] - row0).all()
            ):
                raise ValueError("a trajectory has rows outside the segment")
        except UNREADABLE as error:
            raise IntegrityError(f"segment '{self.path}' is damaged: {error}") from error
        place = TRAJECTORIES.get_field_index("t_commit")
        times = table.column(place)
        if times.null_count:
            own = pa.array(np.full(table.num_rows, float(self.header["t_commit"])))
            times = own if times.null_count == len(times) else pc.coalesce(times, own)
            table = table.set_column(place, TRAJECTORIES.field(place), times)
        return table

    @property
    def is_overlay(self) -> bool:
        return self.header["kind"] == "overlay"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the stored columns, in order."""
        return tuple(self.header["columns"])

    @property
    def replaces(self) -> tuple[str, ...]:
        """Ids of all segments that this one was rewritten from, directly or indirectly."""
        return tuple(self.header.get("replaces", ()))

    def part(self, id: str) -> tuple[int, int]:
        """Return the index of the first trajectory, and the number of trajectories, that come from the replaced segment
        `id`.
        """
        first, count = self.header["replaces"][id]
        return int(first), int(count)

    @cached_property
    def places(self) -> Places:
        """The places of all trajectories; copies, which do not keep the table in memory. IntegrityError if the table is
        damaged."""
        table = self.trajectories
        bases = None
        if self.is_overlay:
            names = np.array(table["base_segment"].to_pylist(), dtype=object)
            bases = Bases(names, uid_array(table["base_uid"]).copy(), table["base_offset"].to_numpy().copy())
        return Places(
            uids=self.uids().copy(),
            row0=table["row0"].to_numpy().copy(),
            length=table["length"].to_numpy().astype(np.uint32),
            first_step=table["first_step"].to_numpy().astype(np.uint32),
            episode=self.episodes(),
            bases=bases,
        )

    @classmethod
    def of_places(cls, header: Mapping[str, Any], path: str, places: Places) -> Footer:
        """Make a footer that has `places`, but no table of trajectories: that takes several times the memory, even as
        it is stored."""
        footer = cls(header, b"", path)
        footer.__dict__["places"] = places
        return footer

    def uids(self) -> np.ndarray:
        return uid_array(self.trajectories["uid"])

    def episodes(self) -> np.ndarray | None:
        """Return a number (n,) uint64 for the episode of each piece, 0 for a whole one; None if there are no pieces."""
        return hash_names(self.trajectories["episode"])


def uid_array(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a binary(16) column to numpy "S16"."""
    array = column.combine_chunks()
    return np.frombuffer(array.buffers()[1], "S16", len(array), array.offset * 16) if len(array) else np.zeros(0, "S16")


def hash_names(column: pa.ChunkedArray) -> np.ndarray | None:
    """Hash names of episodes or histories to numbers (n,) uint64, the same in every process and lake; empty ones and
    nulls to 0. None if there are no others.
    """
    if not pc.max(pc.binary_length(column)).as_py():
        return None
    names = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    known = names.dictionary.to_pylist()
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() if name else bytes(8) for name in known]
    return np.frombuffer(b"".join(hashes), dtype="<u8")[names.indices.to_numpy()]


def hex_uids(uids: np.ndarray) -> list[str]:
    """Return raw uids ("S16", which hides zeros at the end) as 32 hex digits each."""
    return [uid.ljust(16, b"\0").hex() for uid in uids.tolist()]


def make_header(
    *, overlay: bool, schema_id: str, writer: str, sequence: int, rows: int, columns: Mapping[str, int | None]
) -> dict[str, Any]:
    """Build the header of a segment that is committed now; `columns`: their names, in order, and CRC-32."""
    return {
        "format": FORMAT,
        "kind": "overlay" if overlay else "steps",
        "schema": schema_id,
        "writer": writer,
        "sequence": sequence,
        "t_commit": time.time(),
        "rows": rows,
        "columns": dict(columns),
    }


@dataclass(frozen=True)
class PackedTable:
    """A table of trajectories as a footer stores it: base64 of `packed` bytes, which unpack to `size` bytes."""

    packed: bytes
    size: int

    @classmethod
    def pack(cls, table: pa.Table) -> PackedTable:
        """Compress a table by `TRAJECTORIES`, without holding its stream in memory."""
        table, counted, sink = table.combine_chunks(), pa.MockOutputStream(), pa.BufferOutputStream()
        with pa.ipc.new_stream(counted, TRAJECTORIES) as stream:
            stream.write_table(table)
        with (
            pa.CompressedOutputStream(sink, "zstd") as compressed,
            pa.ipc.new_stream(compressed, TRAJECTORIES) as stream,
        ):
            stream.write_table(table)
        return cls(base64.b64encode(sink.getvalue()), counted.size())


def encode(header: Mapping[str, Any], trajectories: pa.Table | PackedTable) -> dict[str, str]:
    """Encode a footer as the texts that Arrow stores."""
    table = trajectories if isinstance(trajectories, PackedTable) else PackedTable.pack(trajectories)
    text = json.dumps({**header, "trajectories_bytes": table.size})
    return {"amago": text, "trajectories": table.packed.decode(), "crc": _crc(text.encode(), table.packed)}


def _crc(text: bytes, packed: bytes) -> str:
    return f"{zlib.crc32(packed, zlib.crc32(text)):08x}"


def decode(values: Mapping[bytes, bytes] | None, path: str) -> Footer:
    """Decode a footer from a file's metadata. IntegrityError for a foreign file, InputMissing for a newer format."""
    texts = values or {}
    try:
        text, packed, crc = texts[b"amago"], texts[b"trajectories"], texts[b"crc"].decode()
    except UNREADABLE as error:
        raise IntegrityError(f"'{path}' is not a segment of a lake") from error
    if _crc(text, packed) != crc:
        raise IntegrityError(f"segment '{path}' is damaged: its footer has a wrong checksum")
    header = parse_object(text)
    version = header.get("format") if header is not None else None
    if isinstance(version, int) and version > FORMAT:
        raise InputMissing(
            f"segment '{path}' has format {version}, this version reads up to {FORMAT}", hint="upgrade amago"
        )
    if header is None or not fits(header, SegmentHeader):
        raise IntegrityError(f"segment '{path}' is damaged: its header lacks the fields of a segment's")
    return Footer(header, packed, path)


def read_footer(storage: Storage, id: str) -> Footer:
    """Read the footer of a segment, in less than 0.1 ms from a local disk. FileNotFoundError if it is gone,
    IntegrityError if it is unreadable.
    """
    try:
        return _read_footer(storage, id)
    except IntegrityError:
        if not storage.forget(segment_key(id)):  # otherwise this host's copy may be what is damaged
            raise
        return _read_footer(storage, id)


def prefetch_footers(storage: Storage, ids: Iterable[str]) -> None:
    """Fetch the footers of remote segments concurrently before they are read."""
    wanted = list(ids)
    for merged, count in ((True, _MERGED_TAIL), (False, _TAIL)):
        storage.prefetch_tails((segment_key(id) for id in wanted if is_rewritten(id) is merged), count)


def _read_footer(storage: Storage, id: str) -> Footer:
    key = segment_key(id)
    path = storage.url(key)
    try:
        # The end of the file with the footer is all that Arrow's reader looks at before a batch. Reading it here is ten
        # times faster than through Arrow's own files, whose reads go through a thread pool.
        tail = storage.tail(key, _TAIL)
        length, _ = _END.unpack(tail[-_END.size :].rjust(_END.size))
        needed = length + 2 * _END.size  # the reader expects the magic bytes of the file's beginning
        if len(tail) == _TAIL and needed > _TAIL:
            tail = storage.tail(key, needed)
        values = pa.ipc.open_file(pa.py_buffer(tail)).metadata
        footer = decode(dict(values) if values is not None else None, path)
    except (FileNotFoundError, StorageError):
        raise
    except UNREADABLE as error:
        raise IntegrityError(f"segment '{path}' is damaged: {error}") from error
    header = footer.header
    if not is_header_of(id, header):
        raise IntegrityError(
            f"segment '{path}' is damaged: it was overwritten by another one, "
            f"number {header['sequence']} of writer '{header['writer']}'"
        )
    return footer


def is_header_of(id: str, header: Mapping[str, Any]) -> bool:
    """Return whether a valid header names the writer and number of segment `id`."""
    return (header["writer"], header["sequence"], header["kind"] == "overlay") == parse_segment_name(id)


def extract_info(row: Mapping[str, Any]) -> TrajectoryInfo:
    """Take the writer's part out of a row of `TRAJECTORIES`."""
    fields = {name: value for name, value in row.items() if name in _INFO}
    fields["attempts"] = tuple(fields["attempts"] or ())
    fields["tags"] = dict(fields["tags"] or ())
    return TrajectoryInfo(**fields)
