"""A batch of windows as tensors, and its states. B batch, T time (steps; T + 1 rows), N valid steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipelines.errors import IntegrityError, UsageError
from pipelines.lake.schema import ACTION, REWARD, TERMINATED
from pipelines.lake.spaces import Discrete, MultiDiscrete, Spaces
from pipelines.nets.packing import Packing
from pipelines.nets.sequence import SequenceEncoder
from pipelines.nets.timestep import TimestepEncoder


class Windows(Protocol):
    """Batch of windows as `pipelines.data` draws it: columns (B, L+1, ...), valid rows `lengths` (B,), `start` (B,),
    importance weights (B,) unless all are 1, and `warm_up` (B,), the first steps that do not count (None: all do).
    """

    @property
    def columns(self) -> Mapping[str, np.ndarray]: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def start(self) -> np.ndarray: ...
    @property
    def importance(self) -> np.ndarray | None: ...
    @property
    def warm_up(self) -> np.ndarray | None: ...


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """Rows 0..T of windows: row t is the token at time `start + t`, row t + 1 the result of the step from t.

    `observation`, `action` (stored form) and `reward` have T + 1 rows, `terminated` and the masks T steps. `mask`:
    valid (unpadded) steps; `loss_mask`: those of them that count in the losses. `importance` (B,): weights of the
    windows' losses; None: all 1. `last_time` is the maximum time index of a valid row, known without a device sync.
    """

    observation: Mapping[str, Tensor]
    action: Tensor
    reward: Tensor
    time: Tensor
    terminated: Tensor
    mask: Tensor
    loss_mask: Tensor
    valid_rows: Tensor
    last_time: int
    importance: Tensor | None = None

    @classmethod
    def from_numpy(
        cls,
        windows: Windows,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        *,
        loss_mask: str = "",
    ) -> TensorBatch:
        """Convert windows, cut to the longest of the batch, and move them to `device`.

        Losses count every valid step except the first `warm_up` of a window, and steps that observe 0 in the column
        `loss_mask`, if one is named.
        """
        lengths = np.asarray(windows.lengths)
        rows = int(lengths.max())
        columns = {name: _tensor(windows.columns[name][:, :rows], device) for name in _columns(spaces)}
        index = torch.arange(rows, device="cpu")
        valid = index < torch.from_numpy(lengths)[:, None]
        start = torch.from_numpy(np.asarray(windows.start, dtype=np.int64))[:, None]
        counted = valid[:, 1:]
        if windows.warm_up is not None:
            counted = counted & (index[:-1] >= torch.from_numpy(np.asarray(windows.warm_up, dtype=np.int64))[:, None])
        if loss_mask:
            shown = torch.from_numpy(np.ascontiguousarray(windows.columns[loss_mask][:, : rows - 1]))
            counted = counted & (shown.reshape(counted.shape) != 0)
        return cls(
            observation={name: columns[name] for name in spaces.observation},
            action=columns[ACTION],
            reward=columns[REWARD].float(),
            time=(start + index).to(device),
            terminated=columns[TERMINATED][:, 1:].bool(),
            mask=valid[:, 1:].to(device),
            loss_mask=counted.to(device),
            valid_rows=valid.to(device),
            last_time=int((np.asarray(windows.start) + lengths).max()) - 1,
            importance=None if windows.importance is None else _tensor(windows.importance, device).float(),
        )

    def split(self, parts: int) -> list[TensorBatch]:
        """Split into micro-batches of (nearly) equal size. ValueError if there are fewer windows than parts."""
        if parts > len(self.mask):
            raise ValueError(f"cannot split {len(self.mask)} windows into {parts} parts")
        chunks: dict[str, Any] = {
            name: value.tensor_split(parts) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        observation = {name: value.tensor_split(parts) for name, value in self.observation.items()}
        return [
            replace(
                self,
                observation={name: value[i] for name, value in observation.items()},
                **{name: value[i] for name, value in chunks.items()},
            )
            for i in range(parts)
        ]


def encode(timestep: TimestepEncoder, sequence: SequenceEncoder, batch: TensorBatch, *, packed: bool) -> Tensor:
    """Compute the states of all rows (B, T + 1, D). `packed`: windows share rows of the network; same states."""
    sequence.require_time(batch.last_time)
    observation = timestep.augment(batch.observation) if timestep.training else batch.observation
    packing = Packing.of(batch.valid_rows) if packed else None
    if packing is None:
        return sequence(timestep(observation, batch.action, batch.reward, batch.time), batch.time)
    columns = {name: packing.pack(column) for name, column in observation.items()}
    time = packing.pack(batch.time)
    tokens = timestep(columns, packing.pack(batch.action), packing.pack(batch.reward), time)
    return packing.unpack(sequence(tokens, time, packing))


def require_choices(windows: Windows, spaces: Spaces) -> None:
    """Raise IntegrityError for a discrete value outside its space, which would be an index out of bounds: windows are
    drawn without verifying checksums.
    """
    columns, lengths = windows.columns, np.asarray(windows.lengths)
    rows = int(lengths.max())
    valid = np.arange(rows) < lengths[:, None]
    for name, space in {**spaces.observation, ACTION: spaces.action}.items():
        if not isinstance(space, Discrete | MultiDiscrete):
            continue
        values, limit = columns[name][:, :rows][valid], space.n if isinstance(space, Discrete) else np.array(space.nvec)
        if ((values < 0) | (values >= limit)).any():
            raise IntegrityError(
                f"a value of '{name}' is outside its space: a segment of the lake is damaged",
                hint="find it with: amago lake verify LAKE",
            )


def require_loss_mask(column: str, spaces: Spaces) -> None:
    """Raise UsageError unless `column` is an observation of one number, or empty."""
    space = spaces.observation.get(column)
    if column and (space is None or space.shape not in ((), (1,))):
        raise UsageError(
            f"train.loss_mask '{column}' is not an observation of one number",
            hint=f"the observation has: {', '.join(spaces.observation)}",
        )


def scattered(value_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Scatter values (N, ...) to the N true places of a mask: (B, T, ...), zeros elsewhere."""
    out = value_N.new_zeros(*mask_BT.shape, *value_N.shape[1:])
    out[mask_BT] = value_N
    return out


def _columns(spaces: Spaces) -> tuple[str, ...]:
    return (*spaces.observation, ACTION, REWARD, TERMINATED)


def _tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
