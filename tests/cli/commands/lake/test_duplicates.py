from __future__ import annotations

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
