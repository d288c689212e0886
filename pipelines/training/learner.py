"""The learner: an agent, its optimiser and counters; one `step` is one gradient update.

Random draws are keyed by update and micro-batch (`pipelines.data.randomness`), so that resuming continues the very same
sequence and checkpoints contain no generator states.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from pipelines.config import host
from pipelines.config.model import AgentSettings
from pipelines.config.settings import InitSettings, TrainSettings
from pipelines.data.batch import Batch
from pipelines.data.randomness import Purpose, key, stream
from pipelines.errors import StageFailed, UsageError
from pipelines.lake.schema import LOGP
from pipelines.lake.spaces import Spaces
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.agent import Agent
from pipelines.learning.batch import HostBatch, TensorBatch, require_choices, require_mask
from pipelines.learning.checkpoint import Checkpoint, resolve_device
from pipelines.learning.diagnostics import inspect_encoders
from pipelines.learning.heads import CriticHeads
from pipelines.learning.warm_start import Transfer, transfer
from pipelines.nets import ranks
from pipelines.nets.compute import autocast, choose_precision, forget_kept
from pipelines.training import speed
from pipelines.training.graphs import UpdateGraph, UpdateGraphs
from pipelines.training.optimizer import (
    compute_entropy_share,
    find_matrices,
    group_parameters,
    learning_rate,
    make_optimizer,
)
from pipelines.training.optimizer import restore as restore_optimizer
from pipelines.training.sharding import NO_SHARDS, Shards, require_blocks, share_out

# Of some windows: rows of their trajectories, numbers of their lakes (None: the only one), mean absolute TD errors.
Learnt = Callable[[np.ndarray, np.ndarray | None, np.ndarray], None]

_LINES = 4  # of the log, of which one has figures of the encoders: these cost a GPU as much as four small updates


class Learner:
    """Trains an `Agent` for `spaces`.

    `draw` given to `step` returns a batch of so many windows, or what `prepare` made of one. It is called once for each
    of `micro_batches`, this rank's share of the update's (`grad_accumulation`, at least one per rank); the sum of all
    gradients makes the update.
    """

    def __init__(self, spaces: Spaces, agent: AgentSettings, train: TrainSettings, *, seed: int) -> None:
        self.micro_batches = ranks.list_micro_batches(train.grad_accumulation)
        number = len(self.micro_batches) * ranks.count_joined()
        if train.batch_size % number:
            among = f", among {ranks.count_joined()} ranks: {number} micro-batches" if ranks.count_joined() > 1 else ""
            raise UsageError(
                f"train.batch_size {train.batch_size} is not a multiple of "
                f"train.grad_accumulation {train.grad_accumulation}{among}"
            )
        self.micro_batch_size = train.batch_size // number
        require_mask("train.loss_mask", train.loss_mask, spaces)
        require_mask("train.actor_mask", train.actor_mask, spaces)
        if train.context == "history" and getattr(agent.sequence, "position", "rope") != "rope":
            raise UsageError(
                "a window of a history may begin anywhere in it, so that absolute positions mean nothing",
                hint="set agent.sequence.position to rope, or use a recurrent encoder",
            )
        use_threads(train.threads)
        self.spaces, self.agent_settings, self.settings, self.seed = spaces, agent, train, seed
        self.device = resolve_device(train.device)
        self.precision = choose_precision(train.precision, self.device)
        self.is_sharded, self.shards = train.sharding == "fsdp" and ranks.count_joined() > 1, NO_SHARDS
        self.agent = Agent(spaces, agent, seed=seed)
        kind = self.agent.agent_type
        if kind.actor_weight == kind.bc_weight == 0 and not agent.reference:
            raise UsageError(
                "nothing teaches the policy: agent.actor_weight and agent.bc_weight are both 0",
                hint="give one of them a weight, or name a policy to stay near, agent.reference",
            )
        if train.sharding == "fsdp":
            require_blocks(self.agent.sequence)
        if not self.is_sharded:  # else it is whole on the host only
            self.agent.to(self.device)
        self.agent.packed = train.packing
        if train.entropy_decay_steps:
            self.agent.entropy_share = torch.ones((), device=self.device)
        encoders: list[torch.nn.Module] = [self.agent.timestep, self.agent.sequence]
        self.notices = speed.prepare(encoders, train, self.device, self.precision)
        self.compiled = train.compile and not self.notices
        if train.optimizer == "muon" and not find_matrices(self.agent):
            encoder = type(self.agent.sequence).__name__
            self.notices.append(f"train.optimizer: AdamW moves all weights, since {encoder} has no blocks for Muon")
        self._parallel: torch.nn.Module | None = None
        self._prepare()
        self.graphs = self._make_graphs()
        self.update = 0
        self.steps_seen = 0
        self.skipped_updates = self.skipped_in_a_row = 0

    def _prepare(self) -> None:
        """Make the optimiser and the average of what this rank has of the parameters."""
        named = self.shards.own(self.agent.trainable_parameters())
        self.names, self.parameters = [*named], [*named.values()]
        self.optimizer = make_optimizer(self.agent, self.settings, self.shards)
        self.average = self._copy_parameters() if self.settings.ema_decay else []

    def _make_graphs(self) -> UpdateGraphs | None:
        """Make the keeper of graphs, where updates can be recorded at all."""
        settings = self.settings
        varies = settings.packing or settings.activation_checkpointing or len(self.micro_batches) > 1
        if not settings.cuda_graphs or self.device.type != "cuda" or varies or ranks.count_joined() > 1:
            return None
        self._changing = [*self.agent.parameters(), *self.agent.buffers()]  # to find them costs as much as a layer
        return UpdateGraphs(self.device)

    def _share_out(self) -> None:
        """Share out the weights among ranks, with what a checkpoint has restored. At the first update, as in
        `_next_loss`."""
        state, average = self.optimizer.state_dict(), self._name_average()
        self.agent.rescaled_too.clear()
        self.shards = share_out(self.agent, self.device)
        self._prepare()
        restore_optimizer(self.optimizer, self.shards.of_optimizer(state, self._list_names(), Shards.cut))
        for name, mean in self._name_average().items():
            mean.copy_(self.shards.cut(name, average[name]))

    def _list_names(self) -> list[str]:
        """Return the names of parameters by their number in the optimiser's state."""
        return [name for group in group_parameters(self.agent, self.settings) for name in group]

    def prepare(self, windows: Batch, update: int) -> HostBatch:
        """Convert windows for an update. Another thread may do so ahead: nothing is used that updates change.
        IntegrityError for windows that are damaged."""
        require_choices(windows, self.spaces)
        rounding = None if self.graphs is None else stream(self.seed, update, 0, Purpose.STEPS)
        tensors = TensorBatch.from_numpy(
            windows,
            self.spaces,
            labelled=self.agent_settings.target == "label",
            logp=(self.agent_settings.trace == "retrace" or self.agent_settings.needs_logp) and LOGP in windows.columns,
            loss_mask=self.settings.loss_mask,
            actor_mask=self.settings.actor_mask,
            rounding=rounding,
        )
        return HostBatch.of(windows, tensors, self.device)

    def step(self, draw: Callable[[int], Batch | HostBatch], learnt: Learnt | None = None) -> dict[str, torch.Tensor]:
        """One update. Returns detached scalar metrics.

        An update whose gradient is not finite is counted and skipped: it moves neither weights nor optimiser nor
        targets, has no metrics, and its batch is not reported. StageFailed after `max_skipped` of them in a row.

        Where windows have an importance, `learnt` receives the mean absolute TD errors (B,) of each batch.
        """
        if self.is_sharded and not self.shards.of:
            self._share_out()
        drawn = [draw(self.micro_batch_size) for _ in self.micro_batches]
        ready = [each if isinstance(each, HostBatch) else self.prepare(each, self.update) for each in drawn]
        self._weight_batches(ready)
        batches = [each.windows for each in ready]
        rate = learning_rate(self.update, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.agent.entropy_share is not None:  # in place: graphs that were recorded read it
            self.agent.entropy_share.fill_(compute_entropy_share(self.update, self.settings))
        if not self.agent.training:  # walking through all modules costs as much as a layer
            self.agent.train()
        graph = self._find_graph(ready)
        if graph is not None:
            tensors = [graph.batch]
            metrics, errors = graph.compute(ready[0])
            self._raise_versions()
        else:
            tensors = [each.move(self.device) for each in ready]
            metrics, errors = self._backward(tensors, *self.randomness())
            self.shards.take_gradients()
            metrics |= self._clip()
        if (self.update + 1) % (_LINES * self.settings.log_every) == 0:
            with autocast(self.device, self.precision):
                metrics |= inspect_encoders(self.agent.timestep, self.agent.sequence, tensors[0])
        is_finite = bool(metrics["grad_norm"] < torch.inf)  # waits for the device, once an update
        if is_finite:
            if graph is not None:
                graph.move(rate)
                self._raise_versions()
            else:
                self._move()
            self._update_average()
        for parameter in self.parameters:
            parameter.grad = None
        self.update += 1
        self.steps_seen += int(ranks.sum_number(sum(int((batch.lengths - 1).sum()) for batch in batches), self.device))
        self._count_skipped(is_finite)
        if not is_finite:
            return {}
        if learnt is not None:
            self._report_errors(batches, errors, learnt)
        return metrics

    def _move(self) -> None:
        """Move the weights by their gradients, and the targets after them."""
        self.optimizer.step()
        self.agent.update_targets()

    def _find_graph(self, batches: list[HostBatch]) -> UpdateGraph | None:
        """Find the graph that repeats this update's kernels, and seed its random numbers; None: there is none."""
        if self.graphs is None:
            return None
        (batch,), (generators, dropout_seeds) = batches, self.randomness()
        if generators[0].device.type != "cuda":
            return None
        self.agent.sequence.require_time(batch.tensors.last_time)
        generator = self.graphs.generator

        def set_seeds() -> None:
            generator.manual_seed(generators[0].initial_seed())
            torch.manual_seed(dropout_seeds[0])

        def record(pool: Any) -> UpdateGraph:
            set_seeds()
            # What was kept before is not part of the graph. Its autograd nodes would add to gradients on a stream that
            # is not recorded, which CUDA refuses.
            forget_kept(self.agent)
            try:
                return UpdateGraph(batch, self.optimizer, generator, pool, self._backward, self._clip, self._move)
            finally:
                forget_kept(self.agent)
                for parameter in self.parameters:  # whose memory is the graph's: the next graph may use it, too
                    parameter.grad = None

        graph = self.graphs.find(batch, record)
        if graph is not None:
            set_seeds()
        elif self.graphs.failure is not None:
            self.notices.append(f"train.cuda_graphs: cannot record an update ({self.graphs.failure}); going on without")
            self.graphs = None
        return graph

    def _raise_versions(self) -> None:
        """Say that tensors of the agent may have changed, as a graph changes them unseen."""
        torch.autograd.graph.increment_version(self._changing)

    def _weight_batches(self, batches: list[HostBatch]) -> None:
        """Divide importance weights by their maximum in the update, in place."""
        weights = [batch.tensors.importance for batch in batches if batch.tensors.importance is not None]
        if weights:
            highest = ranks.find_maximum(max(float(each.max()) for each in weights), self.device)
            for each in weights:
                each /= highest

    def _report_errors(self, batches: list[Batch], errors: list[torch.Tensor], learnt: Learnt) -> None:
        """Call `learnt` for all ranks' micro-batches in the order of their numbers."""
        own = [
            (number, batch.trajectory, batch.lake, error.cpu().numpy())
            for number, batch, error in zip(self.micro_batches, batches, errors, strict=False)
        ]
        for _, trajectory, lake, error in sorted(
            (each for every in ranks.gather(own) for each in every), key=lambda each: each[0]
        ):
            learnt(trajectory, lake, error)

    def _count_skipped(self, is_finite: bool) -> None:
        self.skipped_updates += not is_finite
        self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        if not is_finite and self.skipped_updates == 1:
            self.notices.append(f"update {self.update} was skipped: its gradient was not finite (see skipped_updates)")
        if self.skipped_in_a_row >= self.settings.max_skipped:
            raise StageFailed(
                f"the gradient was not finite in {self.skipped_in_a_row} updates in a row, up to update {self.update}",
                hint="lower train.learning_rate, or check the data with 'amago lake verify'",
            )

    def _clip(self) -> dict[str, torch.Tensor]:
        """Bound the global norm of the gradients, which the optimiser will scale. Returns the norm as it was, and that
        of each part of the network."""
        named = [(name, p.grad) for name, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]
        names = tuple(name for name, _ in named)
        norms = self.shards.norms(torch.stack(torch._foreach_norm([grad for _, grad in named])), names)
        parts, share_PN = _find_parts(names, self.device)
        total, *of_parts = torch.mv(share_PN, norms.square()).sqrt().unbind()
        self.optimizer.grad_scale = ((total + 1e-6) / self.settings.grad_clip).clamp_min(1.0)
        return {"grad_norm": total, **dict(zip(parts, of_parts, strict=True))}

    def _copy_parameters(self) -> list[torch.Tensor]:
        """Copies of the parameters; those of the heads follow PopArt, so that values of an average have true units."""
        heads = copy.deepcopy(self.agent.heads).requires_grad_(False)
        if isinstance(heads, CriticHeads):
            self.agent.rescaled_too.append(heads)
        of_heads = {f"heads.{name}": parameter for name, parameter in heads.named_parameters()}
        return [
            of_heads[name] if name in of_heads else parameter.detach().clone()
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the mean towards the weights; early on faster, so that the initial weights are forgotten."""
        if self.average:
            decay = min(self.settings.ema_decay, (1 + self.update) / (10 + self.update))
            torch._foreach_lerp_(self.average, [*self.parameters], 1 - decay)

    def _name_average(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.average, strict=True)) if self.average else {}

    def _backward(
        self, tensors: list[TensorBatch], generators: list[torch.Generator], dropout_seeds: list[int] | None = None
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Compute the gradients of an update -> (metrics, TD errors of each micro-batch's windows)."""
        total: dict[str, torch.Tensor] = {}
        errors = []
        losses, next_loss = self.agent.losses(tensors, generators, dropout_seeds), self._next_loss()
        for place in range(len(tensors)):
            more = ranks.count_joined() > 1 and place < len(tensors) - 1
            with next_loss.no_sync() if more else contextlib.nullcontext():
                with autocast(self.device, self.precision):
                    loss, metrics = next_loss(losses)
                loss.backward()
            if "td_errors" in metrics:
                errors.append(metrics.pop("td_errors"))
            total = {name: value + total[name] if name in total else value for name, value in metrics.items()}
        return total, errors

    def _next_loss(self) -> Any:
        """Return the function that computes the next of an update's losses; their gradients become the mean over ranks.

        Made at the first update: no rank waits here for one that has refused to train.
        """
        if ranks.count_joined() == 1:
            return next
        if self._parallel is None:
            # Statistics are those of all ranks already; DDP would replace them by rank 0's. The option has another name
            # from torch 2.13 on.
            new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
            keep: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
            loss = _NextLoss(self.agent)
            others = [f"agent.{name}" for name in self.shards.of]  # FSDP2 takes the mean of theirs
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, others)
            self._parallel = DistributedDataParallel(loss, **keep)
        return self._parallel

    def randomness(self) -> tuple[list[torch.Generator], list[int]]:
        """Return the generators and dropout seeds of the next update's micro-batches."""
        places = [(self.seed, self.update, number) for number in self.micro_batches]
        keys = [key(*place, Purpose.ACTIONS) for place in places]
        return (
            [torch.Generator(self.device).manual_seed(each) for each in keys],
            [key(*place, Purpose.DROPOUT) for place in places],
        )

    def describe(self) -> dict[str, Any]:
        """What it computes with: device, precision, attention backend, ranks."""
        found = speed.describe(
            self.agent.sequence, self.settings, self.device, precision=self.precision, compiled=self.compiled
        )
        found |= {} if self.graphs is None else {"graphs": True}
        if ranks.count_joined() == 1:
            return found
        number = len(self.micro_batches) * ranks.count_joined()
        return found | ranks.describe(self.device) | {"micro_batches": number, "sharding": self.settings.sharding}

    def state(self) -> dict[str, Any]:
        """Return whole weights, average and optimiser state. Where weights are shared out, a collective; rank 0 gets
        the result."""
        shards = self.shards
        return {
            "weights": shards.weights(self.agent.state_dict()),
            "average": {name: shards.join(name, mean) for name, mean in self._name_average().items()},
            "optimizer": shards.of_optimizer(self.optimizer.state_dict(), self._list_names(), Shards.join),
        }

    def save(self, directory: Path, record: Mapping[str, Any], data: Mapping[str, torch.Tensor] | None = None) -> Path:
        """Write a checkpoint under `directory`; `record` joins what checkpoint.json says, `data` the tensors. Where
        weights are shared out, the other ranks call `state` meanwhile."""
        state = self.state()
        return checkpoints.save(
            directory,
            record={
                **record,
                "update": self.update,
                "steps_seen": self.steps_seen,
                "skipped_updates": self.skipped_updates,
                "skipped_in_a_row": self.skipped_in_a_row,
                "spaces": self.spaces.to_json(),
                "agent": self.agent_settings.model_dump(mode="json"),
                "context_length": self.settings.resolved_context_length,
                "seed": self.seed,
                "device": self.device.type,
            },
            weights=state["weights"],
            average=state["average"],
            training_state={
                "optimizer": state["optimizer"],
                "data": dict(data or {}),
            },
            keep=self.settings.keep_checkpoints,
        )

    def begin_with(self, weights: Mapping[str, torch.Tensor], settings: InitSettings) -> Transfer:
        """Take the first weights from another agent; see `transfer`. Call it before the first step."""
        done = transfer(self.agent, weights, settings)
        self.agent.rescaled_too.clear()
        self._prepare()  # the average begins with these weights, too
        self.graphs = self._make_graphs()
        return done

    def restore(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """Continue from `checkpoint`; returns the `data` it was saved with."""
        state = checkpoint.training_state()
        with checkpoint.understood():
            self.agent.load_state_dict(dict(checkpoint.weights))
            for name, mean in self._name_average().items():
                mean.copy_(checkpoint.acting[name])
            restore_optimizer(self.optimizer, state["optimizer"])
            self.graphs = self._make_graphs()  # the old ones would move the moments that were
            self.update = checkpoint.update
            self.steps_seen = int(checkpoint.record["steps_seen"])
            self.skipped_updates = int(checkpoint.record["skipped_updates"])
            self.skipped_in_a_row = int(checkpoint.record["skipped_in_a_row"])
            before = checkpoint.record.get("device", self.device.type)
            if before != self.device.type:  # whose generators draw other numbers from the same seeds
                self.notices.append(
                    f"resuming on another kind of device ({before} before, {self.device.type} now), "
                    "whose random numbers differ"
                )
            return dict(state.get("data", {}))


class _NextLoss(torch.nn.Module):
    """The next of an update's losses, as the output of a module: what DistributedDataParallel expects."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def forward(self, losses: Iterator[Any]) -> Any:
        return next(losses)


@functools.lru_cache(maxsize=8)
def _find_parts(names: tuple[str, ...], device: torch.device) -> tuple[list[str], torch.Tensor]:
    """Find the parts of the network that parameters belong to (timestep, sequence, actor, critic, ...): the names of
    their norms, and a matrix that sums numbers of the N parameters, all of them first, then those of each part."""
    part_N = [name.removeprefix("heads.").partition(".")[0] for name in names]
    parts = [*dict.fromkeys(part_N)]
    rows = [[1.0] * len(names), *([float(own == part) for own in part_N] for part in parts)]
    return [f"grad_norm_{part}" for part in parts], torch.tensor(rows).to(device)


def use_threads(threads: int) -> None:
    """Let torch use so many CPU threads (0: as OMP_NUM_THREADS and the available cores say), in this whole process."""
    torch.set_num_threads(host.choose_threads(threads))
