"""croissant.json of a Parquet export says what its files hold; test_clients reads it by another implementation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.stages import collect, export, relabel
from tests.stages.recipes import tiny


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    collect.run(tiny(), lake=tmp_path / "lake")
    relabel.run(tiny(relabel={"relabeler": ["scale:2"]}), lake=tmp_path / "lake")
    wanted = {"to": str(tmp_path / "set"), "format": "parquet", "description": "Mazes.", "author": "A. Nobody"}
    export.dataset(tiny(export=wanted).export, lake=tmp_path / "lake")
    return tmp_path / "set"


@pytest.mark.system
def test_it_names_every_file_and_column(exported: Path) -> None:
    document = json.loads((exported / "croissant.json").read_text())
    files = {each["@id"]: each for each in document["distribution"] if each["@type"] == "cr:FileObject"}
    assert files.keys() == {path.name for path in exported.glob("*.parquet")}
    for name, each in files.items():
        content = (exported / name).read_bytes()
        assert each["sha256"] == hashlib.sha256(content).hexdigest()
        assert each["contentSize"] == f"{len(content)} B"
    records = {each["name"]: each["field"] for each in document["recordSet"]}
    (steps,) = exported.glob("steps-*.parquet")
    assert [field["name"] for field in records["steps"]] == pq.read_schema(steps).names
    untyped = {"tags"}  # a map has no name there
    assert {field["name"] for field in records["trajectories"]} == {
        name for name in pq.read_schema(exported / "trajectories.parquet").names if name not in untyped
    }
    repeated = [field["name"] for field in records["steps"] if field.get("repeated")]
    assert repeated == ["obs"]


@pytest.mark.system
def test_it_says_how_the_data_came_to_be(exported: Path) -> None:
    document = json.loads((exported / "croissant.json").read_text())
    lake = Lake(exported.parent / "lake")
    ((count, steps),) = query(lake, "select count(*), sum(length) from trajectories")[1]
    assert (document["description"], document["creator"]["name"]) == ("Mazes.", "A. Nobody")
    text = document["rai:dataCollection"]
    assert text.startswith(f"{count:,} trajectories of {steps:,} steps. Environments: tmaze ({count:,}).")
    assert "Policies: random" in text
    assert document["rai:dataManipulationProtocol"] == f"Relabelled by: scale:2/0 ({count // 2:,})."


@pytest.mark.system
def test_an_altered_description_is_found(exported: Path) -> None:
    listed = json.loads((exported / "dataset.json").read_text())["files"]
    assert listed["croissant.json"] == hashlib.sha256((exported / "croissant.json").read_bytes()).hexdigest()
