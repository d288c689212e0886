"""What is measured of an environment, and the call without a recipe."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from pipelines import run
from pipelines.config.load import merge, read_toml, resolve
from pipelines.config.settings import CollectSettings, EnvSettings, Settings
from pipelines.envs.goals import GoalReward
from pipelines.envs.make import make
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.events import Event, Progress, Waiting, silent
from pipelines.lake.spaces import Box, Spaces
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.rollout.environment import find_env_model, with_actors
from pipelines.runs.evaluations import RandomPlay
from pipelines.stages.choices import Budget, Choices, EnvFacts
from pipelines.stages.ingest import open_source
from pipelines.stages.make_recipe import choose_limit, make_budget, make_recipe
from pipelines.stages.measure import SeenSteps, measure_data, measure_env, measure_rates
from tests.stages.test_run_offline import trajectories


def measured(name: str, *, seconds: float = 5.0, least: float = 0.0, **params: object) -> EnvFacts:
    env = resolve({"env": {"name": name, **params}}, env_model=find_env_model).env
    return measure_env(env, CollectSettings(), seconds=seconds, least=least, listener=silent)


@pytest.mark.system
@pytest.mark.parametrize("name", ["meta-frozen-lake", "bandit", "dark-room"])
def test_random_play_scores_what_is_known_exactly_of_it(name: str) -> None:
    exact = make(name, num_envs=1, seed=0).spec
    facts = measured(name, least=0.3)
    if exact.random_return is None:
        pytest.skip("not known")
    assert facts.return_mean is not None
    assert facts.return_error is not None
    assert abs(facts.return_mean - exact.random_return) < 5 * facts.return_error


@pytest.mark.system
def test_short_episodes_are_not_favoured() -> None:
    """A return equals the length of its episode, and counting whatever ends first would favour short ones: half of the
    episodes have 2 steps, the others 40, so that of those that end first nearly all are short."""
    facts = measured("tests.stages.test_make_recipe:Unequal", least=0.0)
    assert facts.episodes == 8
    assert facts.return_mean == pytest.approx(21.0)
    assert facts.length_max == 40


class Unequal(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self) -> None:
        self.length = (2, 40)[Unequal.made % 2]
        Unequal.made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), 1.0, self.time >= self.length, False, {}


class Endless(Unequal):
    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Broken(Unequal):
    def step(self, action):
        raise RuntimeError("no power")


class Stuck(Unequal):
    def step(self, action):
        time.sleep(3600)


@pytest.mark.system
@pytest.mark.parametrize("measure", ["actors", "play"])
def test_environment_that_hangs_while_it_is_measured_is_named(measure: str) -> None:
    env = EnvSettings(name="tests.stages.test_make_recipe:Stuck")

    def stop(event: Event) -> None:
        if isinstance(event, Waiting) and event.what.startswith(f"environment '{env.name}'"):
            raise KeyboardInterrupt

    calls = {
        "actors": lambda: with_actors(CollectSettings(), env, listener=stop),
        "play": lambda: measure_env(env, CollectSettings(), seconds=60, listener=stop),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[measure]()


@pytest.mark.system
def test_an_environment_whose_episodes_do_not_end_has_no_score_of_random_play() -> None:
    facts = measured("tests.stages.test_make_recipe:Endless", seconds=0.2)
    assert (facts.episodes, facts.return_mean, facts.success_mean) == (0, None, None)
    assert facts.length_max > 1


@pytest.mark.system
def test_episodes_that_may_not_end_get_a_limit() -> None:
    given = {"env": {"name": "tests.stages.test_make_recipe:Endless"}}

    def settings(document: Mapping[str, Any]) -> Settings:
        return resolve(merge(document, given), env_model=find_env_model)

    made = make_recipe(settings, given, Budget(minutes=0.001))
    assert made.document["env"] == {"name": "tests.stages.test_make_recipe:Endless", "max_episode_steps": 1000}
    given["env"]["max_episode_steps"] = 70  # type: ignore[assignment]
    assert "env" not in make_recipe(settings, given, Budget(steps=50)).document


@pytest.mark.parametrize(
    ("seen", "limit", "horizon"),
    [
        ({"episodes": 9, "length_min": 13, "length_mean": 5600.0, "length_max": 40_926}, 11_000, 11_000),
        ({"episodes": 9, "length_min": 1, "length_mean": 2.0, "length_max": 5}, 1000, None),  # as short as they were
        ({"episodes": 9, "length_min": 5, "length_mean": 5.0, "length_max": 5}, None, None),
        ({"length_max": 70}, 1000, 1000),
        ({"episodes": 9, "length_max": 200, "horizon": 200}, None, 200),
    ],
)
def test_a_policy_that_walks_in_circles_comes_to_an_end(
    seen: dict[str, Any], limit: int | None, horizon: int | None
) -> None:
    facts = EnvFacts(name="gym:CliffWalking-v1", action="Discrete", observation_size=1, **seen)
    choices = Choices({}, facts, Budget(minutes=1))
    choose_limit(choices, Settings(env={"name": facts.name}))  # type: ignore[arg-type]
    assert (choices.document().get("env", {}).get("max_episode_steps"), choices.facts.horizon) == (limit, horizon)


@pytest.mark.system
def test_a_broken_environment_is_its_own_error() -> None:
    with pytest.raises(StageFailed, match="no power"):
        measured("tests.stages.test_make_recipe:Broken")


def test_goal_rules_are_noticed() -> None:
    assert measured("goal-frozen-lake", seconds=0.1).has_goal_rule
    assert measured("mazerunner", seconds=0.1).has_goal_sequence
    assert not measured("tmaze", seconds=0.1).has_goals


def test_goal_rewards_are_noticed() -> None:
    facts = measured("tests.envs.test_goal_reward:Reach", seconds=0.1)  # in a process of its own
    assert facts.goal_reward == GoalReward(tolerance=0.3, reward=0.0, step_reward=-1.0, ends=True)
    repeated = measured("tests.envs.test_goal_reward:Reach", seconds=0.1, action_repeat=2)
    assert repeated.goal_reward is None  # rewards of two steps are added


def test_facts_of_spaces() -> None:
    pendulum = measured("gym:Pendulum-v1", seconds=0.2)
    assert (pendulum.action, pendulum.horizon, pendulum.observation_size) == ("Box", 200, 3)
    assert pendulum.one_by_one
    assert 0.9 < pendulum.observation_min <= 1 < pendulum.observation_max <= 8  # cosine, sine, angular velocity
    car = measured("gym:MountainCar-v0", seconds=0.2)
    assert 0 < car.observation_min <= 0.07  # its velocity
    assert 0.4 < car.observation_max <= 1.2
    lake = measured("meta-frozen-lake", attempts=3)
    assert (lake.action, lake.num_attempts, lake.one_by_one, lake.has_success) == ("Discrete", 3, False, True)


class Quiz(gymnasium.Env):
    """Numbers of the seed to name, one a step. `late`: all rewards come at the end; `moved`: what was answered is shown
    after ten questions; `ending`: a wrong answer after ten questions ends the episode; `streak`: every answer pays as
    much as there were right ones."""

    observation_space = gymnasium.spaces.Box(0, 3, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, rule: str = "") -> None:
        self.rule = rule

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.numbers, self.right = self.np_random.integers(3, size=41), 0
        return self._show(0), {}

    def _show(self, time: int) -> np.ndarray:
        self.time = time
        return np.array([self.numbers[time]], np.float32)

    def step(self, action):
        is_right = action == self.numbers[self.time]
        self.right += is_right
        shown, over = self._show(self.time + 1), self.time == 40
        if self.rule == "moved" and self.time > 10:
            shown = np.array([action], np.float32)
        if self.rule == "ending" and self.time > 10:
            over = over or not is_right
        reward = (self.right if over else 0.0) if self.rule == "late" else float(is_right)
        if self.rule == "streak":
            reward = float(self.right)
        return shown, reward, over, False, {}


@pytest.mark.system
@pytest.mark.parametrize(
    ("rule", "at_once", "forgets"),
    [
        ("", True, True),
        ("moved", False, True),
        ("late", False, False),
        ("ending", False, False),
        ("streak", False, False),
    ],
)
def test_rewards_at_once_where_no_action_changes_what_follows(rule: str, at_once: bool, forgets: bool) -> None:
    facts = measured("tests.stages.test_make_recipe:Quiz", rule=rule)
    assert (facts.rewards_at_once, facts.forgets_actions) == (at_once, forgets)


def test_actions_change_what_follows_in_control_tasks() -> None:
    for name in ("gym:CartPole-v1", "gym:Pendulum-v1"):
        facts = measured(name, seconds=0.1)
        assert (facts.rewards_at_once, facts.forgets_actions) == (False, False)


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "few", "many"),
    [("gym:Pendulum-v1", 0.1, 0.3), ("gym:MountainCarContinuous-v0", 0.05, 0.12), (f"{__name__}:Point", 0.01, 0.2)],
)
def test_motion_agrees_with_a_second_computation(name: str, few: float, many: float) -> None:
    """By numpy's statistics over whole episodes."""
    facts = measured(name, least=0.2)
    env = make(name, num_envs=64, seed=9)
    rng, rows = np.random.default_rng(0), [np.concatenate(list(env.reset().values()), axis=1)]
    for _ in range(facts.length_max - 1):
        seen = env.step(rng.uniform(-1, 1, (64, *env.spec.spaces.action.shape)).astype(np.float32)).observation
        rows.append(np.concatenate(list(seen.values()), axis=1))
    whole = np.array(rows, dtype=np.float64)
    changes = np.diff(whole, axis=0)
    moving = changes.any(axis=(0, 1))
    shares = np.square(changes).mean(axis=(0, 1))[moving] / whole.var(axis=(0, 1))[moving]
    change = np.median(np.sqrt(shares))
    along = (changes[1:] * changes[:-1]).sum(axis=(0, 1)) / np.maximum(np.square(changes).sum(axis=(0, 1)), 1e-12)
    assert facts.step_change == pytest.approx(change, rel=0.3)
    assert few < facts.step_change < many
    assert facts.inertia == pytest.approx(along[moving].max(), abs=0.1)


