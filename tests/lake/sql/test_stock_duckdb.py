"""Programs without amago read the live set of a lake: DuckDB from the index, any Arrow library the steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from tests.lake.factories import derive, fill

QUERIES = (
    'select count(*), sum(length)::bigint, sum("return"), min(uid), max(uid) from trajectories',
    'select task, count(*), avg("return") from trajectories where base_uid is null group by task order by task',
    "select count(*), count(base_uid) from episodes where complete",
    "select count(*), sum(rows)::bigint from segments",
)
STOCK = """
import json, sys, duckdb
index = duckdb.connect(sys.argv[1], read_only=True)
answers = [index.execute(text).fetchall() for text in json.loads(sys.argv[2])]
assert not {"pipelines", "pyarrow"} & sys.modules.keys()
print(json.dumps(answers))
"""
STEPS = """
import json, sys, duckdb, pyarrow as pa
lake = sys.argv[1]
rows = duckdb.connect(f"{lake}/index.duckdb", read_only=True).execute(
    "select uid, segment, row0, length from trajectories where base_uid is null").fetchall()
found = {}
for uid, segment, row0, length in rows:
    steps = pa.ipc.open_file(pa.memory_map(f"{lake}/segments/{segment}.arrow")).read_all().slice(row0, length + 1)
    found[uid] = sum(steps["reward"].to_pylist())
assert "pipelines" not in sys.modules
print(json.dumps(found))
"""


def run_without_amago(tmp_path: Path, program: str, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment).stdout


@pytest.mark.system
def test_what_duckdb_and_arrow_read_is_what_is_live(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    written = fill(lake, [3, 5, 7, 9, 4, 6], seal_every=2)
    uids = list(written)
    derive(lake, {uids[0]: {"reward": np.ones(4, np.float32)}})
    compact(lake, grace_seconds=0)
    fill(lake, [8, 2], seed=1)
    expire(lake, RetentionLimits(where=f"uid in ('{uids[1]}', '{uids[4]}')"))
    expected = [catalog.query(lake, text)[1] for text in QUERIES]
    found = json.loads(run_without_amago(tmp_path, STOCK, str(lake.path / "index.duckdb"), json.dumps(QUERIES)))
    assert [[tuple(row) for row in rows] for rows in found] == expected
    assert expected[0][0][0] == 7
    sums = json.loads(run_without_amago(tmp_path, STEPS, str(lake.path)))
    text = """select s.uid, sum(s.reward) from steps s join trajectories t using (uid)
        where t.base_uid is null group by s.uid"""
    assert sums == pytest.approx(dict(catalog.query(lake, text)[1]))
    assert not {uids[1], uids[4]} & sums.keys()
