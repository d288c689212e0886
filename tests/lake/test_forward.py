"""Lakes that earlier versions wrote, kept under `fixtures/`: everything in them is read as their manifests say."""

from __future__ import annotations

import json
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.data.sampler import WindowSampler
from pipelines.data.view import View
from pipelines.lake import reading
from pipelines.lake.maintenance import compaction, retention
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import assert_same
from tests.lake.fixtures.make_v1 import WINDOW, fill, info, plain, uids_of
from tests.lake.stress import PICTURES, PLAIN, content

KEPT = sorted(path for path in (Path(__file__).parent / "fixtures").iterdir() if (path / "manifest.json").exists())


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Lake, dict[str, Any]]:
    """A copy of a kept lake, and what is in it."""
    copy = shutil.copytree(request.param / "lake", tmp_path / "lake")
    return Lake.open(copy), json.loads((request.param / "manifest.json").read_text())


def test_every_trajectory_is_read_as_it_was_written(old: tuple[Lake, dict[str, Any]]) -> None:
    lake, manifest = old
    reader = Reader(lake)
    assert sorted(reader.uids()) == sorted(manifest["trajectories"])
    for uid, expected in manifest["trajectories"].items():
        found, row = reader.read(uid), reader.row(uid)
        crc = 0
        for name in expected["stored"]:
            crc = zlib.crc32(np.ascontiguousarray(found.columns[name]).tobytes(), crc)
        assert (crc, row["crc"]) == (expected["crc"],) * 2
        assert found.length == expected["length"]
        assert {n: [str(v.dtype), list(v.shape)] for n, v in found.columns.items()} == expected["columns"]
        assert found.info == info(expected["key"])
        known = {PLAIN.id: PLAIN, PICTURES.id: PICTURES}.get(expected["schema"])
        if known is not None and expected["base"] is None:
            assert_same(dict(found.columns), dict(content(expected["key"], known)))


def test_sql_answers_the_same(old: tuple[Lake, dict[str, Any]]) -> None:
    lake, manifest = old
    for text, expected in manifest["questions"].items():
        assert plain(catalog.query(lake, text)[1]) == expected, text


def test_a_view_draws_the_same_windows(old: tuple[Lake, dict[str, Any]]) -> None:
    lake, manifest = old
    view = View(lake, PLAIN.id)
    view.refresh()
    assert uids_of(view) == manifest["draw"]["uids"]
    batch = WindowSampler(view, length=WINDOW, seed=7).sample(6)
    assert batch.start.tolist() == manifest["draw"]["start"]
    assert batch.columns["reward"].tolist() == manifest["draw"]["reward"]


def test_a_snapshot_from_before_the_rewriting_finds_what_is_left(old: tuple[Lake, dict[str, Any]]) -> None:
    lake, manifest = old
    view = View(lake, PLAIN.id)
    view.restore(manifest["snapshot"]["view"])
    assert uids_of(view) == manifest["snapshot"]["left"]


def test_the_log_of_its_dead_writer_is_sealed(old: tuple[Lake, dict[str, Any]]) -> None:
    lake, manifest = old
    assert lake.salvage() == len(manifest["logged"])
    for uid, expected in manifest["logged"].items():
        found = reading.read(lake, uid)
        assert_same(dict(found.columns), dict(content(expected["key"])))
        assert found.info == info(expected["key"])
    report = verify(lake)
    assert (report.corrupt, report.foreign, report.tombstones) == ((), (), ())
    assert report.trajectories >= len(manifest["trajectories"]) + len(manifest["logged"])


def test_it_lives_on(old: tuple[Lake, dict[str, Any]]) -> None:
    """It is written to, compacted and expired from like any other."""
    lake, manifest = old
    with lake.writer(PLAIN) as writer:
        new = writer.append(content(50), TrajectoryInfo(seed=50))
    with lake.overlay_writer(PLAIN, ["reward"]) as overlay:
        base = next(u for u, t in manifest["trajectories"].items() if t["key"] == 1 and t["base"] is None)
        overlay.append(base, {"reward": content(1)["reward"] - 1}, method="less")
    before = {uid: reading.read(lake, uid) for uid in Reader(lake).uids()}
    assert {new, *manifest["trajectories"], *manifest["logged"]} < before.keys()
    compacted = compaction.compact(lake, compaction.Rules(settle_seconds=0), grace_seconds=0)
    assert compacted.segments[1] < compacted.segments[0]
    assert sorted(Reader(lake).uids()) == sorted(before)
    for uid, trajectory in before.items():
        assert_same(dict(reading.read(lake, uid).columns), dict(trajectory.columns))
    retention.expire(lake, retention.Limits(where="seed = 50"), grace_seconds=0)
    assert set(before) - set(Reader(lake).uids()) == {new}
    assert not verify(lake).corrupt


def test_the_script_still_makes_such_a_lake(tmp_path: Path) -> None:
    """So that the next format's fixture can be made as this one was."""
    made = fill(tmp_path / "lake")
    assert {"trajectories", "logged", "expired", "snapshot", "draw", "questions"} <= made.keys()
    assert len(made["expired"]) == 2
    assert set(made["snapshot"]["left"]) == set(made["snapshot"]["uids"]) - set(made["expired"])


def test_the_kept_lakes_are_small_and_old() -> None:
    assert KEPT, "no lake is kept"
    for path in KEPT:
        files = [file for file in path.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < 200_000
        assert not any(file.stat().st_mtime > time.time() + 60 for file in files)
