"""`amago collect --from`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Amago
from tests.formats.d4rl_data import flat, write


@pytest.fixture
def file(amago: Amago) -> Path:
    return write(Path("hopper_medium-v2.hdf5"), flat([5, 3, 7]))


def test_a_file_lands_in_a_run_named_after_it(amago: Amago, file: Path) -> None:
    done = amago("collect", "--from", f"d4rl:{file}", "--steps", 6, "--output", "json")
    assert done.code == 0, done.err
    assert (done.json["run"], done.json["lake"]) == ("runs/hopper_medium-v2", "runs/hopper_medium-v2/lake")
    assert (done.json["metrics"]["trajectories"], done.json["metrics"]["steps"]) == (2, 8)
    more = amago("collect", "--from", f"d4rl:{file}", "--steps", 0, "--output", "json")  # the run remembers 6
    assert (more.code, more.json["metrics"]["steps"], more.json["metrics"]["steps_total"]) == (0, 7, 15)
    again = amago("collect", "--run", "runs/hopper_medium-v2", "--output", "json")  # it knows its source
    assert (again.code, again.json["status"]) == (0, "skipped")
    (row,) = amago(
        "lake", "sql", "runs/hopper_medium-v2", "select distinct env, source from trajectories", "--output", "json"
    ).json
    assert row == {"env": "hopper", "source": "d4rl"}


def test_what_was_taken_in_is_trained_on(amago: Amago, file: Path) -> None:
    from tests.cli.conftest import tiny

    assert amago("collect", "--from", f"d4rl:{file}", "--lake", "data", "-q").code == 0
    arguments = ("--from-lake", "data", "--run", "runs/x", "--steps", 2, "--encoder", "feedforward")
    done = amago("train", *arguments, *tiny(), "--output", "json", "-q")
    assert done.code == 0, done.err
    assert done.json["metrics"]["updates"] == 2


def test_data_goes_out_and_comes_back(amago: Amago, small: Path) -> None:
    for form, kind in (("hdf5", "d4rl"), ("minari", "minari"), ("npz", "npz"), ("parquet", "parquet")):
        out = amago("export", small, "--format", form, "--to", f"{form}-v0", "--output", "json")
        assert out.code == 0, out.err
        back = amago("collect", "--from", f"{kind}:{form}-v0", "--lake", f"lake-{form}", "--output", "json")
        assert back.code == 0, back.err
        assert back.json["metrics"]["steps"] == out.json["metrics"]["steps"]
        assert back.json["metrics"]["trajectories"] == out.json["metrics"]["trajectories"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--from", "d4rl:none.hdf5"], 3, "no file 'none.hdf5'"),
        (["--from", "hopper"], 2, "is not a dataset"),
        (["--from", "d4rl:{file}", "--policy", "random", "--actors", "4"], 2, "--actors, --policy and --from"),
        (["--from", "d4rl:{file}", "--env", "gym:Pendulum-v1"], 3, "obs: 4 values in the source, 3 values"),
        (["--from", "d4rl:{file}", "--set", "source.colums=1"], 2, "did you mean 'source.columns'?"),
        (["--from", "d4rl:{file}", "--set", "source.action_low=2"], 3, "source.action_low is not below"),
        (["--from", "minari:ns/none-v0"], 3, "no Minari dataset"),
    ],
)
def test_mistakes_are_one_line(
    amago: Amago, file: Path, arguments: list[str], code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path("none").resolve()))
    monkeypatch.setitem(sys.modules, "minari", None)
    failed = amago("collect", *(word.format(file=file) for word in arguments))
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err
    assert not Path("runs").exists()


def test_a_missing_extra_is_one_line(amago: Amago, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    failed = amago("collect", "--from", f"d4rl:{file}")
    assert failed.code == 3
    assert 'pip install "amago[hdf5]"' in failed.err
