"""Answers as columns: every reader finds the rows that the same query gives as Python values."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import UsageError
from pipelines.events import Listener, Notice
from pipelines.lake.sql import catalog, columnar
from pipelines.lake.sql import query as queries
from pipelines.lake.sql.columnar import read_table, write_file
from pipelines.lake.sql.query import IndexDamaged
from pipelines.lake.sql.sandbox import LimitReached, QueryLimits
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import IMAGES, INFO, MIXED, SCHEMA, columns, damage, derive, fill
from tests.tiers import some

LIMITS = QueryLimits(seconds=600)
QUERIES = [
    "from trajectories order by uid",  # with a map, lists and NULLs
    "from steps order by uid, t",  # with arrays, and columns that some schemas lack
    'select uid, t, obs, "obs.grid", "obs.wide" from steps order by uid, t',
    "from episodes order by episode",
    "select env, count(*) as n, sum(length) as steps, avg(length), bool_and(success), list(length) from trajectories"
    " group by env order by env",
    "select sum(length) over (order by uid) as total, length > 4 as is_long from trajectories order by uid",
    "from steps where false",
    "select NULL as nothing, [] as empty, 'b'::enum('a', 'b') as label, {'a': [1, NULL]} as pair, map {'k': 2} as m",
    "explain select 1",
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake of three schemas, one with images, and overlays. Tests only read it."""
    lake = Lake.create(tmp_path_factory.mktemp("mixed") / "lake")
    written = fill(lake, [3, 4, 5, 6], seal_every=2)
    derive(lake, {uid: {"reward": values["reward"] + 1} for uid, values in written.items()})
    fill(lake, [2, 3], schema=IMAGES)
    fill(lake, [4], schema=MIXED)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        writer.append(columns(np.random.default_rng(1), 7), INFO)
        writer.append(columns(np.random.default_rng(2), 1), TrajectoryInfo(env="other", task="ü"))
    return lake


