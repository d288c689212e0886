from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from tests.cli.conftest import Amago
from tests.lake.factories import damage, fill

BY_VERSION = "select policy_version, avg(return) r from trajectories group by all order by all"


def test_rows_as_a_list_of_objects(amago: Amago, small: Path) -> None:
    (row,) = amago("lake", "sql", small, BY_VERSION, "--output", "json").json
    assert row.keys() == {"policy_version", "r"}


def test_columns_of_one_name_are_refused_where_rows_are_objects(amago: Amago, small: Path) -> None:
    failed = amago("lake", "sql", small, "select 1 as a, 2 as a", "--output", "json")
    assert failed.code == 2
    assert "two columns are called 'a'" in failed.err
    assert amago("lake", "sql", small, "select 1 as a, 2 as a").out.split()[-2:] == ["1", "2"]


def test_bytes_are_hexadecimal(amago: Amago, small: Path) -> None:
    (row,) = amago("lake", "sql", small, "select 'a\\x00b'::blob as b", "--output", "json").json
    assert row == {"b": "610062"}


def test_a_memory_beyond_all_machines_is_refused(amago: Amago, small: Path) -> None:
    failed = amago("lake", "sql", small, "select 1", "--memory", "10000000000000")
    assert failed.code == 2
    assert "a memory of 64 to" in failed.err


def test_the_index_may_be_deleted(amago: Amago, small: Path) -> None:
    before = amago("lake", "sql", small, BY_VERSION, "--output", "json").json
    for index in small.rglob("index.duckdb*"):
        index.unlink()
    assert amago("lake", "sql", small, BY_VERSION, "--output", "json").json == before


def test_text_leaves_numbers_as_they_are(amago: Amago, small: Path) -> None:
    assert amago("lake", "sql", small, "select 1000003 as seed").out.split()[-1] == "1000003"


@pytest.mark.parametrize(
    "sql", ["drop table trajectories", "select", "select * from nothing", "select nothing from trajectories", ""]
)
def test_a_wrong_or_writing_query_is_a_usage_error(amago: Amago, small: Path, sql: str) -> None:
    failed = amago("lake", "sql", small, sql)
    assert failed.code == 2
    assert "Traceback" not in failed.err


def test_no_file_can_be_read_through_it(amago: Amago, small: Path) -> None:
    assert amago("lake", "sql", small, "select * from read_text('/etc/hostname')").code == 2


STEPS = "select uid, t, obs, action, reward from steps order by uid, t"


def columns_of(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_rows_go_to_a_file_as_columns(amago: Amago, small: Path, form: str) -> None:
    rows = amago("lake", "sql", small, STEPS, "--output", "json").json
    file = Path("new", f"steps.{form}")
    done = amago("lake", "sql", small, STEPS, "--output", form, "--to", file)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1:] == [
        f"  rows   {len(rows)}",
        f"  bytes  {file.stat().st_size:,}",
        f"  wrote {file}",
    ]
    assert columns_of(file).to_pylist() == rows
    assert Lake(small).to_arrow(STEPS).to_pylist() == rows
    assert os.listdir("new") == [file.name]


@pytest.mark.system
def test_csv_goes_to_a_file_or_a_pipe(amago: Amago, small: Path) -> None:
    rows = amago("lake", "sql", small, STEPS, "--output", "json").json
    done = amago("lake", "sql", small, STEPS, "--output", "csv", "--to", "steps.csv")
    assert (done.code, done.err) == (0, "")
    printed = shell(f"amago lake sql small '{STEPS}' --output csv", Path.cwd())
    assert printed.stdout == Path("steps.csv").read_bytes()
    found = list(csv.DictReader(printed.stdout.decode().splitlines()))
    assert [{name: json.loads(cell) if name != "uid" else cell for name, cell in row.items()} for row in found] == rows


def test_columns_are_refused_where_they_cannot_go(amago: Amago, small: Path) -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe")
    for options, code, words in (
        (("--to", "rows.txt"), 2, "--to writes columns, not --output text; add --output parquet, arrow or csv"),
        (("--to", "folder", "--output", "arrow"), 1, "cannot write 'folder': a directory is there"),
        (("--to", "pipe", "--output", "parquet"), 1, "cannot write 'pipe': a pipe is there"),
        (("--to", "small/run.json/rows", "--output", "arrow"), 1, "cannot write 'small/run.json/rows'"),
    ):
        refused = amago("lake", "sql", small, STEPS, *options)
        assert (refused.code, refused.out) == (code, "")
        assert words in refused.err
        assert refused.err.count("\n") == 1
    assert sorted(os.listdir()) == ["folder", "pipe", "small"]
    assert Path("pipe").is_fifo()


def test_a_failed_query_leaves_the_file_as_it_was(amago: Amago, small: Path) -> None:
    file = Path("rows.parquet")
    assert amago("lake", "sql", small, STEPS, "--output", "parquet", "--to", file).code == 0
    before = file.read_bytes()
    text = "select if(range = 190000, 9223372036854775807, 1)::hugeint * 2 as big from range(200000)"
    failed = amago("lake", "sql", small, text, "--output", "parquet", "--to", file)
    assert (failed.code, failed.out) == (2, "")
    assert "beyond 64 bits" in failed.err
    assert file.read_bytes() == before
    assert sorted(os.listdir()) == ["rows.parquet", "small"]


@pytest.mark.system
def test_columns_go_into_a_pipe_whole_or_not_at_all(small: Path, tmp_path: Path) -> None:
    expected = Lake(tmp_path / small).to_arrow(STEPS)
    table = pa.ipc.open_file(shell(f'amago lake sql small "{STEPS}" --output arrow', tmp_path).stdout).read_all()
    assert table.equals(expected)
    text = "select if(range = 190000, 9223372036854775807, 1)::hugeint * 2 as big from range(200000)"
    failed = shell(f'amago lake sql small "{text}" --output arrow', tmp_path)
    assert (failed.returncode, failed.stdout) == (2, b"")
    many = 'amago lake sql small "from range(1000000)" --output arrow'
    closed = shell(f"{many} | head -c 9; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert (closed.stdout, closed.stderr) == (b"ARROW1\0\0\xff141\n", b"")
    full = shell(f"{many} >/dev/full", tmp_path)
    assert full.returncode == 1
    assert full.stderr.startswith(b"error: No space left on device")
    assert full.stderr.count(b"\n") == 1


def shell(line: str, place: Path) -> subprocess.CompletedProcess[bytes]:
    line = line.replace("amago", f"{sys.executable} -P -m amago_cli", 1)
    names: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(["bash", "-c", line], capture_output=True, check=False, env=names, cwd=place)


@pytest.mark.system
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_damaged_segment_is_reported_with_the_rows(amago: Amago, tmp_path: Path, form: str) -> None:
    lake = Lake.create(tmp_path / "damaged")
    fill(lake, [3, 4, 5], seal_every=1)
    catalog.refresh(lake)
    path = damage(lake, 1)
    done = amago("lake", "sql", lake.path, "select count(reward) as n from steps", "--output", form)
    assert (done.code, "10" in done.out) == (0, True)
    assert f"'{path}' is damaged" in done.err
