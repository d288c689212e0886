from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.changes import find_changes, find_varying, flatten
from pipelines.errors import InputMissing
from pipelines.runs.find import find_runs
from tests.runs.factory import make_run


def test_runs_are_found_by_name_by_folder_and_by_pattern(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name) for name in ("a-1", "a-2", "sweep/b")]
    (tmp_path / "runs" / ".hidden").mkdir()
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    assert find_runs([tmp_path / "runs"]) == runs
    assert find_runs([f"{tmp_path}/runs/a-*"]) == runs[:2]
    assert find_runs([runs[1], tmp_path / "runs"]) == [runs[1], runs[0], runs[2]]
    (tmp_path / "empty").mkdir()
    assert find_runs([tmp_path / "empty"]) == []


@pytest.mark.parametrize("place", ["nothing", "runs/b-*"])
def test_a_place_without_anything_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    make_run(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputMissing):
        find_runs([place])


def test_settings_that_differ_between_runs_are_named_by_dotted_key() -> None:
    tables = [
        {"seed": 0, "train": {"steps": 5}, "x": [{"y": 1}]},
        {"seed": 1, "train": {"steps": 5}, "x": [{"y": 1}, {"y": 2}], "z": [1]},
    ]
    flat = [flatten(table) for table in tables]
    assert find_varying(flat) == ["x.1.y", "z"]
    assert find_changes(*flat) == {"seed": (0, 1), "x.1.y": (None, 2), "z": (None, [1])}
