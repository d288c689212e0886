"""Learners of actors: against Q-learning written as in the textbook, one actor and one step at a time."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import LearnerSettings, Settings
from pipelines.errors import StageFailed, UsageError
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.rollout import learners
from pipelines.rollout.learners import QLearning, make_learner, replay_histories
from pipelines.stages import collect

SPACES = Spaces(observation={"cell": Discrete(n=6), "place": Box(shape=(2,))}, action=Discrete(n=3))
GREEDY = LearnerSettings(learning_rate=0.25, discount=0.5, epsilon_steps=1)
GOALS = ["goal=0,1", "goal=2,0", "goal=2,2"]


class TextbookQ:
    """Sutton and Barto (2018), section 6.5, for a single actor."""

    def __init__(self, settings: LearnerSettings, actions: int) -> None:
        self.settings = settings
        self.values: dict[Any, list[float]] = defaultdict(lambda: [0.0] * actions)

    def learn(self, state: Any, action: int, reward: float, ended: bool, following: Any) -> None:
        target = reward + (0.0 if ended else self.settings.discount * max(self.values[following]))
        self.values[state][action] += self.settings.learning_rate * (target - self.values[state][action])

    def best(self, state: Any) -> set[int]:
        values = self.values[state]
        return {action for action, value in enumerate(values) if abs(value - max(values)) < 1e-9}


def observe(rng: np.random.Generator, actors: int) -> dict[str, np.ndarray]:
    cell = rng.integers(6, size=actors).astype(np.int32)
    return {"cell": cell, "place": np.stack([cell % 2, cell // 2], axis=1).astype(np.float32)}


def test_every_actor_learns_as_the_textbook_says() -> None:
    rng, actors = np.random.default_rng(0), 4
    learner = make_learner("learner:q-learning", SPACES, GREEDY, num_actors=actors, seed=0)
    expected = [TextbookQ(GREEDY, 3) for _ in range(actors)]
    for _ in range(400):
        some = np.sort(rng.choice(actors, size=rng.integers(1, actors + 1), replace=False))
        before, after = observe(rng, len(some)), observe(rng, len(some))
        action, reward = rng.integers(3, size=len(some)), rng.normal(size=len(some)).astype(np.float32)
        ended = rng.random(len(some)) < 0.2
        learner.learn(some, before, action, reward, ended, after)
        for i, actor in enumerate(some.tolist()):
            expected[actor].learn(before["cell"][i], action[i], float(reward[i]), ended[i], after["cell"][i])
    for cell in range(6):
        seen = {"cell": np.full(actors, cell, np.int32), "place": np.full((actors, 2), (cell % 2, cell // 2), "f4")}
        acted = learner.act(seen, np.zeros(actors), np.zeros(actors), np.ones(actors))
        assert all(int(acted[actor]) in expected[actor].best(cell) for actor in range(actors))


def test_exploration_falls_with_the_updates_of_each_actor() -> None:
    settings = LearnerSettings(epsilon_last=0.2, epsilon_steps=10)
    learner = QLearning(SPACES, settings, num_actors=3, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(5):
        one = observe(rng, 1)
        learner.learn(np.array([1]), one, np.array([0]), np.zeros(1, "f4"), np.array([True]), one)
    np.testing.assert_allclose(learner.epsilon, [1.0, 0.6, 1.0])
    assert learner.version.tolist() == [0, 5, 0]
    seen = observe(rng, 3)
    drawn = np.array([learner.act(seen, seen["cell"], seen["cell"], seen["cell"]) for _ in range(2000)])
    assert (drawn[:, 0] == 0).mean() == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize(
    ("name", "spaces", "message"),
    [
        ("learner:q-lerning", SPACES, "unknown learner"),
        ("learner:q-learning", Spaces(observation=SPACES.observation, action=Box(shape=(1,))), "discrete actions"),
        (
            "learner:q-learning",
            Spaces(observation={"x": Box(shape=(9, 9))}, action=Discrete(n=2)),
            "at most 64 numbers",
        ),
    ],
)
def test_what_cannot_learn_is_refused(name: str, spaces: Spaces, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_learner(name, spaces, GREEDY, num_actors=1, seed=0)


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "_MOST_BYTES", 1 << 14)
    learner = QLearning(Spaces(observation={"x": Box(shape=(1,))}, action=Discrete(n=2)), GREEDY, num_actors=1, seed=0)
    steps = ({"x": np.array([[value]], "f4")} for value in range(5000))
    with pytest.raises(StageFailed, match="have outgrown"):
        [learner.act(step, np.zeros(1), np.zeros(1), np.zeros(1)) for step in steps]


def rooms(steps: int, **table: Any) -> Settings:
    room = {"name": "dark-room", "size": 3, "attempts": 1, "attempt_steps": 5}
    own = {"tasks": GOALS, "copies": 2, "steps": steps, "policy": "learner:q-learning", **table}
    return Settings.model_validate({"env": room, "collect": own})


def learn_from(lake: Lake) -> dict[str, TextbookQ]:
    """What each history teaches the textbook's learner."""
    reader, taught = Reader(lake), dict[str, TextbookQ]()
    for uid, history in query(lake, "select uid, history from trajectories order by history_index, first_step")[1]:
        columns = reader.read(uid).columns
        learner = taught.setdefault(history, TextbookQ(LearnerSettings(), 5))
        for t in range(len(columns["reward"]) - 1):
            before, after = (tuple(columns["obs"][row].tolist()) for row in (t, t + 1))
            ended = bool(columns["terminated"][t + 1])
            learner.learn(before, columns["action"][t + 1], float(columns["reward"][t + 1]), ended, after)
    return taught


