"""`amago collect --from`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelines.errors import UsageError
from tests.cli.conftest import Amago, tiny
from tests.formats.d4rl_data import flat, write


@pytest.fixture
def file(amago: Amago) -> Path:
    return write(Path("hopper_medium-v2.hdf5"), flat([5, 3, 7]))


@pytest.mark.system
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


@pytest.mark.system
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


@pytest.fixture
def imported(amago: Amago, small: Path) -> Path:
    """A run that imported CartPole's steps and trained on them."""
    assert amago("export", small, "--format", "npz", "--to", "data").code == 0
    words = ("--from", "npz:data", "--env", "gym:CartPole-v1", "--run", "run")
    assert amago("collect", *words).code == 0
    train = ("train", "--from-lake", "run", "--steps", 2, "--encoder", "feedforward", *tiny())
    done = amago(*train)
    assert done.code == 0, done.err
    return Path("run")


def steps_by_collector(amago: Amago, lake: Path) -> dict[str, int]:
    text = "select collector, sum(length)::int as steps from trajectories group by collector"
    return {row["collector"]: row["steps"] for row in amago("lake", "sql", lake, text, "--output", "json").json}


@pytest.mark.system
def test_a_run_that_imported_data_goes_on_online_by_hand(amago: Amago, imported: Path) -> None:
    before = steps_by_collector(amago, imported)
    words = ("collect", "--run", imported, "--policy", imported, "--epsilon", 0.2, "--add", 40, "--actors", 2)
    shown = amago(*words, "--dry-run")
    assert "would play 'gym:CartPole-v1'" in shown.out
    for times in (1, 2):
        played = amago(*words, "--output", "json")
        assert played.code == 0, played.err
        assert (played.json["status"], played.json["metrics"]["steps"]) == ("done", 40)
        assert played.json["metrics"]["epsilon"] == pytest.approx(0.2)
        assert played.json["metrics"]["steps_total"] == 40 * times
    random = amago("collect", "--run", imported, "--add", 30, "--actors", 2, "--output", "json")
    assert random.json["metrics"]["steps_total"] == 30, "imported steps are not counted as played ones"
    after = steps_by_collector(amago, imported)
    assert before.items() <= after.items()
    assert sorted(after.values()) == sorted([*before.values(), 80, 30])
    assert amago("train", "--from-lake", imported, "--steps", 3).code == 0


@pytest.mark.system
def test_a_run_that_imported_data_resumes_the_import_unless_acting_is_asked_for(amago: Amago, imported: Path) -> None:
    shown = amago("collect", "--run", imported, "--steps", 50, "--dry-run")
    assert "would import 'npz:data'" in shown.out
    assert "steps = 50\n" in shown.out
    again = amago("collect", "--run", imported)
    assert again.code == 0
    assert "--add N plays N steps" in again.err


@pytest.mark.system
def test_starting_over_by_playing_forgets_the_source(amago: Amago, imported: Path) -> None:
    done = amago("collect", "--run", imported, "--policy", "random", "--steps", 40, "--actors", 2, "--fresh")
    assert done.code == 0, done.err
    assert list(steps_by_collector(amago, imported).values()) == [40]
    again = amago("collect", "--run", imported, "--steps", 40, "--actors", 2, "--output", "json")
    assert (again.code, again.json["metrics"]["steps_total"]) == (0, 40)


@pytest.mark.system
def test_an_environment_is_named_after_the_import(amago: Amago, small: Path) -> None:
    assert amago("export", small, "--format", "npz", "--to", "data").code == 0
    assert amago("collect", "--from", "npz:data", "--run", "run").code == 0
    unknown = amago("collect", "--run", "run", "--add", 20)
    assert unknown.code == 2
    assert "no environment is named" in unknown.err
    played = amago("collect", "--run", "run", "--add", 20, "--actors", 1, "--env", "gym:CartPole-v1")
    assert played.code in (0, 3), played.err  # 3: the file's spaces have no bounds
    assert "differs from that of its last collect" not in played.err


@pytest.mark.system
def test_the_library_plays_in_a_run_that_imported_data(imported: Path) -> None:
    from pipelines.stages.library import collect

    played = collect(run=imported, policy=str(imported), add=20, settings={"collect.actors": 2})
    assert played.metrics["steps"] == 20
    with pytest.raises(UsageError, match="policy and --from exclude each other"):
        collect(run=imported, source="npz:data", policy="random")


@pytest.mark.parametrize("words", [["--set", "collect.actors=3"], ["--set", "exploration.start=0.5"]])
def test_settings_about_acting_are_refused_beside_a_source(amago: Amago, file: Path, words: list[str]) -> None:
    refused = amago("collect", "--from", f"d4rl:{file}", *words)
    assert refused.code == 2
    assert "--from exclude each other" in refused.err
