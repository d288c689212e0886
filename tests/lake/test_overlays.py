import contextlib
import errno
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from pipelines.errors import InputMissing, Interrupted, StageFailed
from pipelines.lake import reading
from pipelines.lake.folders import segment_key
from pipelines.lake.footer import hex_uids
from pipelines.lake.live import LiveTable
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.overlays import OverlayWriter, overlay_uids
from pipelines.lake.reading import Reader
from pipelines.lake.segment import stored_bytes
from pipelines.lake.sql import catalog
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from tests.lake.factories import (
    IMAGES,
    INFO,
    SCHEMA,
    append_overlay,
    assert_same,
    columns,
    derive,
    fill,
    overlay_writer,
)


def relabel(lake: Lake, written: dict) -> dict[str, dict[str, np.ndarray]]:
    """Every second trajectory cut to half, with other rewards; returns what must be read back."""
    changes, bases = {}, list(written)[::2]
    for uid in bases:
        reward = written[uid]["reward"]
        rows = len(reward) // 2 + 1
        changes[uid] = {"reward": reward[:rows] + 1, "terminated": np.ones(rows, np.uint8)}
    return {
        new: {name: array[: len(own["reward"])] for name, array in written[uid].items()} | own
        for (uid, own), new in zip(changes.items(), derive(lake, changes, method="half"), strict=True)
    }


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "images"])
def test_an_overlay_reads_as_if_it_had_been_written_whole(lake: Lake, schema) -> None:
    written = fill(lake, [5, 40, 33, 7, 90], schema=schema, seal_every=2)
    expected = relabel(lake, written)
    for uid, values in {**written, **expected}.items():
        assert_same(dict(reading.read(lake, uid).columns), values)
    assert LiveTable(lake).refresh().added == 8


@pytest.mark.system
def test_an_overlay_costs_the_changed_columns_only(lake: Lake) -> None:
    written = fill(lake, [5000] * 4, schema=IMAGES)
    derive(lake, {uid: {"reward": values["reward"]} for uid, values in written.items()})
    overlay = next(s for s in _follow(lake).segments if s.is_overlay)
    assert overlay.columns == ("reward",)
    assert stored_bytes(lake.storage, overlay.file) < 4 * 5001 * 4 + 10_000


def test_an_overlay_may_start_inside_its_base(lake: Lake) -> None:
    (uid, values), *_ = fill(lake, [20]).items()
    cut = {name: values[name][6:15].copy() for name in ("action", "reward")}
    for array in cut.values():
        array[0] = 0
    (new,) = derive(lake, {uid: cut}, offset=6)
    assert_same(dict(reading.read(lake, new).columns), {n: a[6:15] for n, a in values.items()} | cut)
    writer = OverlayWriter(lake, SCHEMA, ["reward"], name="w")
    with writer, pytest.raises(ValueError, match="'reward', 'terminated' and 'truncated'"):
        append_overlay(lake, writer, uid, {"reward": cut["reward"]}, offset=6)


def test_an_overlay_may_change_pictures_alone(lake: Lake) -> None:
    (uid, values), *_ = fill(lake, [70], schema=IMAGES).items()
    (new,) = derive(lake, {uid: {"obs": 255 - values["obs"]}})
    assert_same(dict(reading.read(lake, new).columns), values | {"obs": 255 - values["obs"]})
    assert verify(lake).corrupt == ()


def test_the_catalog_knows_what_derives_from_what(lake: Lake) -> None:
    written = fill(lake, [5, 40, 33])
    expected = relabel(lake, written)
    names, rows = catalog.query(lake, "select * from overlays order by length")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    assert {row["uid"] for row in found} == set(expected)
    assert {row["base_uid"] for row in found} == {*list(written)[::2]}
    for row in found:
        assert (row["relabel_method"], row["base_offset"], row["columns"]) == (
            "half",
            0,
            ["reward", "terminated", "truncated"],
        )
        assert row["return"] == pytest.approx(float(expected[row["uid"]]["reward"][1:].sum()), rel=1e-6)


def test_the_row_of_an_overlay_is_its_bases_but_for_what_the_batch_says(lake: Lake) -> None:
    with lake.writer(SCHEMA) as writer:
        values = columns(np.random.default_rng(0), 5)
        base = writer.append(values, INFO)
    own = {"reward": values["reward"] * 2}
    with overlay_writer(lake, {base: own}) as overlays:
        same = append_overlay(lake, overlays, base, own)
        other = append_overlay(
            lake, overlays, base, own, copy=1, success=np.array([0], np.int8), tasks=["right"], tags={"goal": ["b"]}
        )
        unnamed = append_overlay(lake, overlays, base, own, copy=2, success=np.array([-1], np.int8), names_goal=False)
    assert (overlays.trajectories, overlays.steps, overlays.bytes) == (3, 15, 3 * 6 * 4)
    said = replace(INFO, source="relabel")
    assert reading.read(lake, same).info == said
    changed = replace(said, success=False, task="right", tags={**INFO.tags, "goal": "b"})
    assert reading.read(lake, other).info == changed
    assert reading.read(lake, unnamed).info == replace(said, success=None, goal_text="")
    row, old = Reader(lake).row(same), Reader(lake).row(base)
    assert row["return"] == pytest.approx(2 * old["return"])
    assert (row["base_uid"], row["base_offset"], row["relabel_method"]) == (old["uid"], 0, "m")
    assert row["t_commit"] > old["t_commit"]


