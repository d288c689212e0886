"""The actor-critic agent: one encoder trained by every loss, heads with target copies (arXiv 2310.09971, section 4).

B batch, T time, N real steps of a batch, D state width, C critics, G discounts (the last one acts), Z uniforms.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pipelines.config.model import AgentSettings
from pipelines.lake.spaces import Spaces
from pipelines.learning.ensemble import Reduction, draw, reduce
from pipelines.learning.filters import advantage_filter
from pipelines.learning.losses import critic_loss, imitation_loss, maximization_loss
from pipelines.learning.popart import PopArt
from pipelines.learning.targets import n_step_targets
from pipelines.learning.tensors import TensorBatch
from pipelines.learning.values import Evaluation, heads
from pipelines.nets.sequence import sequence_encoder
from pipelines.nets.timestep import timestep_encoder

Metrics = dict[str, Tensor]


class Agent(nn.Module):
    """Learns off-policy from windows; acts through `pipelines.learning.acting`.

    `seed` alone decides the initial weights. Everything an update changes beside parameters (value normalisation,
    input statistics, spectral estimates, target heads) is in the state dict.
    """

    def __init__(self, spaces: Spaces, settings: AgentSettings, *, seed: int = 0) -> None:
        super().__init__()
        self.spaces, self.settings = spaces, settings
        self.gammas = (*settings.gammas, settings.acting_gamma)
        self.register_buffer("gamma_G", torch.tensor(self.gammas), persistent=False)
        self.gamma_G: Tensor
        self.reduction: Reduction = "min" if settings.online_weight > 0 else "mean"
        self.filter = advantage_filter(settings.filter)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.timestep = timestep_encoder(spaces, settings.timestep)
            self.sequence = sequence_encoder(self.timestep.output_size, settings.sequence)
            self.heads = heads(self.sequence.output_size, spaces.action, self.gammas, settings)
        self.target_heads = copy.deepcopy(self.heads).requires_grad_(False)
        self.popart = PopArt(len(self.gammas), settings.popart)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves and the clip norm counts: everything but the target heads."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def update_targets(self) -> None:
        """Move the target heads a step of `target_tau` towards the heads; after the optimiser's step."""
        torch._foreach_lerp_(
            list(self.target_heads.parameters()), list(self.heads.parameters()), self.settings.target_tau
        )

    def encode(self, batch: TensorBatch) -> Tensor:
        """States of all T + 1 rows, (B, T+1, D)."""
        tokens = self.timestep(batch.observation, batch.action, batch.reward, batch.time)
        return self.sequence(tokens, batch.time)

    def loss(self, batch: TensorBatch, generator: torch.Generator | None = None) -> tuple[Tensor, Metrics]:
        """Total loss of an update on one batch, and its metrics (0-d tensors without gradient; where windows have
        an importance, beside them `td_errors` (B,): the mean absolute TD error of each).

        Moves the running statistics. `generator` draws actions and ensemble members; dropout draws from torch's
        global generator.
        """
        return next(self.losses([batch], generator))

    def losses(
        self, batches: Sequence[TensorBatch], generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Metrics]]:
        """One update's loss in micro-batches: call backward on each as it comes; gradients, losses and metrics add
        up to those of one batch with all windows.

        Statistics move once, on all micro-batches, before the first loss; for this, several micro-batches are
        encoded twice (the first time without gradient).
        """
        self._update_statistics(batches)
        single = len(batches) == 1
        with torch.set_grad_enabled(single):
            states = [self.encode(batch) for batch in batches]
        targets = [self._targets(batch, h.detach(), generator) for batch, h in zip(batches, states, strict=True)]
        self._update_popart(torch.cat(targets))
        steps = sum(len(target) for target in targets)
        kept = states if single else [None] * len(states)
        del states
        for batch, target_NG, h_BTD in zip(batches, targets, kept, strict=True):
            h_BTD = self.encode(batch) if h_BTD is None else h_BTD
            yield self._loss(batch, h_BTD, target_NG, steps, generator)

    def _loss(
        self, batch: TensorBatch, h_BTD: Tensor, target_NG: Tensor, steps: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Metrics]:
        noise_NGZ, noise_CNG = self._noise(len(target_NG), generator)
        at = self.heads.evaluate(h_BTD[:, :-1][batch.mask], batch.action[:, 1:][batch.mask], noise_NGZ)
        weight_NG = self._imitation_weights(batch.mask, at)

        importance_N, copied_NG = None, weight_NG
        if batch.importance is not None:
            importance_N = batch.importance[:, None].expand_as(batch.mask)[batch.mask]
            copied_NG = weight_NG * importance_N[:, None]

        critic = critic_loss(at.data_CNG, self.popart.normalize(target_NG), importance_N) / steps
        policy_NG = reduce(at.policy_CNG, draw(noise_CNG, self.settings.critic.subset), self.reduction)
        online = maximization_loss(policy_NG, importance_N)
        offline = imitation_loss(at.log_prob_NG, copied_NG)
        actor = (self.settings.online_weight * online + self.settings.offline_weight * offline) / steps
        total = actor + self.settings.critic_weight * critic
        metrics = self._metrics(at, target_NG, weight_NG, steps, loss=total, critic_loss=critic, actor_loss=actor)
        if batch.importance is not None:
            metrics["td_errors"] = self._td_errors(batch, at, target_NG)
        return total, metrics

    @torch.no_grad()
    def _targets(self, batch: TensorBatch, h_BTD: Tensor, generator: torch.Generator | None) -> Tensor:
        """y of the real steps (N, G), in units of multiplied rewards, by the statistics before this update."""
        next_h_ND = h_BTD[:, 1:][batch.mask]
        noise_NGZ, noise_CNG = self._noise(len(next_h_ND), generator)
        value_CNG = self.target_heads.next_values(next_h_ND, noise_NGZ)
        value_NG = reduce(value_CNG, draw(noise_CNG, self.settings.critic.subset), self.reduction)
        value_BTG = value_NG.new_zeros(*batch.mask.shape, len(self.gammas))
        value_BTG[batch.mask] = self.popart.denormalize(value_NG)
        reward_BT = batch.reward[:, 1:] * self.settings.reward_multiplier
        return n_step_targets(
            reward_BT, batch.terminated, value_BTG, self.gamma_G, batch.mask, n=self.settings.num_steps
        )[batch.mask]

    @torch.no_grad()
    def _imitation_weights(self, mask_BT: Tensor, at: Evaluation) -> Tensor:
        """f(advantage) at the real steps (N, G); the filter sees the batch in its own shape, with the mask."""
        advantage_NG = (at.data_CNG.mean(0) - at.policy_CNG.mean(0)) * self.popart.sigma_G
        advantage_BTG = advantage_NG.new_zeros(*mask_BT.shape, advantage_NG.shape[1])
        advantage_BTG[mask_BT] = advantage_NG
        return self.filter(advantage_BTG, mask_BT[..., None])[mask_BT]

    @torch.no_grad()
    def _update_statistics(self, batches: Sequence[TensorBatch]) -> None:
        self.timestep.update_statistics(batches)
        self.sequence.update_statistics()

    def _update_popart(self, targets_NG: Tensor) -> None:
        scale_G, shift_G = self.popart.update(targets_NG)
        self.heads.rescale(scale_G, shift_G)
        self.target_heads.rescale(scale_G, shift_G)

    def _noise(self, rows: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Uniforms for action samples (N, G, Z) and for the draw of critics (C, N, G), row by row in one draw, so
        that micro-batches see what the batch would."""
        actions, members = self.heads.noise_size, self.settings.critic.ensemble
        device = self.gamma_G.device if generator is None else generator.device
        shape = (rows, len(self.gammas), actions + members)
        noise = torch.rand(shape, generator=generator, device=device).to(self.gamma_G.device)
        return noise[..., :actions], noise[..., actions:].permute(2, 0, 1)

    @torch.no_grad()
    def _td_errors(self, batch: TensorBatch, at: Evaluation, target_NG: Tensor) -> Tensor:
        """Mean absolute TD error of each window (B,), of the acting discount, in reward units."""
        value_CN = self._acting_values(at)
        error_BT = value_CN.new_zeros(batch.mask.shape)
        error_BT[batch.mask] = (value_CN - target_NG[:, -1]).abs().mean(0)
        return error_BT.sum(1) / batch.mask.sum(1) / self.settings.reward_multiplier

    def _acting_values(self, at: Evaluation) -> Tensor:
        """Values of the actions taken (C, N), by the acting discount, in units of multiplied rewards."""
        return at.data_CNG[..., -1] * self.popart.sigma_G[-1] + self.popart.mu_G[-1]

    @torch.no_grad()
    def _metrics(self, at: Evaluation, target_NG: Tensor, weight_NG: Tensor, steps: int, **losses: Tensor) -> Metrics:
        """Sums over the micro-batch's steps divided by the update's; values of the acting discount in reward units."""
        share = len(target_NG) / steps
        acting_CN = self._acting_values(at)
        unit = share / self.settings.reward_multiplier
        return {name: loss.detach() for name, loss in losses.items()} | {
            "q": acting_CN.mean() * unit,
            "target": target_NG[:, -1].mean() * unit,
            "td_error": (acting_CN - target_NG[:, -1]).abs().mean() * unit,
            "ensemble_spread": (acting_CN.amax(0) - acting_CN.amin(0)).mean() * unit,
            "filter_acceptance": weight_NG.mean() * share,
            "entropy": at.entropy_NG[:, -1].mean() * share,
            "popart_mu": self.popart.mu_G[-1] * unit,
            "popart_sigma": self.popart.sigma_G[-1] * unit,
        }
