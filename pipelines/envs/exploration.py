"""Exploration: how often, and how, the executed action departs from the policy's.

Discrete, and Box on a grid: epsilon-greedy. Box: normal noise of deviation epsilon, clipped to [-1, 1]. MultiDiscrete
and MultiBinary: each entry is resampled with probability epsilon. Where an observation has an action mask, random
actions respect it.

Epsilon follows a schedule, a function named by `exploration.kind`; your own has the same form:

    def halved(settings, *, progress, time, horizon, multiplier, every=100):     # kind = "mine:halved"
        return settings.start * 0.5 ** (time / every) * multiplier               # options = { every = 50 }

It returns the epsilon of each actor (N,). `settings` are those of `[exploration]`; `progress` is the share of
`exploration.steps` that has passed, in [0, 1]; `time` (N,) the step within the rollout, 0 at its beginning; `horizon`
the steps of a rollout, None where they are not fixed; `multiplier` (N,) each rollout's own, ones unless
`exploration.randomize`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.config.settings import EXPLORATIONS, ExplorationSettings
from pipelines.envs.draws import SharedDraws
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space


def plain(
    settings: ExplorationSettings, *, progress: float, time: np.ndarray, horizon: int | None, multiplier: np.ndarray
) -> np.ndarray:
    """Let epsilon fall linearly over training."""
    return (settings.start + (settings.end - settings.start) * progress) * multiplier


def bilevel(
    settings: ExplorationSettings, *, progress: float, time: np.ndarray, horizon: int | None, multiplier: np.ndarray
) -> np.ndarray:
    """Let epsilon fall linearly over training and within every rollout."""
    assert horizon is not None
    early = settings.start + (settings.end - settings.start) * progress
    late = settings.late_start + (settings.late_end - settings.late_start) * progress
    return (early + (late - early) * np.minimum(time / max(horizon - 1, 1), 1.0)) * multiplier


def windowed(
    settings: ExplorationSettings, *, progress: float, time: np.ndarray, horizon: int | None, multiplier: np.ndarray
) -> np.ndarray:
    """Use the epsilon of `plain` at both ends of a rollout, and a small constant one between them."""
    assert horizon is not None
    outer = plain(settings, progress=progress, time=time, horizon=horizon, multiplier=multiplier)
    inner = 0.5 / max(horizon - 1, 1) if settings.inner_epsilon is None else settings.inner_epsilon
    return np.where((time >= settings.edge) & (time < horizon - settings.edge), inner, outer)


def none(
    settings: ExplorationSettings, *, progress: float, time: np.ndarray, horizon: int | None, multiplier: np.ndarray
) -> np.ndarray:
    """Never explore: zeros."""
    return np.zeros(len(time))


def perturb(
    actions: np.ndarray,
    epsilon: np.ndarray,
    space: Space,
    rng: np.random.Generator,
    legal: LegalActions | None = None,
    observation: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Explore around the policy's `actions` (N, ...) with each actor's `epsilon` (N,). With `legal` (never of Box),
    random actions are among those that `observation` (N, ...) allows.
    """
    if legal is not None:
        assert observation is not None
        resampled = rng.random(actions.shape) < epsilon.reshape(-1, *(1,) * (actions.ndim - 1))
        return np.where(resampled, legal.draw(observation, rng), actions)
    return _add_noise(actions, epsilon, space, _draw_noise(space, len(actions), rng))


def random_actions(space: Space, num_actors: int, rng: np.random.Generator) -> np.ndarray:
    """Draw actions (N, ...) uniformly over `space`."""
    size = (num_actors, *space.shape)
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=size, dtype=np.int32)
    if isinstance(space, Box):
        return rng.uniform(-1.0, 1.0, size=size).astype(np.float32)
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.nvec, size=size, dtype=np.int32)
    return rng.integers(2, size=size, dtype=np.uint8)


