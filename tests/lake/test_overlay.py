import numpy as np
import pytest

from pipelines.errors import InputMissing
from pipelines.lake import reading
from pipelines.lake.follower import Follower
from pipelines.lake.footer import hex_uids
from pipelines.lake.keys import segment_key
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.segment import stored_bytes
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import IMAGES, SCHEMA, assert_same, fill


def relabel(lake: Lake, written: dict, *, schema=SCHEMA) -> dict[str, dict[str, np.ndarray]]:
    """Every second trajectory cut to half, with other rewards; returns what must be read back."""
    expected = {}
    with lake.overlay_writer(schema, ["reward", "terminated"]) as writer:
        for uid, values in list(written.items())[::2]:
            rows = len(values["reward"]) // 2 + 1
            changed = {"reward": values["reward"][:rows] + 1, "terminated": np.ones(rows, np.uint8)}
            new = writer.append(uid, changed, method="half")
            expected[new] = {name: array[:rows] for name, array in values.items()} | changed
    return expected


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "images"])
def test_an_overlay_reads_as_if_it_had_been_written_whole(lake: Lake, schema) -> None:
    written = fill(lake, [5, 40, 33, 7, 90], schema=schema, seal_every=2)
    expected = relabel(lake, written, schema=schema)
    for uid, values in {**written, **expected}.items():
        assert_same(dict(reading.read(lake, uid).columns), values)
    assert Follower(lake).refresh().added == 8


def test_an_overlay_costs_the_changed_columns_only(lake: Lake) -> None:
    written = fill(lake, [5000] * 4, schema=IMAGES)
    with lake.overlay_writer(IMAGES, ["reward"]) as writer:
        for uid, values in written.items():
            writer.append(uid, {"reward": values["reward"]}, method="same")
    overlay = next(s for s in _follow(lake).segments if s.is_overlay)
    assert overlay.columns == ("reward",)
    assert stored_bytes(lake.storage, overlay.file) < 4 * 5001 * 4 + 10_000


def test_an_overlay_may_start_inside_its_base(lake: Lake) -> None:
    (uid, values), *_ = fill(lake, [20]).items()
    cut = {name: values[name][6:15].copy() for name in ("action", "reward")}
    for array in cut.values():
        array[0] = 0
    with lake.overlay_writer(SCHEMA, ["action", "reward"]) as writer:
        new = writer.append(uid, cut, method="tail", base_offset=6)
    assert_same(dict(reading.read(lake, new).columns), {n: a[6:15] for n, a in values.items()} | cut)
    with lake.overlay_writer(SCHEMA, ["reward"]) as writer, pytest.raises(ValueError, match="'action' and 'reward'"):
        writer.append(uid, {"reward": cut["reward"]}, method="tail", base_offset=6)


def test_an_overlay_may_change_pictures_alone(lake: Lake) -> None:
    (uid, values), *_ = fill(lake, [70], schema=IMAGES).items()
    with lake.overlay_writer(IMAGES, ["obs"]) as writer:
        new = writer.append(uid, {"obs": 255 - values["obs"]}, method="negative")
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
        assert (row["relabel_method"], row["base_offset"], row["columns"]) == ("half", 0, ["reward", "terminated"])
        assert row["return"] == pytest.approx(float(expected[row["uid"]]["reward"][1:].sum()), rel=1e-6)


def test_the_info_is_the_bases_unless_given(lake: Lake) -> None:
    written = fill(lake, [5])
    (uid, values), *_ = written.items()
    with lake.overlay_writer(SCHEMA, ["reward"]) as writer:
        same = writer.append(uid, {"reward": values["reward"]}, method="m")
        other = writer.append(uid, {"reward": values["reward"]}, method="m", info=TrajectoryInfo(task="new"))
    assert reading.read(lake, same).info == reading.read(lake, uid).info
    assert reading.read(lake, other).info.task == "new"


def test_what_has_no_sealed_base_is_refused(lake: Lake) -> None:
    written = fill(lake, [5])
    (uid, values), *_ = written.items()
    with lake.overlay_writer(SCHEMA, ["reward"]) as writer:
        overlay = writer.append(uid, {"reward": values["reward"]}, method="m")
        with pytest.raises(InputMissing, match="no trajectory"):
            writer.append("0" * 32, {"reward": values["reward"]}, method="m")
        with pytest.raises(ValueError, match="rows"):
            writer.append(uid, {"reward": np.zeros(7, np.float32)}, method="m")
    with lake.overlay_writer(SCHEMA, ["reward"]) as writer, pytest.raises(InputMissing, match="overlay itself"):
        writer.append(overlay, {"reward": values["reward"]}, method="m")
    with pytest.raises(InputMissing, match="no columns"):
        lake.overlay_writer(SCHEMA, ["nope"])


def test_an_overlay_seen_before_its_base_waits_for_it(lake: Lake) -> None:
    written = fill(lake, [5])
    relabel(lake, written)
    base = next(s for s in _follow(lake).segments if not s.is_overlay)
    held = lake.path / "tmp" / "held"
    path = lake.storage.fetch(segment_key(base.id))
    path.rename(held)
    follower = Follower(lake)
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
    follower = Follower(lake, told.append)
    follower.refresh()
    assert follower.refresh().added == 1  # the other overlay in the same file
    assert sum(len(s.uids) for s in follower.segments) == 3
    assert "derives from segments that are not here" in told[0].text


def test_a_dead_overlay_writer_is_salvaged_too(lake: Lake) -> None:
    (uid, values), *_ = fill(lake, [12]).items()
    writer = lake.overlay_writer(SCHEMA, ["reward"])
    new = writer.append(uid, {"reward": values["reward"] * 2}, method="twice")
    writer._abandon()
    assert lake.salvage() == 1
    assert_same(dict(reading.read(lake, new).columns), values | {"reward": values["reward"] * 2})


def _follow(lake: Lake) -> Follower:
    follower = Follower(lake)
    follower.refresh()
    return follower
