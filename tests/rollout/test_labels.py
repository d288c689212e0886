"""Labels: what another policy would have done at every step, stored beside what was done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import Settings
from pipelines.envs.make import make
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.reading import Reader, join_pieces
from pipelines.lake.schema import LABEL, Schema
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.rollout.policies import FunctionPolicy, RandomPolicy
from pipelines.rollout.rollout import Cutting, Recording, Rollout
from pipelines.stages import collect

SIZE = 5
SPACES = Spaces(observation={"obs": Box(shape=(2,))}, action=Discrete(n=3))
MOVES = {0: (0, -1), 1: (-1, 0), 2: (0, 1), 3: (1, 0), 4: (0, 0)}


def leads_to_goal(observation: np.ndarray, action: int, task: str) -> bool:
    """Whether a move in the dark room is the beginning of a shortest way, or stays at the goal."""
    goal = np.array([int(text) for text in task.removeprefix("goal=").split(",")])
    cell = np.rint(observation[:2] * SIZE).astype(int)
    far, then = np.abs(goal - cell).sum(), np.abs(goal - cell - MOVES[action]).sum()
    return bool(then == max(far - 1, 0))


def settings(**collect_settings: Any) -> Settings:
    return Settings.model_validate(
        {
            "env": {"name": "dark-room", "size": SIZE, "attempts": 2, "attempt_steps": 7},
            "collect": {"steps": 600, "actors": 3, "label": "expert", **collect_settings},
        }
    )


@pytest.mark.system
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_labels_are_the_experts_actions(tmp_path: Path, chunk: int, workers: int) -> None:
    """Of every observation from which an action follows, also where a piece of an episode begins."""
    collect.run(settings(chunk_steps=chunk, workers=workers), lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    reader, labels = Reader(lake), 0
    for uid, task in query(lake, "select uid, task from trajectories")[1]:
        columns = reader.read_columns(uid, ["obs", LABEL, "action"])
        for row in range(len(columns[LABEL]) - 1):
            assert leads_to_goal(columns["obs"][row], int(columns[LABEL][row]), task)
            labels += 1
    assert labels >= 600
    (agree,) = query(lake, "select avg((action = label)::int) from steps where t > 0")[1][0]
    assert agree < 0.5  # actions were random


def test_pieces_have_the_labels_of_whole_episodes() -> None:
    whole, pieces = ([*play(chunk=chunk)] for chunk in (0, 5))
    joined = join_pieces([each.columns for each in pieces if each.info.episode == pieces[0].info.episode])
    same = next(each for each in whole if np.array_equal(each.columns["action"], joined["action"]))
    np.testing.assert_array_equal(joined[LABEL], same.columns[LABEL])


def play(*, chunk: int) -> list[Trajectory]:
    """Random play in one room, labelled by a function of the observation."""
    stored: list[Trajectory] = []
    env = make("dark-room", num_envs=1, seed=0, params={"size": SIZE, "attempts": 2, "attempt_steps": 7})
    label = FunctionPolicy(lambda observation, *_: np.rint(observation["obs"][:, 0] * SIZE).astype("i4") % 4)
    recording = Recording(sink=stored.extend, cutting=Cutting(steps=chunk), labeller=label)
    rollout = Rollout(env, RandomPolicy(env.spec.spaces.action, seed=0), recording=recording)
    rollout.run(steps=100)
    return stored


def test_the_last_row_has_no_label() -> None:
    for each in play(chunk=0):
        assert each.columns[LABEL][-1] == 0
        expected = np.rint(each.columns["obs"][:-1, 0] * SIZE).astype("i4") % 4
        np.testing.assert_array_equal(each.columns[LABEL][:-1], expected)


def test_labels_do_not_change_what_is_played() -> None:
    env = make("dark-room", num_envs=2, seed=3, params={"size": SIZE})
    labelled, plain = [], []
    for stored, labeller in ((labelled, RandomPolicy(env.spec.spaces.action, seed=9)), (plain, None)):
        env = make("dark-room", num_envs=2, seed=3, params={"size": SIZE})
        recording = Recording(sink=stored.extend, labeller=labeller)
        Rollout(env, RandomPolicy(env.spec.spaces.action, seed=1), recording=recording).run(steps=500)
    assert len(labelled) == len(plain) > 1
    for one, other in zip(labelled, plain, strict=True):
        for name, values in other.columns.items():
            np.testing.assert_array_equal(values, one.columns[name])


def test_a_labeller_sees_the_actions_that_were_taken() -> None:
    seen: list[np.ndarray] = []

    def label(observation: Mapping[str, np.ndarray], prev: np.ndarray, *_: np.ndarray) -> np.ndarray:
        seen.append(prev.copy())
        return np.zeros_like(prev)

    stored: list[Trajectory] = []
    env = make("dark-room", num_envs=1, seed=0, params={"size": SIZE, "attempts": 1, "attempt_steps": 7})
    recording = Recording(sink=stored.extend, labeller=FunctionPolicy(label))
    Rollout(env, RandomPolicy(env.spec.spaces.action, seed=0), recording=recording).run(steps=7)
    np.testing.assert_array_equal(np.concatenate(seen), stored[0].columns["action"][:-1])


def test_labels_of_another_shape_are_refused() -> None:
    env = make("dark-room", num_envs=2, seed=0, params={"size": SIZE})
    wrong = FunctionPolicy(lambda *_: np.zeros((2, 2), "i4"))
    recording = Recording(sink=lambda _: None, labeller=wrong)
    rollout = Rollout(env, RandomPolicy(env.spec.spaces.action, seed=0), recording=recording)
    with pytest.raises(StageFailed, match=r"policy of collect\.label gave actions of shape \(2, 2\)"):
        rollout.run(steps=10)


def test_schemas_with_and_without_labels_differ(tmp_path: Path) -> None:
    plain, labelled = Schema(SPACES), Schema(SPACES, labelled=True)
    assert Schema.from_json(labelled.to_json()) == labelled
    assert Schema.from_json(plain.to_json()) == plain
    assert plain.id != labelled.id
    assert [column.name for column in labelled.columns[:-1]] == [column.name for column in plain.columns]
    label, action = labelled.column(LABEL), labelled.column("action")
    assert (label.dtype, label.shape) == (action.dtype, action.shape)
    lake = Lake.create(tmp_path / "lake")
    lake.register(labelled)
    assert lake.schema_of(SPACES) == labelled
    with pytest.raises(InputMissing, match="holds steps with labels, not without"):
        lake.require_schema(plain)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("learner:q-learning", "does not learn from what others do"),
        ("expert", "has no expert"),
        ("nothing", "no run or bundle at 'nothing'"),
    ],
)
def test_policies_that_cannot_label_are_refused(tmp_path: Path, label: str, words: str) -> None:
    wanted = Settings.model_validate({"env": {"name": "gym:CartPole-v1"}, "collect": {"label": label, "steps": 100}})
    with pytest.raises((UsageError, InputMissing), match=words):
        collect.run(wanted, lake=tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


@pytest.mark.system
def test_collectors_with_other_labels_are_told_apart(tmp_path: Path) -> None:
    for label in ("expert", "random"):
        collect.run(settings(label=label, steps=100), lake=tmp_path / "lake")
    rows = query(Lake(tmp_path / "lake"), "select count(distinct collector) from trajectories")[1]
    assert rows == [(2,)]
