"""Proximal policy optimisation (Schulman et al. 2017) for many actors, each with networks of its own.

N actors, of which m learn at a time; B steps; D numbers of an observation. Weights have N as first dimension, so that
all actors act, and all that are due learn, in batched products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from pipelines.config.settings import LearnerSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces

_MOST_NUMBERS = 4096  # of an observation
_STREAM, _ORDER = 6, 7  # streams of actions, and of the order in which steps are learned
_VALUE_WEIGHT, _MOST_NORM, _BETAS, _TINY = 0.5, 0.5, (0.9, 0.999), 1e-8
Weights = list[torch.Tensor]


class PPO:
    """A policy and a value network of two layers for each actor, trained on its own last `ppo.steps` steps.

    A choice is drawn from a softmax, a continuous action from a normal distribution, and clipped to [-1, 1]. What an
    actor learns depends on its own steps alone, and, but for rounding, not on which others learn at the same time.
    UsageError for other actions, and for observations of many numbers.
    """

    def __init__(self, spaces: Spaces, settings: LearnerSettings, *, num_actors: int, seed: int, acting: int) -> None:
        action = spaces.action
        if not isinstance(action, Discrete | Box):
            raise UsageError(
                f"learner:ppo needs discrete or continuous actions, not {type(action).__name__}",
                hint="choose another environment, or another --policy",
            )
        self._spaces = dict(sorted(spaces.observation.items()))
        numbers = sum(space.flat_size for space in self._spaces.values())
        kinds = (Box, Discrete, MultiBinary, MultiDiscrete)
        if numbers > _MOST_NUMBERS or not all(isinstance(space, kinds) for space in self._spaces.values()):
            raise UsageError(
                f"learner:ppo needs observations of at most {_MOST_NUMBERS:,} numbers, without texts",
                hint="choose an environment with smaller observations",
            )
        self._action, self._settings, self._seed = action, settings.ppo, seed
        self._rng = np.random.default_rng([acting, _STREAM])
        self.version = np.zeros(num_actors, dtype=np.int64)
        self.epsilon = np.zeros(num_actors)  # exploration is the policy's own
        outputs = action.n if isinstance(action, Discrete) else action.flat_size
        # Each actor draws for itself: learners that learn again may be fewer, if the last of them have stored nothing.
        seeds = [np.random.SeedSequence([seed, actor]).generate_state(1)[0] for actor in range(num_actors)]
        generators = [torch.Generator().manual_seed(int(each)) for each in seeds]
        self._weights: Weights = []
        for output, gain in ((outputs, 0.01), (1, 1.0)):
            sizes = [numbers, *settings.ppo.hidden, output]
            for number, (rows, columns) in enumerate(itertools.pairwise(sizes)):
                each = torch.empty(num_actors, rows, columns)
                for one, generator in zip(each, generators, strict=True):
                    is_last = number == len(settings.ppo.hidden)
                    torch.nn.init.orthogonal_(one, gain if is_last else math.sqrt(2), generator=generator)
                self._weights += [each, torch.zeros(num_actors, 1, columns)]
        if isinstance(action, Box):
            self._weights.append(torch.zeros(num_actors, 1, outputs))  # logarithms of standard deviations
        self._moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in self._weights]
        self._adam_steps = np.zeros(num_actors, dtype=np.int64)
        steps = settings.ppo.steps
        shape = () if isinstance(action, Discrete) else (outputs,)
        self._kept = {
            "seen": np.zeros((num_actors, steps, numbers), np.float32),
            "following": np.zeros((num_actors, steps, numbers), np.float32),
            "action": np.zeros((num_actors, steps, *shape), np.float32),
            "reward": np.zeros((num_actors, steps), np.float32),
            "ended": np.zeros((num_actors, steps), bool),
            "over": np.zeros((num_actors, steps), bool),
        }
        self._count = np.zeros(num_actors, dtype=np.int64)

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        output = self._compute(self._flatten(observation)[:, None])[:, 0]
        if isinstance(self._action, Discrete):
            return np.asarray((output + self._rng.gumbel(size=output.shape)).argmax(axis=1))
        drawn = output + np.exp(self._weights[-1][:, 0].numpy()) * self._rng.normal(size=output.shape)
        return np.asarray(drawn.clip(-1.0, 1.0).reshape(len(drawn), *self._action.shape), dtype=np.float32)

    def learn(
        self,
        actors: np.ndarray,
        observation: Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        ended: np.ndarray,
        over: np.ndarray,
        following: Mapping[str, np.ndarray],
    ) -> None:
        place = actors, self._count[actors]
        kept = self._kept
        kept["seen"][place], kept["following"][place] = self._flatten(observation), self._flatten(following)
        kept["action"][place], kept["reward"][place] = action.reshape(kept["action"][place].shape), reward
        kept["ended"][place], kept["over"][place] = ended, over
        self._count[actors] += 1
        due = actors[self._count[actors] == self._settings.steps]
        if len(due):
            # Equal numbers of updates share the order in which steps are learned.
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # products are small: several threads would mostly wait for one another
            try:
                for updates in np.unique(self.version[due]):
                    self._update(due[self.version[due] == updates], int(updates))
            finally:
                torch.set_num_threads(threads)
            self._count[due] = 0
            self.version[due] += 1

    def choose_best(self, actor: int, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        output = self._compute(self._flatten(observation)[None], slice(actor, actor + 1))[0]
        if isinstance(self._action, Discrete):
            return np.asarray(output.argmax(axis=1))
        return np.asarray(output.clip(-1.0, 1.0).reshape(len(output), *self._action.shape), dtype=np.float32)

    def _compute(self, hidden: np.ndarray, actors: slice = slice(None)) -> np.ndarray:
        """Run the policies of `actors` on (m, B, D), by numpy, which has no threads to wake for a small product."""
        for number in range(len(self._settings.hidden) + 1):
            kernel, bias = (each.numpy()[actors] for each in self._weights[2 * number : 2 * number + 2])
            hidden = (np.tanh(hidden) if number else hidden) @ kernel + bias
        return hidden

    def _flatten(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Join the columns of observations (m, ...) as numbers (m, D), choices as indicators."""
        parts = []
        for name, space in self._spaces.items():
            values = np.asarray(observation[name])
            if isinstance(space, Discrete):
                parts.append(np.eye(space.n, dtype=np.float32)[values.reshape(-1)])
            elif isinstance(space, MultiDiscrete):
                columns = values.reshape(len(values), -1).T
                parts += [np.eye(n, dtype=np.float32)[each] for n, each in zip(space.nvec, columns, strict=True)]
            else:
                parts.append(values.reshape(len(values), -1).astype(np.float32))
        return np.concatenate(parts, axis=1)

    def _run_network(self, weights: Weights, inputs: torch.Tensor, which: int) -> torch.Tensor:
        """Run the policy (`which` = 0) or the value network (1) on (m, B, D)."""
        layers = len(self._settings.hidden) + 1
        hidden = inputs
        for number in range(which * layers, (which + 1) * layers):
            if number % layers:
                hidden = hidden.tanh()
            hidden = torch.baddbmm(weights[2 * number + 1], hidden, weights[2 * number])
        return hidden

    def _rate(self, weights: Weights, seen: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probabilities of actions (m, B, ...), and entropies (m, B)."""
        output = self._run_network(weights, seen, 0)
        if isinstance(self._action, Discrete):
            log_probs = F.log_softmax(output, dim=-1)
            chosen = log_probs.gather(-1, action.long()[..., None])[..., 0]
            return chosen, -(log_probs.exp() * log_probs).sum(-1)
        normal = torch.distributions.Normal(output, weights[-1].exp())
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)

    def _update(self, actors: np.ndarray, updates: int) -> None:
        """Learn from the steps of `actors` that are kept, after `updates` updates of each."""
        ppo = self._settings
        weights = [each[actors] for each in self._weights]
        kept = {name: torch.from_numpy(values[actors]) for name, values in self._kept.items()}
        with torch.no_grad():
            value = self._run_network(weights, kept["seen"], 1)[..., 0]
            after = self._run_network(weights, kept["following"], 1)[..., 0]
            old, _ = self._rate(weights, kept["seen"], kept["action"])
            # The trace ends with an episode, and where an environment was restarted.
            goes_on = ~kept["over"] & ~kept["ended"]
            goes_on[:, :-1] &= (kept["following"][:, :-1] == kept["seen"][:, 1:]).all(-1)
            discount = ppo.discount
            error = kept["reward"] + discount * after * ~kept["ended"] - value
            advantage, later = torch.empty_like(error), torch.zeros(len(actors))
            for t in reversed(range(ppo.steps)):
                later = error[:, t] + discount * ppo.trace_decay * goes_on[:, t] * (later if t < ppo.steps - 1 else 0.0)
                advantage[:, t] = later
            target = advantage + value
        rng = np.random.default_rng([self._seed, _ORDER, updates])
        for _ in range(ppo.passes):
            for rows in np.array_split(rng.permutation(ppo.steps), max(ppo.steps // ppo.batch_size, 1)):
                self._descend(actors, weights, kept, rows, old, advantage, target)
        for each, learned in zip(self._weights, weights, strict=True):
            each[actors] = learned.detach()

    def _descend(
        self,
        actors: np.ndarray,
        weights: Weights,
        kept: Mapping[str, torch.Tensor],
        rows: np.ndarray,
        old: torch.Tensor,
        advantage: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """Take one step of Adam on some rows of each actor, in place."""
        ppo = self._settings
        needed = [each.detach().requires_grad_() for each in weights]
        seen = kept["seen"][:, rows]
        log_prob, entropy = self._rate(needed, seen, kept["action"][:, rows])
        weight = advantage[:, rows]
        weight = (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + _TINY)
        ratio = (log_prob - old[:, rows]).exp()
        clipped = ratio.clamp(1 - ppo.clip, 1 + ppo.clip)
        policy_loss = -torch.minimum(ratio * weight, clipped * weight).mean(1)
        value_loss = (self._run_network(needed, seen, 1)[..., 0] - target[:, rows]).square().mean(1)
        loss = policy_loss + _VALUE_WEIGHT * value_loss - ppo.entropy_weight * entropy.mean(1)
        gradients: Sequence[torch.Tensor] = torch.autograd.grad(loss.sum(), needed)
        norm = torch.stack([each.flatten(1).square().sum(1) for each in gradients]).sum(0).sqrt()
        scale = (_MOST_NORM / (norm + 1e-6)).clamp(max=1.0)[:, None, None]
        self._adam_steps[actors] += 1
        passed = torch.from_numpy(self._adam_steps[actors])[:, None, None].double()
        first, second = ((1 - beta**passed).float() for beta in _BETAS)
        with torch.no_grad():
            for number, (gradient, (mean, square)) in enumerate(zip(gradients, self._moments, strict=True)):
                mean[actors] = torch.lerp(gradient * scale, mean[actors], _BETAS[0])
                square[actors] = torch.lerp((gradient * scale).square(), square[actors], _BETAS[1])
                step = (mean[actors] / first) / ((square[actors] / second).sqrt() + _TINY)
                weights[number] = needed[number].detach() - ppo.learning_rate * step
