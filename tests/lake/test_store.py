import json
from pathlib import Path

import pytest

from pipelines.errors import InputMissing, IntegrityError
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, SCHEMA


def test_a_run_directory_means_its_lake(tmp_path: Path) -> None:
    made = Lake.create(tmp_path / "run" / "lake")
    assert Lake(tmp_path / "run").id == Lake(tmp_path / "run" / "lake").id == made.id
    assert Lake.open_or_create(tmp_path / "run").path == made.path


def test_a_missing_lake_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no lake at"):
        Lake(tmp_path / "nowhere")
    assert Lake.open_or_create(tmp_path / "new").id


def test_two_lakes_never_share_an_id(tmp_path: Path) -> None:
    assert Lake.create(tmp_path / "a").id != Lake.create(tmp_path / "b").id
    with pytest.raises(InputMissing, match="a lake already"):
        Lake.create(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"version": 99}, InputMissing, "upgrade amago"),
        ({"version": 1}, InputMissing, "earlier version of amago"),
        ({"required_features": ["time-travel"]}, InputMissing, "time-travel"),
        ({"format": "other"}, InputMissing, "format other"),
        ({"version": "x"}, IntegrityError, "damaged"),
    ],
)
def test_a_header_from_elsewhere_is_refused(lake: Lake, change: dict, error: type, text: str) -> None:
    path = lake.path / "lake.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=text):
        Lake(lake.path)
    with pytest.raises(error, match=text):
        Lake.open_or_create(lake.path)


def test_a_torn_header_is_integrity(lake: Lake) -> None:
    (lake.path / "lake.json").write_text("{")
    with pytest.raises(IntegrityError):
        Lake(lake.path)


def test_schemas_are_named_by_content(lake: Lake) -> None:
    assert lake.register(SCHEMA) == lake.register(SCHEMA) == SCHEMA.id
    assert Lake(lake.path).schemas() == {SCHEMA.id: SCHEMA}
    path = lake.path / "schemas" / f"{SCHEMA.id}.json"
    path.write_text(json.dumps(IMAGES.to_json()))
    with pytest.raises(IntegrityError, match="does not match"):
        Lake(lake.path).schema(SCHEMA.id)
    for text, words in (("[]", "does not match"), ("{", "damaged")):
        path.write_text(text)
        with pytest.raises(IntegrityError, match=words):
            Lake(lake.path).schema(SCHEMA.id)
    lake.register(SCHEMA)
    assert Lake(lake.path).schemas() == {SCHEMA.id: SCHEMA}
    with pytest.raises(InputMissing):
        lake.schema("0" * 16)


def test_other_spaces_are_refused_with_what_differs(lake: Lake) -> None:
    ours = Schema(Spaces(observation={"obs": Box(shape=(4,))}, action=Discrete(n=2)))
    theirs = Schema(Spaces(observation={"obs": Box(shape=(6,))}, action=Discrete(n=3)))
    assert lake.require_schema(ours) == ours.id
    with pytest.raises(InputMissing, match="is empty"):
        lake.only_schema()
    lake.register(ours)
    assert lake.require_schema(ours) == ours.id
    with pytest.raises(InputMissing, match=r"obs: box\(shape=\[4\].*shape=\[6\].*action: discrete\(n=2.*n=3"):
        lake.require_schema(theirs)
    assert lake.only_schema() == ours
    lake.register(theirs)
    with pytest.raises(InputMissing, match="2 different"):
        lake.only_schema()
