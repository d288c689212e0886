"""Learners of actors: against Q-learning written as in the textbook, one actor and one step at a time."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config.settings import LearnerSettings, PPOSettings, Settings
from pipelines.envs.make import make
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.events import Notice
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.rollout import learners
from pipelines.rollout.learners import QLearning, make_learner, replay_histories
from pipelines.rollout.plan import NamedPolicy
from pipelines.rollout.ppo import PPO
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
        learner.learn(some, before, action, reward, ended, ended, after)
        for i, actor in enumerate(some.tolist()):
            expected[actor].learn(before["cell"][i], action[i], float(reward[i]), ended[i], after["cell"][i])
    for cell in range(6):
        seen = {"cell": np.full(actors, cell, np.int32), "place": np.full((actors, 2), (cell % 2, cell // 2), "f4")}
        acted = learner.act(seen, np.zeros(actors), np.zeros(actors), np.ones(actors))
        assert all(int(acted[actor]) in expected[actor].best(cell) for actor in range(actors))


def test_exploration_falls_with_the_updates_of_each_actor() -> None:
    settings = LearnerSettings(epsilon_last=0.2, epsilon_steps=10)
    learner = QLearning(SPACES, settings, num_actors=3, seed=0, acting=0)
    rng = np.random.default_rng(0)
    for _ in range(5):
        one = observe(rng, 1)
        over = np.array([True])
        learner.learn(np.array([1]), one, np.array([0]), np.zeros(1, "f4"), over, over, one)
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
        make_learner(name, spaces, GREEDY, num_actors=1, seed=0, acting=0)


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "_MOST_BYTES", 1 << 14)
    learner = QLearning(
        Spaces(observation={"x": Box(shape=(1,))}, action=Discrete(n=2)), GREEDY, num_actors=1, seed=0, acting=0
    )
    steps = ({"x": np.array([[value]], "f4")} for value in range(5000))
    with pytest.raises(StageFailed, match="have outgrown"):
        [learner.act(step, np.zeros(1), np.zeros(1), np.zeros(1)) for step in steps]


class WrittenOutPPO:
    """Schulman et al. (2017) for a single actor, by torch's modules, optimiser and clipping, and generalised advantages
    (Schulman et al. 2016) by their definition as a sum."""

    def __init__(self, weights: list[torch.Tensor], settings: PPOSettings) -> None:
        self.settings = settings
        self.networks: list[torch.nn.Sequential] = []
        for part in (weights[:4], weights[4:8]):
            layers: list[torch.nn.Module] = []
            for kernel, bias in zip(part[::2], part[1::2], strict=True):
                layer = torch.nn.Linear(*kernel.shape)
                layer.weight.data, layer.bias.data = kernel.T.clone(), bias[0].clone()
                layers += [torch.nn.Tanh(), layer]
            self.networks.append(torch.nn.Sequential(*layers[1:]))
        self.log_std = torch.nn.Parameter(weights[8][0].clone()) if len(weights) == 9 else None
        own = [each for network in self.networks for each in network.parameters()]
        own += [] if self.log_std is None else [self.log_std]
        self.parameters, self.optimizer = own, torch.optim.Adam(own, lr=settings.learning_rate)
        self.updates = 0

    def distribution(self, seen: torch.Tensor) -> torch.distributions.Distribution:
        output = self.networks[0](seen)
        if self.log_std is None:
            return torch.distributions.Categorical(logits=output)
        return torch.distributions.Independent(torch.distributions.Normal(output, self.log_std.exp()), 1)

    def learn(self, steps: list[tuple[Any, ...]]) -> None:
        chosen, order = self.settings, np.random.default_rng([4, 7, self.updates])
        self.updates += 1
        seen, action, reward, ended, over, following = (
            torch.tensor(np.array(each)) for each in zip(*steps, strict=True)
        )
        with torch.no_grad():
            value, after = self.networks[1](seen)[:, 0], self.networks[1](following)[:, 0]
            old = self.distribution(seen).log_prob(action)
        error = reward + chosen.discount * after * ~ended - value
        advantage = torch.zeros(len(steps))
        for t in range(len(steps)):
            for k in range(t, len(steps)):
                advantage[t] += (chosen.discount * chosen.trace_decay) ** (k - t) * error[k]
                if over[k] or ended[k]:
                    break
        target = advantage + value
        for _ in range(chosen.passes):
            for rows in np.array_split(order.permutation(len(steps)), len(steps) // chosen.batch_size):
                now = self.distribution(seen[rows])
                weight = advantage[rows]
                weight = (weight - weight.mean()) / (weight.std() + 1e-8)
                ratio = (now.log_prob(action[rows]) - old[rows]).exp()
                clipped = ratio.clip(1 - chosen.clip, 1 + chosen.clip)
                loss = (
                    -torch.min(ratio * weight, clipped * weight).mean() - chosen.entropy_weight * now.entropy().mean()
                )
                loss = loss + 0.5 * torch.nn.functional.mse_loss(self.networks[1](seen[rows])[:, 0], target[rows])
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()


@pytest.mark.parametrize("action", [Discrete(n=3), Box(shape=(2,))], ids=["choices", "continuous"])
def test_every_actor_follows_ppo_as_written_out(action: Discrete | Box) -> None:
    """Whichever other actors have a step at the same time, and through two updates."""
    chosen = PPOSettings(steps=16, batch_size=8, passes=2, learning_rate=0.01, hidden=(5,))
    spaces = Spaces(observation={"cell": Discrete(n=6), "place": Box(shape=(2,))}, action=action)
    learner = PPO(spaces, LearnerSettings(ppo=chosen), num_actors=3, seed=4, acting=4)
    expected = [WrittenOutPPO([each[actor] for each in learner._weights], chosen) for actor in range(3)]
    rng, last = np.random.default_rng(0), observe(np.random.default_rng(1), 3)
    kept: list[list[tuple[Any, ...]]] = [[], [], []]
    for _ in range(70):
        some = np.sort(rng.choice(3, size=rng.integers(1, 4), replace=False))
        before, after = {name: values[some] for name, values in last.items()}, observe(rng, len(some))
        if isinstance(action, Discrete):
            acted = rng.integers(3, size=len(some))
        else:
            acted = rng.uniform(-1, 1, (len(some), 2)).astype("f4")
        reward = (rng.normal(size=len(some)) * rng.choice([0.1, 10])).astype("f4")  # some gradients are clipped
        over = rng.random(len(some)) < 0.2
        ended = over & (rng.random(len(some)) < 0.5)
        learner.learn(some, before, acted, reward, ended, over, after)
        for i, actor in enumerate(some.tolist()):
            seen, following = (
                np.r_[np.eye(6)[each["cell"][i]], each["place"][i]].astype("f4") for each in (before, after)
            )
            kept[actor].append((seen, acted[i], reward[i], ended[i], over[i], following))
            if len(kept[actor]) == 16:
                expected[actor].learn(kept[actor])
                kept[actor] = []
            for name in last:
                last[name][actor] = after[name][i]
    for actor, one in enumerate(expected):
        assert one.updates == learner.version[actor] >= 2
        layers = [layer for network in one.networks for layer in network if isinstance(layer, torch.nn.Linear)]
        written = [values for layer in layers for values in (layer.weight.T, layer.bias[None])]
        written += [] if one.log_std is None else [one.log_std[None]]
        # Rounding grows through clipped ratios; a step of Adam moves a weight by 0.01.
        torch.testing.assert_close([each[actor] for each in learner._weights], written, rtol=0, atol=1e-3)


def rooms(steps: int, *, seed: int = 0, **table: Any) -> Settings:
    room = {"name": "dark-room", "size": 3, "attempts": 1, "attempt_steps": 5}
    own = {"tasks": GOALS, "copies": 2, "steps": steps, "policy": "learner:q-learning", **table}
    return Settings.model_validate({"env": room, "collect": own, "seed": seed})


def learn_from(lake: Lake, where: str = "true") -> dict[str, TextbookQ]:
    """What each history teaches the textbook's learner."""
    reader, taught = Reader(lake), dict[str, TextbookQ]()
    text = f"select uid, history from trajectories where {where} order by history_index, first_step"
    for uid, history in query(lake, text)[1]:
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


