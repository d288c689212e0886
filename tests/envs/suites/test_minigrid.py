"""MiniGrid and BabyAI: what is seen is the library's, two attempts are at one task, and instructions become words."""

from __future__ import annotations

import contextlib
import io

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("minigrid")

from pipelines.config.model import TimestepSettings
from pipelines.envs.make import make
from pipelines.envs.suites.minigrid import (
    LEVELS,
    MISSION_WORDS,
    SPREAD,
    VOCABULARY,
    WORDS,
    find_id,
    find_step_limit,
    make_level,
)
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Ragged
from pipelines.nets.timestep import TimestepEncoder, choose_routes
from tests.envs import contract

EMPTY, MULTI = "minigrid:MiniGrid-Empty-5x5-v0", "babyai-multi"
TINY = {"levels": ("GoToObjS4", "OneRoomS8")}
LEFT, FORWARD = 0, 2
ALL_IDS = sorted(name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-")))


@pytest.mark.parametrize(("name", "params"), [(MULTI, TINY), (EMPTY, {}), ("minigrid:BabyAI-BossLevel-v0", {})])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_batch_keeps_the_contract(check, name, params):
    check(name, params=params)


def test_what_is_shown_is_what_the_library_shows():
    env = make("minigrid:BabyAI-GoToLocal-v0", num_envs=1, seed=0, split="test")
    observation = env.reset()
    seed = int(env.tasks(np.arange(1))[0].partition("/")[2])
    theirs = gymnasium.make("BabyAI-GoToLocal-v0")
    with contextlib.redirect_stdout(io.StringIO()):
        expected, _ = theirs.reset(seed=seed)
    rng = np.random.default_rng(0)
    while True:
        np.testing.assert_array_equal(observation["obs.image"][0] // SPREAD, expected["image"])
        assert observation["obs.direction"][0] == expected["direction"]
        length = observation["obs.mission.length"][0]
        assert "".join(map(chr, observation["obs.mission"][0, :length])) == expected["mission"]
        assert env.goal_texts(np.arange(1)) == [expected["mission"]]
        action = rng.integers(7)
        expected, reward, terminated, truncated, _ = theirs.step(action)
        result = env.step(np.array([action]))
        observation = result.observation
        assert (result.terminated[0], result.truncated[0]) == (terminated, truncated)
        assert result.reward[0] == np.float32(reward)
        if terminated or truncated:
            break
    assert result.attempt_end[0]
    env.close()


def test_spread_codes_fit_into_bytes():
    from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX

    highest = [max(codes.values()) for codes in (OBJECT_TO_IDX, COLOR_TO_IDX, STATE_TO_IDX)]
    assert all(code * int(step) <= 255 for code, step in zip([*highest[:2], 3], SPREAD, strict=True))
    assert highest[2] <= 3


def test_success_pays_less_the_later_it_comes():
    env = make(EMPTY, num_envs=1, seed=0)
    env.reset()
    for t, action in enumerate((FORWARD, FORWARD, 1, FORWARD, FORWARD), start=1):
        result = env.step(np.array([action]))
        assert result.terminated[0] == result.success[0] == result.attempt_end[0] == (t == 5)
    assert result.reward[0] == pytest.approx(1 - 0.9 * 5 / 100)
    assert not result.truncated[0]
    env.close()


def test_time_out_is_truncation_and_no_success():
    env = make(EMPTY, num_envs=1, seed=0)
    env.reset()
    assert env.spec.horizon == 100
    for t in range(1, 101):
        result = env.step(np.array([LEFT]))
        assert result.truncated[0] == (t == 100)
    assert not result.terminated[0]
    assert not result.success[0]
    env.close()


def test_both_attempts_are_at_one_task_with_a_step_between_them():
    env = make(MULTI, num_envs=1, seed=0, params={"levels": ["GoToObjS4"]})
    assert (env.spec.horizon, env.spec.num_attempts) == (2 * 16 + 1, 2)
    first = env.reset()
    ends = []
    for t in range(1, 34):
        result = env.step(np.array([LEFT]))
        ends.append((bool(result.attempt_end[0]), bool(result.reset[0]), bool(result.terminated[0])))
        if t == 17:
            between = result
    assert ends[15] == (True, False, False)
    assert ends[16] == (False, True, False)
    assert ends[32] == (True, False, True)
    assert not any(any(end) for k, end in enumerate(ends) if k not in (15, 16, 32))
    assert between.reward[0] == 0
    for column in ("obs.image", "obs.direction", "obs.mission"):
        np.testing.assert_array_equal(between.observation[column], first[column])
    assert (first["obs.attempt"][0, 0], between.observation["obs.attempt"][0, 0]) == (0.0, 0.5)
    assert result.observation["obs.attempt"][0, 0] == 1.0
    env.close()


def test_instructions_are_the_numbers_of_their_words():
    env = make(MULTI, num_envs=5, seed=0)
    space = env.spec.spaces.observation["obs.mission"]
    assert isinstance(space, Ragged)
    assert (space.max_length, space.dtype) == (MISSION_WORDS, "int32")
    observation = env.reset()
    for i, text in enumerate(env.goal_texts(np.arange(5))):
        numbers = observation["obs.mission"][i, : observation["obs.mission.length"][i]]
        assert " ".join(WORDS[n - 2] for n in numbers) == text
        assert (observation["obs.mission"][i, len(numbers) :] == 0).all()
    env.close()


def test_the_timestep_encoder_sees_a_picture_and_words():
    env = make(MULTI, num_envs=6, seed=0)
    columns = env.spec.spaces.observation
    expected = {
        "image": "image",
        "mission": "tokens",
        "mission.length": "hidden",
        "direction": "flat",
        "attempt": "flat",
    }
    assert choose_routes(columns, {}) == {f"obs.{name}": way for name, way in expected.items()}
    torch.manual_seed(0)
    encoder = TimestepEncoder(env.spec.spaces, TimestepSettings(output=16, normalize=False))
    observation = {name: torch.from_numpy(column) for name, column in env.reset().items()}
    action, zeros = torch.zeros(6, dtype=torch.int32), torch.zeros(6)
    shown = encoder(observation, action, zeros, zeros)
    for column in ("obs.image", "obs.mission", "obs.direction", "obs.attempt"):
        other = {**observation, column: observation[column].flip(-1) + (column == "obs.attempt")}
        if column == "obs.direction":
            other[column] = (observation[column] + 1) % 4
        assert ((encoder(other, action, zeros, zeros) - shown).abs().amax(1) > 1e-4).all(), column
    env.close()


def test_the_vocabulary_has_every_word_and_room_for_the_longest_instruction():
    seen = set()
    for level in LEVELS:
        env = make_level(LEVELS[level])
        for seed in range(4):
            with contextlib.redirect_stdout(io.StringIO()):
                words = env.reset(seed=seed)[0]["mission"].replace(",", "").split()
            assert len(words) <= MISSION_WORDS
            seen |= set(words)
            assert env.max_steps == find_step_limit(LEVELS[level])
    assert seen <= set(WORDS)
    assert len(set(WORDS)) + 2 == VOCABULARY


def test_levels_are_about_one_object_or_among_those_that_amago_trains_on():
    left_out = ("Seq", "Synth", "Boss", "PutNext", "TwoDoors", "RedBlueDoors", "DoorsOrder", "MoveTwoAcross", "Debug")
    babyai = {name.removeprefix("BabyAI-")[:-3] for name in ALL_IDS if name.startswith("BabyAI-")}
    about_one_object = {name for name in babyai if not any(part in name for part in left_out)}
    assert set(LEVELS) == about_one_object | {"OpenDoorDebug", "OpenRedBlueDoors", "PickupDistDebug"}
    assert len(LEVELS) == 68


def test_train_and_test_have_no_seed_in_common():
    for split, parity in (("train", 0), ("test", 1)):
        for task in contract.first_tasks(MULTI, 20, seed=0, split=split, params=TINY):
            assert int(task.partition("/")[2]) % 2 == parity


def test_all_levels_are_played():
    levels = {task.partition("/")[0] for task in contract.first_tasks(MULTI, 100, count=500, seed=0)}
    assert levels == set(LEVELS)


def test_tasks_can_be_named():
    env = make(MULTI, num_envs=2, seed=0)
    env.play_only(["GoToObj/7", "Unlock/3"])
    env.reset()
    assert env.tasks(np.arange(2)) == ["GoToObj/7", "Unlock/3"]
    env.reset()
    assert env.tasks(np.arange(2)) == ["GoToObj/7", "Unlock/3"]
    with pytest.raises(InputMissing, match="tasks are LEVEL/SEED"):
        env.play_only(["BossLevel/7"])
    env.close()


def test_nothing_is_printed(capsys):
    env = make("minigrid:BabyAI-GoToRedBlueBall-v0", num_envs=20, seed=0)
    env.reset()
    assert capsys.readouterr().out == ""
    env.close()


def test_wrong_names_are_refused_with_the_closest():
    with pytest.raises(UsageError, match="did you mean 'minigrid:MiniGrid-Empty-5x5-v0'"):
        make("minigrid:MiniGrid-Empty-5x5", num_envs=1, seed=0)
    with pytest.raises(InputMissing, match="pattern pictures"):
        make("minigrid:MiniGrid-WFC-MazeSimple-v0", num_envs=1, seed=0)
    with pytest.raises(UsageError) as refused:
        make(MULTI, num_envs=1, seed=0, params={"levels": ["GoToOb"]})
    assert "'GoToOb' is not a level of babyai-multi; did you mean 'GoToObj'?" in refused.value.problems[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL_IDS if "WFC" not in name])
def test_every_level_can_be_played(name):
    assert find_id(name) == name
    contract.observations_are_what_the_spec_says(f"minigrid:{name}", num_envs=2, steps=20)


def test_levels_of_test_may_be_apart_from_those_of_training():
    params = {"levels": ("GoToObjS4", "OneRoomS8"), "test_levels": ("Pickup",)}
    found = {
        split: {task.partition("/")[0] for task in contract.first_tasks(MULTI, 20, seed=0, split=split, params=params)}
        for split in ("train", "test")
    }
    assert found == {"train": {"GoToObjS4", "OneRoomS8"}, "test": {"Pickup"}}
    env = make(MULTI, num_envs=1, seed=0, params=params)
    assert env.spec.split == "2 levels to train on, 1 others to test"


def test_levels_of_test_are_left_out_of_training_where_all_are_trained_on():
    params = {"test_levels": tuple(LEVELS)[1:]}
    assert {task.partition("/")[0] for task in contract.first_tasks(MULTI, 3, seed=0, params=params)} == {
        next(iter(LEVELS))
    }


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"levels": ("Pickup", "GoTo"), "test_levels": ("Pickup",)}, "both of training and of test: Pickup"),
        ({"test_levels": ("Pikup",)}, "did you mean 'Pickup'?"),
        ({"test_levels": tuple(LEVELS)}, "no level is left to train on"),
    ],
)
def test_wrong_levels_of_test_are_refused(params, said):
    with pytest.raises(UsageError) as caught:
        make(MULTI, num_envs=1, seed=0, params=params)
    assert said in " ".join(caught.value.problems)