def plain(value: Any) -> Any:
    """A value as JSON has it: readers differ in whether an array is a tuple or a list."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def written(lake: Lake, text: str, form: str) -> bytes:
    file = io.BytesIO()
    rows = write_file(lake, text, file, form, limits=LIMITS)
    assert rows == read_table(lake, text, limits=LIMITS).num_rows
    return file.getvalue()


def objects(table: pa.Table) -> list[dict[str, Any]]:
    return [plain(row) for row in table.to_pylist(maps_as_pydicts="strict")]


@pytest.mark.system
@pytest.mark.parametrize("text", some(QUERIES, 0, 1, 4, 7))
def test_every_reader_gets_the_rows(mixed: Lake, tmp_path: Path, text: str) -> None:
    names, rows = catalog.query(mixed, text)
    expected = [dict(zip(names, plain(row), strict=True)) for row in rows]
    assert objects(read_table(mixed, text, limits=LIMITS)) == expected
    assert objects(pa.ipc.open_file(written(mixed, text, "arrow")).read_all()) == expected
    path = tmp_path / "rows.parquet"
    path.write_bytes(written(mixed, text, "parquet"))
    assert objects(pq.read_table(path)) == expected
    with duckdb.connect() as stock:
        found = stock.execute("from read_parquet(?)", [str(path)])
        assert [column[0] for column in found.description] == names
        assert plain(found.fetchall()) == plain(rows)


def as_cell(value: Any, cell: str) -> Any:
    """Read a cell of a CSV file as a value of the type of `value`."""
    if isinstance(value, list | tuple | dict):
        return json.loads(cell)
    if isinstance(value, bool):
        return {"true": True, "false": False}[cell]
    if (
        isinstance(value, float) and float(np.float32(value)) == value
    ):  # float32 is written with as few digits as it needs
        return float(np.float32(cell))
    return None if value is None and cell == "" else type(value)(cell)


@pytest.mark.parametrize("text", some([q for q in QUERIES if q != "explain select 1"], 0, 1, 4, 7))
def test_every_reader_of_csv_gets_the_rows(mixed: Lake, tmp_path: Path, text: str) -> None:
    names, rows = catalog.query(mixed, text)
    path = tmp_path / "rows.csv"
    path.write_bytes(written(mixed, text, "csv"))
    with open(path, encoding="utf-8", newline="") as file:
        header, *cells = csv.reader(file, strict=True)
    assert header == names
    for row, line in zip(rows, cells, strict=True):
        assert [as_cell(value, cell) for value, cell in zip(row, line, strict=True)] == plain(row)
    with duckdb.connect() as stock:
        answer = stock.execute("from read_csv(?, all_varchar = true, header = true, strict_mode = true)", [str(path)])
        assert [[cell or "" for cell in row] for row in answer.fetchall()] == cells


def test_csv_quotes_texts(mixed: Lake, tmp_path: Path) -> None:
    text = '''
    select * from (values
        ('a"b', 'x,y', e'one\ntwo', e'\r', '', NULL, 1.5::double, 'nan'::double, 'ab'::blob, ' ü ', ['q"', NULL])
    ) as t("say ""it""", comma, line, "return", empty, missing, number, nan, bytes, spaces, list)
    '''
    path = tmp_path / "rows.csv"
    path.write_bytes(written(mixed, text, "csv"))
    header = ['say "it"', "comma", "line", "return", "empty", "missing", "number", "nan", "bytes", "spaces", "list"]
    row = ['a"b', "x,y", "one\ntwo", "\r", "", "", "1.5", "nan", "6162", " ü ", '["q\\"", null]']
    with open(path, encoding="utf-8", newline="") as file:
        assert list(csv.reader(file, strict=True)) == [header, row]
    with duckdb.connect() as stock:
        options = "all_varchar = true, header = true, strict_mode = true, quote = '\"', escape = '\"', delim = ','"
        (found,) = stock.execute(f"from read_csv(?, {options})", [str(path)]).fetchall()
    assert [*found] == [*row[:4], None if found[4] is None else "", None, *row[6:]]
    assert path.read_bytes().count(b'"",,') == 1  # an empty text is not a missing one
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    assert ([*frame.columns], frame.to_numpy().tolist()) == (header, [row])


REFUSED = ("hugeint", "uhugeint", "bignum", "bit", "time_tz", "interval", "union", "geometry", "variant")


def kinds() -> list[str]:
    with duckdb.connect() as stock:
        return [column[0] for column in stock.execute("from test_all_types()").description]


@pytest.mark.parametrize("name", some(kinds(), 5, 6, 23, 26, 30, 40))
def test_every_type_arrives_unchanged_or_is_refused(mixed: Lake, tmp_path: Path, name: str) -> None:
    text = f'select "{name}" as value from test_all_types()'
    path = tmp_path / "rows.parquet"
    if name in REFUSED:
        with pytest.raises(UsageError, match=r"SQL: the column 'value' .*cast it, e\.g\. \"value\"::"):
            written(mixed, text, "parquet")
        return
    path.write_bytes(written(mixed, text, "parquet"))
    with duckdb.connect() as stock:
        expected = stock.execute(f"select value::varchar from ({text})").fetchall()
        assert stock.execute(f"select value::varchar from '{path}'").fetchall() == expected


def test_sums_of_integers_are_int64(mixed: Lake) -> None:
    text = "select sum(length) as total, sum(length) over () as of_all from trajectories group by length"
    assert set(read_table(mixed, text, limits=LIMITS).schema.types) == {pa.int64()}
    with pytest.raises(UsageError, match=r"'total' holds a number beyond 64 bits.*::double"):
        read_table(mixed, "select sum(9223372036854775807) as total from range(2)", limits=LIMITS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("select 1 as a, 2 as a", "two columns are called 'a'"),
        ("select [1::hugeint] as a", "type HUGEINT"),
        ("select {'size': 1::uhugeint} as a", "UHUGEINT"),
        ("select nope from steps", "nope"),
        ("drop table trajectories", "one SELECT"),
        ("from read_text('/etc/hostname')", "disabled"),
    ],
)
def test_a_wrong_query_is_refused(mixed: Lake, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_table(mixed, text, limits=LIMITS)


def test_a_segment_that_cannot_be_read_is_reported(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    text = "select count(reward) as n from steps"
    assert read_table(lake, text, limits=LIMITS).to_pylist() == [{"n": 15}]
    path = damage(lake, 1)
    told: list[Any] = []
    assert read_table(lake, text, limits=LIMITS, listener=told.append).to_pylist() == [{"n": 10}]
    (notice,) = [event for event in told if isinstance(event, Notice)]
    assert f"'{path}' is damaged" in notice.text


def test_an_error_after_many_rows_is_the_error_of_the_query(mixed: Lake) -> None:
    text = "select if(range = 190000, 9223372036854775807, 1)::hugeint * 2 as big from range(200000)"
    file = io.BytesIO()
    with pytest.raises(UsageError, match="beyond 64 bits"):
        write_file(mixed, text, file, "parquet", limits=LIMITS)
    assert catalog.query(mixed, "select 1", limits=LIMITS)[1] == [(1,)]


@pytest.mark.system
def test_a_file_that_cannot_be_written_ends_the_query(mixed: Lake) -> None:
    for form in ("arrow", "parquet"):
        with pytest.raises(OSError, match="No space left"), open("/dev/full", "r+b", buffering=0) as file:
            write_file(mixed, "from range(1000000)", Full(file), form, limits=LIMITS)
        assert catalog.query(mixed, "select 1", limits=LIMITS)[1] == [(1,)]


class Full(io.RawIOBase):
    """A file on a full disk, which can be truncated."""

    def __init__(self, device: io.FileIO) -> None:
        self._device = device

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._device.write(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return offset

    def truncate(self, size: int | None = None, /) -> int:
        return 0


def answer_and_fail_once(
    connection: Any, lake: Lake, listener: Listener, text: str
) -> Iterator[pa.Schema | pa.RecordBatch]:
    """Find the index damaged after the first rows, but not a second time."""
    for number, part in enumerate(queries.answer_in_batches(connection, lake, listener, text)):
        yield part
        if number == 100:  # the first group of rows is written
            try:
                os.mkdir(lake.path / "failed")
            except FileExistsError:
                continue
            raise IndexDamaged("the index is damaged")


@pytest.mark.system
def test_an_answer_starts_again_when_its_index_is_damaged(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "select range as n from range(250000)"
    expected = [read_table(lake, text, limits=LIMITS), written(lake, text, "arrow"), written(lake, text, "parquet")]
    monkeypatch.setattr(columnar.sql, "answer_in_batches", answer_and_fail_once)
    for number, form in enumerate(("", "arrow", "parquet")):
        found = read_table(lake, text, limits=LIMITS) if not form else write_again(lake, text, form)
        assert found == expected[number], form
        (lake.path / "failed").rmdir()


def write_again(lake: Lake, text: str, form: str) -> bytes:
    file = io.BytesIO()
    assert write_file(lake, text, file, form, limits=LIMITS) == 250_000
    return file.getvalue()


@pytest.mark.system
def test_a_file_may_be_larger_than_the_memory_and_a_table_not(lake: Lake) -> None:
    text = "select range, repeat('x', 200) || range as long from range(1000000)"
    limits = QueryLimits(seconds=600, megabytes=64)
    file = io.BytesIO()
    assert write_file(lake, text, file, "parquet", limits=limits) == 1_000_000
    groups = pq.ParquetFile(file)
    assert groups.num_row_groups == 9
    assert groups.read_row_group(8, ["range"])["range"][-1].as_py() == 999_999
    with pytest.raises(LimitReached, match="memory limit of 64 MB"):
        read_table(lake, text, limits=limits)
    assert read_table(lake, "select 1 as one", limits=limits).to_pylist() == [{"one": 1}]


@pytest.mark.system
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("from range(1000000000000)", "time limit of 0.5 s"),
        ("select list_sum(range(3000000000))", "memory limit of 128 MB"),
        ("select range from range(1000000000) order by hash(range)", "memory limit of 128 MB"),
        ("select repeat('x', 2000000000)", "memory limit of 128 MB"),
    ],
)
def test_limits_hold_for_a_file(lake: Lake, tmp_path: Path, text: str, limit: str) -> None:
    limits = QueryLimits(seconds=0.5 if "time" in limit else 600, megabytes=128)
    with pytest.raises(LimitReached, match=limit), open(tmp_path / "rows", "w+b") as file:
        write_file(lake, text, file, "arrow", limits=limits)
    assert read_table(lake, "select 1 as one", limits=LIMITS).to_pylist() == [{"one": 1}]
