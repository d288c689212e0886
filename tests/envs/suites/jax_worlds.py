"""Counting to a target, in JAX, written for each interface that `jax:MODULE:FACTORY` takes.

A key draws a target from 3 to 6. Action 1 counts on; reaching the target pays 1 and terminates; seven steps are all.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

MOST = 7


@struct.dataclass
class Params:
    max_timesteps: int = MOST
    bonus: float = 0.0


@struct.dataclass
class World:
    count: jax.Array
    target: jax.Array
    time: jax.Array


class Discrete:
    def __init__(self, n):
        self.n = n


class Box:
    def __init__(self):
        self.shape, self.low, self.high = (1,), -2.0, 2.0


def begun(key):
    return World(count=jnp.int32(0), target=jax.random.randint(key, (), 3, 7), time=jnp.int32(0))


def stepped(world, action):
    count = world.count + (action > 0)
    return world.replace(count=count, time=world.time + 1)


def seen(world):
    return {"count": world.count.astype(jnp.float32)[None], "target": world.target}


class OldGymnax:
    """gymnax before it told truncation; the public `step` begins the next episode by itself."""

    default_params = Params()

    def reset(self, key, params):
        world = begun(key)
        return seen(world), world

    def step_env(self, key, state, action, params):
        state = stepped(state, jnp.squeeze(action))
        solved = state.count >= state.target
        over = solved | (state.time >= params.max_timesteps)
        return seen(state), state, solved + params.bonus, over, {}

    def step(self, key, state, action, params):
        raise AssertionError("it would begin the next episode")

    def action_space(self, params):
        return Discrete(2)

    def observation_space(self, params):
        return None


@jax.custom_batching.custom_vmap
def shared(count):
    return count


@shared.def_vmap
def _not_batched(size, batched, count):
    return jnp.zeros(3, dtype=count.dtype), True


class Shared(OldGymnax):
    """A part of its state has no dimension of actors, as with MuJoCo Warp."""

    def reset(self, key, params):
        observation, world = super().reset(key, params)
        return observation, world.replace(target=shared(world.target))


class Shelf:
    world = OldGymnax


class Continuous(OldGymnax):
    def action_space(self, params):
        return Box()


class Inherited(OldGymnax):
    """Written for a gymnax without `is_truncated`; that of a later base class reads a field that it does not have."""

    def is_truncated(self, state, params):
        return state.steps >= params.max_steps_in_episode


class MultiDiscrete:
    """Kinetix' own class of this name."""

    def __init__(self, *counts):
        self.number_of_dims_per_distribution = jnp.array(counts)


class Several(OldGymnax):
    """Has two choices in each action; the first counts."""

    def action_space(self, params):
        return MultiDiscrete(2, 3)

    def step_env(self, key, state, action, params):
        return super().step_env(key, state, action[0], params)


class Unlimited:
    """Of gymnax' form, with parameters that the factory makes, and no limit of time."""

    reset, step_env = OldGymnax.reset, OldGymnax.step_env
    action_space, observation_space = OldGymnax.action_space, OldGymnax.observation_space


@struct.dataclass
class Endless:
    bonus: float = 0.0
    max_timesteps_of_nobody: int = 10**6

    @property
    def max_timesteps(self):
        raise AttributeError


def unlimited():
    class Env(Unlimited):
        def step_env(self, key, state, action, params):
            state = stepped(state, action)
            return seen(state), state, params.bonus, jnp.array(False), {}

    return Env(), Endless(bonus=0.5)


class Wrapper:
    """Has gymnax' functions only of what it wraps, so what it adds would be passed by."""

    def __init__(self):
        self.env = OldGymnax()

    def __getattr__(self, name):
        return getattr(self.env, name)

    def step(self, key, state, action, params):
        return self.env.step(key, state, action, params)


@struct.dataclass
class BraxState:
    world: World
    obs: jax.Array
    reward: jax.Array
    done: jax.Array


class BraxWorld:
    action_size = observation_size = 1

    def reset(self, rng):
        world = begun(rng)
        return BraxState(world, seen(world)["count"], jnp.float32(0), jnp.float32(0))

    def step(self, state, action):
        world = stepped(state.world, action[0])
        solved = (world.count >= world.target).astype(jnp.float32)
        return BraxState(world, seen(world)["count"], solved, solved)


@struct.dataclass
class Timestep:
    world: World
    observation: jax.Array
    reward: jax.Array
    step_type: jax.Array

    def is_truncation(self):
        return self.step_type == 1

    def is_termination(self):
        return self.step_type == 2


class NavixWorld:
    max_steps = MOST

    class action_space:
        maximum = jnp.asarray(1)

    def reset(self, key):
        world = begun(key)
        return Timestep(world, seen(world)["count"], jnp.float32(0), jnp.int32(0))

    def step(self, timestep, action):
        world = stepped(timestep.world, action)
        solved = world.count >= world.target
        step_type = jnp.where(solved, 2, jnp.where(world.time >= MOST, 1, 0))
        return Timestep(world, seen(world)["count"], solved.astype(jnp.float32), step_type)


class Observation(NamedTuple):
    count: jax.Array
    legal: jax.Array


@struct.dataclass
class DmTimeStep:
    observation: Observation
    reward: jax.Array
    discount: jax.Array
    is_last: jax.Array

    def last(self):
        return self.is_last


class DiscreteArray:
    num_values = 2


class JumanjiWorld:
    action_spec, time_limit = DiscreteArray(), MOST

    def _timestep(self, world, solved):
        observation = Observation(seen(world)["count"], jnp.ones(2, dtype=bool))
        over = solved | (world.time >= MOST)
        return DmTimeStep(observation, solved.astype(jnp.float32), 1.0 - solved, over)

    def reset(self, key):
        world = begun(key)
        return world, self._timestep(world, jnp.array(False))

    def step(self, state, action):
        state = stepped(state, action)
        return state, self._timestep(state, state.count >= state.target)


class Neither:
    def reset(self):
        """Take no key."""

    def step(self):
        """Take no action."""


def nothing():
    return 3
