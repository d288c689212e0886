"""Tournaments: every two players meet in all seats, and the ratings are those of what was played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, RequirementNotMet, UsageError
from pipelines.evaluation.elo import rate
from pipelines.rollout.opponents import select_checkpoints
from pipelines.stages import evaluate, export, tournament
from pipelines.stages import run as chain
from tests.cli.conftest import call
from tests.stages.recipes import tiny

pytestmark = pytest.mark.system
GAME: dict[str, Any] = {"env": {"name": "tic-tac-toe"}, "agent": {"action_mask": "obs.action_mask"}}
MASK = "obs.action_mask"


def settings(*opponents: str, **wanted: Any) -> Any:
    return tiny(**GAME, evaluate={"episodes": 11, "actors": 4, "opponents": opponents, "greedy": False, **wanted})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 6 and 12."""
    run = tmp_path_factory.mktemp("trained") / "run"
    stages = [{"stage": "collect"}, {"stage": "train"}]
    chain.run(tiny(**GAME, stages=stages, epochs=2, train={"keep_checkpoints": 9, "checkpoint_every": 6}), run=run)
    return run


def hold(trained: Path, *opponents: str, **wanted: Any) -> Any:
    document = settings(*opponents, **wanted)
    return tournament.run(document, source=f"{trained}@latest", directory=RunDirectory(trained))


def first_legal(observation: Any, prev_action: Any, prev_reward: Any, time: Any) -> np.ndarray:
    return np.asarray(observation[MASK].argmax(axis=1))


def test_all_players_meet_in_all_seats(trained: Path) -> None:
    identity = RunDirectory(trained).identity
    result = hold(trained, "random", "expert", "select update from checkpoints")
    [path] = result.outputs
    report = json.loads(path.read_text())
    names = [player["player"] for player in report["players"]]
    assert names[0] == f"{identity}@12"
    assert set(names[1:]) == {"random", "expert", f"{identity}@6"} | ({f"{identity}@0"} & set(names))
    pairings = report["pairings"]
    assert len(pairings) == len(names) * (len(names) - 1)
    assert {(each["player"], each["against"]) for each in pairings} == {
        (first, second) for i, first in enumerate(names) for second in names[i + 1 :]
    }
    assert {each["games"] for each in pairings} == {6}  # 11 games, rounded up, half of them in each seat
    assert all(each["games"] == each["wins"] + each["draws"] + each["losses"] for each in pairings)
    outcomes: dict[tuple[int, int], list[float]] = {}
    for each in pairings:
        scored = [1.0] * each["wins"] + [0.5] * each["draws"] + [0.0] * each["losses"]
        outcomes.setdefault((names.index(each["player"]), names.index(each["against"])), []).extend(scored)
    expected = rate(len(names), {pair: np.array(scored) for pair, scored in outcomes.items()})
    found = [player["elo"] for player in report["players"]]
    np.testing.assert_allclose(found, expected.elo, atol=0.06)
    for player in report["players"]:
        low, high = player["elo_ci95"]
        assert low <= player["elo"] <= high
        assert player["games"] == 12 * (len(names) - 1)
    by_name = {player["player"]: player for player in report["players"]}
    assert by_name["expert"]["losses"] == 0
    assert max(by_name, key=lambda name: by_name[name]["elo"]) == "expert"
    assert result.metrics["elo"] == by_name[f"{identity}@12"]["elo"]


def test_it_is_the_evaluation_against_that_opponent(trained: Path) -> None:
    """The same games from an evaluation: a deterministic policy against one that draws by the episode."""
    name = "tests.stages.test_tournament:first_legal"
    report = json.loads(hold(trained, name, episodes=40, greedy=True).outputs[0].read_text())
    document = settings(f"{name}", episodes=40, greedy=True)
    figures = evaluate.run(document, run=trained).metrics
    first = report["players"][0]
    assert first["wins"] / 40 == figures["success_mean"]
    assert first["draws"] / 40 == figures["draw_mean"]


def test_repeating_a_tournament_reads_it_and_another_process_plays_the_same(trained: Path) -> None:
    first = hold(trained, "random")
    assert hold(trained, "random").status == "skipped"
    report = json.loads(first.outputs[0].read_text())
    first.outputs[0].write_text("{}")
    again = hold(trained, "random")
    assert again.status == "done"
    for name in ("players", "pairings"):
        assert json.loads(again.outputs[0].read_text())[name] == report[name]
    assert hold(trained, "random", seed=5).outputs != first.outputs


