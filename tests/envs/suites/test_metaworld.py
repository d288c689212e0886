"""Meta-World: goals as the library draws them, attempts, splits, and a simulation without what is only seen."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

metaworld = pytest.importorskip("metaworld")

from metaworld.policies import SawyerReachV3Policy  # noqa: E402

from pipelines.envs.make import make  # noqa: E402
from pipelines.envs.suites.metaworld import ALL_CLASSES, choose_classes  # noqa: E402
from pipelines.envs.suites.metaworld_tasks import (  # noqa: E402
    ClassPool,
    Shelf,
    load_goals,
)
from pipelines.errors import InputMissing, UsageError  # noqa: E402
from pipelines.files.user_cache import cache_home  # noqa: E402
from tests.envs import contract  # noqa: E402

REACH = "metaworld-ml1-reach"
SHORT = {"attempts": 2, "attempt_steps": 8}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMAGO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def library_env(name, vector, *, hidden=True):
    """An object as the library makes it, set to the goal `vector`."""
    cls = metaworld.env_dict.ALL_V3_ENVIRONMENTS[name]
    env = cls()
    task = {"rand_vec": vector, "env_cls": cls, "partially_observable": hidden}
    env.set_task(metaworld.Task(env_name=name, data=pickle.dumps(task)))
    return env


def vectors(name, seed):
    pool = ClassPool(goal_seed=seed, hide_goal=True)
    pool.give(name, pool.take(name, 0))
    return load_goals(name, seed, lambda: pytest.fail("the goals are not in the cache"))


def played(env, steps, *, seed=0):
    """Observations and rewards (T + 1, 40) of random actions, from a reset on."""
    rng, rows = np.random.default_rng(seed), [np.append(env.reset()[0], 0.0)]
    for _ in range(steps):
        observation, reward, *_ = env.step(rng.uniform(-1, 1, 4).astype(np.float32))
        rows.append(np.append(observation, reward))
    return np.array(rows)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_ml1_keeps_the_contract(check):
    sizes = {"count": 6} if "task_k" in check.__name__ else {"num_envs": 2}
    check(REACH, params=SHORT, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metaworld-ml10", "metaworld-ml45", "metaworld-mt10"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_the_many_classes_keep_the_contract(check, name):
    sizes = {"count": 6} if "task_k" in check.__name__ else {"num_envs": 2}
    check(name, params=SHORT, **sizes)


def test_goals_are_those_of_the_library_train_and_test():
    benchmark = metaworld.ML1("push-v3", seed=5)
    for tasks, split in ((benchmark.train_tasks, "train"), (benchmark.test_tasks, "test")):
        expected = np.array([pickle.loads(task.data)["rand_vec"] for task in tasks])
        (name,), seed = choose_classes("metaworld-ml1-push-v3", split, 5)
        np.testing.assert_array_equal(vectors(name, seed), expected)


def test_train_and_test_goals_have_none_in_common():
    train, test = (
        vectors("reach-v3", choose_classes("metaworld-ml1-reach-v3", split, 0)[1]) for split in ("train", "test")
    )
    assert not (train[:, None] == test[None]).all(-1).any()


@pytest.mark.parametrize(("name", "train", "test"), [("ml10", 10, 5), ("ml45", 45, 5)])
def test_test_classes_are_not_trained_on(name, train, test):
    seen, unseen = (set(choose_classes(f"metaworld-{name}", split, 0)[0]) for split in ("train", "test"))
    assert (len(seen), len(unseen)) == (train, test)
    assert not seen & unseen
    assert seen | unseen <= set(ALL_CLASSES)


def test_where_the_library_tests_on_a_train_class_the_goals_are_others():
    (seen, train), (tested, test) = (choose_classes("metaworld-ml25", split, 0) for split in ("train", "test"))
    assert (len(seen), len(tested)) == (25, 5)
    assert set(tested) & set(seen) == {"basketball-v3"}
    assert train != test


def test_the_classes_of_the_benchmarks_are_the_published_ones():
    def names(benchmark, split):
        return {name.removesuffix("-v3") for name in choose_classes(f"metaworld-{benchmark}", split, 0)[0]}

    assert names("ml10", "test") == {"drawer-open", "door-close", "shelf-place", "sweep-into", "lever-pull"}
    assert names("ml45", "test") == {"bin-picking", "box-close", "hand-insert", "door-lock", "door-unlock"}
    assert {"reach", "basketball", "peg-insert-side"} < names("ml10", "train")
    assert (len(names("mt10", "train")), len(names("mt50", "train")), len(ALL_CLASSES)) == (10, 50, 50)


def test_an_attempt_is_what_the_library_plays():
    env = make(REACH, num_envs=1, seed=3, split="test", params={"attempts": 1})
    shown = [env.reset()["obs"][0]]
    name, number = env.tasks(np.arange(1))[0].split("/")
    expected = played(library_env(name, vectors(name, 1)[int(number)]), 500)
    rng, rewards = np.random.default_rng(0), [0.0]
    for _ in range(500):
        result = env.step(rng.uniform(-1, 1, 4).astype(np.float32)[None])
        shown.append(result.observation["obs"][0])
        rewards.append(result.reward[0])
    assert result.terminated.all()
    assert result.truncated.all()
    np.testing.assert_array_equal(np.array(shown)[:, :39], expected[:, :39].astype(np.float32))
    np.testing.assert_array_equal(np.array(rewards, np.float32), expected[:, 39].astype(np.float32))
    assert (np.array(shown)[:, 36:39] == 0).all()
    env.close()


def test_attempts_begin_anew_in_the_step_that_ends_the_one_before():
    env = make(REACH, num_envs=1, seed=0, params={"attempts": 3, "attempt_steps": 4})
    assert (env.spec.horizon, env.spec.num_attempts, env.spec.spaces.observation["obs"].shape) == (12, 3, (40,))
    start = env.reset()["obs"][0]
    for t in range(1, 13):
        result = env.step(np.ones((1, 4), np.float32))
        over, boundary, shown = t == 12, t % 4 == 0, result.observation["obs"][0]
        assert result.attempt_end[0] == boundary
        assert result.reset[0] == shown[39] == (boundary and not over)
        assert result.terminated[0] == result.truncated[0] == over
        assert np.array_equal(shown[:39], start[:39]) == (boundary and not over)
    env.close()


def test_an_attempt_succeeds_if_any_step_did():
    env = make("metaworld-mt10", num_envs=1, seed=0, params={"attempt_steps": 120})
    env.play_only(["reach-v3/3"])
    observation, policy = env.reset(), SawyerReachV3Policy()
    assert env.tasks(np.arange(1)) == ["reach-v3/3"]
    assert env.goal_texts(np.arange(1)) == ["reach"]
    for t in range(120):
        away = t > 80  # by then the goal was reached; leave it again
        action = np.array([-1, -1, 1, 0]) if away else policy.get_action(observation["obs.state"][0, :39])
        result = env.step(np.clip(action, -1, 1)[None].astype(np.float32))
        observation = result.observation
    assert result.success.all()
    assert (observation["obs.state"][0, 36:39] != 0).any()
    goal = observation["obs.state"][0, 36:39]
    assert np.linalg.norm(observation["obs.state"][0, :3] - goal) > 0.05
    env.close()


def test_what_is_only_seen_makes_no_difference():
    check_simulation("coffee-pull-v3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_CLASSES)
def test_what_is_only_seen_makes_no_difference_in_any_class(name):
    check_simulation(name)


def check_simulation(name):
    """An object of the pool plays as one of the library, however it was used before."""
    pool = ClassPool(goal_seed=0, hide_goal=True)
    env = pool.take(name, 7)
    first = played(env, 60)
    pool.give(name, env)
    again = pool.take(name, 3)
    assert again is env
    played(again, 20, seed=1)
    pool.give(name, again)
    second = played(pool.take(name, 7), 60)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, played(library_env(name, vectors(name, 0)[7]), 60))


def test_few_objects_are_kept():
    shelf = Shelf(spare=1)
    pool = ClassPool(goal_seed=0, hide_goal=True, shelf=shelf)
    for name in ("reach-v3", "push-v3", "reach-v3"):
        pool.give(name, pool.take(name, 0))
        assert len(shelf) == 1
    pool.take("reach-v3", 1)
    assert len(shelf) == 0


def test_an_object_can_hide_its_goal_after_it_was_shown():
    shelf = Shelf()
    shown, hidden = (ClassPool(goal_seed=0, hide_goal=hide, shelf=shelf) for hide in (False, True))
    for _ in range(2):
        for pool in (shown, hidden):
            env = pool.take("reach-v3", 0)
            assert (env.reset()[0][36:] == 0).all() == (pool is hidden)
            pool.give("reach-v3", env)
    assert len(shelf) == 1


def test_a_simulation_is_made_when_it_is_first_needed():
    env = make("metaworld-ml45", num_envs=300, seed=0)
    assert all(single.env._env is None for single in env.envs)
    env.close()


@pytest.mark.parametrize("damage", ["cut", "noise", "shape", "nan"])
def test_a_damaged_cache_is_written_anew(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path))
    goals = np.random.default_rng(0).random((50, 3))
    drawn = iter(goals)
    np.testing.assert_array_equal(load_goals("reach-v3", 0, lambda: next(drawn)), goals)
    (path,) = tmp_path.glob("metaworld-*/reach-v3-0.npz")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "noise":
        path.write_bytes(b"\x00" * 100)
    else:
        broken = goals[:49] if damage == "shape" else np.where(goals > 0.5, np.nan, goals)
        np.savez(path, goals=broken)
    drawn = iter(goals)
    np.testing.assert_array_equal(load_goals("reach-v3", 0, lambda: next(drawn)), goals)
    np.testing.assert_array_equal(load_goals("reach-v3", 0, lambda: pytest.fail("not cached")), goals)


def test_where_nothing_can_be_kept_goals_are_drawn(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "file"))
    goals = np.random.default_rng(0).random((50, 3))
    for _ in range(2):
        drawn = iter(goals)
        np.testing.assert_array_equal(load_goals("reach-v3", 0, lambda: next(drawn)), goals)  # noqa: B023


def test_the_cache_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.delenv("AMAGO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "amago"


def test_global_randomness_is_left_as_it_was():
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    pool = ClassPool(goal_seed=1234, hide_goal=True)
    pool.take("reach-v3", 0)
    assert np.random.random() == expected


def test_wrong_names_are_refused_with_the_closest():
    with pytest.raises(UsageError, match=r"no class 'raech'; did you mean 'metaworld-ml1-reach'\?"):
        make("metaworld-ml1-raech", num_envs=1, seed=0)
    with pytest.raises(UsageError, match=r"its 50 classes: assembly, basketball, .* window-close"):
        make("metaworld-ml1-xyz", num_envs=1, seed=0)
    env = make(REACH, num_envs=1, seed=0)
    assert env.spec.name == "metaworld-ml1-reach-v3"
    with pytest.raises(InputMissing, match="'push-v3/1' is not a task"):
        env.play_only(["push-v3/1"])
    with pytest.raises(InputMissing, match="0 to 49"):
        env.play_only(["reach-v3/50"])
    env.close()


def test_the_papers_protocol_tests_multi_task_agents_on_the_goals_of_training():
    def goals(split, **params):
        env = make("metaworld-mt10", num_envs=1, seed=0, split=split, params=params)
        env.play_only(["reach-v3/7"])
        goal = env.reset()["obs.state"][0, 36:39].copy()
        env.close()
        return goal

    np.testing.assert_array_equal(goals("test", protocol="paper"), goals("train"))
    assert (goals("test") != goals("train")).any()