@pytest.mark.system
@pytest.mark.parametrize("table", [{}, {"workers": 2}, {"chunk_steps": 2}], ids=["whole", "workers", "pieces"])
def test_a_resumed_learner_knows_what_its_history_teaches(tmp_path: Path, table: dict[str, Any]) -> None:
    for steps in (120, 600):
        collect.run(rooms(steps, **table), run=tmp_path / "run")
    lake = Lake(tmp_path / "run/lake")
    (name,) = query(lake, "select distinct collector from trajectories")[1][0]
    rows = query(
        lake,
        """select history, task, history_index, max(policy_version), sum(length) from trajectories
        group by all order by history, history_index""",
    )[1]
    assert [row[2] for row in rows] == [*range(20)] * 6
    assert all(row[0].startswith(f"{name}/") and row[0].endswith(f"/{row[1]}") for row in rows)
    assert [(row[3], row[4]) for row in rows] == [(5 * (row[2] + 1), 5) for row in rows]
    spaces = lake.only_schema().spaces
    learner = make_learner("learner:q-learning", spaces, LearnerSettings(epsilon_steps=1), num_actors=6, seed=0)
    assert replay_histories(lake, name, learner, 6).tolist() == [20] * 6
    taught = learn_from(lake)
    for state in {state for each in taught.values() for state in each.values}:
        acted = learner.act({"obs": np.tile(np.array(state, "f4"), (6, 1))}, np.zeros(6), np.zeros(6), np.ones(6))
        for history, each in taught.items():
            assert int(acted[int(history.split("/")[1])]) in each.best(state)


def test_learners_improve(tmp_path: Path) -> None:
    collect.run(rooms(6000, learner={"epsilon_steps": 500}), run=tmp_path / "run")
    found = query(Lake(tmp_path / "run/lake"), "select avg(first_return), avg(last_return) from histories")[1]
    ((first, last),) = found
    assert last > first + 1.5


def test_a_learner_whose_episodes_have_gone_is_not_resumed(tmp_path: Path) -> None:
    collect.run(rooms(120), run=tmp_path / "run")
    expire(Lake(tmp_path / "run/lake"), RetentionLimits(where="history_index = 1"))
    with pytest.raises(StageFailed, match="have gone from lake"):
        collect.run(rooms(240), run=tmp_path / "run")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"tasks": [], "copies": 1}, "learns one task for each actor"),
        ({"explore": True}, "explores by itself"),
        ({"policy": "learner:dqn"}, "unknown learner 'learner:dqn'"),
    ],
)
def test_collects_that_no_learner_can_do_write_nothing(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        collect.run(rooms(120, **table), run=tmp_path / "run")
    assert not (tmp_path / "run/lake").exists()
