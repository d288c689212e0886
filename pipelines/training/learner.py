"""The learner: an agent, its optimiser and counters; one `step` is one gradient update.

Random draws are keyed by update and micro-batch (`pipelines.data.randomness`), so that resuming continues the very same
sequence and checkpoints contain no generator states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.config import cores
from pipelines.config.model import AgentSettings
from pipelines.config.settings import TrainSettings
from pipelines.data.batch import Batch
from pipelines.data.randomness import Purpose, key
from pipelines.errors import StageFailed, UsageError
from pipelines.lake.spaces import Spaces
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.agent import Agent
from pipelines.learning.batch import TensorBatch, require_choices, require_loss_mask
from pipelines.learning.checkpoint import Checkpoint, resolve_device
from pipelines.learning.diagnostics import inspect_encoders
from pipelines.learning.heads import CriticHeads
from pipelines.nets.precision import autocast
from pipelines.training import speed
from pipelines.training.optimizer import learning_rate, make_optimizer
from pipelines.training.optimizer import restore as restore_optimizer

Learnt = Callable[[Batch, np.ndarray], None]


class Learner:
    """Trains an `Agent` for `spaces`.

    `draw` given to `step` returns a batch of so many windows; with `grad_accumulation` > 1 it is called once per
    micro-batch and the sum of all gradients makes the update.
    """

    def __init__(self, spaces: Spaces, agent: AgentSettings, train: TrainSettings, *, seed: int) -> None:
        if train.batch_size % train.grad_accumulation:
            raise UsageError(
                f"train.batch_size {train.batch_size} is not a multiple of "
                f"train.grad_accumulation {train.grad_accumulation}"
            )
        require_loss_mask(train.loss_mask, spaces)
        use_threads(train.threads)
        self.spaces, self.agent_settings, self.settings, self.seed = spaces, agent, train, seed
        self.device = resolve_device(train.device)
        self.agent = Agent(spaces, agent, seed=seed).to(self.device)
        self.agent.packed = train.packing
        encoders: list[torch.nn.Module] = [self.agent.timestep, self.agent.sequence]
        self.notices = speed.prepare(encoders, train, self.device)
        self.compiled = train.compile and not self.notices
        self.parameters = list(self.agent.trainable_parameters())
        self.parts = _parts(self.agent)
        self.optimizer = make_optimizer(self.agent, train)
        self.average = self._copied() if train.ema_decay else []
        self.update = 0
        self.steps_seen = 0
        self.skipped_updates = self.skipped_in_a_row = 0

    def step(self, draw: Callable[[int], Batch], learnt: Learnt | None = None) -> dict[str, torch.Tensor]:
        """One update. Returns detached scalar metrics.

        An update whose gradient is not finite is counted and skipped: it moves neither weights nor optimiser nor
        targets, has no metrics, and its batch is not reported. StageFailed after `max_skipped` of them in a row.

        Where windows have an importance, `learnt` receives the mean absolute TD errors (B,) of each batch.
        """
        size, parts = self.settings.batch_size, self.settings.grad_accumulation
        batches = [draw(size // parts) for _ in range(parts)]
        for batch in batches:
            require_choices(batch, self.spaces)
        masks: dict[str, Any] = {"burn_in": self.settings.burn_in, "loss_mask": self.settings.loss_mask}
        tensors = [TensorBatch.from_numpy(batch, self.spaces, self.device, **masks) for batch in batches]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.update, self.settings)
        self.agent.train()
        metrics, errors = self._backward(tensors)
        if (self.update + 1) % self.settings.log_every == 0:
            with autocast(self.device, self.settings.precision):
                metrics |= inspect_encoders(self.agent.timestep, self.agent.sequence, tensors[0])
        norms = self._clip()
        is_finite = bool(torch.isfinite(norms["grad_norm"]))  # waits for the device, once an update
        if is_finite:
            self.optimizer.step()
            self.agent.update_targets()
            self._update_average()
        self.optimizer.zero_grad(set_to_none=True)
        self.update += 1
        self.steps_seen += sum(int((batch.lengths - 1).sum()) for batch in batches)
        self._count_skipped(is_finite)
        if not is_finite:
            return {}
        if learnt is not None:
            for batch, error in zip(batches, errors, strict=False):
                learnt(batch, error.cpu().numpy())
        return metrics | norms

    def _count_skipped(self, is_finite: bool) -> None:
        self.skipped_updates += not is_finite
        self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.settings.max_skipped:
            raise StageFailed(
                f"the gradient was not finite in {self.skipped_in_a_row} updates in a row, up to update {self.update}",
                hint="lower train.learning_rate, or check the data with 'amago lake verify'",
            )

    def _clip(self) -> dict[str, torch.Tensor]:
        """Bound the global norm of the gradients; returns it as it was, and that of each part of the network."""
        named = [(name, p.grad) for name, p in zip(self.parts, self.parameters, strict=True) if p.grad is not None]
        norms = torch.stack(torch._foreach_norm([grad for _, grad in named]))
        total = torch.linalg.vector_norm(norms)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.grad_clip, total, foreach=True)
        place = {part: [i for i, (name, _) in enumerate(named) if name == part] for part, _ in named}
        parts = {f"grad_norm_{part}": torch.linalg.vector_norm(norms[which]) for part, which in place.items()}
        return {"grad_norm": total, **parts}

    def _copied(self) -> list[torch.Tensor]:
        """Copies of the parameters; those of the heads follow PopArt, so that values of an average have true units."""
        heads = copy.deepcopy(self.agent.heads).requires_grad_(False)
        if isinstance(heads, CriticHeads):
            self.agent.rescaled_too.append(heads)
        of_heads = {f"heads.{name}": parameter for name, parameter in heads.named_parameters()}
        return [
            of_heads[name] if name in of_heads else parameter.detach().clone()
            for name, parameter in self.agent.named_parameters()
            if parameter.requires_grad
        ]

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the mean towards the weights; early on faster, so that the initial weights are forgotten."""
        if self.average:
            decay = min(self.settings.ema_decay, (1 + self.update) / (10 + self.update))
            torch._foreach_lerp_(self.average, [*self.parameters], 1 - decay)

    def _named_average(self) -> dict[str, torch.Tensor]:
        names = [name for name, parameter in self.agent.named_parameters() if parameter.requires_grad]
        return dict(zip(names, self.average, strict=True)) if self.average else {}

    def _backward(self, tensors: list[TensorBatch]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        total: dict[str, torch.Tensor] = {}
        errors = []
        losses = self.agent.losses(tensors, *self.randomness(len(tensors)))
        for _ in tensors:
            with autocast(self.device, self.settings.precision):
                loss, metrics = next(losses)
            loss.backward()
            if "td_errors" in metrics:
                errors.append(metrics.pop("td_errors"))
            total = {name: value + total[name] if name in total else value for name, value in metrics.items()}
        return total, errors

    def randomness(self, micro_batches: int) -> tuple[list[torch.Generator], list[int]]:
        """Return the generators and dropout seeds of the next update's micro-batches."""
        places = [(self.seed, self.update, part) for part in range(micro_batches)]
        keys = [key(*place, Purpose.ACTIONS) for place in places]
        return (
            [torch.Generator(self.device).manual_seed(each) for each in keys],
            [key(*place, Purpose.DROPOUT) for place in places],
        )

    def described(self) -> dict[str, Any]:
        """What it computes with: device, precision, attention backend."""
        return speed.described(self.agent.sequence, self.settings, self.device, compiled=self.compiled)

    def save(self, directory: Path, record: Mapping[str, Any], data: Mapping[str, torch.Tensor] | None = None) -> Path:
        """Write a checkpoint under `directory`; `record` joins what checkpoint.json says, `data` the tensors."""
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
                "precision": self.settings.precision,
                "seed": self.seed,
            },
            weights=self.agent.state_dict(),
            average=self._named_average(),
            training_state={
                "optimizer": self.optimizer.state_dict(),
                "data": dict(data or {}),
            },
            keep=self.settings.keep_checkpoints,
        )

    def restore(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """Continue from `checkpoint`; returns the `data` it was saved with."""
        state = checkpoint.training_state()
        with checkpoint.understood():
            self.agent.load_state_dict(dict(checkpoint.weights))
            for name, mean in self._named_average().items():
                mean.copy_(checkpoint.acting[name])
            restore_optimizer(self.optimizer, state["optimizer"])
            self.update = checkpoint.update
            self.steps_seen = int(checkpoint.record["steps_seen"])
            self.skipped_updates = int(checkpoint.record["skipped_updates"])
            self.skipped_in_a_row = int(checkpoint.record["skipped_in_a_row"])
            return dict(state.get("data", {}))


def _parts(agent: Agent) -> list[str]:
    """Of each trainable parameter the part of the network it belongs to: timestep, sequence, actor, critic, ..."""
    names = [name for name, parameter in agent.named_parameters() if parameter.requires_grad]
    return [name.removeprefix("heads.").partition(".")[0] for name in names]


def use_threads(threads: int) -> None:
    """Let torch use so many CPU threads (0: as OMP_NUM_THREADS and the available cores say), in this whole process."""
    torch.set_num_threads(cores.threads(threads))