def _draw_noise(space: Space, n: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw the noise for `n` actors: normal for Box, else thresholds for resampling and the random actions."""
    shape = (n, *space.shape)
    if isinstance(space, Box):
        return (rng.standard_normal(shape),)
    high = space.nvec if isinstance(space, MultiDiscrete) else space.n if isinstance(space, Discrete) else 2
    return rng.random(shape), rng.integers(high, size=shape)


def _add_noise(
    actions: np.ndarray,
    epsilon: np.ndarray,
    space: Space,
    noise: tuple[np.ndarray, ...],
    grid: np.ndarray | None = None,
) -> np.ndarray:
    """Replace or shift `actions` by `noise`, with rate or deviation `epsilon`; noise of a `grid` numbers its points."""
    if grid is not None:
        return np.where((noise[0] < epsilon).reshape(-1, *(1,) * (actions.ndim - 1)), grid[noise[1]], actions)
    scale = epsilon.reshape(-1, *(1,) * len(space.shape))
    if isinstance(space, Box):
        return np.clip(actions + scale * noise[0], -1.0, 1.0).astype(np.float32)
    return np.where(noise[0] < scale, noise[1], actions)


_STREAM = 1  # apart from a policy's own generator of the same seed
_MULTIPLIERS = 3
_PERSISTENCE = 4
_EXPLORERS = 5
_RATES = ("start", "end", "late_start", "late_end", "inner_epsilon")


class Exploration:
    """The schedule of `num_actors` actors, with its position. `horizon`: the environment's, in steps. `legal`, which
    may be set at any time: what random actions are drawn from. `grid`: the only Box actions (n, *shape) to choose.

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
        grid: np.ndarray | None = None,
    ) -> None:
        self._grid = grid
        if grid is not None:
            space = Discrete(n=len(grid))
        if settings.kind in ("bilevel", "windowed") and horizon is None:
            raise UsageError(
                f'exploration.kind = "{settings.kind}" needs an environment with a fixed horizon',
                hint='use "plain", or set env.max_episode_steps',
            )
        if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
            raise TypeError(f"no exploration for {type(space).__name__}")
        for name in () if isinstance(space, Box) else _RATES:
            if (rate := getattr(settings, name) or 0) > 1:
                raise UsageError(
                    f"exploration.{name} is {rate:g}, but for these actions epsilon is a probability",
                    hint="choose a value from 0 to 1; only for Box actions is it a standard deviation",
                )
        self.settings, self.horizon = settings, horizon
        self.legal = legal
        self._schedule = EXPLORATIONS.get(settings.kind)
        names = ("progress", "time", "horizon", "multiplier")
        try:  # an option of one of these names is given twice, which is a TypeError
            inspect.signature(self._schedule).bind(settings, **dict.fromkeys(names), **settings.options)
        except TypeError as error:
            raise UsageError(f"exploration '{settings.kind}': {error}", hint="see exploration.options") from error
        self._space = space
        self._rng = np.random.default_rng([seed, _STREAM])
        self._multiplier_rng = np.random.default_rng([seed, _MULTIPLIERS])
        self._multiplier = np.ones(num_actors)
        self._explorer_rng = np.random.default_rng([seed, _EXPLORERS])
        self._explores = np.zeros(num_actors, bool)  # throughout its rollout
        self._steps = [0]
        self._persistent = _PersistentNoise(settings.persistence, space, num_actors, seed)
        self._shared = SharedDraws(self._draw)

    def _draw(self) -> tuple[np.ndarray | None, np.ndarray | None, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Draw, for all actors, multipliers and who explores, for those that begin a rollout, noise, and how it
        persists."""
        n = len(self._multiplier)
        multiplier = self._multiplier_rng.random(n) if self.settings.randomize else None
        explores = self._explorer_rng.random(n) < self.settings.explorers if self.settings.explorers else None
        noise = () if self.legal is not None else _draw_noise(self._space, n, self._rng)
        return multiplier, explores, noise, self._persistent.draw()

    @property
    def legal(self) -> LegalActions | None:
        """What random actions are drawn from; None: all actions. UsageError where noise persists."""
        return self._legal

    @legal.setter
    def legal(self, legal: LegalActions | None) -> None:
        if legal is not None and self.settings.persistence > 1:
            raise UsageError(
                "exploration.persistence is not for agents with an action mask",
                hint="set exploration.persistence=1: a repeated action may have become illegal",
            )
        self._legal = legal

    def split(self, sizes: Sequence[int]) -> bool:
        """Allow steps of parts of the actors from now on; each actor's draws stay the same. False, without effect, if
        all actors must act together. Call between steps of all actors.
        """
        if self.legal is not None:
            return False
        self._shared.split(sizes)
        self._steps = [self.steps] * len(sizes)
        return True

    @property
    def steps(self) -> int:
        """The position."""
        return min(self._steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = [steps] * len(self._steps)

    @property
    def num_choices(self) -> int | None:
        """The number of choices of which a random action is one, whatever was done before; None for other spaces, and
        where noise persists."""
        return self._space.n if isinstance(self._space, Discrete) and self.settings.persistence <= 1 else None

    def mix(
        self, log_prob: np.ndarray, actions: np.ndarray, epsilon: np.ndarray, observation: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Compute the log-probabilities (N,) of executed choices from those under the policy: of (1 - epsilon) pi(a) +
        epsilon / n, since a random action may be what the policy would have done. n counts the legal choices."""
        uniform: np.ndarray | float = 1 / (self.num_choices or 1)
        if self._legal is not None:
            uniform = self._legal.probability(observation, actions)
        mixed: np.ndarray = np.log((1 - epsilon) * np.exp(log_prob) + epsilon * uniform)
        return mixed

    @property
    def progress(self) -> float:
        """Share of the annealing done, in [0, 1]."""
        return min(self.steps / self.settings.steps, 1.0)

    def __call__(
        self,
        actions: np.ndarray,
        time: np.ndarray,
        observation: Mapping[str, np.ndarray] | None = None,
        part: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return executed actions and the epsilon (N,) that applied, and advance the position by one step.
        `observation` is the one that the policy saw; only an action mask needs it. `part`: act for this part of the
        actors only.
        """
        drawn, exploring, noise, persisting = self._shared.take(part)
        here = slice(None) if part is None else self._shared.places[part]
        multiplier = self._multiplier[here]
        if drawn is not None:
            np.copyto(multiplier, drawn[here], where=time == 0)
        if persisting:
            noise = self._persistent.apply(noise, persisting, time, here)
        progress = min(self._steps[part or 0] / self.settings.steps, 1.0)
        epsilon = self._epsilon(progress, time, multiplier)
        if exploring is not None:
            explores = self._explores[here]
            np.copyto(explores, exploring[here], where=time == 0)
            epsilon = np.where(explores, self._epsilon(0.0, time, np.ones(len(time))), epsilon)
        self._steps = [n + (part is None or i == part) for i, n in enumerate(self._steps)]
        if not epsilon.any():
            return actions, epsilon
        if self.legal is not None:
            return perturb(actions, epsilon, self._space, self._rng, self.legal, observation), epsilon
        own = noise if persisting else tuple(each[here] for each in noise)
        return _add_noise(actions, epsilon, self._space, own, self._grid), epsilon

    def _epsilon(self, progress: float, time: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
        epsilon = np.asarray(
            self._schedule(
                self.settings,
                progress=progress,
                time=time,
                horizon=self.horizon,
                multiplier=multiplier,
                **self.settings.options,
            )
        )
        if epsilon.shape != time.shape:
            raise UsageError(
                f"exploration '{self.settings.kind}' returned an epsilon of shape {epsilon.shape}, "
                f"not one for each of {len(time)} actors"
            )
        return epsilon

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "multiplier": self._multiplier.tolist(),
            "explores": self._explores.tolist(),
            "rng": self._rng.bit_generator.state,
            "multiplier_rng": self._multiplier_rng.bit_generator.state,
            "explorer_rng": self._explorer_rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. With another number of actors, multipliers are drawn at the next rollouts."""
        self.steps = int(state["steps"])
        if len(state["multiplier"]) == len(self._multiplier):
            self._multiplier[:] = state["multiplier"]
            self._explores[:] = state["explores"]
        self._rng.bit_generator.state = state["rng"]
        self._multiplier_rng.bit_generator.state = state["multiplier_rng"]
        self._explorer_rng.bit_generator.state = state["explorer_rng"]


class _PersistentNoise:
    """Noise that is correlated over the steps of a rollout.

    Independent noise cancels within a few steps, so that a car in a valley or a walker in a corridor never gets far.
    Box: an autoregressive process of order one with unit variance, a cheap relative of pink noise (Eberhard et al.
    2023, "Pink noise is all you need"). Choices: temporally extended epsilon-greedy (Dabney et al. 2021, arXiv
    2006.01782), with geometric durations.
    """

    def __init__(self, longest: float, space: Space, num_actors: int, seed: int) -> None:
        self.longest, self._is_box = longest, isinstance(space, Box)
        self._rng = np.random.default_rng([seed, _PERSISTENCE])
        self._duration = np.ones(num_actors)
        self._held = tuple(np.zeros_like(each) for each in _draw_noise(space, num_actors, np.random.default_rng(0)))

    def draw(self) -> tuple[np.ndarray, ...]:
        """Draw two uniforms for every actor, or nothing where noise does not persist."""
        n = len(self._duration)
        return (self._rng.random(n), self._rng.random(n)) if self.longest > 1 else ()

    def apply(
        self, noise: tuple[np.ndarray, ...], uniforms: tuple[np.ndarray, ...], time: np.ndarray, here: slice
    ) -> tuple[np.ndarray, ...]:
        """Return the noise of the actors `here` (n, ...), whose steps are `time` (n,), from the independent noise of
        all actors (N, ...)."""
        begins, duration = time == 0, self._duration[here]
        np.copyto(duration, self.longest ** uniforms[0][here], where=begins)
        shape = (-1, *(1,) * (noise[0].ndim - 1))
        if self._is_box:
            kept = np.where(begins, 0.0, 1 - 1 / duration).reshape(shape)
            (held,), (fresh,) = self._held, noise
            held[here] = kept * held[here] + np.sqrt(1 - kept**2) * fresh[here]
        else:
            renewed = (begins | (uniforms[1][here] * duration < 1)).reshape(shape)
            for held, fresh in zip(self._held, noise, strict=True):
                np.copyto(held[here], fresh[here], where=renewed)
        return tuple(held[here] for held in self._held)
