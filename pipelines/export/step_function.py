"""One step of acting as a pure function of tensors, which can be exported: memory goes in and comes out.

    (observation, action, reward, reset, noise, memory) -> (greedy, sampled, parameters, memory)

N actors, L layers, H heads, S slots, Dh head size, Z uniforms of a sample, P action parameters. The actor is the first
dimension of every tensor, so that the memory of one actor is a row. Spectral norms are multiplied into the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipelines.errors import UsageError
from pipelines.lake.spaces import Spaces
from pipelines.learning.agent import Agent
from pipelines.learning.batch import join_shortcut
from pipelines.nets.cache import KVCache, NoMemory, State
from pipelines.nets.linear import fold

TIME, WRITTEN, KEYS, VALUES, STATE = "time", "written", "keys", "values", "state"

Tensors = dict[str, Tensor]


class StepFunction(nn.Module):
    """The step of `agent`, with attention to the last `capacity` tokens of each actor.

    `memory` always has `time` (N,) int64, the number of steps since the actor's reset; the rest depends on the sequence
    encoder. All zeros is the empty memory, and a reset actor's memory counts as empty whatever it holds.
    """

    def __init__(self, agent: Agent, *, capacity: int) -> None:
        super().__init__()
        self.agent = fold(copy.deepcopy(agent).eval().requires_grad_(False))
        self.agent.target_heads = None
        self.spaces: Spaces = agent.spaces
        self._policy = self.agent.make_player()
        found = self.agent.sequence.memory(num_actors=1, capacity=capacity)
        self._tensors: Tensors = {}
        self._cached = isinstance(found, KVCache)
        if isinstance(found, KVCache):
            self._ring, self._sink = found.ring, found.sink
            for layer, (keys, values) in enumerate(zip(found.keys, found.values, strict=True)):
                self._tensors |= {f"{KEYS}{layer}": keys.transpose(-1, -2), f"{VALUES}{layer}": values}
            self._tensors[WRITTEN] = found.written_N
        elif isinstance(found, State):
            self._tensors = {f"{STATE}{n}": tensor.transpose(0, 1) for n, tensor in enumerate(found.tensors)}
        elif not isinstance(found, NoMemory):
            raise UsageError(
                f"the memory of {type(self.agent.sequence).__name__} is of a kind that cannot be exported",
                hint="keep it in pipelines.nets.cache.KVCache or pipelines.nets.cache.State",
            )

    @property
    def noise_size(self) -> int:
        """Z, the number of uniforms in [0, 1) that a sampled action takes."""
        return self._policy.noise_size

    @property
    def max_time(self) -> int | None:
        """Number of steps between resets that the positions allow; None: any."""
        return self.agent.sequence.max_time

    def empty(self, actors: int) -> Tensors:
        """Make the memory of `actors` new actors: all zeros."""
        own = {name: tensor.new_zeros(actors, *tensor.shape[1:]) for name, tensor in self._tensors.items()}
        return {TIME: torch.zeros(actors, dtype=torch.int64), **own}

    def forward(
        self, observation: Tensors, action: Tensor, reward: Tensor, reset: Tensor, noise: Tensor, memory: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        """Act once for N actors.

        Args:
            observation: columns (N, ...) as the lake stores them.
            action: previous actions (N, ...) in stored form; ignored where `reset`.
            reward: previous rewards (N,) float32; ignored where `reset`.
            reset: (N,) bool, whether the observation is the first of an episode.
            noise: uniforms (N, Z) float32 of the sampled action.
            memory: what the last step returned; `empty` at first.

        Returns:
            The most probable and the sampled actions in stored form, the action parameters (N, P) float32, the memory.
        """
        agent, policy = self.agent, self._policy
        time_N = memory[TIME].masked_fill(reset, 0)
        token_ND = agent.timestep(observation, action, reward.masked_fill(reset, 0.0), time_N)
        h_ND, after = self._encode(token_ND, time_N, reset, memory)
        h_ND = join_shortcut(token_ND, h_ND, agent.shortcut)
        params_NP = agent.heads.actor.acting(agent.policy_input(h_ND, observation)).float()
        legal = agent.legal(observation)
        greedy = policy.to_stored(policy.mode(params_NP, legal))
        sampled = policy.to_stored(policy.sample(params_NP, noise, legal))
        return greedy, sampled, params_NP, {TIME: time_N + 1, **after}

    def _encode(
        self, token_ND: Tensor, time_N: Tensor, reset_N: Tensor, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensors]:
        sequence = self.agent.sequence
        if self._cached:
            cache = _Slots(memory, reset_N, ring=self._ring, sink=self._sink)
            return sequence.step(token_ND, time_N, cache), cache.after()
        if not self._tensors:
            return sequence.step(token_ND, time_N, NoMemory()), {}
        kept = [memory[name] for name in self._tensors]
        masks = [reset_N.view(-1, *[1] * (tensor.dim() - 1)) for tensor in kept]
        pairs = zip(kept, masks, strict=True)
        fresh = [tensor.masked_fill(mask, 0.0).transpose(0, 1).contiguous() for tensor, mask in pairs]
        state = State(*fresh)
        h_ND = sequence.step(token_ND, time_N, state)
        return h_ND, {name: t.transpose(0, 1) for name, t in zip(self._tensors, state.tensors, strict=True)}


class _Slots:
    """`KVCache` for one step, without writing in place: all slots are read, and hidden where nothing is in them.

    Each layer has tensors of its own, and keys are (N, H, Dh, S), so that a runtime copies a memory once and transposes
    nothing.
    """

    def __init__(self, memory: Mapping[str, Tensor], reset_N: Tensor, *, ring: int, sink: int) -> None:
        self._memory, self._written_N = memory, memory[WRITTEN].masked_fill(reset_N, 0)
        self._ring, self._sink = ring, sink
        self._new: Tensors = {}

    def begin_step(self) -> None:
        """Claim each actor's next slot."""
        written_N, sink = self._written_N, self._sink
        turn_N = torch.remainder(written_N - sink, self._ring) + sink
        self._slot_N = torch.where(written_N < sink, written_N, turn_N) if sink else turn_N
        slots_S = torch.arange(self._ring + sink, device=written_N.device)
        self._written_N = written_N + 1
        self.visible_NS = slots_S < self._written_N[:, None]

    def append(self, layer: int, k_NHD: Tensor, v_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step's key and value -> those of all slots, (N, H, S, Dh) each."""
        slot_NHD = self._slot_N[:, None, None].expand(k_NHD.shape)
        keys_NHDS = self._memory[f"{KEYS}{layer}"].scatter(3, slot_NHD[..., None], k_NHD[..., None])
        values_NHSD = self._memory[f"{VALUES}{layer}"].scatter(2, slot_NHD[:, :, None], v_NHD[:, :, None])
        self._new |= {f"{KEYS}{layer}": keys_NHDS, f"{VALUES}{layer}": values_NHSD}
        return keys_NHDS.transpose(-1, -2), values_NHSD

    def after(self) -> Tensors:
        """Collect the memory after the step."""
        return {**self._new, WRITTEN: self._written_N}
