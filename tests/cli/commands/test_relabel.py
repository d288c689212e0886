from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Amago


@pytest.mark.system
def test_hindsight_writes_an_overlay_that_the_lake_shows(amago: Amago) -> None:
    assert amago("collect", "--env", "goal-frozen-lake", "--run", "g", "--steps", 200, "--actors", 4).code == 0
    done = amago("relabel", "--from-lake", "g", "--with", "hindsight", "--copies", 2, "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["trajectories"] > 0
    assert done.json["metrics"]["overlay_bytes"] > 0
    twice = ("--with", "hindsight:final", "--with", "scale:0.5", "--output", "json")
    halved = amago("relabel", "--from-lake", "g", *twice)
    assert halved.code == 0, halved.err
    query = "select count(*) n from trajectories where relabel_method like '%scale%' and \"return\" = 0.5"
    found = amago("lake", "sql", "g", query, "--output", "json").json[0]["n"]
    assert found == halved.json["metrics"]["trajectories"] > 0
    sql = "select count(*) n from overlays where relabel_method = 'hindsight:future/0'"
    assert amago("lake", "sql", "g", sql, "--output", "json").json[0]["n"] == done.json["metrics"]["trajectories"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no lake given"),
        (["--from-lake", "nowhere"], 3, "no lake at 'nowhere'"),
        (["--from-lake", "small"], 3, "has no goal rule"),
        (["--from-lake", "small", "--with", "hindsigt"], 2, "did you mean 'hindsight'"),
        (["--from-lake", "small", "--with", "reward:nothing"], 2, "nothing"),
        (["--from-lake", "small", "--with", "reward:null::double"], 2, "NULL or NaN"),
        (["--from-lake", "small", "--with", "scale:2", "--strategy", "some"], 2, "strategy"),
        (["--from-lake", "small", "--set", "relabel.goal.tolerance=0.1"], 3, "no column 'obs.achieved_goal'"),
        (["--from-lake", "small", "--fraction", "2"], 2, "relabel.fraction"),
        (["--from-lake", "small", "--from-lake", "small"], 2, "2 times"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    amago: Amago, small: Path, arguments: list[str], code: int, words: str
) -> None:
    failed = amago("relabel", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err
