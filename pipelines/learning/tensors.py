"""A batch of windows as tensors. B batch, T time (steps; T + 1 rows), N real steps."""

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


class Windows(Protocol):
    """What is read of `pipelines.data`'s batch: columns (B, L+1, ...), lengths (B,) real rows, start (B,), and the
    importance (B,) of the windows, if they differ in it.
    """

    @property
    def columns(self) -> Mapping[str, np.ndarray]: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def start(self) -> np.ndarray: ...
    @property
    def importance(self) -> np.ndarray | None: ...


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """Rows 0..T of windows; row t is the token at time `start + t`, row t + 1 what the step from t led to.

    `observation`, `action` (stored form) and `reward` have T + 1 rows, `terminated` and the masks T steps. `mask`:
    valid steps; `loss_mask`: those of them that count in the losses. The loss of a window counts `importance` (B,)
    times; None: all alike. `last_time` is the greatest time index of a valid row, known without asking the device.
    """

    observation: Mapping[str, Tensor]
    action: Tensor
    reward: Tensor
    time: Tensor
    terminated: Tensor
    mask: Tensor
    loss_mask: Tensor
    real_rows: Tensor
    last_time: int
    importance: Tensor | None = None

    @classmethod
    def from_numpy(
        cls,
        windows: Windows,
        spaces: Spaces,
        device: torch.device | str = "cpu",
        *,
        burn_in: int = 0,
        loss_mask: str = "",
    ) -> TensorBatch:
        """Cut to the longest window of the batch (padding beyond it has no use) and moved to `device`.

        Losses count every valid step but the first `burn_in` of a window that does not begin its trajectory, and those
        that observe 0 in the column `loss_mask`, if one is named.
        """
        lengths = np.asarray(windows.lengths)
        rows = int(lengths.max())
        columns = {name: _tensor(windows.columns[name][:, :rows], device) for name in _columns(spaces)}
        index = torch.arange(rows, device="cpu")
        real = index < torch.from_numpy(lengths)[:, None]
        start = torch.from_numpy(np.asarray(windows.start, dtype=np.int64))[:, None]
        counted = real[:, 1:] & ((start == 0) | (index[:-1] >= burn_in))
        if loss_mask:
            shown = torch.from_numpy(np.ascontiguousarray(windows.columns[loss_mask][:, : rows - 1]))
            counted &= shown.reshape(counted.shape) != 0
        return cls(
            observation={name: columns[name] for name in spaces.observation},
            action=columns[ACTION],
            reward=columns[REWARD].float(),
            time=(start + index).to(device),
            terminated=columns[TERMINATED][:, 1:].bool(),
            mask=real[:, 1:].to(device),
            loss_mask=counted.to(device),
            real_rows=real.to(device),
            last_time=int((np.asarray(windows.start) + lengths).max()) - 1,
            importance=None if windows.importance is None else _tensor(windows.importance, device).float(),
        )

    def split(self, parts: int) -> list[TensorBatch]:
        """Micro-batches of (nearly) equal size. ValueError if there are fewer windows than parts."""
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


def require_choices(windows: Windows, spaces: Spaces) -> None:
    """IntegrityError for a discrete value outside its space, which would be an index out of bounds: checksums of what
    is drawn are not checked.
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
                f"a value of '{name}' that was drawn is outside its space: a segment of the lake is damaged",
                hint="find it with: amago lake verify LAKE",
            )


def require_loss_mask(column: str, spaces: Spaces) -> None:
    """UsageError unless `column` is an observation of one number, or empty."""
    space = spaces.observation.get(column)
    if column and (space is None or space.shape not in ((), (1,))):
        raise UsageError(
            f"train.loss_mask '{column}' is not an observation of one number",
            hint=f"the observation has: {', '.join(spaces.observation)}",
        )


def scattered(value_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Values (N, ...) at the N true places of a mask, (B, T, ...), zeros elsewhere."""
    out = value_N.new_zeros(*mask_BT.shape, *value_N.shape[1:])
    out[mask_BT] = value_N
    return out


def _columns(spaces: Spaces) -> tuple[str, ...]:
    return (*spaces.observation, ACTION, REWARD, TERMINATED)


def _tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
