"""Games of PettingZoo's interfaces, written by a user; they need the extra `pettingzoo`."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import AgentSelector


class Matching(ParallelEnv):
    """Both choose at once; `even` earns 1 where the choices match and loses it where they do not, for `rounds`."""

    metadata = {"name": "matching"}  # noqa: RUF012

    def __init__(self, rounds=3):
        self.possible_agents, self.rounds = ["even", "odd"], rounds

    def observation_space(self, agent):
        return spaces.Box(0, 9, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.round = list(self.possible_agents), 0
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        self.round += 1
        sign = 1.0 if actions["even"] == actions["odd"] else -1.0
        seen = {a: np.array([self.round, actions["odd" if a == "even" else "even"]], np.float32) for a in self.agents}
        rewards, over = {"even": sign, "odd": -sign}, self.round >= self.rounds
        terminations = dict.fromkeys(self.agents, over)
        infos = {agent: {} for agent in self.agents}
        cut = dict.fromkeys(self.agents, False)
        if over:
            self.agents = []
        return seen, rewards, terminations, cut, infos


class Leaving(AECEnv):
    """Three count up in turn: who says what is not legal leaves and pays 1 to each of the others; the last one stays.

    The mask is in `infos`. A game with `fails` breaks when somebody says 3.
    """

    metadata = {"name": "leaving"}  # noqa: RUF012

    def __init__(self, fails=False, uneven=False):
        self.possible_agents, self.fails, self.uneven = ["a", "b", "c"], fails, uneven

    def observation_space(self, agent):
        return spaces.Discrete(100 if self.uneven and agent == "c" else 50)

    def action_space(self, agent):
        return spaces.Discrete(4)

    def observe(self, agent):
        return self.said

    def _show(self):
        legal = np.array([1, 1, 1, 0] if self.said < 20 else [1, 0, 0, 0], np.int8)
        self.infos = {agent: {"action_mask": legal} for agent in self.agents}

    def reset(self, seed=None, options=None):
        self.agents, self.said = list(self.possible_agents), 0
        self.rewards, self._cumulative_rewards = (dict.fromkeys(self.agents, 0.0) for _ in range(2))
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self._selector = AgentSelector(self.agents)
        self.agent_selection = self._selector.reset()
        self._show()

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if self.fails and action == 3:
            raise RuntimeError("three is too many")
        legal = self.infos[agent]["action_mask"][action]
        self._cumulative_rewards[agent] = 0
        self._clear_rewards()
        self.said += 1 + int(action)
        if not legal:
            others = [each for each in self.agents if each != agent and not self.terminations[each]]
            self.rewards = {each: (1.0 if each in others else 0.0) for each in self.agents}
            self.rewards[agent] = -float(len(others))
            self.terminations[agent] = True
            if len(others) == 1:
                self.terminations = dict.fromkeys(self.agents, True)
        if self.said >= 40:
            self.truncations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self._show()
        alive = [each for each in self.agents if not self.terminations[each]] or [agent]
        order = self.possible_agents
        place = order.index(agent)
        self.agent_selection = next(each for each in (order[(place + k) % 3] for k in range(1, 4)) if each in alive)
        self._deads_step_first()


def alone():
    """A game of one seat."""
    env = Matching()
    env.possible_agents = ["even"]
    return env
