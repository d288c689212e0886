"""Built-in auxiliary losses, which train the memory beside values and policy. B batch, T time, D state width.

They are named under `[[agent.auxiliary_losses]]`, as losses of the user's own are (see `pipelines.learning.extra`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipelines.errors import UsageError
from pipelines.lake.spaces import Spaces
from pipelines.learning.tensors import TensorBatch
from pipelines.nets.features import features
from pipelines.nets.linear import MLP
from pipelines.nets.norms import RunningNorm
from pipelines.nets.timestep import routes


class NextStep(nn.Module):
    """Predicts the next observation and the reward from the state and the action taken.

    To predict what an action will do in this task, a state has to remember what it did before: the same memory that
    values need, but learned from every step instead of from rare, noisy returns (self-predictive representations:
    Ni et al. 2024, arXiv 2401.08898; the targets here are the observations themselves, so nothing can collapse).

    Targets are standardized by running moments, so the loss of guessing the mean is about the number of features,
    whatever their units. Images and sequences are not predicted.
    """

    def __init__(self, spaces: Spaces, state_size: int, *, hidden: int = 128, rate: float = 1e-3) -> None:
        super().__init__()
        if hidden < 1:
            raise UsageError(f"loss 'next-step': hidden {hidden} is less than 1")
        self.spaces = spaces
        way = routes(spaces.observation, {})
        self.columns = {name: space for name, space in spaces.observation.items() if way[name] == "flat"}
        size = sum(space.flat_size for space in self.columns.values()) + 1
        self.norm = RunningNorm(size, rate, least_sigma=1e-3)
        self.net = MLP(state_size + spaces.action.flat_size, (hidden,), size, gain=0.1)

    @torch.no_grad()
    def update_statistics(self, batches: Sequence[TensorBatch]) -> None:
        """Take the targets of an update's micro-batches into the running moments."""
        rows = [self._targets(batch)[batch.loss_mask] for batch in batches]
        finite = [row[row.isfinite().all(-1)] for row in rows]
        if any(map(len, finite)):
            self.norm.update(torch.cat(finite))

    def forward(self, states_BTD: Tensor, batch: TensorBatch, mask_BT: Tensor) -> Tensor:
        """Squared error, summed over features (B, T)."""
        action_BTF = features(batch.action[:, 1:], self.spaces.action)
        predicted_BTF = self.net(torch.cat((states_BTD[:, :-1], action_BTF), -1))
        return (predicted_BTF.float() - self.norm(self._targets(batch))).square().sum(-1)

    def _targets(self, batch: TensorBatch) -> Tensor:
        columns = [features(batch.observation[name], space) for name, space in self.columns.items()]
        return torch.cat((*columns, batch.reward[..., None]), -1)[:, 1:]
