"""The log-probabilities of executed actions, against a forward pass over whole episodes and against frequencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config.settings import ExplorationSettings, Settings
from pipelines.envs.env import Env
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.envs.make import make
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.reading import join_pieces
from pipelines.lake.schema import LOGP, Schema
from pipelines.lake.spaces import Box, Discrete, MultiBinary, Spaces, make_grid
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.rollout.policies import FunctionPolicy, Policy, RandomPolicy
from pipelines.rollout.rollout import Cutting, Recording, Rollout
from pipelines.stages import collect, run, train
from tests.learning.factories import settings as agent_settings

SPACES = Spaces(observation={"obs": Box(shape=(2,))}, action=Discrete(n=3))
EPSILON = 0.3
PLAIN = ExplorationSettings(kind="plain", start=EPSILON, end=EPSILON, randomize=False)


def play(
    env: Env,
    policy: Policy,
    *,
    explored: Exploration | None = None,
    chunk: int = 0,
    logp: bool = True,
    steps: int = 120,
) -> list[Trajectory]:
    stored: list[Trajectory] = []
    recording = Recording(sink=stored.extend, keep_unfinished=True, cutting=Cutting(steps=chunk), logp=logp)
    rollout = Rollout(env, policy, exploration=explored, recording=recording)
    rollout.run(steps=steps)
    rollout.finish()
    return stored


def room(**options: Any) -> Env:
    return make("dark-room", num_envs=3, seed=0, params={"size": 5, "attempts": 2, "attempt_steps": 7}, **options)


def pendulum() -> Env:
    return make("gym:Pendulum-v1", num_envs=3, seed=0, params={"max_episode_steps": 15})


def made_agent(env: Env, **changes: Any) -> Agent:
    """An agent whose policy is far from uniform."""
    agent = Agent(env.spec.spaces, agent_settings("gru", **changes)).eval()
    for parameter in agent.heads.actor.parameters():
        parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return agent


@torch.no_grad()
def probabilities(agent: Agent, columns: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The acting policy's probabilities (T, n) in an episode, and the numbers (T,) of the choices made there."""
    rows = {name: torch.from_numpy(np.asarray(columns[name]))[None] for name in (*agent.spaces.observation, "action")}
    reward, time = torch.from_numpy(columns["reward"])[None], torch.arange(len(columns["reward"]))[None]
    tokens = agent.timestep({name: rows[name] for name in agent.spaces.observation}, rows["action"], reward, time)
    params = agent.heads.actor.acting(agent.sequence(tokens, time))[0, :-1]
    policy: Any = agent.make_player()
    return policy.probs(params).double().numpy(), policy.index(rows["action"][0, 1:]).numpy()


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("explores", [False, True])
@pytest.mark.parametrize("grid", [False, True])
def test_agents_store_what_a_pass_over_the_episode_gives(grid: bool, explores: bool, greedy: bool) -> None:
    env = pendulum() if grid else room()
    agent = made_agent(env, **({"actor": {"distribution": "grid", "grid_points": 3, "hidden": [16]}} if grid else {}))
    policy = AgentPolicy(agent, num_actors=3, capacity=40, greedy=greedy, seed=1)
    points, action = make_grid(env.spec.spaces.action, 3) if grid else None, env.spec.spaces.action
    explored = Exploration(PLAIN, action, 3, horizon=env.spec.horizon, grid=points) if explores else None
    epsilon, off_policy = EPSILON if explores else 0.0, 0
    for each in play(env, policy, explored=explored):
        probs, taken = probabilities(agent, dict(each.columns))
        if greedy:
            off_policy += int((probs.argmax(1) != taken).sum())
            probs = np.eye(probs.shape[1])[probs.argmax(1)]
        expected = (1 - epsilon) * probs[np.arange(len(taken)), taken] + epsilon / probs.shape[1]
        np.testing.assert_allclose(np.exp(each.columns[LOGP][1:]), expected, rtol=1e-4)
        assert each.columns[LOGP][0] == 0
    assert (off_policy > 5) == (greedy and explores)


@pytest.mark.system
def test_mixed_probabilities_are_frequencies() -> None:
    """Half of the actors may choose two actions of four, the others all."""
    spaces = Spaces(observation={"obs.legal": MultiBinary(n=4)}, action=Discrete(n=4))
    legal, count = LegalActions("obs.legal", spaces), 40_000
    mask = np.where(np.arange(count)[:, None] % 2, [[1, 0, 1, 0]], [[0, 0, 0, 0]]).astype(
        "u1"
    )  # of none, all are legal
    seen, chosen = {"obs.legal": mask}, np.full(count, 2, dtype="i4")
    exploration = Exploration(PLAIN, spaces.action, count, legal=legal)
    actions, epsilon = exploration(chosen, np.zeros(count, dtype="i8"), seen)
    for odd in (0, 1):
        rows = np.arange(count) % 2 == odd
        for action in range(4):
            log_prob = np.log(np.where(np.full(count, action) == chosen, 1.0, 1e-300))
            given = np.exp(exploration.mix(log_prob, np.full(count, action), epsilon, seen))[rows]
            assert given == pytest.approx((actions[rows] == action).mean(), abs=0.01)


def test_random_play_is_uniform_over_what_is_legal() -> None:
    policy = RandomPolicy(Discrete(n=5), seed=0)
    policy.act({}, np.zeros(2, "i4"), np.zeros(2, "f4"), np.zeros(2, "i8"))
    np.testing.assert_allclose(np.exp(policy.log_prob(np.array([4, 0]))), 0.2)
    spaces = Spaces(observation={"obs.legal": MultiBinary(n=5)}, action=Discrete(n=5))
    masked = RandomPolicy(spaces.action, seed=0, legal=LegalActions("obs.legal", spaces))
    seen = {"obs.legal": np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 1]], dtype="u1")}
    masked.act(seen, np.zeros(2, "i4"), np.zeros(2, "f4"), np.zeros(2, "i8"))
    np.testing.assert_allclose(np.exp(masked.log_prob(np.array([2, 4]))), [0.5, 1.0])
    np.testing.assert_array_equal(np.exp(masked.log_prob(np.array([1, 0]))), [0.0, 0.0])


