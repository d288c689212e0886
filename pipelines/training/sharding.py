"""Shards of an agent (FSDP2): of each weight of the sequence encoder's blocks, a rank keeps some rows, with their
gradient, optimiser state and average.

Torch gathers the weights of a block when its forward or backward comes to it, and spreads their gradient afterwards.
All other parameters are whole on every rank: they are few, and heads compute with them outside of a module's forward.
The optimiser has plain tensors of this rank's rows, so that no operation mixes DTensors with others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipelines.config.host import is_main
from pipelines.errors import UsageError
from pipelines.learning.agent import Agent
from pipelines.nets import ranks
from pipelines.nets.sequence import SequenceEncoder

_PER_ELEMENT = ("exp_avg", "exp_avg_sq")  # of the optimiser's state of a parameter


@dataclass(frozen=True)
class Shard:
    """This rank's rows of a parameter, as a parameter of their own that shares their memory."""

    parameter: nn.Parameter
    rows: nn.Parameter

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Shard:
        """Describe a parameter that FSDP2 has sharded."""
        return cls(parameter, nn.Parameter(cast(Any, parameter).to_local().detach()))

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor of the parameter's shape. ValueError if it has another shape."""
        if whole.shape != self.parameter.shape:
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} is not one of {tuple(self.parameter.shape)}")
        return whole[ranks.find_own_rows(len(whole))].to(self.rows.device, copy=True)

    def join(self, rows: Tensor) -> Tensor:
        """Return to rank 0, on the host, the tensor of which each rank has `rows`; other ranks get their rows back."""
        whole = ranks.join_rows(rows.detach(), len(self.parameter))
        return whole.cpu() if is_main() else rows


@dataclass(frozen=True)
class Shards:
    """Shards of an agent's parameters, by name. If there are any, joining them is a collective, whose result rank 0
    gets."""

    of: Mapping[str, Shard]

    def own(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Replace each parameter of which this rank has only rows by its rows."""
        return {name: self.of[name].rows if name in self.of else each for name, each in parameters.items()}

    def take_gradients(self) -> None:
        """Move the gradients of parameters to their rows."""
        for shard in self.of.values():
            gradient: Any = shard.parameter.grad
            if gradient is not None:
                shard.rows.grad, shard.parameter.grad = gradient.to_local(), None

    def norms(self, norms: Tensor, names: Sequence[str]) -> Tensor:
        """Return the norms of whole tensors, given those of what this rank has of them."""
        if not self.of:
            return norms
        is_cut = torch.tensor([name in self.of for name in names], device=norms.device)
        squares = ranks.sum_tensor(torch.where(is_cut, norms.double().square(), 0.0))
        return torch.where(is_cut, squares.sqrt().to(norms.dtype), norms)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return what this rank has of a tensor of the parameter's shape."""
        return self.of[name].cut(whole) if name in self.of else whole

    def join(self, name: str, own: Tensor) -> Tensor:
        """Return a whole tensor of the parameter's shape, given what this rank has of it."""
        return self.of[name].join(own) if name in self.of else own

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of whole weights."""
        return {name: self.join(name, self.of[name].rows if name in self.of else own) for name, own in state.items()}

    def of_optimizer(
        self, state: Mapping[str, Any], names: Sequence[str], convert: Callable[[Shards, str, Tensor], Tensor]
    ) -> dict[str, Any]:
        """Return an optimiser's state, whose parameters have these names by number, with its tensors cut or joined."""
        if not self.of:
            return dict(state)
        found = {}
        for number, own in state["state"].items():
            changed = {key: convert(self, names[number], own[key]) for key in _PER_ELEMENT}
            found[number] = {**own, **changed}
        return {**state, "state": found}


NO_SHARDS = Shards({})


def require_blocks(sequence: SequenceEncoder) -> None:
    """Raise UsageError for an encoder without blocks that could be shared out."""
    if not sequence.shardable():
        raise UsageError(
            f"train.sharding 'fsdp' needs a sequence encoder of blocks, and {type(sequence).__name__} has none",
            hint="use train.sharding=none, or see SequenceEncoder.shardable",
        )


def share_out(agent: Agent, device: torch.device) -> Shards:
    """Move `agent` to `device`, where this rank has only its rows of the weights of the sequence encoder's blocks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    blocks = agent.sequence.shardable()
    # FSDP2 refuses scalars: the gains of spectrally normalised layers
    shared = {each for block in blocks for each in block.parameters() if each.dim()}
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (ranks.count_joined(),)),
        "ignored_params": set(agent.sequence.parameters()) - shared,
        "reshard_after_forward": True,
    }
    for module in (*blocks, agent.sequence):  # the encoder has no shard of its own: it lets blocks prefetch one another
        fully_shard(module, **options)
        if device.type == "cpu":  # gloo's mean of a reduce-scatter is a sum in some versions (pytorch#162338)
            cast(FSDPModule, module).set_force_sum_reduction_for_comms(True)
    agent.to(device)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nothing changes in place
    return Shards({name: Shard.of(each) for name, each in agent.named_parameters() if ranks.is_sharded(each)})
