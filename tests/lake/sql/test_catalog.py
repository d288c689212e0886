import contextlib
import json
import multiprocessing
import os
import threading
from pathlib import Path

import duckdb
import numpy as np
import pytest

from pipelines.errors import UsageError
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import INFO, SCHEMA, columns, fill, segment_files

EVERYTHING = "select * from trajectories order by uid"


def test_mean_return_by_policy_version(lake: Lake) -> None:
    written = fill(lake, [5] * 10, seal_every=3)
    returns = [float(v["reward"][1:].sum(dtype=np.float64)) for v in written.values()]
    names, rows = catalog.query(lake, 'select policy_version, avg("return") from trajectories group by 1 order by 1')
    assert names == ["policy_version", 'avg("return")'] or names[0] == "policy_version"
    assert [version for version, _ in rows] == [0, 1, 2]
    np.testing.assert_allclose([m for _, m in rows], [np.mean(returns[i : i + 4]) for i in (0, 4, 8)])
    assert catalog.query(lake, "select avg(return) from trajectories")[1][0][0] == pytest.approx(np.mean(returns))


def test_every_field_of_a_trajectory_is_a_column(lake: Lake) -> None:
    with lake.writer(SCHEMA) as writer:
        uid = writer.append(columns(np.random.default_rng(0), 6), INFO)
    names, rows = catalog.query(lake, "select * from trajectories")
    row = dict(zip(names, rows[0], strict=True))
    assert row["uid"] == uid
    assert (row["env"], row["task"], row["policy_version"], row["success"]) == ("maze", "left", 3, True)
    assert (row["attempts"], row["tags"], row["base_uid"]) == ([False, True], dict(INFO.tags), None)
    assert (row["length"], row["row0"], row["schema"], row["epsilon"]) == (6, 0, SCHEMA.id, 0.25)


@pytest.mark.system
@pytest.mark.parametrize("spoil", ["delete", "garbage", "truncate", "other lake", "other version", "empty"])
def test_an_index_that_is_lost_or_damaged_is_built_again_with_the_same_answers(lake: Lake, spoil: str) -> None:
    fill(lake, [5, 6, 7, 8], seal_every=1)
    before = catalog.query(lake, EVERYTHING)
    index = lake.path / "index.duckdb"
    if spoil == "delete":
        index.unlink()
    elif spoil == "garbage":
        index.write_bytes(os.urandom(20_000))
    elif spoil == "truncate":
        index.write_bytes(index.read_bytes()[:9_000])
    elif spoil == "empty":
        index.write_bytes(b"")
    else:
        with duckdb.connect(str(index)) as connection:
            connection.execute("delete from bookkeeping.rows")
            change = "lake = 'x'" if spoil == "other lake" else "version = 0"
            connection.execute(f"update bookkeeping.about set {change}")
    assert catalog.query(lake, EVERYTHING) == before


def test_what_was_indexed_is_not_read_again(lake: Lake, monkeypatch) -> None:
    fill(lake, [5, 6], seal_every=1)
    catalog.refresh(lake)
    fill(lake, [7], seed=1)
    read = []
    real = catalog.read_footer
    monkeypatch.setattr(catalog, "read_footer", lambda storage, id: read.append(id) or real(storage, id))
    for _ in range(2):
        monkeypatch.setattr(catalog, "_checked", set())  # as in a new process
        assert catalog.query(lake, "select count(*) from trajectories")[1] == [(3,)]
    assert len(read) == 1


@pytest.mark.system
def test_the_index_follows_the_segments(lake: Lake) -> None:
    count = "select count(*) from trajectories"
    assert catalog.query(lake, count)[1] == [(0,)]
    fill(lake, [5, 6], seal_every=1)
    assert catalog.query(lake, count)[1] == [(2,)]
    segment_files(lake)[0].unlink()
    fill(lake, [7], seed=1)
    live = catalog.query(lake, EVERYTHING)
    assert len(live[1]) == 2
    catalog.rebuild(lake)
    assert catalog.query(lake, EVERYTHING) == live