@pytest.mark.system
@pytest.mark.parametrize(
    "own",
    [{"learner": {"epsilon_steps": 500}}, {"policy": "learner:ppo", "learner": {"ppo": {"steps": 64}}}],
    ids=["q-learning", "ppo"],
)
def test_learners_improve(tmp_path: Path, own: dict[str, Any]) -> None:
    collect.run(rooms(6000, **own), run=tmp_path / "run")
    found = query(Lake(tmp_path / "run/lake"), "select avg(first_return), avg(last_return) from histories")[1]
    ((first, last),) = found
    assert last > first + 1.5


@pytest.mark.parametrize("clock", [True, False])
def test_a_clock_among_the_observations_is_reported(tmp_path: Path, clock: bool) -> None:
    env = {"name": "dark-key-door", "size": 5, "horizon": 50, "show_clock": clock}
    collecting = {"policy": "learner:q-learning", "tasks": 2, "steps": 2400}
    told: list[Any] = []
    settings = Settings.model_validate({"env": env, "collect": collecting})
    collect.run(settings, run=tmp_path / "run", listener=told.append)
    reported = [event.text for event in told if isinstance(event, Notice) and "such as a clock" in event.text]
    assert len(reported) == clock
    assert not clock or "different observations in 1,200 steps of each actor" in reported[0]


