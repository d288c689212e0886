"""Opponents by name: they play the other seats of what is collected and evaluated, and are recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.envs.env import Env, OpponentTurn
from pipelines.envs.make import make
from pipelines.errors import AmagoError, InputMissing, UsageError
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.rollout.opponents import OpponentLoader, PolicyOpponent, is_sql, name_opponents, select_checkpoints
from pipelines.rollout.plan import EvaluationPlan
from pipelines.rollout.policies import load_policy
from pipelines.stages import collect, evaluate, filming
from pipelines.stages import run as chain
from tests.stages.recipes import stopping, tiny

pytestmark = pytest.mark.system
GAME: dict[str, Any] = {"env": {"name": "tic-tac-toe"}, "agent": {"action_mask": "obs.action_mask"}}
NEWEST = "select update from checkpoints order by update desc limit 2"
STAGES = [{"stage": "collect"}, {"stage": "train"}]
MASK = "obs.action_mask"


def settings(**tables: Any) -> Any:
    return tiny(**{**GAME, **tables})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 6, 12 and 18."""
    run = tmp_path_factory.mktemp("trained") / "run"
    chain.run(settings(stages=STAGES, epochs=3, train={"keep_checkpoints": 9, "checkpoint_every": 6}), run=run)
    return run


def count_opponents(place: Path) -> dict[str, int]:
    rows = query(Lake(place), "select tags['opponent'], count(*) from episodes group by 1")[1]
    return dict(rows)


def test_sql_selects_among_the_runs_checkpoints(trained: Path) -> None:
    known = [int(path.name) for path in sorted((trained / "checkpoints").glob("0*"))]
    assert known[-2:] == [12, 18]
    assert select_checkpoints(trained, NEWEST) == [18, 12]
    assert name_opponents(["random", NEWEST], trained) == (("random",), (f"{trained}@18", f"{trained}@12"))
    assert name_opponents([NEWEST.replace("from checkpoints", "from checkpoints where false")], trained) == (
        ("random",),
    )
    assert name_opponents([str(trained), f"{trained}@12"], None) == ((f"{trained}@18",), (f"{trained}@12",))


def test_the_best_by_elo_can_be_chosen(trained: Path) -> None:
    identity = RunDirectory(trained).identity
    folder = trained / "tournaments"
    folder.mkdir(exist_ok=True)
    for time, elos in ((1.0, {12: 300.0, 18: 10.0}), (2.0, {18: 50.0})):
        players = [{"policy_id": identity, "update": update, "elo": elo} for update, elo in elos.items()]
        players += [{"policy_id": "other", "update": 18, "elo": 999.0}, {"policy_id": "random", "elo": 0.0}]
        (folder / f"{time:g}.json").write_text(json.dumps({"time": time, "players": players}))
    for number, text in enumerate(["[", '{"players": [1]}', '{"time": "x", "players": []}', '{"players": 5}']):
        (folder / f"damaged{number}.json").write_text(text)
    try:
        best = "select update from checkpoints where elo is not null order by elo desc"
        assert select_checkpoints(trained, best) == [12, 18]
        assert select_checkpoints(trained, "select update from checkpoints where elo = 50") == [18]
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("select name from checkpoints", "name"),
        ("select 1 as number from checkpoints", "the column 'update' is missing, there is number"),
        ("select 7 as update", "has no checkpoint 7"),
        ("select update from checkpoints; drop table checkpoints", "SQL"),
    ],
)
def test_other_sql_is_refused(trained: Path, text: str, told: str) -> None:
    assert is_sql(text)
    with pytest.raises(UsageError, match=told):
        name_opponents([text], trained)


@pytest.mark.parametrize(
    ("name", "env", "error", "told"),
    [
        ("random", "tmaze", UsageError, "'tmaze' has a single seat"),
        ("expert", "connect-four", UsageError, "'connect-four' has no expert"),
        ("learner:q-learning", "tic-tac-toe", UsageError, "a learner learns by playing"),
        ("", "tic-tac-toe", UsageError, "'' is not an opponent"),
        ("nobody", "tic-tac-toe", InputMissing, "no run or bundle at 'nobody'"),
        ("tests.envs.own:nothing", "tic-tac-toe", InputMissing, "has no 'nothing'"),
        (NEWEST, "tic-tac-toe", UsageError, "there is none"),
        ("RUN", "connect-four", InputMissing, "trained for other spaces than those of 'connect-four'"),
    ],
)
@pytest.mark.parametrize("is_chain", [False, True])
def test_opponents_that_cannot_play_are_refused_before_anything_is_written(
    trained: Path, tmp_path: Path, name: str, env: str, error: type[AmagoError], told: str, is_chain: bool
) -> None:
    wanted = {"opponents": str(trained) if name == "RUN" else name}
    agent = {"action_mask": ""} if env == "tmaze" else {}
    if is_chain and name != NEWEST:
        for more in ({"collect": wanted}, {"stages": [*STAGES, {"stage": "evaluate", **wanted}]}):
            tables = {"stages": STAGES, "env": {"name": env}, "agent": {**GAME["agent"], **agent}, **more}
            document = tiny(**tables)
            with pytest.raises(error, match=told):
                chain.run(document, run=tmp_path / "run")
    else:
        document = settings(env={"name": env}, agent={**GAME["agent"], **agent}, collect=wanted)
        with pytest.raises(error, match=told):
            collect.run(document, lake=tmp_path / "lake")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]


