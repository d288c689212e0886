"""Atari: true ends, seeds that decide everything, and the three forms of an action."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ale_py")

from ale_py import Action
from ale_py.env import AtariEnv

from pipelines.envs.make import make
from pipelines.envs.suites.atari import AtariSettings
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract

SHORT = {"params": {"max_frames": 60, "threads": 1}}
MULTI = {"params": {"max_frames": 40, "games": ["pong", "breakout", "freeway"]}}
NOOP, FIRE = 0, 1


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    ("name", "options"), [("atari-pong", SHORT), pytest.param("atari-multi", MULTI, marks=pytest.mark.full)]
)
def test_atari_keeps_the_contract(check, name, options):
    sizes = {"count": 4} if "count" in check.__kwdefaults__ else {"num_envs": 2}
    if "steps" in check.__kwdefaults__:
        sizes["steps"] = 20
    check(name, **options, **sizes)


def test_an_end_by_frames_is_a_truncation_with_a_true_final_observation_and_no_step_is_lost():
    env = make("atari-pong", num_envs=2, seed=0, params={"max_frames": 40, "sticky": 0.0, "threads": 1})
    assert env.spec.horizon == 10
    env.reset()
    for step in range(1, 11):
        result = env.step(np.array([NOOP, NOOP]))
        assert result.truncated.all() == (step == 10)
        assert not result.terminated.any()
    final = result.observation["obs"]
    begun = env.reset(np.array([True, False]))["obs"]
    assert (begun[0] != final[0]).any()
    np.testing.assert_array_equal(begun[1], final[1])
    env.reset(np.array([False, True]))
    for step in range(1, 11):  # ten steps again: none was swallowed by a reset of the emulator's own
        result = env.step(np.array([NOOP, NOOP]))
        assert result.truncated.all() == (step == 10)
    np.testing.assert_array_equal(result.observation["obs"], final)
    env.close()


def test_game_over_terminates_after_all_lives_and_a_lost_life_where_so_wanted():
    ends = {}
    for early in (False, True):
        env = make("atari-breakout", num_envs=1, seed=0, params={"life_ends_episode": early, "sticky": 0.0, "size": 16})
        env.reset()
        result, ends[early] = env.step(np.array([FIRE])), 1
        while not result.terminated[0] and ends[early] < 2000:
            result, ends[early] = env.step(np.array([FIRE])), ends[early] + 1
        assert not result.truncated.any()
        env.close()
    assert ends[True] * 3 < ends[False] < 2000


def test_rewards_are_the_games_own_and_those_of_gymnasiums_environment():
    """The score of one game, step by step, in ALE's single environment with the same joystick."""
    env = make("atari-ms-pacman", num_envs=1, seed=0, params={"sticky": 0.0})
    single = AtariEnv("ms_pacman", repeat_action_probability=0.0, full_action_space=True)
    env.reset()
    single.reset(seed=0)
    rng = np.random.default_rng(0)
    rewards = []
    for _ in range(400):
        action = int(rng.integers(18))
        result = env.step(np.array([action]))
        _, reward, terminated, _, _ = single.step(action)
        assert result.reward[0] == reward
        assert result.terminated[0] == terminated
        if terminated:
            break
        rewards.append(reward)
    assert max(rewards) >= 10  # clipped ones would be 1
    env.close()


def test_sticky_actions_follow_from_the_seed():
    def pictures(seed):
        env = make("atari-breakout", num_envs=1, seed=seed, params={"sticky": 0.25})
        env.reset()
        shown = [env.step(np.array([action % 18])).observation["obs"] for action in range(60)]
        env.close()
        return np.stack(shown)

    np.testing.assert_array_equal(pictures(1), pictures(1))
    assert (pictures(1) != pictures(2)).any()