@pytest.mark.system
def test_a_resumed_ppo_has_the_weights_that_its_histories_teach(tmp_path: Path) -> None:
    chosen = LearnerSettings(ppo=PPOSettings(steps=16, batch_size=8))
    for steps in (240, 600):
        collect.run(rooms(steps, policy="learner:ppo", learner=chosen.model_dump()), run=tmp_path / "run")
    lake = Lake(tmp_path / "run/lake")
    (name,) = query(lake, "select distinct collector from trajectories")[1][0]
    spaces, reader = lake.only_schema().spaces, Reader(lake)
    again, one_by_one = (make_learner("learner:ppo", spaces, chosen, num_actors=6, seed=0) for _ in range(2))
    assert replay_histories(lake, name, again, 6).tolist() == [20] * 6
    episodes = query(lake, "select uid, history from trajectories order by history, history_index")[1]
    for uid, history in episodes:
        columns, actor = reader.read(uid).columns, int(history.split("/")[1])
        for t in range(rows := len(columns["reward"]) - 1):
            before, after = ({"obs": columns["obs"][[row]]} for row in (t, t + 1))
            ended, over = np.array([columns["terminated"][t + 1] != 0]), np.array([t + 1 == rows])
            result = columns["action"][[t + 1]], columns["reward"][[t + 1]], ended, over, after
            one_by_one.learn(np.array([actor]), before, *result)
    assert isinstance(again, PPO)
    assert isinstance(one_by_one, PPO)
    assert again.version.tolist() == one_by_one.version.tolist() == [100 // 16] * 6
    torch.testing.assert_close(again._weights, one_by_one._weights)


def test_a_resumed_ppo_begins_with_the_same_weights_and_draws_other_actions() -> None:
    env = make("dark-room", num_envs=4, seed=0)
    named = NamedPolicy.of(rooms(100, policy="learner:ppo", seed=3), rooms(100, policy="learner:ppo").collect)
    first, resumed = (named(env, seed).policy for seed in (1, 2))
    assert isinstance(first, PPO)
    assert isinstance(resumed, PPO)
    torch.testing.assert_close(first._weights, resumed._weights, rtol=0, atol=0)
    seen = env.reset()
    acted = [[each.act(seen, *[np.zeros(4)] * 3).tolist() for _ in range(20)] for each in (first, resumed)]
    assert acted[0] != acted[1]


@pytest.mark.parametrize("action", [Discrete(n=3), Box(shape=(2,))], ids=["discrete", "box"])
def test_networks_of_an_actor_do_not_depend_on_how_many_there_are(action: Discrete | Box) -> None:
    spaces = Spaces(observation=SPACES.observation, action=action)
    few, many = (make_learner("learner:ppo", spaces, LearnerSettings(), num_actors=n, seed=7) for n in (2, 5))
    rng = np.random.default_rng(0)
    seen = observe(rng, 50)
    for actor in (0, 1):
        best = few.choose_best(actor, seen)
        assert best.shape == (50, *action.shape)
        np.testing.assert_array_equal(best, many.choose_best(actor, seen))
    assert not np.array_equal(few.choose_best(0, seen), few.choose_best(1, seen))


@pytest.mark.parametrize("where", ["history_index = 1", "history_index = 3", "true"], ids=["middle", "last", "all"])
def test_a_learner_whose_episodes_have_gone_is_not_resumed(tmp_path: Path, where: str) -> None:
    collect.run(rooms(120), run=tmp_path / "run")
    expire(Lake(tmp_path / "run/lake"), RetentionLimits(where=where))
    with pytest.raises(InputMissing, match="have gone from lake"):
        collect.run(rooms(240), run=tmp_path / "run")


@pytest.mark.system
@pytest.mark.parametrize("policy", ["learner:q-learning", "random"])
def test_several_collectors_go_on_with_their_histories(tmp_path: Path, policy: str) -> None:
    for steps in (240, 480):
        collect.run(rooms(steps, policy=policy, collectors=2), run=tmp_path / "run")
    text = "select list(history_index order by history_index), max(policy_version) from trajectories group by history"
    found = query(Lake(tmp_path / "run/lake"), text)[1]
    assert len(found) == 12
    assert all(order == [*range(8)] for order, _ in found)
    assert policy == "random" or {version for _, version in found} == {40}
    if policy != "random":
        expire(Lake(tmp_path / "run/lake"), RetentionLimits(where="history_index = 7"))
        with pytest.raises(InputMissing, match="have gone from lake"):
            collect.run(rooms(600, policy=policy, collectors=2), run=tmp_path / "run")


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