def test_uids_follow_from_base_method_and_copy() -> None:
    bases = np.array([bytes([i]) * 16 for i in range(3)], dtype="S16")
    found = [overlay_uids(bases, method, copy) for method in ("a", "b") for copy in (0, 1)]
    assert len({uid for uids in found for uid in uids.tolist()}) == 12
    np.testing.assert_array_equal(found[1], overlay_uids(bases, "a", np.array([1, 1, 1])))
    assert {UUID(uid).version for uids in found for uid in hex_uids(uids)} == {8}


def test_a_lake_has_a_derived_trajectory_once_however_often_it_is_written(lake: Lake) -> None:
    (base, values), *_ = fill(lake, [5]).items()
    own = {"reward": values["reward"] + 1}
    assert derive(lake, {base: own}) == derive(lake, {base: own})
    assert len(Reader(lake).uids()) == 2
    assert catalog.query(lake, "select count(*) from trajectories")[1] == [(2,)]


def test_columns_that_do_not_fit_are_refused(lake: Lake) -> None:
    (base, values), *_ = fill(lake, [5]).items()
    with pytest.raises(InputMissing, match="no columns"):
        OverlayWriter(lake, SCHEMA, ["nope"], name="w")
    with pytest.raises(ValueError, match="shape"), overlay_writer(lake, {base: {"reward": values["reward"]}}) as writer:
        append_overlay(lake, writer, base, {"reward": np.zeros((6, 2), np.float32)})


@pytest.mark.parametrize("error", [None, Interrupted("stop"), RuntimeError()], ids=["done", "interrupted", "failed"])
def test_what_was_derived_is_published_at_the_end_unless_something_failed(lake: Lake, error) -> None:
    written = fill(lake, [5, 6])
    changes = {uid: {"reward": values["reward"]} for uid, values in written.items()}
    with contextlib.suppress(Interrupted, RuntimeError), overlay_writer(lake, changes, seal_bytes=1) as writer:
        for base, own in changes.items():
            append_overlay(lake, writer, base, own)
        assert len(Reader(lake).uids()) == 2
        assert len(list((lake.path / "tmp").glob("relabel.*.tmp"))) == 2
        if error is not None:
            raise error
    assert len(Reader(lake).uids()) == (2 if isinstance(error, RuntimeError) else 4)
    assert not list((lake.path / "tmp").iterdir())
    assert not list((lake.path / "wal").iterdir())


def test_staged_files_are_published_early_once_they_take_too_much(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7])
    with OverlayWriter(lake, SCHEMA, ["reward"], name="w", seal_bytes=1, held_bytes=50) as writer:
        for base, values in written.items():
            append_overlay(lake, writer, base, {"reward": values["reward"]})
        assert len(Reader(lake).uids()) == 5
    assert len(Reader(lake).uids()) == 6


@pytest.mark.parametrize("published", [0, 1, 2])
def test_a_refused_disk_leaves_what_was_published_and_nothing_else(lake: Lake, published: int, monkeypatch) -> None:
    written = fill(lake, [5, 6], schema=IMAGES)
    changes = {uid: {"obs": 255 - values["obs"]} for uid, values in written.items()}
    real, calls = LocalStorage.publish, []

    def publish(self: LocalStorage, staged: Path, key: str) -> None:
        calls.append(key)
        if len(calls) > 2 * published + 1:  # the wide columns of the next segment are there already
            raise OSError(errno.ENOSPC, "no space left")
        real(self, staged, key)

    monkeypatch.setattr(LocalStorage, "publish", publish)
    with (
        contextlib.nullcontext() if published == 2 else pytest.raises(StageFailed, match="no space"),
        overlay_writer(lake, changes, seal_bytes=1) as writer,
    ):
        for base, own in changes.items():
            append_overlay(lake, writer, base, own)
    assert len(Reader(lake).uids()) == 2 + published
    assert not list((lake.path / "tmp").iterdir())
    assert not list((lake.path / "wal").iterdir())
    assert verify(lake).foreign == ()


def test_an_overlay_seen_before_its_base_waits_for_it(lake: Lake) -> None:
    written = fill(lake, [5])
    relabel(lake, written)
    base = next(s for s in _follow(lake).segments if not s.is_overlay)
    held = lake.path / "tmp" / "held"
    path = lake.storage.fetch(segment_key(base.id))
    path.rename(held)
    follower = LiveTable(lake)
    assert follower.refresh().added == 0
    held.rename(path)
    assert follower.refresh().added == 2
    assert follower.refresh().added == 0


def test_an_overlay_whose_base_is_gone_is_left_out_with_a_notice(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7], seal_every=1)
    relabel(lake, written)
    lost = next(s.id for s in _follow(lake).segments if next(iter(written)) in hex_uids(s.uids))
    lake.storage.remove(segment_key(lost))
    told: list = []
    follower = LiveTable(lake, told.append)
    follower.refresh()
    assert follower.refresh().added == 1  # the other overlay in the same file
    assert sum(len(s.uids) for s in follower.segments) == 3
    assert "derives from missing segments" in told[0].text


def test_salvage_removes_what_a_dead_overlay_writer_staged(lake: Lake) -> None:
    (base, values), *_ = fill(lake, [12], schema=IMAGES).items()
    own = {"obs": values["obs"] + 1}
    writer = overlay_writer(lake, {base: own}, seal_bytes=1)
    append_overlay(lake, writer, base, own)
    assert list((lake.path / "tmp").iterdir())
    assert lake.salvage() == 0  # it lives
    assert list((lake.path / "tmp").iterdir())
    writer._log.close()
    assert lake.salvage() == 0
    assert not list((lake.path / "tmp").iterdir())
    assert not list((lake.path / "wal").iterdir())
    assert Reader(lake).uids() == [base]


def _follow(lake: Lake) -> LiveTable:
    follower = LiveTable(lake)
    follower.refresh()
    return follower
