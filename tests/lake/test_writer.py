import errno
import os
from dataclasses import replace
from pathlib import Path
from uuid import RFC_4122, UUID

import numpy as np
import pyarrow as pa
import pytest

from pipelines.errors import StageFailed
from pipelines.lake import reading
from pipelines.lake.footer import hex_uids
from pipelines.lake.live import LiveTable
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Discrete, Ragged, Spaces
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Infos, Trajectories, TrajectoryInfo
from tests.lake.factories import (
    IMAGES,
    INFO,
    MIXED,
    RAGGED,
    SCHEMA,
    assert_same,
    columns,
    fill,
    footer_at,
    refuse,
    segment_files,
)
from tests.tiers import some, trials


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES, MIXED, RAGGED], ids=["plain", "images", "mixed", "ragged"])
def test_what_is_appended_is_what_is_read(lake: Lake, schema) -> None:
    written = fill(lake, [1, 40, 7, 100, 2], schema=schema, seal_every=2)
    for uid, values in written.items():
        found = reading.read(lake, uid)
        assert_same(dict(found.columns), values)
        assert found.length == len(values["reward"]) - 1


def test_trajectories_logged_together_are_told_apart_whatever_their_texts(lake: Lake) -> None:
    """Their rows are encoded in one go and cut where one ends and the next begins; salvage reads the log back."""
    texts = ['}, {"uid": ', '"}, {"uid": "0"', "\\", "", '\n}, {\\"uid\\": ']
    rng = np.random.default_rng(0)
    values = columns(rng, 3)
    together = {name: np.concatenate([column] * len(texts)) for name, column in values.items()}
    infos = [replace(INFO, task=text, goal_text=text, tags={text: text}) for text in texts]
    writer = lake.writer(SCHEMA)
    uids = writer.append_many(Trajectories(together, [4] * len(texts), infos))
    writer._abandon()  # as a dead writer leaves it: in its log
    lake.salvage()
    assert len(set(uids)) == len(texts)
    assert all(UUID(uid).version == 4 and UUID(uid).variant == RFC_4122 for uid in uids)
    assert [reading.read(lake, uid).info for uid in uids] == infos


def test_what_the_writer_says_of_a_trajectory_is_kept(lake: Lake) -> None:
    values = columns(np.random.default_rng(0), 9)
    with lake.writer(SCHEMA) as writer:
        uid = writer.append(values, INFO)
    assert reading.read(lake, uid).info == INFO
    row = footer_at(segment_files(lake)[0]).trajectories.to_pylist()[0]
    assert row["uid"].hex() == uid
    assert row["return"] == pytest.approx(float(values["reward"][1:].sum()))
    assert (row["length"], row["terminated"], row["truncated"], row["base_uid"]) == (9, True, False, None)


def test_the_reward_in_the_first_row_is_part_of_no_return(lake: Lake) -> None:
    """It belongs to no action, whatever is stored there."""
    first, second = (columns(np.random.default_rng(seed), 3) for seed in (0, 1))
    first["reward"][:], second["reward"][:] = [5, 1, 2, 4], [70, 10, 20, 40]
    with lake.writer(SCHEMA) as writer:
        writer.append_many(laid_together([first, second], [INFO, INFO]))
    assert [row["return"] for row in rows_of(lake)] == [7, 70]


def test_a_segment_is_one_plain_arrow_batch_for_anyone(lake: Lake) -> None:
    written = fill(lake, [4, 6])
    with pa.OSFile(str(segment_files(lake)[0])) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.num_rows == 12
    assert not any(field.nullable for field in table.schema)
    both = np.concatenate([v["obs.state"] for v in written.values()])
    np.testing.assert_array_equal(np.array(table["obs.state"].to_pylist(), np.float32), both)


def test_wide_columns_go_to_a_compressed_file(lake: Lake) -> None:
    with lake.writer(IMAGES) as writer:
        writer.append(IMAGES.empty(100), TrajectoryInfo())
    main, blob = sorted(segment_files(lake), key=lambda p: ".blob" in p.name)
    assert blob.name == main.name.replace(".arrow", ".blob.arrow")
    assert blob.stat().st_size < 20 * 20 * 3 * 100 / 10
    with pa.OSFile(str(blob)) as file:
        assert pa.ipc.open_file(file).num_record_batches == 4  # 101 rows, 32 a batch


