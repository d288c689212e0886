from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.errors import IntegrityError, UsageError
from pipelines.formats.base import Exported, Item
from pipelines.formats.export import export
from pipelines.formats.make import EXPORTERS, FORMATS, IMPORTERS, find_exporter
from pipelines.formats.manifest import verify_files
from pipelines.formats.tables import writer
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, MIXED, SCHEMA, assert_same, derive, fill, flip_a_bit

ABOUT = {"lake": "x", "where": ""}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES, MIXED], ids=["plain", "images", "mixed"])
def test_npz_has_every_column_and_the_row(lake: Lake, tmp_path: Path, schema: Schema) -> None:
    written = fill(lake, [3, 5], schema=schema)
    done = export(lake, list(written), tmp_path / "out", form="npz", about=ABOUT)
    assert (done.trajectories, done.steps, done.written) == (2, 8, 2)
    for uid, values in written.items():
        with np.load(tmp_path / "out" / f"{uid}.npz") as file:
            row = json.loads(str(file["trajectory"]))
            assert_same({name: file[name] for name in file.files if name != "trajectory"}, values)
        assert (row["uid"], row["length"], row["env"]) == (uid, len(values["reward"]) - 1, "maze")


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES, MIXED], ids=["plain", "images", "mixed"])
def test_parquet_is_found_by_the_places_of_its_table(
    lake: Lake, tmp_path: Path, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GROUP_BYTES", 8 * schema.step_bytes)
    monkeypatch.setattr(writer, "FILE_BYTES", 16 * schema.step_bytes)
    monkeypatch.setattr(writer, "_ROWS_HELD", 2)
    written = fill(lake, [3, 5, 2, 9, 4], schema=schema)
    export(lake, list(written), tmp_path / "out", form="parquet", about=ABOUT)
    table = pq.read_table(tmp_path / "out" / "trajectories.parquet").to_pylist()
    assert [row["uid"] for row in table] == list(written)
    assert len({(row["file"], row["row_group"]) for row in table}) > 2
    for row in table:
        group = pq.ParquetFile(tmp_path / "out" / row["file"]).read_row_group(row["row_group"])
        steps = group.slice(row["first_row"], row["rows"])
        assert steps["uid"].to_pylist() == [row["uid"]] * row["rows"]
        assert steps["t"].to_pylist() == list(range(row["rows"]))
        for name, values in written[row["uid"]].items():
            shape = json.loads(steps.schema.field(name).metadata[b"shape"])
            found = np.array(steps[name].to_pylist(), dtype=values.dtype).reshape(-1, *shape)
            np.testing.assert_array_equal(found, values)


def test_overlays_are_applied(lake: Lake, tmp_path: Path) -> None:
    (base,) = fill(lake, [6])
    (derived,) = derive(lake, {base: {"reward": np.arange(7, dtype=np.float32)}})
    export(lake, [derived], tmp_path / "out", form="npz", about=ABOUT)
    with np.load(tmp_path / "out" / f"{derived}.npz") as file:
        np.testing.assert_array_equal(file["reward"], np.arange(7))
        np.testing.assert_array_equal(file["obs.state"], Reader(lake).read(base).columns["obs.state"])
        assert json.loads(str(file["trajectory"]))["base_uid"] == base


def test_several_spaces_have_files_of_their_own(lake: Lake, tmp_path: Path) -> None:
    uids = [*fill(lake, [3]), *fill(lake, [4], schema=MIXED)]
    export(lake, uids, tmp_path / "out", form="parquet", about=ABOUT)
    names = {row["file"] for row in pq.read_table(tmp_path / "out" / "trajectories.parquet").to_pylist()}
    assert names == {f"steps-{schema.id[:8]}-00000.parquet" for schema in (SCHEMA, MIXED)}


@pytest.mark.system
@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_the_same_again_writes_nothing_and_more_writes_what_is_missing(lake: Lake, tmp_path: Path, form: str) -> None:
    uids = list(fill(lake, [3, 4]))
    first = export(lake, uids, tmp_path / "out", form=form, about=ABOUT)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = export(lake, uids, tmp_path / "out", form=form, about=ABOUT)
    assert (again.trajectories, again.steps, again.written) == (2, 7, 0)
    assert again.bytes == first.bytes
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    uids += fill(lake, [5], seed=1)
    more = export(lake, uids, tmp_path / "out", form=form, about=ABOUT)
    assert (more.trajectories, more.written) == (3, 1 if form == "npz" else 3)


@pytest.mark.system
@pytest.mark.parametrize("form", ["npz", "parquet", "hdf5"])
def test_exporting_again_replaces_a_damaged_file(lake: Lake, tmp_path: Path, form: str) -> None:
    """As the message of an import says."""
    uids, out = list(fill(lake, [3, 4])), tmp_path / "out"
    export(lake, uids, out, form=form, about=ABOUT)
    damaged = max(
        (path for path in out.rglob("*") if path.name != "dataset.json"), key=lambda path: path.stat().st_size
    )
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(IntegrityError, match="export it again"):
        verify_files(str(out))
    assert export(lake, uids, out, form=form, about=ABOUT).written > 0
    verify_files(str(out))


def test_an_interrupted_one_goes_on(lake: Lake, tmp_path: Path) -> None:
    uids = list(fill(lake, [3, 4, 5]))

    def stop(event: object) -> None:
        if getattr(event, "done", 0) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(lake, uids, tmp_path / "out", form="npz", about=ABOUT, listener=stop)
    assert not json.loads((tmp_path / "out" / "dataset.json").read_text())["complete"]
    assert export(lake, uids, tmp_path / "out", form="npz", about=ABOUT).written in (1, 2)


def test_a_folder_with_something_else_is_left_alone(lake: Lake, tmp_path: Path) -> None:
    uids = list(fill(lake, [3]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        export(lake, uids, tmp_path / "mine", form="npz", about=ABOUT)
    export(lake, uids, tmp_path / "out", form="npz", about=ABOUT)
    with pytest.raises(UsageError, match="another dataset") as refused:
        export(lake, uids, tmp_path / "out", form="npz", about={**ABOUT, "where": "success"})
    assert refused.value.problems == ("where: '' there, 'success' asked for",)


@pytest.mark.parametrize("form", ["npz", "parquet", "hdf5"])
def test_a_flipped_bit_does_not_leave(lake: Lake, tmp_path: Path, form: str) -> None:
    written = fill(lake, [5, 6], seal_every=1)
    damaged, whole = written
    segment = flip_a_bit(lake, written[damaged]["reward"])
    with pytest.raises(IntegrityError, match=f"{segment}.*wrong checksum in reward"):
        export(lake, [whole, damaged], tmp_path / "out", form=form, about=ABOUT)
    assert export(lake, [whole], tmp_path / "sound", form=form, about=ABOUT).trajectories == 1


def lengths(items: Iterable[Item], to: Path, about: Mapping[str, Any]) -> Exported:
    """A format of a user's own: a line a trajectory."""
    found = [item.trajectory().length for item in items]
    (to / "lengths.txt").write_text("\n".join(map(str, found)))
    return Exported(trajectories=len(found), steps=sum(found), written=len(found), bytes=0)


def test_a_format_of_a_users_own_is_module_attr(lake: Lake, tmp_path: Path) -> None:
    written = fill(lake, [3, 5])
    done = export(lake, list(written), tmp_path / "out", form=f"{__name__}:lengths", about=ABOUT)
    assert (done.trajectories, done.steps) == (2, 8)
    assert sorted((tmp_path / "out" / "lengths.txt").read_text().split()) == ["3", "5"]


def test_a_format_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match=r"export.format: there is no format 'parqet'") as caught:
        find_exporter("parqet")
    assert caught.value.hint == "did you mean 'parquet'?"


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_the_table_names_what_is_there(name: str) -> None:
    row = FORMATS[name]
    assert row.importer or row.exporter
    for registry, target in ((IMPORTERS, row.importer), (EXPORTERS, row.exporter)):
        assert not target or callable(registry.get(name))