def test_pieces_have_the_log_probabilities_of_whole_episodes() -> None:
    agent = made_agent(room())
    whole, pieces = (play(room(), AgentPolicy(agent, num_actors=3, capacity=40), chunk=chunk) for chunk in (0, 5))
    joined = join_pieces([each.columns for each in pieces if each.info.episode == pieces[0].info.episode])
    same = next(each for each in whole if np.array_equal(each.columns["action"], joined["action"]))
    np.testing.assert_array_equal(joined[LOGP], same.columns[LOGP])


@pytest.mark.system
def test_parts_have_the_log_probabilities_of_all_actors(tmp_path: Path) -> None:
    stored = []
    for workers in (0, 2):
        env = {"name": "dark-room", "size": 5, "attempts": 1, "attempt_steps": 7}
        wanted = {"steps": 200, "actors": 4, "logp": True, "workers": workers, "explore": True}
        place = tmp_path / f"{workers}"
        collect.run(Settings.model_validate({"env": env, "collect": wanted}), lake=place)
        rows = Lake(place).sql("select logp, action from steps where t > 0")
        stored.append(sorted((row["logp"], row["action"]) for row in rows))
    assert stored[0] == stored[1]
    assert {round(float(np.exp(logp)), 5) for logp, _ in stored[0]} == {0.2}


def test_storing_them_does_not_change_what_is_played() -> None:
    agent = made_agent(room())
    with_them, without = (
        play(room(), AgentPolicy(agent, num_actors=3, capacity=40), logp=logp) for logp in (True, False)
    )
    assert len(with_them) == len(without) > 1
    for one, other in zip(with_them, without, strict=True):
        assert one.columns.keys() - other.columns.keys() == {LOGP}
        for name, values in other.columns.items():
            np.testing.assert_array_equal(values, one.columns[name])


def test_schemas_with_and_without_logp_differ(tmp_path: Path) -> None:
    plain, more = Schema(SPACES), Schema(SPACES, logp=True)
    assert [Schema.from_json(each.to_json()) for each in (plain, more)] == [plain, more]
    assert plain.id != more.id
    lake = Lake.create(tmp_path / "lake")
    lake.register(more)
    with pytest.raises(InputMissing, match="holds steps with logp, not without"):
        lake.require_schema(plain)


@pytest.mark.parametrize(
    ("env", "changes", "words"),
    [
        ("gym:Pendulum-v1", {}, "does not give the probabilities"),
        ("bandit", {"collect": {"policy": "expert"}}, "does not give the probabilities"),
        ("bandit", {"collect": {"explore": True}, "exploration": {"persistence": 4}}, "random actions persist"),
    ],
)
def test_collectors_that_do_not_know_them_are_refused(
    tmp_path: Path, env: str, changes: dict[str, Any], words: str
) -> None:
    wanted = {"env": {"name": env}, **changes, "collect": {"steps": 100, "logp": True, **changes.get("collect", {})}}
    with pytest.raises(UsageError, match=words):
        collect.run(Settings.model_validate(wanted), lake=tmp_path / "lake")
    chain = {**wanted, "stages": [{"stage": "collect"}], "train": {"steps": 10}}
    with pytest.raises(UsageError, match=words):
        run.run(Settings.model_validate(chain), run=tmp_path / "run")
    assert not (tmp_path / "lake").exists()
    assert [path.name for path in (tmp_path / "run").glob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_a_grid_with_other_exploration_is_refused() -> None:
    env = pendulum()
    agent = made_agent(env, actor={"distribution": "grid", "grid_points": 3, "hidden": [16]})
    explored = Exploration(PLAIN, env.spec.spaces.action, 3, horizon=15)
    with pytest.raises(UsageError, match="among 3 points of a grid, but exploration does not"):
        play(env, AgentPolicy(agent, num_actors=3, capacity=40), explored=explored)
    with pytest.raises(UsageError, match="does not give the probabilities"):
        play(env, FunctionPolicy(lambda *_: np.zeros((3, 1), "f4")))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"trace": "vtrace"}, r"agent\.trace is 'vtrace'"),
        ({"reference": "zoo:cartpole", "reference_ratio": 1.5}, r"agent\.reference_ratio is 1\.5"),
    ],
    ids=["vtrace", "reference"],
)
def test_some_settings_need_them(tmp_path: Path, agent: dict[str, Any], message: str) -> None:
    env = {"name": "bandit"}
    wanted = {"env": env, "collect": {"steps": 200, "actors": 2}, "train": {"steps": 2, "context_length": 8}}
    collect.run(Settings.model_validate(wanted), lake=tmp_path / "lake")
    traced = Settings.model_validate({**wanted, "size": "tiny", "agent": agent})
    with pytest.raises(InputMissing, match=f"{message}, but the steps of lake '.*' have no logp"):
        train.run(traced, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
    assert not (tmp_path / "run" / "config.toml").exists()
    chain = traced.model_copy(update={"stages": Settings.model_validate({"stages": [{"stage": "collect"}]}).stages})
    with pytest.raises(UsageError, match=f"{message}, but what is collected has no logp"):
        run.run(chain, run=tmp_path / "chain")
    assert not (tmp_path / "chain").exists()
