"""Environments of packages in JAX beside the packages themselves: 200 random steps of two actors, with ends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

from pipelines.envs.make import make
from pipelines.envs.suites.jax_env import list_leaves
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete, Space

STEPS, LIMIT = 200, 60


class Outcome(NamedTuple):
    """What the package itself returns for a step."""

    observation: Any
    state: Any
    reward: Any
    terminated: Any
    truncated: Any


class Package(NamedTuple):
    """An environment by our name and settings, and how its package resets and steps it. `tells`: it distinguishes
    truncation; otherwise an end at the limit is one.
    """

    name: str
    params: dict[str, Any]
    reset: Callable[[Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any], Outcome]
    tells: bool = False


def gymnax_like(name: str, params: dict[str, Any], env: Any, theirs: Any) -> Package:
    """Of gymnax' form, whose `step` does not begin the next episode; `theirs` hold a limit of `LIMIT` steps."""

    def step(key: Any, state: Any, action: Any) -> Outcome:
        observation, state, reward, over, _ = env.step(key, state, action, theirs)
        return Outcome(observation, state, reward, over, False)

    return Package(name, params, lambda key: env.reset(key, theirs), step)


def craftax(kind: str) -> Package:
    module = pytest.importorskip("craftax.craftax_env")
    env = module.make_craftax_env_from_name(kind, auto_reset=False)
    options = {"options": {"name": kind, "auto_reset": False}, "params": {"max_timesteps": LIMIT}}
    name = "jax:craftax.craftax_env:make_craftax_env_from_name"
    return gymnax_like(name, options, env, env.default_params.replace(max_timesteps=LIMIT))


def kinetix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """By the factory that docs/environments.md shows."""
    pytest.importorskip("kinetix")
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    start = page.index("import kinetix.environment")
    (folder / "my_kinetix.py").write_text(page[start : page.index("```", start)])
    monkeypatch.syspath_prepend(str(folder))
    env, theirs = importlib.import_module("my_kinetix").make()
    params = {"params": {"max_timesteps": LIMIT}}
    return gymnax_like("jax:my_kinetix:make", params, env, theirs.replace(max_timesteps=LIMIT))


def playground(task: str) -> Package:
    options = {"env_name": task, "config_overrides": {"impl": "jax"}}
    env = pytest.importorskip("mujoco_playground").registry.load(**options)

    def reset(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return state.obs, state

    def step(key: Any, state: Any, action: Any) -> Outcome:
        state = env.step(state, action)
        return Outcome(state.obs, state, state.reward, state.done, False)

    params = {"options": options, "max_episode_steps": LIMIT}
    return Package("jax:mujoco_playground:registry.load", params, reset, step)


def navix(task: str) -> Package:
    env = pytest.importorskip("navix").make(task, max_steps=LIMIT)

    def reset(key: Any) -> tuple[Any, Any]:
        first = env.reset(key)
        return first.observation, first

    def step(key: Any, state: Any, action: Any) -> Outcome:
        after = env.step(state, action)
        return Outcome(after.observation, after, after.reward, after.is_termination(), after.is_truncation())

    return Package("jax:navix:make", {"options": {"name": task, "max_steps": LIMIT}}, reset, step, tells=True)


def jumanji(task: str) -> Package:
    env = pytest.importorskip("jumanji").make(task, time_limit=LIMIT)

    def reset(key: Any) -> tuple[Any, Any]:
        state, first = env.reset(key)
        return first.observation, state

    def step(key: Any, state: Any, action: Any) -> Outcome:
        state, after = env.step(state, action)
        ended = after.discount == 0
        return Outcome(after.observation, state, after.reward, after.last() & ended, after.last() & ~ended)

    return Package("jax:jumanji:make", {"options": {"id": task, "time_limit": LIMIT}}, reset, step, tells=True)


def drawn(space: Space, rng: np.random.Generator) -> np.ndarray:
    """An action of each of two actors, as the system gives it."""
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=2)
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.nvec, size=(2, len(space.nvec)))
    return rng.uniform(-1, 1, size=(2, *space.shape)).astype(np.float32)


def meant(space: Space, action: np.ndarray) -> np.ndarray:
    """The same action in the environment's own bounds."""
    if not isinstance(space, Box):
        return action.astype(np.int32)
    low, high = np.array(space.low, np.float32), np.array(space.high, np.float32)
    return low.reshape(action.shape) + (action + 1) / 2 * (high - low).reshape(action.shape)


def same(ours: dict[str, np.ndarray], actor: int, theirs: Any) -> None:
    columns = dict(list_leaves(theirs, "obs"))
    assert set(ours) == set(columns)
    for name, value in columns.items():
        value = np.asarray(value)
        np.testing.assert_allclose(ours[name][actor], value.astype(ours[name].dtype), rtol=1e-4, atol=1e-4)


def beside(package: Package) -> int:
    """Play both with the same random numbers; how many episodes ended."""
    env = make(package.name, num_envs=2, seed=0, params=package.params)
    rng, ends, states = np.random.default_rng(0), 0, [None, None]
    reset, step, folded = jax.jit(package.reset), jax.jit(package.step), jax.random.fold_in

    def begin(shown: dict[str, np.ndarray], actors: list[int]) -> None:
        for i in actors:
            observation, states[i] = reset(folded(env._keys[i], 0))
            same(shown, i, observation)

    begin(env.reset(), [0, 1])
    clock = np.zeros(2, dtype=int)
    for _ in range(STEPS):
        action = drawn(env.spec.spaces.action, rng)
        result = env.step(action)
        clock += 1
        for i in range(2):
            theirs = step(folded(env._keys[i], clock[i]), states[i], meant(env.spec.spaces.action, action[i]))
            states[i] = theirs.state
            same(result.observation, i, theirs.observation)
            np.testing.assert_allclose(result.reward[i], theirs.reward, rtol=1e-4, atol=1e-4)
            late = bool(theirs.truncated) if package.tells else clock[i] == LIMIT
            assert (result.terminated[i], result.truncated[i]) == (bool(theirs.terminated) and not late, late)
        over = result.terminated | result.truncated
        if over.any():
            ends += int(over.sum())
            clock[over] = 0
            begin(env.reset(over), np.flatnonzero(over).tolist())
    return ends


@pytest.mark.full
def test_navix() -> None:
    assert beside(navix("Navix-DoorKey-5x5-v0")) >= 6


@pytest.mark.full
def test_jumanji() -> None:
    assert beside(jumanji("Snake-v1")) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Craftax-Symbolic-v1", "Craftax-Classic-Symbolic-v1"])
def test_craftax(kind: str) -> None:
    assert beside(craftax(kind)) >= 6


@pytest.mark.slow
@pytest.mark.timeout(3600)  # XLA compiles its engine for five minutes
def test_kinetix_by_the_factory_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside(kinetix(tmp_path, monkeypatch)) >= 6


@pytest.mark.slow
def test_mujoco_playground() -> None:
    assert beside(playground("CartpoleBalance")) >= 6
