"""Sources without a kind, flat arrays under other names, and parts of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import AmagoError, InputMissing, UsageError
from pipelines.formats.export import export
from pipelines.formats.make import find_kind_and_place, open_importer
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from tests.formats.d4rl_data import flat, without, write
from tests.formats.test_round_trip import stored
from tests.lake.factories import SCHEMA


def read(name: Path | str, **settings: Any) -> list[Trajectory]:
    source = open_importer(SourceSettings(name=str(name), **settings))
    try:
        return [trajectory for batch in source.batches() for trajectory in batch]
    finally:
        source.close()


@pytest.mark.parametrize("form", ["hdf5", "npz", "parquet", "minari"])
def test_an_export_comes_back_by_its_own_name_and_by_none(tmp_path: Path, form: str) -> None:
    lake = Lake.create(tmp_path / "lake")
    uids = [trajectory.uid for trajectory in stored(lake, SCHEMA, [3, 4])]
    export(lake, uids, tmp_path / "set-v0", form=form, about={})
    for name in (f"{form}:{tmp_path / 'set-v0'}", tmp_path / "set-v0"):
        assert sorted(trajectory.length for trajectory in read(name)) == [3, 4]


def test_an_exported_folder_and_its_files_are_read_alike(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    uids = [trajectory.uid for trajectory in stored(lake, SCHEMA, [3, 4])]
    export(lake, uids, tmp_path / "set", form="parquet", about={})
    (tmp_path / "set" / "trajectories.json").touch()
    ways = [read(f"parquet:{tmp_path / 'set'}{files}") for files in ("", "/*.parquet", "/steps-*.parquet")]
    for found in ways[1:]:
        for one, other in zip(ways[0], found, strict=True):
            assert one.info == other.info
            for name in one.columns:
                np.testing.assert_array_equal(one.columns[name], other.columns[name])


def test_a_file_named_as_the_table_of_trajectories_is_read_where_it_is_alone(tmp_path: Path) -> None:
    rows = {"obs": np.arange(4.0), "action": np.zeros(4), "reward": np.zeros(4), "terminated": np.arange(4) == 3}
    pq.write_table(pa.table(rows), tmp_path / "trajectories.parquet")
    assert [one.length for one in read(f"parquet:{tmp_path}/*.parquet")] == [4]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.hdf5", "hdf5"),
        ("some/x.h5", "hdf5"),
        ("logs/*.parquet", "parquet"),
        ("x.arrow", "arrow"),
        ("x.npz", "npz"),
        ("hopper-medium-v2", "d4rl"),
        ("d4rl:hopper-medium-v2", "d4rl"),
        ("mine:trajectories", "mine"),
        ("nothing", ""),
    ],
)
def test_a_name_shows_its_kind(name: str, kind: str) -> None:
    assert find_kind_and_place(name)[0] == kind


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("hdf:x.hdf5", UsageError, "unknown kind of source 'hdf'; did you mean 'hdf5:x.hdf5'"),
        ("hdf5:none.hdf5", InputMissing, "no file 'none.hdf5'"),
        ("none.npz", InputMissing, "no folder or file 'none.npz'"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, error: type[AmagoError], words: str) -> None:
    with pytest.raises(error, match=words):
        read(name)


@pytest.mark.parametrize("form", ["hdf5", "npz"])
def test_flat_arrays_may_be_named_otherwise(tmp_path: Path, form: str) -> None:
    data = flat([4, 6])
    names = {
        "obs": "states",
        "next_obs": "next_states",
        "action": "moves",
        "reward": "r",
        "terminated": "d",
        "truncated": "t",
    }
    theirs = dict(zip(names.values(), (data[n] for n in ORDER), strict=True))
    path = tmp_path / f"x.{form}"
    if form == "npz":
        np.savez_compressed(path, **theirs)
    else:
        write(path, theirs)
    with pytest.raises(InputMissing, match=r"lacks 'actions', .*'observations'; map its columns with source\.columns"):
        read(path)
    found, wanted = read(path, columns=names), read(write(tmp_path / "y.hdf5", data))
    for one, other in zip(found, wanted, strict=True):
        for name, values in other.columns.items():
            np.testing.assert_array_equal(one.columns[name], values)


ORDER = ("observations", "next_observations", "actions", "rewards", "terminals", "timeouts")


def test_npz_with_d4rls_names_is_read_as_their_hdf5(tmp_path: Path) -> None:
    data = flat([4, 6])
    np.savez(tmp_path / "x.npz", **data)
    found, wanted = read(f"npz:{tmp_path / 'x.npz'}"), read(write(tmp_path / "x.hdf5", data))
    assert [trajectory.length for trajectory in found] == [4, 6]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.columns["obs"], other.columns["obs"])
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:400])
    with pytest.raises(AmagoError, match="damaged"):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize("followed", [True, False])
def test_parts_of_an_array_become_observations(tmp_path: Path, followed: bool) -> None:
    data = flat([4, 6], size=7)
    data = data if followed else without(data, "next_observations")
    columns = {
        "obs.observation": "observations[0:5]",
        "obs.achieved_goal": "observations[:2]",
        "obs.rest": "observations[5:]",
    }
    path = write(tmp_path / "x.hdf5", data, compression="gzip", chunks=True)
    found, whole = read(path, columns=columns), read(path)
    assert len(found) == len(whole) == 2
    for parts, one in zip(found, whole, strict=True):
        seen = one.columns["obs"]
        assert sorted(name for name in parts.columns if name.startswith("obs")) == sorted(columns)
        np.testing.assert_array_equal(parts.columns["obs.observation"], seen[:, :5])
        np.testing.assert_array_equal(parts.columns["obs.achieved_goal"], seen[:, :2])
        np.testing.assert_array_equal(parts.columns["obs.rest"], seen[:, 5:])
    with pytest.raises(InputMissing, match=r"no 'observations\[0:9\]': 'observations' has 7 columns"):
        read(path, columns={"obs.a": "observations[0:9]"})