def test_a_text_costs_what_it_says_not_the_room_it_has(lake: Lake) -> None:
    spaces = Spaces(
        observation={"obs.length": Discrete(n=901), "obs": Ragged(max_length=900, dtype="uint8")}, action=Discrete(n=3)
    )
    schema, rng = Schema(spaces), np.random.default_rng(0)
    values = schema.empty(1001)
    for row in range(1001):
        length = int(rng.integers(20, 40))
        values["obs"][row, :length], values["obs.length"][row] = rng.integers(97, 123, length), length
    with lake.writer(schema) as writer:
        uid = writer.append(values, TrajectoryInfo())
    blob = next(path for path in segment_files(lake) if ".blob" in path.name)
    assert blob.stat().st_size < 3 * values["obs.length"].sum()
    assert_same(dict(reading.read(lake, uid).columns), values)


def test_the_callers_arrays_may_change_after_append(lake: Lake) -> None:
    values = columns(np.random.default_rng(0), 5)
    before = {name: array.copy() for name, array in values.items()}
    with lake.writer(SCHEMA) as writer:
        uid = writer.append(values, TrajectoryInfo())
        for array in values.values():
            array[...] = 1
    assert_same(dict(reading.read(lake, uid).columns), before)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: v.pop("reward"),
        lambda v: v.update(extra=v["reward"]),
        lambda v: v.update(reward=v["reward"][:-1]),
        lambda v: v.update(action=v["action"].astype(np.float64) + 0.5),
        lambda v: v.update({"obs.state": v["obs.state"][:, :2]}),
        lambda v: v.update({name: array[:1] for name, array in v.items()}),
    ],
    ids=["missing", "extra", "ragged", "dtype", "shape", "too-short"],
)
def test_columns_of_another_form_are_refused_and_nothing_is_logged(lake: Lake, spoil) -> None:
    values = columns(np.random.default_rng(0), 5)
    spoil(values)
    with lake.writer(SCHEMA) as writer, pytest.raises(ValueError, match=r"column|rows"):
        writer.append(values, TrajectoryInfo())
    assert segment_files(lake) == []


def laid_together(values: list[dict[str, np.ndarray]], infos: list[TrajectoryInfo]) -> Trajectories:
    joined = {name: np.concatenate([v[name] for v in values]) for name in values[0]}
    return Trajectories(joined, [len(v["reward"]) for v in values], infos)


def rows_of(lake: Lake) -> list[dict]:
    """What is said of the trajectories of a lake of one segment, apart from their names and when they came."""
    table = footer_at(next(path for path in segment_files(lake) if ".blob" not in path.name)).trajectories
    return table.drop_columns(["uid", "t_commit"]).to_pylist()


@pytest.mark.system
@pytest.mark.trials
@pytest.mark.parametrize("schema", some([SCHEMA, IMAGES, MIXED], 2), ids=["plain", "images", "mixed"])
@pytest.mark.parametrize("crash", [False, True], ids=["sealed", "salvaged"])
def test_many_appended_at_once_are_each_as_if_appended_alone(lake: Lake, tmp_path: Path, schema, crash: bool) -> None:
    rng, other, count = np.random.default_rng(0), Lake.create(tmp_path / "other"), trials(700, 300)
    values = [columns(rng, int(rng.integers(1, 20)), schema) for _ in range(count)]
    infos = [replace(INFO, seed=i, attempts=(True,) * (i % 3), tags={"i": str(i)}) for i in range(count)]
    writer = lake.writer(schema, seal_seconds=1e9)
    uids = writer.append_many(laid_together(values, infos))
    assert (writer.trajectories, writer.steps) == (count, sum(len(v["reward"]) - 1 for v in values))
    writer._abandon() if crash else writer.close()
    with other.writer(schema, seal_seconds=1e9) as one_by_one:
        alone = [one_by_one.append(v, info) for v, info in zip(values, infos, strict=True)]
    assert lake.salvage() == (count if crash else 0)
    ours, theirs = reading.Reader(lake), reading.Reader(other)
    assert ours.uids() == uids
    for a, b in zip(rows_of(lake), rows_of(other), strict=True):
        assert a.pop("return") == pytest.approx(b.pop("return"), rel=1e-12, abs=1e-12)
        assert a == b
    for uid, partner in zip(uids, alone, strict=True):
        assert_same(dict(ours.read(uid).columns), dict(theirs.read(partner).columns))


