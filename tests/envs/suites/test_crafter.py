"""Crafter: the game as published, instructions that columns alone can replay, and worlds that only seeds decide."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("crafter")

import crafter

from pipelines.envs.goals import GOAL_SEQUENCES
from pipelines.envs.make import make
from pipelines.envs.suites import crafter_goals as words
from pipelines.envs.suites.crafter import Crafter, CrafterSettings
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract

NOOP, LEFT, RIGHT, UP, DOWN, DO, SLEEP = range(7)
PLAIN, ASKED = {"max_steps": 30}, {"max_steps": 30, "goals": 3, "show_achievements": True}


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("params", [PLAIN, ASKED], ids=["plain", "asked"])
def test_crafter_keeps_the_contract(check, params):
    sizes = {"count": 4} if "count" in check.__kwdefaults__ else {"num_envs": 2}
    check("crafter", params=params, **sizes)


def begun(seed, **settings):
    env = Crafter(CrafterSettings(**settings))
    env.split = "train"
    return env, env.reset(seed=seed)[0]


def test_words_and_achievements_are_the_games_own():
    assert tuple(crafter.constants.achievements) == words.ACHIEVEMENTS
    assert len(words.ACHIEVEMENTS) == 22
    assert [crafter.constants.actions[i] for i in (NOOP, LEFT, RIGHT, UP, DOWN, DO, SLEEP)] == [
        *("noop", "move_left", "move_right", "move_up", "move_down", "do", "sleep")
    ]
    every = [words.parse_goal(name) for name in words.ACHIEVEMENTS]
    every += [words.find_square(np.array([x, y])) for x in range(0, 64, 5) for y in range(0, 64, 5)]
    assert len(set(every)) == 22 + 13 * 13
    assert all(words.parse_goal(words.spell(numbers)) == numbers for numbers in every)
    assert words.spell(words.find_square(np.array([63, 4]))) == "travel 60 0"
    for wrong in ("", "collect gold", "travel 30", "travel 31 5"):
        with pytest.raises(ValueError, match="is not a goal"):
            words.parse_goal(wrong)


def test_rewards_are_those_of_the_package():
    env, _ = begun(3)
    other, _ = begun(3)
    game, rng, total = other._game, np.random.default_rng(0), 0.0
    for _ in range(120):
        action = int(rng.integers(17))
        _, reward, terminated, truncated, _ = env.step(action)
        _, theirs, done, _ = game.step(action)
        assert reward == theirs
        assert terminated == bool(done)
        assert not truncated
        total += reward
        if terminated:
            break
    assert total > 0


def test_death_terminates_and_the_limit_truncates():
    env, _ = begun(5, max_steps=3)
    ends = [env.step(NOOP)[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    env.reset(seed=5)
    env._game._player.health = 0
    assert env.step(NOOP)[2:4] == (True, False)
    assert env.outcome.attempt_end
    assert not env.outcome.success


def test_a_world_follows_from_its_number_alone():
    """Whatever was played before, and in whatever process: nothing hangs on where objects lie in memory."""
    rng = np.random.default_rng(1)
    actions = rng.integers(17, size=150).tolist()

    def shown(before):
        env, _ = begun(before)
        junk = [object() for _ in range(before * 1000)]
        for _ in range(before):
            env.step(RIGHT)
        pictures = [env.reset(seed=8)[0]]
        for action in actions:
            pictures.append(env.step(action)[0])
        return np.stack(pictures), len(junk)

    np.testing.assert_array_equal(shown(2)[0], shown(7)[0])
    chunks = begun(8)[0]._game._world._chunks
    assert all(list(members) == list(dict.fromkeys(members)) for members in chunks.values())
    assert not any(isinstance(members, set) for members in chunks.values())


def test_goals_are_followed_in_order_and_shown_until_they_are_reached():
    env, _ = begun(4, goals=3)
    here = words.spell(words.find_square(env._game.position))
    env.play(f"4: {here}, collect wood, collect sapling")
    observation = env.reset(seed=1)[0]
    assert env.task == f"4: {here}, collect wood, collect sapling"
    assert env.goal_text == f"{here}, then collect wood, then collect sapling"
    asked = np.stack([words.parse_goal(name) for name in (here, "collect wood", "collect sapling")])
    np.testing.assert_array_equal(observation["goals"], asked)  # being there at the start earns nothing
    observation, reward, *_ = env.step(NOOP)
    assert reward == 1
    np.testing.assert_array_equal(observation["goals"], [words.NONE, *asked[1:]])

    def achieve(name):
        """What collecting does, done to the player, and a step in which nothing else happens."""
        update = env._game._player.update

        def collecting():
            update()
            env._game._player.achievements[name] += 1

        env._game._player.update = collecting
        result = env.step(NOOP)
        env._game._player.update = update
        return result

    observation, reward, terminated, _, _ = achieve("collect_sapling")
    assert (reward, terminated) == (0, False)  # not its turn
    np.testing.assert_array_equal(observation["achieved"][1], words.parse_goal("collect sapling"))
    assert achieve("collect_wood")[1] == 1
    assert env.step(NOOP)[0]["achieved"][1].tolist() == [0, 0, 0]
    observation, reward, terminated, truncated, _ = achieve("collect_sapling")
    assert (reward, terminated, truncated) == (1, True, False)
    assert env.outcome.success
    assert not observation["goals"].any()


def test_columns_alone_tell_what_was_reached_and_when():
    """A literal replay from the columns `achieved` and `goals` gives rewards, ends and progress: as hindsight would."""
    env = make("crafter", num_envs=4, seed=0, params={"goals": 4, "max_steps": 60})
    env.play_only(["2: travel 30 30, travel 30 25, collect sapling", "4: travel 30 30, wake up", "6: eat cow"])
    rows = contract.play(env, 150)
    paid = 0
    for actor in range(4):
        goals, at, over = [], 0, True
        for row in rows:
            shown = [tuple(goal) for goal in row["obs.goals"][actor].tolist()]
            if "reward" not in row:
                if over:
                    goals, at, over = shown, 0, False
                continue
            achieved = [tuple(goal) for goal in row["obs.achieved"][actor].tolist()]
            asked = [goal for goal in goals if any(goal)]
            reached = at < len(asked) and asked[at] in achieved
            at += reached
            assert row["reward"][actor] == reached
            assert row["success"][actor] == (at == len(asked))
            assert shown == [words.NONE] * at + goals[at:]
            over = row["terminated"][actor] or row["truncated"][actor]
            assert row["attempt_end"][actor] == over
            paid += reached
    assert paid
    env.close()


def test_other_goals_are_replayed_as_the_world_itself_would_have_paid_them():
    """A recorded path under its own goals, and under goals that another play of the same world and actions is given."""
    rng = np.random.default_rng(0)
    actions = rng.integers(17, size=60).tolist()

    def played(task):
        env, _ = begun(2, goals=3)
        env.play(task)
        shown, rewards = [env.reset(seed=0)[0]], [0.0]
        for action in actions:
            observation, reward, terminated, *_ = env.step(action)
            shown.append(observation)
            rewards.append(reward)
            if terminated:
                break
        return np.stack([o["achieved"] for o in shown]), np.stack([o["goals"] for o in shown]), np.array(rewards)

    rule = GOAL_SEQUENCES.get("crafter")
    achieved, _, _ = played("2: make iron sword")  # never reached, so the whole path is known
    for asked in ("travel 30 30, collect sapling, travel 30 25", "wake up", "travel 30 30, travel 30 30"):
        mine, goals, rewards = played(f"2: {asked}")
        shown, paid, success = rule.replay(achieved, goals[0])
        rows = len(rewards)
        np.testing.assert_array_equal(mine, achieved[:rows])  # what is asked changes nothing else
        np.testing.assert_array_equal(shown[:rows], goals)
        np.testing.assert_array_equal(paid[:rows], rewards)
        assert success.any() == (rows < len(achieved))
        assert not paid[rows:].any()


def test_worlds_of_training_and_test_differ():
    train = contract.first_tasks("crafter", 2, count=6, seed=0)
    test = contract.first_tasks("crafter", 2, count=6, seed=0, split="test")
    assert all(int(world) % 2 == 0 for world in train)
    assert all(int(world) % 2 == 1 for world in test)


def test_named_tasks_are_played_and_wrong_ones_refused():
    env = make("crafter", num_envs=2, seed=0, params={"goals": 2})
    env.play_only(["12: eat cow", "13: wake up, travel 30 30"])
    env.reset()
    assert env.tasks(np.arange(2)) == ["12: eat cow", "13: wake up, travel 30 30"]
    assert env.goal_texts(np.arange(2)) == ["eat cow", "wake up, then travel 30 30"]
    for wrong in ("12", "12: eat moon", "x: eat cow", "1: eat cow, eat cow, eat cow"):
        with pytest.raises(InputMissing, match="is not a task"):
            env.play_only([wrong])
    env.close()


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError) as caught:
        make("crafter", num_envs=1, seed=0, params={"goals": 2, "least_goals": 3})
    assert "least_goals 3 is more than goals 2" in caught.value.problems[0]


def test_an_episode_tells_its_achievements_in_the_plain_game_alone():
    env = make("crafter", num_envs=2, seed=0, params={"show_achievements": True})
    assert len(env.spec.achievements) == 22
    env.reset()
    rng, seen = np.random.default_rng(0), 0
    for _ in range(60):
        result = env.step(rng.integers(17, size=2))
        np.testing.assert_array_equal(env.achieved(np.arange(2)), result.observation["obs.achievements"])
        seen += env.achieved(np.arange(2)).sum()
    assert seen
    env.close()
    assert make("crafter", num_envs=1, seed=0, params={"goals": 2}).spec.achievements == ()
