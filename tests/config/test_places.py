from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.config.places import is_lake, is_run, split_checkpoint, suggest
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing
from pipelines.lake.store import Lake


@pytest.fixture(autouse=True)
def _two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cartpole", "maze"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
        Lake.create(tmp_path / "runs" / name / "lake")


Opening = Callable[[str], RunDirectory | Lake]


def hint_of(place: str, opening: Opening) -> str | None:
    with pytest.raises(InputMissing) as caught:
        opening(place)
    return caught.value.hint


@pytest.mark.parametrize("opening", [RunDirectory.open, Lake])
@pytest.mark.parametrize("place", ["cartpole", "runs/cartpol", "cartpoel"])
def test_the_nearest_name_beside_it_or_in_runs_is_offered(place: str, opening: Opening) -> None:
    assert hint_of(place, opening) == "did you mean 'runs/cartpole'?"


def test_a_directory_of_several_says_what_is_in_it() -> None:
    assert hint_of("runs", RunDirectory.open) == "it contains runs: runs/cartpole, runs/maze"
    assert hint_of("runs", Lake) == "it contains lakes (amago lake ls runs): runs/cartpole, runs/maze"


def test_what_is_like_nothing_says_how_to_make_one() -> None:
    assert (hint_of("nowhere/at/all", Lake) or "").startswith("make one with: amago collect")
    assert suggest(Path("zzz"), is_run, inside="", otherwise="none") == "none"
    assert is_lake(Path("runs/maze"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("runs/maze", ("runs/maze", "")),
        ("runs/maze@best", ("runs/maze", "best")),
        ("me@corp/maze", ("me@corp/maze", "")),
        ("me@corp/maze@40", ("me@corp/maze", "40")),
        ("runs/none@", ("runs/none", "")),
        ("zoo:tmaze", ("zoo:tmaze", "")),
    ],
)
def test_an_at_in_the_path_of_a_run_names_no_checkpoint(name: str, split: tuple[str, str]) -> None:
    Path("me@corp/maze").mkdir(parents=True)
    Path("me@corp/maze/config.toml").touch()
    assert split_checkpoint(name) == split