def test_games_are_not_played_in_workers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are played in this process") as caught:
        collect.run(settings(collect={"workers": 2}), lake=tmp_path / "lake")
    assert "--collectors" in str(caught.value.hint)


def test_what_is_collected_names_its_opponents(trained: Path, tmp_path: Path) -> None:
    wanted = {"opponents": ["expert", f"{trained}@12"], "steps": 400}
    collect.run(settings(collect=wanted), lake=tmp_path / "lake")
    counts, rival = count_opponents(tmp_path / "lake"), f"{RunDirectory(trained).identity}@12"
    assert counts.keys() == {"expert", rival}
    assert min(counts.values()) > sum(counts.values()) / 4
    [record] = (tmp_path / "lake/collectors").glob("*.json")
    recorded = json.loads(record.read_text())
    assert recorded["opponents"].keys() == counts.keys()
    assert recorded["opponents"]["expert"] is None
    assert recorded["opponents"][rival]["absolute"] == str(trained)
    assert recorded["behaviour"]["opponents"] == ["expert", f"{trained}@12"]


def test_other_opponents_are_another_collector_and_the_same_ones_resume(tmp_path: Path) -> None:
    place = tmp_path / "lake"
    first = collect.run(settings(collect={"opponents": "expert"}), lake=place)
    assert collect.run(settings(collect={"opponents": "expert"}), lake=place).status == "skipped"
    more = collect.run(settings(collect={"opponents": "expert", "steps": 200}), lake=place)
    assert more.metrics["collector"] == first.metrics["collector"]
    other = collect.run(settings(), lake=place)
    assert other.metrics["collector"] != first.metrics["collector"]
    assert count_opponents(place).keys() == {"expert", "random"}


def test_a_chain_plays_against_its_own_earlier_checkpoints(tmp_path: Path) -> None:
    document = settings(
        stages=STAGES, epochs=4, collect={"opponents": NEWEST}, train={"keep_checkpoints": 9, "checkpoint_every": 6}
    )
    with pytest.raises(AmagoError, match="stopped"):
        chain.run(document, run=tmp_path / "run", listener=stopping(6))
    chain.run(document, run=tmp_path / "run")
    identity = RunDirectory(tmp_path / "run").identity
    met = query(
        Lake(tmp_path / "run/lake"),
        "select policy_version, tags['opponent'] from episodes where coalesce(tags['unfinished'], '') <> 'true'",
    )[1]
    assert len({opponent for _, opponent in met}) >= 3
    for (
        version,
        opponent,
    ) in met:  # the newest two checkpoints, or those of an epoch before where the episode was longer
        name, _, update = opponent.rpartition("@")
        assert name == identity
        assert version - 12 <= int(update) <= version


def greedy_game(trained: Path, mine: int, other: int, seat: str) -> tuple[list[int], float]:
    """Moves of seat `seat` and its return; checkpoint `mine` plays it and `other` the other seat, both greedily."""
    env = make("tic-tac-toe", num_envs=3, seed=0, params={"seat": seat})
    loader = OpponentLoader(env, seed=0, greedy=True)
    env.play_against(loader.load(((f"{trained}@{other}",),)))
    policy = load_policy(f"{trained}@{mine}", env, seed=0, greedy=True).policy
    observation, action = env.reset(), np.zeros(3, dtype=np.int32)
    reward, chosen, total = np.zeros(3, dtype=np.float32), [], 0.0
    for time in range(9):
        action = policy.act(observation, action, reward, np.full(3, time))
        result = env.step(action)
        observation, reward = result.observation, result.reward
        chosen.append(int(action[0]))
        total += float(reward[0])
        if result.terminated[0]:
            return chosen, total
    raise AssertionError("the game goes on")


def test_a_policy_plays_as_an_opponent_what_it_plays_as_the_agent(trained: Path) -> None:
    """The same game seen from both sides: returns are opposite, and each side's memory sees its own steps."""
    first, won = greedy_game(trained, 12, 18, "player_1")
    second, lost = greedy_game(trained, 18, 12, "player_2")
    assert won == -lost
    cells = np.zeros(9)
    for turn, place in enumerate(first):
        assert cells[place] == 0
        cells[place] = 1
        if turn < len(second):
            assert cells[second[turn]] == 0
            cells[second[turn]] = 2
    assert len(first) - len(second) in (0, 1)