@pytest.mark.parametrize("actions", ["multi-binary", "continuous"])
def test_forms_of_an_action_move_the_same_joystick(actions):
    """UPRIGHTFIRE and its parts, chosen as a number and in the other form, give the same game."""
    wanted = ["NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN", "UPRIGHTFIRE", "DOWNLEFT", "LEFTFIRE"] * 6
    angle = {"RIGHT": 0.0, "UPRIGHT": 0.25, "UP": 0.5, "UPLEFT": 0.75, "LEFT": 1.0, "DOWNLEFT": -0.75, "DOWN": -0.5}

    def form(name):
        way, fire = name.removesuffix("FIRE").replace("NOOP", ""), name.endswith("FIRE")
        if actions == "continuous":
            return np.array([[1.0 if way else -1.0, angle.get(way, 0.0), 1.0 if fire else -1.0]], dtype=np.float32)
        return np.array([["UP" in way, "RIGHT" in way, "LEFT" in way, "DOWN" in way, fire]], dtype=np.uint8)

    def play(params, chosen):
        env = make("atari-seaquest", num_envs=1, seed=0, params={"sticky": 0.0, **params})
        env.reset()
        shown = [env.step(action).observation["obs"] for action in chosen]
        env.close()
        return np.stack(shown)

    discrete = play({}, [np.array([Action.__members__[name].value]) for name in wanted])
    np.testing.assert_array_equal(discrete, play({"actions": actions}, [form(name) for name in wanted]))
    assert (discrete[-1] != discrete[0]).any()


def test_opposite_buttons_cancel():
    env = make("atari-pong", num_envs=1, seed=0, params={"actions": "multi-binary"})
    assert env._decode(np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])).tolist() == [FIRE, Action.UP.value]


@pytest.mark.parametrize(
    ("params", "shape"),
    [
        ({}, (84, 84, 3)),
        ({"color": False}, (84, 84, 1)),
        ({"color": False, "stack": 4}, (84, 84, 4)),
        ({"stack": 2, "size": 64}, (64, 64, 6)),
    ],
)
def test_pictures(params, shape):
    env = make("atari-pong", num_envs=2, seed=0, params=params)
    shown = env.reset()["obs"]
    assert shown.shape == (2, *shape)
    assert env.spec.spaces.observation["obs"].is_image
    for _ in range(40):
        shown, before = env.step(np.array([NOOP, FIRE])).observation["obs"], shown
    channels = shape[-1] // params.get("stack", 1)
    if params.get("stack", 1) > 1:  # the newer pictures of before are the older ones of now
        np.testing.assert_array_equal(shown[..., :-channels], before[..., channels:])
    env.close()


def test_multi_plays_many_games_and_can_be_told_which():
    env = make("atari-multi", num_envs=2, seed=0, params=MULTI["params"])
    seen = set()
    for _ in range(8):
        env.reset()
        seen |= set(env.tasks(np.arange(2)))
    assert seen == {"pong", "breakout", "freeway"}
    env.play_only(["freeway", "pong"])
    env.reset()
    assert sorted(env.tasks(np.arange(2))) == ["freeway", "pong"]
    with pytest.raises(InputMissing, match="'alien' is not a task"):
        env.play_only(["alien"])
    env.close()


def test_held_out_games_are_not_those_of_training():
    params = {"games": ["pong", "breakout"], "test_games": ["freeway", "asterix"], "max_frames": 60}
    train = contract.first_tasks("atari-multi", 4, count=12, seed=0, params=params)
    test = contract.first_tasks("atari-multi", 4, count=12, seed=0, split="test", params=params)
    assert set(train) == {"pong", "breakout"}
    assert set(test) == {"freeway", "asterix"}
    with pytest.raises(UsageError, match="both of training and of test: pong"):
        make("atari-multi", num_envs=1, seed=0, params={"games": ["pong"], "test_games": ["pong"]})


def test_an_unknown_game_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'ms_pacman'"):
        make("atari-mspacman", num_envs=1, seed=0)


def test_human_normalised_scores_are_of_whole_games_and_unclipped_rewards():
    assert make("atari-pong", num_envs=1, seed=0).spec.score.bounds["pong"] == (-20.7, 14.6)
    for params in ({"clip_rewards": True}, {"life_ends_episode": True}):
        assert make("atari-pong", num_envs=1, seed=0, params=params).spec.score is None


def test_the_papers_protocol_begins_with_idle_frames_and_has_no_sticky_actions():
    settings = AtariSettings(protocol="paper", stack=2)
    assert (settings.color, settings.stack, settings.sticky, settings.noop_max) == (False, 2, 0.0, 30)
