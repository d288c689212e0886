import base64
import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.errors import InputMissing, IntegrityError
from pipelines.lake import footer
from pipelines.lake.footer import FORMAT, TRAJECTORIES, Footer, decode
from pipelines.lake.store import Lake
from tests.lake.factories import fill, footer_at, segment_files

PLACES = {"uid": pa.array([b"a" * 16, b"b" * 16], pa.binary(16)), "row0": [0, 4], "length": [3, 4]}


def table(columns: dict[str, object]) -> pa.Table:
    """A table of trajectories in which other columns are null."""
    empty = {name: [None, None] for name in TRAJECTORIES.names}
    return pa.Table.from_pydict({**empty, **columns}, schema=TRAJECTORIES)


def packed(table: pa.Table, path: Path, **header: object) -> Footer:
    """A footer with this table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    raw = sink.getvalue()
    about = {"format": 1, "t_commit": 5.0, "trajectories_bytes": raw.size, "rows": 20} | header
    return Footer(about, base64.b64encode(pa.compress(raw, "zstd", asbytes=True)), str(path))


def test_a_table_of_other_columns_is_damage(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="do not have the columns"):
        _ = packed(pa.table(PLACES), tmp_path).trajectories


def test_a_trajectory_keeps_the_time_it_was_first_committed(tmp_path: Path) -> None:
    rewritten = table({**PLACES, "t_commit": [1.0, None]})
    found = packed(rewritten, tmp_path, replaces={"2026/a": [0, 1], "2026/b": [1, 1]})
    assert found.trajectories["t_commit"].to_pylist() == [1.0, 5.0]
    assert found.replaces == ("2026/a", "2026/b")
    assert found.part("2026/b") == (1, 1)


def test_trajectories_of_a_new_segment_were_committed_with_it(lake: Lake) -> None:
    fill(lake, [3, 4])
    found = footer_at(segment_files(lake)[0])
    assert found.trajectories["t_commit"].to_pylist() == [found.header["t_commit"]] * 2
    assert found.replaces == ()


@pytest.mark.parametrize("count", [1, 40, 900])
def test_a_footer_read_from_the_files_end_is_the_one_arrow_reads(lake: Lake, count: int) -> None:
    fill(lake, [1] * count)
    path = segment_files(lake)[0]
    with pa.OSFile(str(path)) as file:
        values = dict(pa.ipc.open_file(file).metadata)
    found = footer_at(path)
    assert json.loads(values[b"amago"]) == found.header
    assert values[b"trajectories"] == found.packed
    assert found.trajectories.num_rows == count


def test_a_file_cut_short_or_with_a_wrong_length_is_damaged(lake: Lake, tmp_path: Path) -> None:
    fill(lake, [1] * 400)
    data = segment_files(lake)[0].read_bytes()
    rng = np.random.default_rng(0)
    other = tmp_path / "segments" / "h" / "x.arrow"
    other.parent.mkdir(parents=True)
    for length in [0, 1, 5, 9, 10, 11, 20, *rng.integers(0, len(data), 100).tolist()]:
        other.write_bytes(data[:length])
        with pytest.raises(IntegrityError):
            footer_at(other)
    for wrong in (-(2**31), -1, 0, 1, footer._TAIL, len(data), 2**31 - 1):
        other.write_bytes(data[:-10] + wrong.to_bytes(4, "little", signed=True) + data[-6:])
        with pytest.raises(IntegrityError):
            footer_at(other)


HEADER = {
    "kind": "steps",
    "schema": "0" * 16,
    "writer": "w",
    "sequence": 0,
    "t_commit": 1.0,
    "rows": 1,
    "columns": {},
    "trajectories_bytes": 0,
}


@pytest.mark.parametrize(
    "values", [{"row0": [0, 16]}, {"row0": [-1, 4]}, {"length": [3, 2**62]}, {"uid": [None, None]}]
)
def test_trajectories_outside_their_segment_are_damage(tmp_path: Path, values: dict[str, list]) -> None:
    with pytest.raises(IntegrityError, match="is damaged: a trajectory has"):
        _ = packed(table({**PLACES, **values}), tmp_path).trajectories


@pytest.mark.parametrize(
    "wrong",
    [{"rows": -1}, {"rows": "7"}, {"columns": []}, {"columns": {"a": "b"}}, {"replaces": {"a": [1]}}, {"kind": "x"}],
    ids=str,
)
def test_a_header_with_a_right_checksum_and_wrong_content_is_damage(wrong: dict[str, object]) -> None:
    text = json.dumps({**HEADER, "format": FORMAT, **wrong}).encode()
    with pytest.raises(IntegrityError, match="lacks the fields"):
        decode({b"amago": text, b"trajectories": b"", b"crc": f"{zlib.crc32(text):08x}".encode()}, "x")


def test_a_segment_of_the_next_format_is_refused() -> None:
    for version, readable in ((FORMAT, True), (FORMAT + 1, False)):
        text = json.dumps({**HEADER, "format": version}).encode()
        values = {b"amago": text, b"trajectories": b"", b"crc": f"{zlib.crc32(text):08x}".encode()}
        if readable:
            assert decode(values, "x").header["format"] == version
        else:
            with pytest.raises(InputMissing, match=f"format {version}, this version reads up to {FORMAT}"):
                decode(values, "x")