@pytest.mark.parametrize(
    ("name", "alike", "costs"),
    [("gym:CartPole-v1", True, False), ("gym:MountainCar-v0", False, True), ("gym:Pendulum-v1", False, True)],
)
def test_rewards_that_are_the_same_in_every_step_or_costs(name: str, alike: bool, costs: bool) -> None:
    """MountainCar's are the same, but below 0: an early end is what pays there."""
    assert (measured(name).pays_alike, measured(name).only_costs) == (alike, costs)


class Mass(gymnasium.Env):
    """A force on a mass for 600 steps; its place and speed are observed, and a constant."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place, self.speed, self.time = 0.0, 0.0, 0
        return self._show(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._move(float(action[0]))
        self.time += 1
        return self._show(), -abs(self.place), False, self.time == 600, {}

    def _move(self, force: float) -> None:
        self.speed += 0.02 * (force - self.place)
        self.place += 0.02 * self.speed

    def _show(self) -> np.ndarray:
        return np.array([self.place, self.speed, 3.0], np.float32)


class Point(Mass):
    """A point that is moved at once, as little in a step."""

    def _move(self, force: float) -> None:
        self.place += 0.02 * force


@pytest.mark.system
def test_actions_are_repeated_where_steps_are_fine() -> None:
    made = {}
    for name in ("Mass", "Point"):
        given = {"env": {"name": f"{__name__}:{name}"}, "train": {"device": "cpu"}}
        settle = functools.partial(settle_over, given)
        made[name] = make_recipe(settle, given, Budget(steps=4_000))
        assert settle(made[name].document).env.params.get("action_repeat", 1) == {"Mass": 4, "Point": 1}[name]
    row = next(row for row in made["Mass"].choices if row.setting == "env.action_repeat")
    assert "of its spread" in row.reason
    assert made["Mass"].plan["measured"]["length_mean"] == 150


class Hidden(Mass):
    """A mass whose speed is not observed, whose place is rewarded by its distance to a goal that is not observed, whose
    observation is noisy, or that is moved to another place in every step. `rare`: 1 is paid far out alone."""

    def __init__(
        self, speed: bool = False, goal: bool = False, noise: float = 0.0, drawn: bool = False, rare: bool = False
    ) -> None:
        self.hides_speed, self.has_goal, self.noise, self.is_drawn, self.is_rare = speed, goal, noise, drawn, rare

    def reset(self, **options: Any) -> tuple[np.ndarray, dict]:
        super().reset(**options)
        self.goal = self.np_random.normal() if self.has_goal else 0.0
        self.place, self.speed = self.np_random.normal(size=2)
        return self._show(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.is_drawn:
            self.place, self.speed = self.np_random.normal(size=2)
        seen, _, *_ = super().step(action)
        reward = float(self.place > 3) if self.is_rare else -abs(self.place - self.goal)
        return seen, reward, False, self.time == 150, {}

    def _show(self) -> np.ndarray:
        shown = super()._show() + self.noise * self.np_random.normal(size=3).astype(np.float32)
        shown[1] *= not self.hides_speed
        return shown


@pytest.mark.system
@pytest.mark.parametrize(
    ("hidden", "shows"),
    [
        ({}, True),
        ({"speed": True}, False),
        ({"goal": True}, False),
        ({"noise": 0.5}, False),
        ({"drawn": True}, False),
        ({"rare": True}, True),
    ],
)
def test_random_play_shows_whether_there_is_something_to_remember(
    hidden: dict[str, Any], shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.stages.measure.is_users", lambda name: False)  # no process of its own
    assert measured(f"{__name__}:Hidden", least=0.2, **hidden).shows_state is shows


def settle_over(given: Mapping[str, Any], document: Mapping[str, Any]) -> Settings:
    return resolve(merge(document, given), env_model=find_env_model)


@pytest.mark.system
def test_measuring_can_be_interrupted() -> None:
    heard: list[Event] = []

    def stop(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Progress):
            raise KeyboardInterrupt

    env = EnvSettings(name="tests.stages.test_make_recipe:Endless")
    with pytest.raises(KeyboardInterrupt):
        measure_env(env, CollectSettings(), seconds=60, listener=stop)


@pytest.mark.system
@pytest.mark.parametrize("name", ["gym:CartPole-v1", "gym:Pendulum-v1", "tests.cli.sorter:Sorter"])
def test_rates_of_any_actions(name: str) -> None:
    document = {"env": {"name": name}, "size": "tiny", "collect": {"actors": 2, "workers": 0}}
    document |= {"train": {"context_length": 4, "batch_size": 2}}
    rates = measure_rates(resolve(document, env_model=find_env_model), seconds=0.01, listener=silent)
    assert rates.in_cpu_seconds
    assert rates.update_seconds > 0
    assert rates.collect_seconds > 0


def test_an_agent_that_learns_from_labels_needs_some_before_anything_is_measured(tmp_path: Path) -> None:
    listened: list[object] = []
    with pytest.raises(UsageError, match="nothing labels what is collected"):
        run(env="tmaze", directory=tmp_path / "run", settings={"agent.target": "label"}, listener=listened.append)
    assert not any(isinstance(event, Progress) for event in listened)


def record_pushes() -> list[dict[str, Any]]:
    """Ten episodes of a point that is pushed, of 20 to 29 steps each: return 2 for each step, and the longer ones 1
    more for each."""
    rng, episodes = np.random.default_rng(5), []
    for number in range(10):
        length = 20 + number
        actions = rng.uniform(-1, 1, (length, 1)).astype(np.float32)
        places = np.concatenate((np.zeros((1, 1)), np.cumsum(actions, axis=0)))
        rewards = np.full(length, 3.0 if number >= 5 else 2.0)
        observations = np.concatenate((places, 40 * places), axis=1).astype(np.float32)
        episodes.append({"observations": observations, "actions": actions, "rewards": rewards, "terminated": False})
    return episodes


@pytest.mark.system
def test_a_dataset_is_measured_without_an_environment() -> None:
    given = {"source": {"name": f"{__name__}:record_pushes"}, "train": {"context_length": 4}}

    def settings(document: Mapping[str, Any]) -> Settings:
        return resolve(merge(document, given), env_model=find_env_model)

    heard: list[Event] = []
    made = make_recipe(settings, given, Budget(minutes=0.02), listener=heard.append)
    returns = sorted(float(each["rewards"].sum()) for each in record_pushes())
    assert made.plan["data"] == {
        "trajectories": 10,
        "steps": sum(range(20, 30)),
        "total_steps": sum(range(20, 30)),
        "is_whole": True,
        "return_mean": np.mean(returns),
        "return_high": returns[-1],
    }
    facts = made.plan["measured"]
    largest = max(float(np.abs(each["observations"]).max()) for each in record_pushes())
    assert facts["observation_max"] == pytest.approx(largest, rel=0.05)
    assert (facts["reward_max"], facts["length_min"], facts["length_max"]) == (3.0, 20, 29)
    assert (facts["action"], facts["action_size"], facts["observation_size"]) == ("Box", 1, 2)
    assert made.document["agent"]["timestep"]["symlog"]
    assert [entry["stage"] for entry in made.document["stages"]] == ["ingest", "train"]
    assert any("return 62.5" in str(getattr(event, "text", "")) for event in heard)


def test_pieces_of_a_recorded_episode_are_one_return() -> None:
    given = {"source": {"name": f"{__name__}:record_pushes", "longest": 7}}
    with contextlib.closing(open_source(resolve(given, env_model=find_env_model))) as source:
        found = measure_data(source, None, seconds=10, device="cpu", listener=silent)
    assert (found.data.trajectories, found.facts.length_min, found.facts.length_max) == (10, 20, 29)


def test_a_large_dataset_is_measured_in_part() -> None:
    settings = resolve({"source": {"name": f"{__name__}:record_pushes"}}, env_model=find_env_model)
    with contextlib.closing(open_source(settings)) as source:
        whole = list(source.batches())
        source.batches = lambda start=0: iter(whole * 2)  # type: ignore[method-assign]
        found = measure_data(source, None, seconds=-1, device="cpu", listener=silent)
    assert (found.data.trajectories, found.data.is_whole) == (10, False)


def test_steps_that_are_not_imported_do_not_count() -> None:
    settings = resolve({"source": {"name": f"{__name__}:record_pushes"}}, env_model=find_env_model)
    with contextlib.closing(open_source(settings)) as source:
        assert measure_data(source, None, steps=50, seconds=9, device="cpu", listener=silent).data.total_steps == 50


def test_a_dataset_without_usable_steps_is_named() -> None:
    settings = resolve({"source": {"name": f"{__name__}:record_pushes"}}, env_model=find_env_model)
    with contextlib.closing(open_source(settings)) as source:
        source.batches = lambda start=0: iter(())  # type: ignore[method-assign]
        with pytest.raises(InputMissing, match="'record_pushes' has no usable steps"):
            measure_data(source, None, seconds=1, device="cpu", listener=silent)


once = iter(record_pushes())


def test_a_dataset_that_can_be_read_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can be read once"):
        run(source=f"{__name__}:once", directory=tmp_path / "run", minutes=0.01)


def test_the_state_is_looked_for_in_recorded_steps() -> None:
    """What moves the point is shown; where only the place before is, it is not."""

    def look(observations: Callable[[np.ndarray], np.ndarray]) -> bool | None:
        rng = np.random.default_rng(1)
        force = rng.uniform(-1, 1, (16, 200, 1))
        speed = np.cumsum(force, axis=1)
        state = np.concatenate((np.cumsum(speed, axis=1), speed), axis=2)
        seen = np.concatenate((np.zeros((16, 1, 2)), state), axis=1)
        rows = observations(seen).astype(np.float32).reshape(16 * 201, -1)
        taken = np.concatenate((np.zeros((16, 1, 1)), force), axis=1).astype(np.float32)
        columns = {"obs": rows, "action": taken.reshape(-1, 1), "reward": np.zeros(16 * 201, np.float32)}
        spaces = Spaces(observation={"obs": Box(shape=rows.shape[1:])}, action=Box(shape=(1,), low=(-1,), high=(1,)))
        infos = [TrajectoryInfo(seed=number) for number in range(16)]
        seen_again = SeenSteps.replay(Trajectories(columns, [201] * 16, infos), spaces, seconds=60)
        return seen_again.transitions.show_state(rewards_are_known=True)

    assert look(lambda state: state) is True
    assert look(lambda state: state[..., 1:] ** 2 % 1.0) is False


def test_labels_that_a_dataset_lacks_are_missed_before_it_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no labels"):
        run(source=f"{__name__}:record_pushes", directory=tmp_path / "run", settings={"agent.target": "label"})


@pytest.mark.system
def test_a_call_with_a_dataset_learns_from_it_and_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "tests.stages.test_run_offline:trajectories"
    call = functools.partial(run, env="tmaze", source=source, minutes=0.03, settings={"env.corridor": 4})
    done = call()
    assert (done.status, done.run) == ("done", Path("runs/trajectories"))
    assert done.metrics["ingested"] == 60
    assert done.metrics["steps"] == 0
    assert done.metrics["updates"] > 0
    assert done.metrics["evaluated_split"] == "test"
    assert call().status == "skipped"
    with pytest.raises(UsageError, match="another command"):
        run(env="tmaze", directory="runs/trajectories", minutes=0.03, settings={"env.corridor": 4})


def record_riches() -> list[dict[str, Any]]:
    """T-Mazes that paid more than any does."""
    return [{**each, "rewards": np.full(len(each["rewards"]), 100.0)} for each in trajectories()]


@pytest.mark.system
def test_a_score_below_what_was_recorded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomPlay, "find", lambda *_: None)  # which would be told first
    source = f"{__name__}:record_riches"
    done = run(env="tmaze", source=source, directory=tmp_path / "run", minutes=0.02, settings={"env.corridor": 4})
    assert done.metrics["recorded_return"] == 500
    assert "the score is below what was recorded" in done.remark
    assert done.remark.endswith("with another --run")
    assert "return in the dataset" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.system
def test_a_call_without_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"collect.workers": 0, "env.corridor": 3}
    done = run(env="tmaze", steps=200, settings=small)
    assert (done.status, done.run) == ("done", Path("runs/tmaze"))
    assert run(env="tmaze", steps=200, settings=small).status == "skipped"
    assert read_toml(Path("runs/tmaze/config.toml"))["env"]["corridor"] == 3
    with pytest.raises(UsageError, match="another command"):
        run(env="tmaze", steps=201, settings=small)
    with pytest.raises(UsageError, match="neither a recipe nor an environment"):
        run()
    with pytest.raises(UsageError, match="for runs without stages"):
        run("quickstart", minutes=1)
    with pytest.raises(UsageError, match="exclude each other"):
        run(env="tmaze", minutes=1, steps=1)
    for budget in ({"steps": 100.5}, {"steps": "100"}, {"steps": True}, {"minutes": "1"}, {"minutes": np.nan}):
        with pytest.raises(UsageError, match="is not a budget"):
            run(env="tmaze", **budget)  # type: ignore[arg-type]
    assert make_budget(np.float32(0.5), None) == Budget(minutes=0.5)  # type: ignore[arg-type]
    assert isinstance(make_budget(None, np.int64(7)).steps, int)  # type: ignore[arg-type]
