"""Exports have whole episodes, whether a lake stores them in pieces or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.formats.export import export
from pipelines.formats.make import open_importer
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from tests.lake.factories import assert_same
from tests.lake.pieces import fill_twice

ABOUT = {"lake": "x", "where": ""}
LENGTHS = [7, 3, 12, 4, 1]


def read_again(form: str, place: Path) -> list[Trajectory]:
    importer = open_importer(SourceSettings(name=f"{form}:{place}"))
    found = [each for batch in importer.batches() for each in batch]
    importer.close()
    return sorted(found, key=lambda each: each.info.seed)


@pytest.mark.system
@pytest.mark.parametrize("form", ["npz", "parquet", "hdf5", "minari"])
def test_exports_of_pieces_are_those_of_whole_episodes(tmp_path: Path, form: str) -> None:
    whole, pieces = (Lake.create(tmp_path / name) for name in ("whole", "pieces"))
    known, cut = fill_twice(whole, pieces, LENGTHS, steps=4)
    assert [len(uids) for uids in cut] == [2, 1, 3, 1, 1]
    done = export(whole, known, tmp_path / "a", form=form, about=ABOUT)
    same = export(pieces, [uid for uids in cut for uid in uids], tmp_path / "b", form=form, about=ABOUT)
    assert (done.trajectories, done.steps) == (same.trajectories, same.steps) == (5, 27)
    for left, right in zip(read_again(form, tmp_path / "a"), read_again(form, tmp_path / "b"), strict=True):
        assert_same(left.columns, right.columns)
        for name in ("seed", "task", "success", "attempts", "policy_version", "env"):
            assert getattr(left.info, name) == getattr(right.info, name)
    again = export(pieces, [uid for uids in cut for uid in uids], tmp_path / "b", form=form, about=ABOUT)
    assert (again.written, again.trajectories) == (0, 5)


def test_one_piece_brings_its_episode(tmp_path: Path) -> None:
    whole, pieces = (Lake.create(tmp_path / name) for name in ("whole", "pieces"))
    known, cut = fill_twice(whole, pieces, LENGTHS, steps=4)
    export(pieces, [cut[2][-1]], tmp_path / "out", form="npz", about=ABOUT)
    (found,) = read_again("npz", tmp_path / "out")
    assert_same(dict(found.columns), dict(Reader(whole).read(known[2]).columns))


def test_an_episode_with_a_hole_is_exported_on_both_sides_of_it(tmp_path: Path) -> None:
    """Time goes on after the hole; such a part begins where it begins."""
    whole, pieces = (Lake.create(tmp_path / name) for name in ("whole", "pieces"))
    known, cut = fill_twice(whole, pieces, [20], steps=4)
    kept = Lake.create(tmp_path / "kept")
    reader = Reader(pieces)
    with kept.writer(pieces.only_schema()) as writer:
        uids = [writer.append(each.columns, each.info) for each in map(reader.read, cut[0]) if each.info.chunk != 2]
    assert export(kept, uids, tmp_path / "out", form="parquet", about=ABOUT).trajectories == 2
    values = Reader(whole).read(known[0]).columns["obs.state"]
    steps = pq.read_table(next((tmp_path / "out").glob("steps-*.parquet"))).to_pylist()
    assert [step["t"] for step in steps] == [*range(9), *range(12, 21)]
    for step in steps:
        np.testing.assert_array_equal(np.float32(step["obs.state"]), values[step["t"]])


@pytest.mark.system
def test_an_export_is_updated_when_an_episode_has_grown(tmp_path: Path) -> None:
    whole, pieces = (Lake.create(tmp_path / name) for name in ("whole", "pieces"))
    fill_twice(whole, pieces, [12], steps=4)
    grown = Lake.create(tmp_path / "grown")
    stored = [Reader(pieces).read(uid) for uid in Reader(pieces).uids()]
    uids = []
    for number, each in enumerate(sorted(stored, key=lambda each: each.info.chunk), 1):
        with grown.writer(pieces.only_schema()) as writer:
            uids.append(writer.append(each.columns, each.info))
        export(grown, uids, tmp_path / "out", form="npz", about=ABOUT)
        (found,) = read_again("npz", tmp_path / "out")
        assert found.length == 4 * number
