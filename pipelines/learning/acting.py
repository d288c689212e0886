"""Acting with an agent: N actors per step, only the acting discount's head, memories kept between steps.

N actors, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipelines.envs.draws import SharedDraws
from pipelines.lake.schema import ACTION, REWARD
from pipelines.learning.agent import Agent
from pipelines.learning.batch import join_shortcut
from pipelines.nets.actor import Categorical
from pipelines.nets.attention import avoid_plans
from pipelines.nets.cache import Memory
from pipelines.nets.compute import DTYPES, autocast
from pipelines.nets.sequence import Stepper


class AgentPolicy:
    """Policy of `num_actors` actors by an agent's current weights, sampled or `greedy`.

    An actor whose `time` is 0 begins an episode, and its memory is reset. Attention keeps the last `capacity` tokens of
    each actor. When weights change, memories made with the old ones stay in use until `rebuild` is called. Actions are
    drawn from the policy's own generator, so `seed` and the inputs determine them. Actors from `offset` on of `total`
    draw what they would among all of these. Choices are sampled at the agent's own temperature times `temperature`
    (`Agent.make_player`); by a policy that `explores`, as the agent learns, at 1.
    """

    def __init__(
        self, agent: Agent, *, num_actors: int, capacity: int, greedy: bool = False, seed: int = 0,
        device: torch.device | str = "cpu", precision: str = "float32", offset: int = 0, total: int = 0,
        temperature: float = 1.0, explores: bool = False,
    ) -> None:  # fmt: skip
        self.agent, self.num_actors, self.greedy, self.device = agent, num_actors, greedy, torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)
        self._policy = agent.heads.policy if explores else agent.make_player(temperature)
        self._precision, self._capacity = precision, capacity
        rows, here = total or num_actors, slice(offset, offset + num_actors)
        self._tape = SharedDraws(lambda: torch.rand(rows, self._policy.noise_size, generator=self._generator)[here])
        self._places: Sequence[slice] = [slice(0, num_actors)]
        self._memories = [self._memory(num_actors)]
        self._step: Stepper | None = None
        self._last: dict[int, tuple[Tensor, Tensor | None]] = {}  # by group: what its last actions were drawn from

    def _memory(self, num_actors: int) -> Memory:
        return self.agent.sequence.memory(
            num_actors=num_actors, capacity=self._capacity, device=self.device, dtype=DTYPES[self._precision]
        )

    def split(self, sizes: Sequence[int]) -> bool:
        """Act for groups of actors, each with its own memories, which are reset if the grouping changes."""
        if list(sizes) != [here.stop - here.start for here in self._places]:
            self._memories = [self._memory(size) for size in sizes]
        self._tape.split(sizes)
        self._places = self._tape.places
        return True

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
        part: int | None = None,
    ) -> np.ndarray:
        """Return actions (N, ...) in stored form, for one token of every actor (of group `part`); `time` (N,) counts
        from 0 in its episode."""
        if part is not None or len(self._memories) == 1:
            return self._act(part or 0, observation, prev_action, prev_reward, time, self._noise(part))
        noise, actions = self._noise(None), []
        for number, here in enumerate(self._places):
            seen = {name: column[here] for name, column in observation.items()}
            drawn = None if noise is None else noise[here]
            actions.append(self._act(number, seen, prev_action[here], prev_reward[here], time[here], drawn))
        return np.concatenate(actions)

    def _noise(self, part: int | None) -> Tensor | None:
        if self.greedy:
            return None
        row = self._tape.take(part)
        return row if part is None else row[self._tape.places[part]]

    @torch.no_grad()
    def _act(
        self,
        part: int,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
        noise_NZ: Tensor | None,
    ) -> np.ndarray:
        params_NP, legal = self._last[part] = self.parameters(observation, prev_action, prev_reward, time, part)
        if noise_NZ is None:
            features_NF = self._policy.mode(params_NP, legal)
        else:
            features_NF = self._policy.sample(params_NP, noise_NZ.to(self.device), legal)
        return self._policy.to_stored(features_NF).cpu().numpy()

    @property
    def num_choices(self) -> int | None:
        """The number of choices, of Discrete actions or points of a grid; None for other actions."""
        return self._policy.num_params if isinstance(self._policy, Categorical) else None

    @torch.no_grad()
    def log_prob(self, actions: np.ndarray, part: int | None = None) -> np.ndarray:
        """Compute the log-probabilities (N,) of any choices where `act` last acted, of 0 or 1 if it is greedy."""
        assert isinstance(self._policy, Categorical)
        if part is None:
            return np.concatenate([self.log_prob(actions[here], number) for number, here in enumerate(self._places)])
        params_NP, legal = self._last[part]
        index_N = self._policy.index(self._tensor(actions))
        if self.greedy:
            probs_N = (index_N == self._policy.most_likely(params_NP, legal)).double()
        else:
            probs_N = self._policy.probs(params_NP, legal).double().gather(-1, index_N[:, None])[:, 0]
        log_probs: np.ndarray = probs_N.log().cpu().numpy()
        return log_probs

    @torch.no_grad()
    def parameters(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
        part: int = 0,
        memory: Memory | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add one token of every actor of group `part` to its memory, or to `memory`; return the parameters (N, P) of
        its next action's distribution, and which choices are legal (None: all)."""
        self.agent.sequence.require_time(int(np.max(time)))
        memory = self._memories[part] if memory is None else memory
        time_N = self._tensor(np.asarray(time, dtype=np.int64))
        if not np.all(time):
            memory.reset(torch.from_numpy(np.asarray(time == 0)))
        columns = {name: self._tensor(observation[name]) for name in self.agent.spaces.observation}
        with autocast(self.device, self._precision), avoid_plans(self.device):
            token_ND = self.agent.timestep(
                columns,
                self._tensor(prev_action),
                self._tensor(prev_reward).float(),
                time_N,
            )
            if self._step is None or self._step.stale:
                self._step = self.agent.sequence.stepper()
            h_ND = join_shortcut(token_ND, self._step(token_ND, time_N, memory), self.agent.shortcut)
            params_NP = self.agent.heads.actor.acting(self.agent.policy_input(h_ND, columns)).float()
        return params_NP, self.agent.legal(columns)

    @torch.no_grad()
    def act_for(
        self,
        actors: np.ndarray,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
        noise: Callable[[int], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Act for the distinct `actors` (B,) alone: as `act`, with B values. The memories of others stay. `noise` draws
        the numbers (B, count) in [0, 1) that choose, in place of the policy's own generator."""
        memory: Any = self._memories[0]
        with memory.at(self._tensor(actors)) as chosen:
            params_BP, legal = self.parameters(observation, prev_action, prev_reward, time, memory=chosen)
        if self.greedy:
            features_BF = self._policy.mode(params_BP, legal)
        else:
            size = self._policy.noise_size
            if noise is None:
                noise_BZ = torch.rand(len(actors), size, generator=self._generator)
            else:  # rounded down, as a float32 of nearly 1 would be 1
                noise_BZ = self._tensor(np.floor(noise(size) * 2**24) / 2**24).float()
            features_BF = self._policy.sample(params_BP, noise_BZ.to(self.device), legal)
        return self._policy.to_stored(features_BF).cpu().numpy()

    @torch.no_grad()
    def rebuild(self, prefix: Sequence[Mapping[str, np.ndarray]], time: np.ndarray | None = None) -> None:
        """Recompute all memories with the current weights, in one padded forward.

        `prefix`: for each actor the columns of the last tokens on which it has acted in its episode (none at its
        start). `time` (N,): of each actor's next token; None: as many as there are in its prefix.
        """
        self._step = None
        lengths = np.array([len(columns[REWARD]) for columns in prefix], dtype=np.int64)
        start = np.zeros_like(lengths) if time is None else time - lengths
        for here, memory in zip(self._places, self._memories, strict=True):
            self._rebuild(prefix[here], start[here], memory)

    def _rebuild(self, prefix: Sequence[Mapping[str, np.ndarray]], start: np.ndarray, memory: Any) -> None:
        lengths = [len(columns[REWARD]) for columns in prefix]
        memory.reset(torch.ones(len(prefix), dtype=torch.bool, device="cpu"))
        if max(lengths) == 0:
            return
        self.agent.sequence.require_time(int((start + lengths).max()) - 1)
        names = (*self.agent.spaces.observation, ACTION, REWARD)
        rows = {n: pad_sequence([self._tensor(columns[n]) for columns in prefix], batch_first=True) for n in names}
        time_NT = self._tensor(start)[:, None] + torch.arange(max(lengths), device=self.device)
        observation = {name: rows[name] for name in self.agent.spaces.observation}
        with autocast(self.device, self._precision), avoid_plans(self.device):
            tokens_NTD = self.agent.timestep(observation, rows[ACTION], rows[REWARD].float(), time_NT)
            self.agent.sequence.prefill(tokens_NTD, time_NT, torch.tensor(lengths, device=self.device), memory)

    def state_dict(self) -> dict[str, Any]:
        """Return the random generator's state; memories follow from the trajectories (see `rebuild`)."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
