"""An agent that acts: N actors a step, only the acting discount's head, memories kept between steps.

N actors, T time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipelines.lake.schema import ACTION, REWARD
from pipelines.learning.agent import Agent
from pipelines.nets.precision import DTYPES, autocast


class AgentPolicy:
    """Steps `num_actors` actors with an agent's current weights, sampled or `greedy`.

    An actor whose `time` is 0 begins an episode and forgets. Attention keeps the last `capacity` tokens of each
    actor. When weights change, memories made with the old ones stay in use until `rebuild` is called. An action is
    drawn from this policy's own generator, so `seed` and the inputs decide it.
    """

    def __init__(
        self, agent: Agent, *, num_actors: int, capacity: int, greedy: bool = False, seed: int = 0,
        device: torch.device | str = "cpu", precision: str = "float32",
    ) -> None:  # fmt: skip
        self.agent, self.num_actors, self.greedy, self.device = agent, num_actors, greedy, torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)
        self._policy = agent.heads.policy
        self._precision = precision
        self._memory = agent.sequence.memory(
            num_actors=num_actors, capacity=capacity, device=device, dtype=DTYPES[precision]
        )

    @torch.no_grad()
    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        """Actions (N, ...) in stored form, for one token of every actor; `time` (N,) counts from 0 in its episode."""
        time_N = self._tensor(np.asarray(time, dtype=np.int64))
        if not np.all(time):
            self._memory.reset(time_N == 0)
        columns = {name: self._tensor(observation[name]) for name in self.agent.spaces.observation}
        with autocast(self.device, self._precision):
            token_ND = self.agent.timestep(
                columns,
                self._tensor(prev_action),
                self._tensor(prev_reward).float(),
                time_N,
            )
            h_ND = self.agent.sequence.step(token_ND, time_N, self._memory)
            params_NP = self.agent.heads.actor.acting(h_ND).float()
        legal = self.agent.legal(columns)
        if self.greedy:
            features_NF = self._policy.mode(params_NP, legal)
        else:
            noise_NZ = torch.rand(self.num_actors, self._policy.noise_size, generator=self._generator)
            features_NF = self._policy.sample(params_NP, noise_NZ.to(self.device), legal)
        return self._policy.stored(features_NF).cpu().numpy()

    @torch.no_grad()
    def rebuild(self, prefix: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Recompute all memories with the current weights, in one padded forward.

        `prefix`: for each actor the columns of the tokens it has acted on in its episode (rows 0..t-1 if its next
        `time` is t; none at the start of an episode).
        """
        lengths = [len(columns[REWARD]) for columns in prefix]
        self._memory.reset(torch.ones(self.num_actors, dtype=torch.bool, device=self.device))
        if max(lengths) == 0:
            return
        names = (*self.agent.spaces.observation, ACTION, REWARD)
        rows = {n: pad_sequence([self._tensor(columns[n]) for columns in prefix], batch_first=True) for n in names}
        time_NT = torch.arange(max(lengths), device=self.device).expand(self.num_actors, -1)
        observation = {name: rows[name] for name in self.agent.spaces.observation}
        with autocast(self.device, self._precision):
            tokens_NTD = self.agent.timestep(observation, rows[ACTION], rows[REWARD].float(), time_NT)
            self.agent.sequence.prefill(tokens_NTD, time_NT, torch.tensor(lengths, device=self.device), self._memory)

    def state_dict(self) -> dict[str, Any]:
        """The random generator's state; memories follow from the trajectories (see `rebuild`)."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
