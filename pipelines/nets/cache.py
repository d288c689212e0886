"""Memory that a sequence encoder keeps for each actor between steps.

N actors, H heads, S slots, T time, Dh head size.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor


class Memory(Protocol):
    """Interface of an encoder's memory that acting needs: reset, actor by actor, by a mask of host or device."""

    def reset(self, mask_N: Tensor) -> None: ...


def count_bytes(memory: object) -> int:
    """Count the bytes of a memory's tensors."""
    parts = [value if isinstance(value, list | tuple) else [value] for value in vars(memory).values()]
    return sum(value.nbytes for value in itertools.chain(*parts) if isinstance(value, Tensor))


class NoMemory:
    """Memory of encoders that see one token at a time."""

    def reset(self, mask_N: Tensor) -> None:
        pass

    @contextlib.contextmanager
    def at(self, actors_B: Tensor) -> Iterator[Self]:
        yield self


class State:
    """Memory of recurrent encoders: tensors (L, N, ...), zero when empty."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)

    def reset(self, mask_N: Tensor) -> None:
        for tensor in self.tensors:
            tensor[:, mask_N.to(tensor.device)] = 0.0

    @contextlib.contextmanager
    def at(self, actors_B: Tensor) -> Iterator[State]:
        chosen = State(*(tensor[:, actors_B] for tensor in self.tensors))
        yield chosen
        for tensor, new in zip(self.tensors, chosen.tensors, strict=True):
            tensor[:, actors_B] = new

    def restore(self, before: Sequence[Tensor], mask_N: Tensor) -> None:
        """Undo changes to the actors in `mask_N` since `before`."""
        for tensor, old in zip(self.tensors, before, strict=True):
            tensor[:, mask_N] = old[:, mask_N]


class KVCache:
    """Keys and values of the first `sink` and the last `ring` tokens, preallocated, with a write index for each actor.

    The order of slots is irrelevant: positions are in the tokens themselves (added, or rotated into the keys). A step
    is `begin_step`, then one `append` per layer.
    """

    def __init__(
        self, *, num_layers: int, num_actors: int, num_heads: int, head_size: int, ring: int, sink: int = 0,
        device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.ring, self.sink, self.capacity, self.num_heads = ring, sink, sink + ring, num_heads
        shape = (num_layers, num_actors, num_heads, self.capacity, head_size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.written_N = torch.zeros(num_actors, device=device, dtype=torch.int64)
        # The host's own count, or more: reading the device's would make it wait at every step.
        self._count_N = np.zeros(num_actors, dtype=np.int64)
        self._actors_N = torch.arange(num_actors, device=device)
        self._slots_S = torch.arange(self.capacity, device=device)
        self._first_NH = self.capacity * torch.arange(num_actors * num_heads, device=device).view(num_actors, num_heads)

    def reset(self, mask_N: Tensor) -> None:
        """Forget all tokens of the actors in `mask_N` (bool)."""
        self.written_N.masked_fill_(mask_N.to(self.written_N.device), 0)
        self._count_N[mask_N.cpu().numpy()] = 0

    @contextlib.contextmanager
    def at(self, actors_B: Tensor) -> Iterator[KVCache]:
        """Yield a memory of some actors. A range of them is not copied; of others, the slots in use are copied, and the
        one that the step writes is copied back."""
        first, count = int(actors_B[0]), len(actors_B)
        chosen = object.__new__(KVCache)
        chosen.ring, chosen.sink, chosen.capacity, chosen.num_heads = (
            self.ring,
            self.sink,
            self.capacity,
            self.num_heads,
        )
        chosen._actors_N, chosen._slots_S = self._actors_N[:count], self._slots_S
        chosen._first_NH = self._first_NH[:count]
        if torch.equal(actors_B, self._actors_N[first : first + count]):
            here = slice(first, first + count)
            chosen.keys, chosen.values, chosen.written_N = (
                self.keys[:, here],
                self.values[:, here],
                self.written_N[here],
            )
            chosen._count_N = self._count_N[here]
            yield chosen
            return
        chosen.written_N = self.written_N[actors_B]
        numbers = actors_B.cpu().numpy()
        chosen._count_N = self._count_N[numbers]
        used = min(int(chosen._count_N.max()) + 1, self.capacity)
        chosen.keys, chosen.values = (self._take(slots, actors_B, used) for slots in (self.keys, self.values))
        yield chosen
        self.written_N[actors_B] = chosen.written_N
        self._count_N[numbers] = chosen._count_N
        slot_B = self._find_slot(chosen.written_N - 1)
        for slots, new in ((self.keys, chosen.keys), (self.values, chosen.values)):
            slots[:, actors_B, :, slot_B] = new[:, chosen._actors_N, :, slot_B]

    def _take(self, slots: Tensor, actors_B: Tensor, used: int) -> Tensor:
        taken = slots.new_empty(slots.shape[0], len(actors_B), *slots.shape[2:])
        taken[..., :used, :] = slots[:, actors_B, :, :used]
        return taken

    def begin_step(self) -> None:
        """Claim each actor's next slot; a full ring discards its oldest token."""
        self._slot_N = self._find_slot(self.written_N)
        self.written_N += 1
        self._count_N += 1
        self._used = min(int(self._count_N.max()), self.capacity)
        self.visible_NS = self._slots_S[: self._used] < self.written_N[:, None]

    def append(self, layer: int, k_NHD: Tensor, v_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step's key and value; return those of all slots in use, (N, H, S', Dh) each."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self._actors_N, :, self._slot_N] = k_NHD.to(keys.dtype)
        values[self._actors_N, :, self._slot_N] = v_NHD.to(values.dtype)
        return keys[:, :, : self._used], values[:, :, : self._used]

    def bias(self) -> Tensor:
        """Make what is added to scores after `begin_step`, (N H, 1, S'): 0 where a slot holds a token, else -inf.
        Claims the slots of `append_flat`."""
        self._rows = (self._first_NH + self._slot_N[:, None]).flatten()
        hidden = torch.zeros(self.visible_NS.shape, dtype=self.keys.dtype, device=self.keys.device)
        hidden.masked_fill_(~self.visible_NS, -torch.inf)
        return hidden[:, None].expand(-1, self.num_heads, -1).reshape(len(self._rows), 1, -1)

    def append_flat(self, layer: int, k_NHD: Tensor, v_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """Append, with actors and heads in one dimension: (N H, S', Dh) each."""
        size, heads = k_NHD.shape[-1], len(self._rows)
        found = []
        for slots, new in ((self.keys[layer], k_NHD), (self.values[layer], v_NHD)):
            slots.view(-1, size).index_copy_(0, self._rows, new.reshape(heads, size))
            found.append(slots.view(heads, self.capacity, size)[:, : self._used])
        return found[0], found[1]

    def fill(self, layer: int, k_NHTD: Tensor, v_NHTD: Tensor, lengths_N: Tensor) -> None:
        """Store the retained part of each actor's first `lengths_N` tokens; the rest of T is padding."""
        k_NHTD, v_NHTD = k_NHTD.to(self.keys.dtype), v_NHTD.to(self.values.dtype)
        self._count_N[:] = lengths = lengths_N.tolist()
        for actor, length in enumerate(lengths):
            time = torch.arange(length, device=k_NHTD.device)
            time = time[(time < self.sink) | (time >= length - self.ring)]
            self.keys[layer, actor][:, self._find_slot(time)] = k_NHTD[actor, :, time]
            self.values[layer, actor][:, self._find_slot(time)] = v_NHTD[actor, :, time]
        self.written_N.copy_(lengths_N)

    def _find_slot(self, time: Tensor) -> Tensor:
        """Find the slot of an actor's `time`-th token."""
        return torch.where(time < self.sink, time, self.sink + (time - self.sink) % self.ring)