def test_a_segment_distinguishes_what_came_alone_in_lists_and_in_columns(lake: Lake) -> None:
    """Its table is put together from what trajectories have in common and what each has of its own."""
    rng = np.random.default_rng(0)
    listed = [
        replace(INFO, task=f"t{i}", seed=i, tags={"k": str(i)} if i else {}, attempts=(True,) * i) for i in range(3)
    ]
    shared = replace(INFO, env="other", tags={}, success=None, epsilon=-0.0)
    by_column = Infos(shared, {"task": ["x", "y"], "success": [None, False], "attempts": [(), (False,)]})
    written, uids = [], []
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        for infos in ([INFO], listed, by_column, [replace(INFO, collector="c1")], [shared], listed[:2]):
            values = [columns(rng, int(rng.integers(1, 9))) for _ in infos]
            together = {name: np.concatenate([v[name] for v in values]) for name in values[0]}
            uids += writer.append_many(Trajectories(together, [len(v["reward"]) for v in values], infos))
            written += [*zip(infos, values, strict=True)]
    (path,) = segment_files(lake)
    table = footer_at(path).trajectories
    assert [uid.hex() for uid in table["uid"].to_pylist()] == uids
    assert table["length"].to_pylist() == [len(values["reward"]) - 1 for _, values in written]
    for uid, (info, values) in zip(uids, written, strict=True):
        found = reading.read(lake, uid)
        assert found.info == info
        assert_same(dict(found.columns), values)


