from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.lake.sql.describing import find_duplicates
from pipelines.lake.store import Lake
from tests.cli.conftest import Amago, tiny


def collect(amago: Amago, run: str, *, seed: int = 0, env: str = "gym:CartPole-v1") -> None:
    words = ("--env", env, "--run", run, "--steps", 120, "--actors", 3, "--seed", seed, "-q")
    assert amago("collect", *words).code == 0


@pytest.fixture
def twins(amago: Amago) -> None:
    """Two runs with the same episodes, and one with others."""
    collect(amago, "one")
    collect(amago, "two")
    collect(amago, "three", seed=3)


@pytest.mark.system
@pytest.mark.usefixtures("twins")
def test_merging_lakes_of_the_same_seed_names_the_collectors_that_played_the_same(amago: Amago) -> None:
    count = len(Lake("one").sql("select 1 from trajectories"))
    merged = amago("lake", "merge", "one", "two", "three", "--into", "all")
    assert merged.code == 0
    assert f"{count} trajectories are there twice: 'one-" in merged.err
    assert merged.err.count("are there twice") == 1
    assert "are there twice" not in amago("lake", "merge", "one", "two", "--into", "all").err, "nothing was copied"
    assert "are there twice" not in amago("lake", "merge", "one", "three", "--into", "others").err


@pytest.mark.system
@pytest.mark.usefixtures("twins")
def test_training_on_a_mixture_of_the_same_experience_says_so(amago: Amago) -> None:
    words = ("--run", "mixed", "--steps", 1, "--encoder", "feedforward", *tiny())
    done = amago("train", "--from-lake", "one", "--from-lake", "two", *words)
    assert done.code == 0, done.err
    assert "in 'one/lake' and 'two-" in done.err
    other = amago("train", "--from-lake", "one", "--from-lake", "three", *words, "--run", "other")
    assert "are there twice" not in other.err


@pytest.mark.system
@pytest.mark.usefixtures("twins")
def test_duplicates_are_those_of_equal_content(amago: Amago) -> None:
    """Checked against the steps themselves."""
    lakes = [Lake(Path(name)) for name in ("one", "two")]
    contents = []
    for lake in lakes:
        rows = lake.sql("select uid, list(reward order by t) as rewards from steps group by uid")
        contents.append(sorted(tuple(row["rewards"]) for row in rows))
    (found,) = find_duplicates(lakes)
    assert contents[0] == contents[1]
    assert found.trajectories == len(contents[0])
    assert find_duplicates(lakes[:1]) == []


@pytest.mark.system
def test_collector_that_repeats_another_one_is_warned_and_found(amago: Amago) -> None:
    words = ("collect", "--env", "gym:CartPole-v1", "--lake", "lake", "--steps", 120, "--actors", 3)
    first = amago(*words, "--run", "one")
    assert (first.code, "has played" in first.err) == (0, False)
    assert "has played" not in amago(*words, "--run", "three", "--seed", 3).err
    again = amago(*words, "--run", "two")
    assert again.code == 0
    assert "has played the same environment with seed 0 in lake 'lake'" in again.err
    assert "has played" not in amago("collect", "--run", "two", "--lake", "lake", "--add", 30).err
    for command in ("info", "verify"):
        found = amago("lake", command, "lake")
        assert found.code == 0
        assert found.err.count("are there twice: 'one-") == 1


@pytest.mark.system
def test_collector_that_another_host_fills_is_named(amago: Amago) -> None:
    words = ("collect", "--env", "bandit", "--lake", "lake", "--actors", 2)
    assert amago(*words, "--steps", 40).code == 0
    [path] = Path("lake/collectors").iterdir()
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"processes": [record["processes"][0] | {"host": "far", "pid": 7}]}))
    again = amago(*words, "--add", 40)
    assert again.code == 0
    assert "was last filled by pid 7 on far; if that still runs, both play the same episodes" in again.err
    assert "was last filled" not in amago(*words, "--add", 40).err