def test_a_damaged_segment_is_left_out_with_a_notice(lake: Lake) -> None:
    fill(lake, [5, 6], seal_every=1)
    path = segment_files(lake)[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    told: list = []
    assert catalog.query(lake, "select count(*) from trajectories", listener=told.append)[1] == [(1,)]
    assert "left out of the index" in told[0].text


def test_a_run_brings_its_own_tables(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lake = Lake.create(run / "lake")
    fill(lake, [3, 4])
    (run / "run.json").write_text(json.dumps({"argv": ["amago", "train"], "seed": 3}))
    (run / "metrics.jsonl").write_text('{"update": 1, "loss": 2}\n{"update": 2, "loss": 1.5, "x": "y"}\n{"upda')
    for update in (10, 20):
        folder = run / "checkpoints" / f"{update:06d}"
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(json.dumps({"update": update, "time": 1.5 * update}))
    (run / "checkpoints" / "latest").symlink_to("000020")
    assert catalog.query(lake, "select name, seed, argv from runs")[1] == [("run", 3, '["amago", "train"]')]
    assert catalog.query(lake, 'select "update", time from checkpoints order by 1')[1] == [(10, 15.0), (20, 30.0)]
    assert catalog.query(lake, 'select sum(loss), count(x), max("update") from metrics')[1] == [(3.5, 1, 2)]
    joined = "select count(*) from trajectories t, runs r where r.seed = 3 and t.length > 3"
    assert catalog.query(lake, joined)[1] == [(1,)]
    tables = {name for (name,) in catalog.query(lake, "show tables")[1]}
    assert {"trajectories", "segments", "overlays", "steps", "runs", "checkpoints", "metrics"} <= tables


def test_a_lake_outside_a_run_has_those_tables_empty(lake: Lake) -> None:
    for name in ("runs", "checkpoints", "metrics"):
        assert catalog.query(lake, f"select count(*) from {name}")[1] == [(0,)]


def test_summary_counts(lake: Lake) -> None:
    fill(lake, [5, 6, 7], seal_every=2)
    found = catalog.summary(lake)
    assert {k: found[k] for k in ("trajectories", "steps", "segments", "overlays", "environments")} == {
        "trajectories": 3,
        "steps": 18,
        "segments": 2,
        "overlays": 0,
        "environments": ["maze"],
    }
    assert found["bytes"] == sum(p.stat().st_size for p in segment_files(lake))


def _append_and_ask(path: Path, seed: int, results) -> None:
    lake = Lake(path)
    for i in range(5):
        with lake.writer(SCHEMA) as writer:
            writer.append(columns(np.random.default_rng(seed), 4), TrajectoryInfo(seed=i))
        results.put(catalog.query(lake, "select count(*) from trajectories")[1][0][0])


@pytest.mark.system
def test_processes_and_threads_ask_at_once(lake: Lake) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_append_and_ask, args=(lake.path, seed, results)) for seed in range(3)]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=catalog.refresh, args=(lake,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for worker in [*threads, *processes]:
        worker.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert max(results.get() for _ in range(15)) == 15
    live = catalog.query(lake, EVERYTHING)
    (lake.path / "index.duckdb").unlink()
    assert catalog.query(lake, EVERYTHING) == live


@pytest.mark.system
def test_an_index_held_by_a_stranger_is_not_deleted(lake: Lake, tmp_path: Path) -> None:
    """Another program has the file open for writing: the answer comes from memory, the file stays."""
    fill(lake, [3])
    catalog.refresh(lake)
    index = lake.path / "index.duckdb"
    fill(lake, [4], seed=1)
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    stranger = context.Process(target=_hold, args=(index, ready, done))
    stranger.start()
    try:
        assert ready.wait(600)
        before = index.stat().st_ino
        assert catalog.query(lake, "select count(*) from trajectories")[1] == [(2,)]
        assert index.stat().st_ino == before
    finally:
        done.set()
        stranger.join()


def _hold(index: Path, ready, done) -> None:
    with duckdb.connect(str(index)):
        ready.set()
        done.wait(600)


def test_a_lake_on_a_full_disk_answers(small_disk: Path) -> None:
    lake = Lake.create(small_disk / "lake")
    fill(lake, [3, 4])
    with contextlib.suppress(OSError), open(small_disk / "more", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for _ in range(2):
        assert catalog.query(lake, "select count(*), sum(length) from trajectories")[1] == [(2, 7)]
    (small_disk / "more").unlink()
    assert catalog.query(lake, "select count(*), sum(length) from trajectories")[1] == [(2, 7)]


def test_a_read_only_lake_answers(small_disk: Path) -> None:
    lake = Lake.create(small_disk / "lake")
    fill(lake, [3, 4])
    os.system(f"mount -o remount,ro {small_disk}")
    assert catalog.query(lake, "select count(*), sum(length) from trajectories")[1] == [(2, 7)]
    with pytest.raises(UsageError):
        catalog.query(lake, "select * from read_text('/etc/passwd')")