def test_a_sampling_opponent_moves_as_its_episode_says(trained: Path) -> None:
    """Its choices follow from the episode, not from the actors that are played beside it."""

    def lengths(actors: int) -> list[tuple[str, float]]:
        env = make("tic-tac-toe", num_envs=actors, seed=1)
        env.play_against(OpponentLoader(env, seed=0).load(((f"{trained}@12", f"{trained}@18"),)))
        return played_by_first_legal(env, 24)

    assert lengths(8) == lengths(3)


def played_by_first_legal(env: Env, episodes: int) -> list[tuple[str, float]]:
    found: dict[int, tuple[str, float]] = {}
    observation = env.reset()
    while not set(range(episodes)) <= found.keys():
        result = env.step(observation[MASK].argmax(axis=1))
        observation, over = result.observation, np.flatnonzero(result.terminated)
        for actor, opponent in zip(over.tolist(), env.opponents(over), strict=True):
            found.setdefault(int(env.episodes.current[actor]), (opponent, float(result.reward[actor])))
        if len(over):
            observation = env.reset(result.terminated)
    return [found[number] for number in range(episodes)]


@pytest.mark.parametrize("seats", [2, 3])
def test_an_opponent_has_a_policy_for_every_other_seat(seats: int) -> None:
    env = make("tic-tac-toe", num_envs=2, seed=0)
    rival = PolicyOpponent("tests.stages.test_opponents:Counting", env, seed=0, greedy=False, action_mask="")
    observation = {MASK: np.eye(9)[:2]}
    for place in range(1, seats):
        for _ in range(2):
            rival.act(OpponentTurn(place, np.arange(2), observation, *np.zeros((3, 2)), lambda count: None))
    assert [Counting.made[-k].calls for k in range(1, seats)] == [2] * (seats - 1)
    assert rival.name == "tests.stages.test_opponents:Counting"


class Counting:
    made: list[Counting] = []  # noqa: RUF012

    def __init__(self, *, spaces: Any, num_actors: int, seed: int) -> None:
        self.calls = 0
        self.made.append(self)

    def act(self, observation: Any, prev_action: Any, prev_reward: Any, time: Any) -> np.ndarray:
        self.calls += 1
        return np.asarray(observation[MASK].argmax(axis=1))


def test_an_evaluation_against_an_expert_counts_wins_draws_and_losses(trained: Path) -> None:
    wanted = {"episodes": 20, "actors": 10, "opponents": "expert", "greedy": False}
    document = settings(evaluate=wanted)
    first = evaluate.run(document, run=trained).metrics
    assert first["success_mean"] == 0
    assert first["draw_mean"] + first["loss_mean"] == 1
    assert first["return_mean"] == pytest.approx(-first["loss_mean"])
    shared = {"evaluators": 1, "actors": 4}
    again = evaluate.run(settings(evaluate={**wanted, **shared}), run=trained).metrics
    assert again["draw_mean"] + again["loss_mean"] == 1
    easier = evaluate.run(settings(evaluate={**wanted, "opponents": "random"}), run=trained).metrics
    assert easier["return_mean"] > first["return_mean"]


def test_another_run_in_the_place_of_an_opponent_is_another_evaluation(trained: Path, tmp_path: Path) -> None:
    """Its name and the number of its checkpoint may be those of the run before it."""
    wanted = settings(evaluate={"episodes": 4, "actors": 4, "opponents": f"{tmp_path / 'other'}@6"})
    shutil.copytree(trained, tmp_path / "other")
    assert evaluate.run(wanted, run=trained).status == "done"
    assert evaluate.run(wanted, run=trained).status == "skipped"
    shutil.rmtree(tmp_path / "other")
    chain.run(settings(stages=STAGES, epochs=1, train={"checkpoint_every": 6}), run=tmp_path / "other")
    assert evaluate.run(wanted, run=trained).status == "done"


def test_an_episode_is_watched_against_the_opponents_of_the_evaluation(trained: Path) -> None:
    wanted = {"episodes": 1, "actors": 1, "opponents": "expert", "greedy": False}
    for seed in range(4):
        same = settings(evaluate={**wanted, "seed": seed})
        watched = filming.watch(same, run=trained)
        assert sum(watched.film.rewards) == evaluate.run(same, run=trained).metrics["return_mean"]


def test_evaluators_play_the_same_games_against_opponents(trained: Path, tmp_path: Path) -> None:
    wanted = {"episodes": 12, "actors": 6, "opponents": [f"{trained}@12", "random"], "greedy": False, "seed": 5}

    def figures(number: int) -> dict[str, Any]:
        checkpoint = checkpoints.load(trained / "checkpoints", "18")
        document = settings(evaluate={**wanted, "evaluators": number})
        names = name_opponents(document.evaluate.opponents, trained)
        report = evaluate.play(EvaluationPlan(settings=document, checkpoint=checkpoint, opponents=names))
        return dict(report["metrics"])

    assert figures(1) == figures(2)