def test_the_number_of_actors_does_not_change_the_games(trained: Path) -> None:
    few, many = (
        tournament.play(settings(actors=count), [f"{trained}@12", "random", f"{trained}@6"]) for count in (3, 8)
    )
    assert few["pairings"] == many["pairings"]


def test_a_player_of_two_spellings_plays_once_and_no_seat_is_fixed(trained: Path) -> None:
    found = hold(trained, f"{trained}@6", f"{trained.parent}/../{trained.parent.name}/{trained.name}@6").metrics
    assert [player["update"] for player in found["players"]] == [12, 6]
    fixed = settings().model_copy(update={"env": settings().env.model_copy(update={"seat": "player_1"})})
    with pytest.raises(UsageError, match="every seat equally often"):
        tournament.run(fixed, source=str(trained), directory=RunDirectory(trained))


def test_ratings_choose_opponents(trained: Path) -> None:
    hold(trained, "random", f"{trained}@6")
    best, *_ = select_checkpoints(trained, "select update from checkpoints where elo is not null order by elo desc")
    rated = hold(trained, "random", f"{trained}@6").metrics["players"]
    own = [player for player in rated if player["update"] is not None]
    assert best == max(own, key=lambda player: player["elo"])["update"]


def test_a_bundle_plays_and_writes_where_it_should(trained: Path, tmp_path: Path) -> None:
    export.run(settings(), run=trained)
    bundle = trained / "export"
    found = tournament.run(settings("random"), source=str(bundle), directory=None)
    assert not found.outputs
    [path] = tournament.run(settings("random"), source=str(bundle), directory=None, to=tmp_path / "out").outputs
    assert path.parent == tmp_path / "out"
    assert json.loads(path.read_text())["players"] == found.metrics["players"]


def test_a_gate_is_about_the_ratings(trained: Path) -> None:
    with pytest.raises(RequirementNotMet) as caught:
        hold(trained, "random", "expert", require="elo >= 5000")
    assert caught.value.result.metrics["elo"] < 5000


@pytest.mark.parametrize(
    ("opponents", "wanted", "told"),
    [
        ([], {}, "needs two players"),
        (["RUN@12"], {}, "needs two players"),
        (["random"], {"attempts": 3}, "does not use evaluate.attempts"),
        (["random"], {"video": 1}, "does not use evaluate.video"),
        (["random"], {"require": "return_mean > 0"}, "no metric 'return_mean'"),
        (["learner:q-learning"], {}, "a learner learns by playing"),
    ],
)
def test_what_is_no_tournament_is_refused(
    trained: Path, opponents: list[str], wanted: dict[str, Any], told: str
) -> None:
    before = sorted(trained.rglob("*"))
    with pytest.raises(UsageError, match=told):
        hold(trained, *(name.replace("RUN", str(trained)) for name in opponents), **wanted)
    assert sorted(trained.rglob("*")) == before


def test_a_tournament_of_another_environment_is_refused(trained: Path, tmp_path: Path) -> None:
    for env, error, told in (("tmaze", UsageError, "single seat"), ("connect-four", InputMissing, "other spaces")):
        document = tiny(env={"name": env}, evaluate={"opponents": ["random"]})
        with pytest.raises(error, match=told):
            tournament.run(document, source=str(trained), directory=RunDirectory(trained))


def test_the_command_prints_a_table_and_refuses_what_does_not_go_with_it(trained: Path) -> None:
    found = call("evaluate", trained, "--tournament", "--opponents", "random", "--episodes", 4, "--sample")
    assert found.code == 0
    assert "Elo" in found.out
    assert "by pairing and seat" in found.out
    as_json = call("evaluate", trained, "--tournament", "--opponents", "random", "--episodes", 4, "--output", "json")
    assert [player["games"] for player in as_json.json["metrics"]["players"]] == [4, 4]
    for more in (
        ["--follow"],
        ["--form", "onnx"],
        ["--to", "out"],
        ["--tasks", "success"],
        ["--track", "tensorboard"],
        ["--env-timeout", "5"],
    ):
        refused = call("evaluate", trained, "--tournament", "--opponents", "random", *more)
        assert refused.code == 2, more