def test_floats_of_many_may_come_as_an_array_which_stays_the_callers(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    values, epsilon = [columns(rng, 4) for _ in range(3)], np.array([0.25, 0.5, 0.75])
    together = {name: np.concatenate([v[name] for v in values]) for name in values[0]}
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        uids = writer.append_many(Trajectories(together, [5] * 3, Infos(INFO, {"epsilon": epsilon})))
        epsilon[:] = 9.0
        with pytest.raises(ValueError, match="'epsilon'"):
            writer.append_many(Trajectories(together, [5] * 3, Infos(INFO, {"epsilon": np.zeros((3, 2))})))
    assert [reading.read(lake, uid).info for uid in uids] == [replace(INFO, epsilon=x) for x in (0.25, 0.5, 0.75)]


def test_one_bad_trajectory_keeps_its_whole_company_out(lake: Lake) -> None:
    values = [columns(np.random.default_rng(0), 5) for _ in range(3)]
    with lake.writer(SCHEMA) as writer:
        with pytest.raises(ValueError, match="trajectory"):
            writer.append_many(laid_together(values, [INFO, TrajectoryInfo(seed=2**70), INFO]))
        with pytest.raises(ValueError, match="rows"):
            writer.append_many(Trajectories(laid_together(values, [INFO] * 3).columns, [6, 11, 1], [INFO] * 3))
    assert segment_files(lake) == []


def test_two_writers_share_a_lake_without_knowing_of_each_other(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    with lake.writer(SCHEMA, name="a/b c") as one, lake.writer(SCHEMA, name="a/b c") as two:
        uids = {w.append(columns(rng, 3), TrajectoryInfo()) for _ in range(5) for w in (one, two)}
        one.seal()
        uids.add(two.append(columns(rng, 3), TrajectoryInfo()))
    follower = LiveTable(lake)
    assert follower.refresh().added == len(uids) == 11


@pytest.mark.parametrize(
    ("code", "text"), [(errno.ENOSPC, "no space left"), (errno.EROFS, "read-only"), (errno.EACCES, "permission denied")]
)
def test_a_refusing_disk_is_said_plainly_and_costs_nothing_acknowledged(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    rng = np.random.default_rng(0)
    writer = lake.writer(SCHEMA)
    first = writer.append(columns(rng, 5), TrajectoryInfo())
    for name in ("writev", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse(code))
            with pytest.raises(StageFailed, match=text):
                writer.append(columns(rng, 5), TrajectoryInfo()) if name == "writev" else writer.seal()
        assert segment_files(lake) == []
        assert list((lake.path / "tmp").iterdir()) == []
    second = writer.append(columns(rng, 5), TrajectoryInfo())
    writer.close()
    follower = LiveTable(lake)
    follower.refresh()
    assert [hex_uids(segment.uids) for segment in follower.segments] == [[first], [second]]


def test_a_short_write_leaves_whole_records_only(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up takes a part of a record and refuses the rest."""
    rng = np.random.default_rng(0)
    writer = lake.writer(SCHEMA)
    kept = [writer.append(columns(rng, 5), TrajectoryInfo())]
    real = os.writev
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda fd, parts: real(fd, parts[:1]))
        patch.setattr(os, "write", refuse(errno.ENOSPC))
        with pytest.raises(StageFailed, match="no space left"):
            writer.append(columns(rng, 5), TrajectoryInfo())
    kept.append(writer.append(columns(rng, 5), TrajectoryInfo()))
    writer._abandon()
    assert lake.salvage() == 2
    assert sorted(reading.Reader(lake).uids()) == sorted(kept)


def test_a_really_full_disk(small_disk: Path) -> None:
    lake = Lake.create(small_disk / "lake")
    rng, kept = np.random.default_rng(0), []
    writer = lake.writer(SCHEMA, seal_bytes=200_000, seal_seconds=1e9)

    def fill_up() -> None:
        for _ in range(1000):
            kept.append(writer.append(columns(rng, 500), TrajectoryInfo()))

    with pytest.raises(StageFailed, match="no space left"):
        fill_up()
    writer._abandon()
    assert list((lake.path / "tmp").iterdir()) == []
    assert set(kept) >= set(reading.Reader(lake).uids())
    lake.salvage()  # no space for it yet: the log stays
    ballast = small_disk / "ballast"
    ballast.unlink()
    lake.salvage()
    assert set(kept) <= set(reading.Reader(lake).uids())


def test_a_directory_that_turned_read_only(small_disk: Path) -> None:
    lake = Lake.create(small_disk / "lake")
    written = fill(lake, [3, 4])
    writer = lake.writer(SCHEMA)
    os.system(f"mount -o remount,ro {small_disk}")
    with pytest.raises(StageFailed, match="read-only"):
        writer.append(columns(np.random.default_rng(0), 5), TrajectoryInfo())
    with pytest.raises(StageFailed, match="read-only"):
        Lake.create(small_disk / "other")
    assert set(reading.Reader(Lake(lake.path)).uids()) == set(written)


def test_numpy_values_in_the_info_are_kept_as_plain_ones(lake: Lake) -> None:
    values = columns(np.random.default_rng(0), 5)
    info = TrajectoryInfo(success=np.bool_(True), seed=np.int64(3), epsilon=np.float32(0.5), attempts=np.array([True]))
    with lake.writer(SCHEMA) as writer:
        uid = writer.append(values, info)
    found = reading.read(lake, uid).info
    assert (found.success, found.seed, found.epsilon, found.attempts) == (True, 3, 0.5, (True,))


@pytest.mark.parametrize(
    "info",
    [
        TrajectoryInfo(env=3),
        TrajectoryInfo(seed=2**70),
        TrajectoryInfo(success=1.5),
        TrajectoryInfo(tags={"a": 1}),
        TrajectoryInfo(attempts=(1.0,)),
        TrajectoryInfo(task=object()),
    ],
    ids=["env", "seed", "success", "tags", "attempts", "task"],
)
def test_an_info_that_could_not_be_sealed_is_refused_before_it_is_logged(lake: Lake, info: TrajectoryInfo) -> None:
    values = columns(np.random.default_rng(0), 5)
    with lake.writer(SCHEMA) as writer:
        with pytest.raises(ValueError, match="trajectory"):
            writer.append(values, info)
        writer.append(values, INFO)
    assert LiveTable(lake).refresh().added == 1
