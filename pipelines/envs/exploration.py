"""Exploration: how often, and how, the executed action departs from the policy's.

Discrete: epsilon-greedy. Box: normal noise of deviation epsilon, clipped to [-1, 1]. MultiDiscrete and
MultiBinary: each entry is drawn anew with chance epsilon. Where an observation says which choices are legal,
random ones are among these. The schedules are those of `config.exploration`; `time` is the step within the
rollout (0 at its beginning), `progress` the share of the annealing done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.config.exploration import ExplorationSettings
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space


def rate(settings: ExplorationSettings, progress: float, time: np.ndarray, horizon: int | None) -> np.ndarray:
    """Epsilon of each actor (N,) before its rollout's multiplier; windowed: of the edges.

    `horizon` (steps of a rollout) is needed by `bilevel` only.
    """
    epsilon = settings.start + (settings.end - settings.start) * progress
    if settings.kind == "bilevel":
        assert horizon is not None
        late = settings.late_start + (settings.late_end - settings.late_start) * progress
        return epsilon + (late - epsilon) * np.minimum(time / max(horizon - 1, 1), 1.0)
    return np.full(len(time), epsilon)


def perturb(
    actions: np.ndarray,
    epsilon: np.ndarray,
    space: Space,
    rng: np.random.Generator,
    legal: LegalActions | None = None,
    observation: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Executed actions (N, ...) for the policy's `actions` and each actor's `epsilon` (N,). With `legal` (never of
    Box), random ones are among those that `observation` (N, ...) allows."""
    if legal is not None:
        assert observation is not None
        anew = rng.random(actions.shape) < epsilon.reshape(-1, *(1,) * (actions.ndim - 1))
        return np.where(anew, legal.draw(observation, rng), actions)
    if isinstance(space, Box):
        scale = epsilon.reshape(-1, *(1,) * len(space.shape))
        return np.clip(actions + scale * rng.standard_normal(actions.shape), -1.0, 1.0).astype(np.float32)
    if isinstance(space, Discrete):
        return np.where(rng.random(len(actions)) < epsilon, rng.integers(space.n, size=len(actions)), actions)
    anew = rng.random(actions.shape) < epsilon[:, None]
    high = space.nvec if isinstance(space, MultiDiscrete) else 2
    return np.where(anew, rng.integers(high, size=actions.shape), actions)


_STREAM = 1  # apart from a policy's own generator of the same seed


class Exploration:
    """The schedule of `num_actors` actors, with its position. `horizon`: the environment's, in steps. `legal`, which
    may be set at any time: what random actions are drawn from.

    The position counts steps of one actor, goes on between calls, and is part of the run's state. UsageError
    where the schedule needs a horizon that the environment does not have.
    """

    def __init__(
        self,
        settings: ExplorationSettings,
        space: Space,
        num_actors: int,
        *,
        horizon: int | None = None,
        seed: int = 0,
        legal: LegalActions | None = None,
    ) -> None:
        if settings.kind in ("bilevel", "windowed") and horizon is None:
            raise UsageError(
                f'exploration.kind = "{settings.kind}" needs an environment with a fixed horizon',
                hint='use "plain", or set env.max_episode_steps',
            )
        if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
            raise TypeError(f"no exploration for {type(space).__name__}")
        self.settings, self.horizon, self.legal, self.steps = settings, horizon, legal, 0
        self._space = space
        self._rng = np.random.default_rng([seed, _STREAM])
        self._multiplier = np.ones(num_actors)

    @property
    def progress(self) -> float:
        """Share of the annealing done, in [0, 1]."""
        return min(self.steps / self.settings.steps, 1.0)

    def __call__(
        self, actions: np.ndarray, time: np.ndarray, observation: Mapping[str, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Executed actions and the epsilon (N,) that applied; advances the position by one step. `observation` is
        what the actions answer to; it is needed where it says what is legal."""
        if self.settings.kind == "none":
            return actions, np.zeros(len(time))
        if self.settings.randomize:
            beginning = np.flatnonzero(time == 0)
            if len(beginning):
                self._multiplier[beginning] = self._rng.random(len(beginning))
        epsilon = rate(self.settings, self.progress, time, self.horizon) * self._multiplier
        if self.settings.kind == "windowed":
            epsilon = np.where(self._inside(time), self._inner_epsilon, epsilon)
        self.steps += 1
        return perturb(actions, epsilon, self._space, self._rng, self.legal, observation), epsilon

    def _inside(self, time: np.ndarray) -> np.ndarray:
        assert self.horizon is not None
        return (time >= self.settings.edge) & (time < self.horizon - self.settings.edge)

    @property
    def _inner_epsilon(self) -> float:
        assert self.horizon is not None
        given = self.settings.inner_epsilon
        return 0.5 / max(self.horizon - 1, 1) if given is None else given

    def state_dict(self) -> dict[str, Any]:
        """Position, multipliers and generator: plain data."""
        return {
            "steps": self.steps,
            "multiplier": self._multiplier.tolist(),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. With another number of actors, multipliers are those of the next rollouts."""
        self.steps = int(state["steps"])
        if len(state["multiplier"]) == len(self._multiplier):
            self._multiplier[:] = state["multiplier"]
        self._rng.bit_generator.state = state["rng"]
