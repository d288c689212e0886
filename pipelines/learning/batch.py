"""A batch of windows as tensors, and its states. B batch, T time (steps; T + 1 rows), N valid steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.data.batch import Batch
from pipelines.errors import IntegrityError, UsageError
from pipelines.lake.schema import ACTION, LABEL, LOGP, REWARD, TERMINATED
from pipelines.lake.spaces import Discrete, MultiDiscrete, Spaces
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import SequenceEncoder
from pipelines.nets.timestep import TimestepEncoder

_ALIGNMENT = 256  # bytes; what CUDA allocates begins at multiples of it, and kernels read parts of that as fast


class _RowsAt(torch.autograd.Function):
    """Rows at distinct places. Their gradient is a copy; that of `index_select` is a sum, and several times slower."""

    @staticmethod
    def forward(ctx: Any, rows_RF: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.rows = len(rows_RF)
        return rows_RF.index_select(0, place_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad_NF,), (place_N,) = grads, ctx.saved_tensors
        return grad_NF.new_zeros(ctx.rows, *grad_NF.shape[1:]).index_copy_(0, place_N, grad_NF), None


@dataclass(frozen=True)
class StepIndex:
    """Some steps of windows, as a mask and as places that the host computed. Selecting by the mask would make the host
    wait until a device has counted its true elements.

    `step_N`: places among the B T steps; `row_N` and `next_row_N`: places of the rows before and after a step among the
    B (T + 1) rows. Where some steps are repeated to make up a number, `place_N` says where `scatter` puts values; those
    of repeated steps come behind all others, and are dropped.
    """

    mask_BT: Tensor
    step_N: Tensor
    row_N: Tensor
    next_row_N: Tensor
    place_N: Tensor | None = None

    @classmethod
    def of(cls, mask_BT: np.ndarray, rounding: Rounding | None = None) -> StepIndex:
        """Index the true steps of a mask. With `rounding`, some are repeated."""
        step_N = np.flatnonzero(mask_BT)
        repeated = 0 if rounding is None else rounding.missing(len(step_N))
        place_N = np.concatenate((step_N, np.full(repeated, mask_BT.size)))
        if rounding is not None and repeated:
            step_N = np.concatenate((step_N, rounding.random.choice(step_N, repeated)))
        row_N = step_N + step_N // mask_BT.shape[1]  # each window has a row more than steps
        indices = (step_N, row_N, row_N + 1) if rounding is None else (step_N, row_N, row_N + 1, place_N)
        return cls(_to_tensor(mask_BT), *map(_to_tensor, indices))

    def __len__(self) -> int:
        return len(self.step_N)

    def take(self, x_BT: Tensor) -> Tensor:
        """Select values of steps: (B, T, ...) to (N, ...)."""
        return x_BT.flatten(0, 1).index_select(0, self.step_N)

    def take_before(self, x_BR: Tensor) -> Tensor:
        """Select the rows that steps begin at: (B, T + 1, ...) to (N, ...)."""
        select: Callable[..., Tensor] = _RowsAt.apply
        return select(x_BR.flatten(0, 1), self.row_N)

    def take_after(self, x_BR: Tensor) -> Tensor:
        """Select the rows that steps end at: (B, T + 1, ...) to (N, ...)."""
        return x_BR.flatten(0, 1).index_select(0, self.next_row_N)

    def scatter(self, value_N: Tensor) -> Tensor:
        """Put values (N, ...) at their steps (B, T, ...), zeros elsewhere; without gradient."""
        steps = self.mask_BT.numel()
        if self.place_N is None:
            out = value_N.new_zeros(steps, *value_N.shape[1:]).index_copy_(0, self.step_N, value_N)
        else:
            out = value_N.new_zeros(steps + 1, *value_N.shape[1:]).index_copy_(0, self.place_N, value_N)[:steps]
        return out.unflatten(0, self.mask_BT.shape)


@dataclass(frozen=True)
class Rounding:
    """Rounds the sizes of a batch, so that batches of windows of all lengths have few shapes: what is computed for a
    shape can be kept. Numbers of steps become multiples of `unit`, a 32nd of the batch's largest."""

    unit: int
    random: np.random.Generator

    @classmethod
    def of(cls, lengths: np.ndarray, longest: int, random: np.random.Generator) -> Rounding | None:
        """Round batches of windows of up to `longest` steps; None where these lengths are all the same."""
        is_even = lengths.min() == lengths.max()
        return None if is_even else cls(max(len(lengths) * longest // 32, 1), random)

    def missing(self, count: int) -> int:
        """Count the steps that make `count` a multiple, and must be repeated."""
        return -count % self.unit if count else 0

    def rows(self, longest: int, most: int) -> int:
        """Round the rows of a batch up to eighths of the `most` steps, and one."""
        part = -(-(most - 1) // 8)
        return min(-(-(longest - 1) // part) * part + 1, most)

    def thin(self, mask_BT: np.ndarray) -> np.ndarray:
        """Leave out steps at random, so that their number is a multiple. A few steps are all used."""
        step_N, thinned = np.flatnonzero(mask_BT), mask_BT.copy()
        if len(step_N) >= 4 * self.unit:
            thinned.reshape(-1)[self.random.choice(step_N, len(step_N) % self.unit, replace=False)] = False
        return thinned


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """Rows 0..T of windows: row t is the token at time `start + t`, row t + 1 the result of the step from t.

    `observation`, `action` (stored form) and `reward` have T + 1 rows, `terminated` and the masks T steps. `valid`:
    unpadded steps whose result is known; `counted`: those of them that count in the losses; `actor_counted`: those of
    these that count in the policy's terms, too (None: all). `importance` (B,): weights of the losses of windows; None:
    all 1. `label` (B, T + 1, ...): row t is that of the action from t; None: labels are not used. `logp` (B, T + 1):
    row t + 1 is the log-probability with which the data's policy took the action from t; None: it is unknown, or not
    used. `lengths` (valid rows of each window) and `last_time` (the maximum time index of a valid row) are known
    without a device sync.
    """

    observation: Mapping[str, Tensor]
    action: Tensor
    reward: Tensor
    time: Tensor
    terminated: Tensor
    valid: StepIndex
    counted: StepIndex
    valid_rows: Tensor
    lengths: tuple[int, ...]
    last_time: int
    actor_counted: StepIndex | None = None
    importance: Tensor | None = None
    label: Tensor | None = None
    logp: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """Valid steps (B, T): unpadded, with a known result."""
        return self.valid.mask_BT

    @property
    def loss_mask(self) -> Tensor:
        """Steps that count in the losses (B, T)."""
        return self.counted.mask_BT

    @classmethod
    def from_numpy(
        cls,
        windows: Batch,
        spaces: Spaces,
        *,
        loss_mask: str = "",
        actor_mask: str = "",
        labelled: bool = False,
        logp: bool = False,
        rounding: np.random.Generator | None = None,
    ) -> TensorBatch:
        """Convert windows, cut to the longest of the batch; the tensors may share the windows' memory.

        Losses count every valid step except the first `warm_up` of a window, and steps that observe 0 in the column
        `loss_mask`, if one is named. The policy's terms also leave out steps that observe 0 in `actor_mask`.
        `labelled`: with the labels; `logp`: with the log-probabilities of actions. With `rounding`, batches of windows
        of different lengths have few shapes: rows are added, valid steps repeated, and of those that count up to a 32nd
        of the largest number is left out, drawn by it.
        """
        lengths = np.asarray(windows.lengths)
        rows, most = int(lengths.max()), windows.columns[REWARD].shape[1]
        rounded = None if rounding is None else Rounding.of(lengths, most - 1, rounding)
        rows = rows if rounded is None else rounded.rows(rows, most)
        names = (*spaces.observation, ACTION, REWARD, TERMINATED)
        columns = {name: _to_tensor(windows.columns[name][:, :rows]) for name in names}
        index, start = np.arange(rows), np.asarray(windows.start, dtype=np.int64)[:, None]
        valid = index < lengths[:, None]
        real = valid[:, 1:]
        if windows.cut_off is not None:  # targets do not reach across them either
            real = real & ~windows.cut_off[:, : rows - 1]
        counted = real
        if windows.warm_up is not None:
            counted = counted & (index[:-1] >= np.asarray(windows.warm_up)[:, None])
        if loss_mask:
            counted = counted & (windows.columns[loss_mask][:, : rows - 1].reshape(counted.shape) != 0)
        if rounded is not None:
            counted = rounded.thin(counted)
        steps = StepIndex.of(real, rounded)
        actor_counted = None
        if actor_mask:
            actor_counted = StepIndex.of(
                counted & (windows.columns[actor_mask][:, : rows - 1].reshape(counted.shape) != 0)
            )
        return cls(
            observation={name: columns[name] for name in spaces.observation},
            action=columns[ACTION],
            reward=columns[REWARD].float(),
            time=_to_tensor(start + index),
            terminated=columns[TERMINATED][:, 1:].bool(),
            valid=steps,
            counted=steps if counted is real else StepIndex.of(counted),
            valid_rows=_to_tensor(valid),
            lengths=tuple(lengths.tolist()),
            last_time=int((np.asarray(windows.start) + lengths).max()) - 1,
            actor_counted=actor_counted,
            importance=None if windows.importance is None else _to_tensor(windows.importance.astype(np.float32)),
            label=_to_tensor(windows.columns[LABEL][:, :rows]) if labelled else None,
            logp=_to_tensor(windows.columns[LOGP][:, :rows]).float() if logp else None,
        )


@dataclass(frozen=True)
class HostBatch:
    """Windows and their tensors, ready for a device: all tensors are parts of one `block` of page-locked memory, which
    a device gets in one copy while the host goes on. None: they are used on the host, wherever they are."""

    windows: Batch
    tensors: TensorBatch
    block: Tensor | None = None

    @classmethod
    def of(cls, windows: Batch, tensors: TensorBatch, device: torch.device) -> HostBatch:
        """Prepare a batch for `device`."""
        if device.type == "cpu":
            return cls(windows, tensors)
        places: dict[int, tuple[Tensor, int]] = {}
        size = 0
        for tensor in list_tensors(tensors):
            if id(tensor) not in places:
                places[id(tensor)] = tensor, size
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")

        def copy_in(tensor: Tensor) -> Tensor:
            begin = places[id(tensor)][1]
            part = block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return part.copy_(tensor)

        return cls(windows, map_tensors(tensors, copy_in), block)

    def move(self, device: torch.device) -> TensorBatch:
        """Return the tensors on `device`."""
        return self.tensors if self.block is None else self.find_in(self.block.to(device, non_blocking=True))

    def find_in(self, block: Tensor) -> TensorBatch:
        """Return the tensors as parts of a copy of the block."""

        def find(tensor: Tensor) -> Tensor:
            begin = tensor.storage_offset() * tensor.element_size()
            return block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return map_tensors(self.tensors, find)

    def describe(self) -> tuple[Any, ...]:
        """Describe what the kernels of an update depend on: which fields the batch has, their shapes, and where they
        are in the block."""
        fields = tuple(name for name, value in vars(self.tensors).items() if value is not None)
        parts = ((tuple(x.shape), x.dtype, x.storage_offset()) for x in list_tensors(self.tensors))
        return fields, tuple(parts)


def list_tensors(batch: Any) -> list[Tensor]:
    """List the tensors of a batch, in the order of its fields; those that fields share are listed twice."""
    found: list[Tensor] = []
    for value in (batch if isinstance(batch, Mapping) else vars(batch)).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Mapping) or is_dataclass(value):
            found.extend(list_tensors(value))
    return found


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy a batch, or a part of one, with `change` of each of its tensors."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, change) for name, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{name: map_tensors(value, change) for name, value in vars(batch).items()})
    return batch


def encode(
    timestep: TimestepEncoder, sequence: SequenceEncoder, batch: TensorBatch, *, packed: bool, shortcut: bool = False
) -> Tensor:
    """Compute the states of all rows (B, T + 1, D). `packed`: windows share rows of the network; same states."""
    sequence.require_time(batch.last_time)
    observation = timestep.augment(batch.observation) if timestep.training else batch.observation
    packing = Packing.of(batch.lengths, batch.time) if packed else None
    if packing is None:
        token = timestep(observation, batch.action, batch.reward, batch.time)
        return join_shortcut(token, sequence(token, batch.time), shortcut)
    columns = {name: packing.pack(column) for name, column in observation.items()}
    time = packing.pack(batch.time)
    tokens = timestep(columns, packing.pack(batch.action), packing.pack(batch.reward), time)
    return packing.unpack(join_shortcut(tokens, sequence(tokens, time, packing), shortcut))


def join_shortcut(token: Tensor, h: Tensor, shortcut: bool) -> Tensor:
    """Concatenate tokens (..., E) and what the sequence encoder made of them (..., D), if there is a shortcut."""
    return torch.cat((token, h), -1) if shortcut else h


def require_choices(windows: Batch, spaces: Spaces) -> None:
    """Raise IntegrityError for a discrete value outside its space, which would be an index out of bounds: windows are
    drawn without verifying checksums.
    """
    columns, lengths = windows.columns, np.asarray(windows.lengths)
    rows = int(lengths.max())
    valid = np.arange(rows) < lengths[:, None]
    for name, space in {**spaces.observation, ACTION: spaces.action, LABEL: spaces.action}.items():
        if name not in columns or not isinstance(space, Discrete | MultiDiscrete):
            continue
        values, limit = columns[name][:, :rows][valid], space.n if isinstance(space, Discrete) else np.array(space.nvec)
        if ((values < 0) | (values >= limit)).any():
            raise IntegrityError(
                f"a value of '{name}' is outside its space: a segment of the lake is damaged",
                hint="find it with: amago lake verify LAKE",
            )


def require_mask(setting: str, column: str, spaces: Spaces) -> None:
    """Raise UsageError, which names the `setting`, unless `column` is an observation of one number, or empty."""
    space = spaces.observation.get(column)
    if column and (space is None or space.shape not in ((), (1,))):
        raise UsageError(
            f"{setting} '{column}' is not an observation of one number",
            hint=f"the observation has: {', '.join(spaces.observation)}",
        )


def _to_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
