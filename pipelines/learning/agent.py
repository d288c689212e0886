"""An agent: one encoder trained by every loss, heads with target copies (arXiv 2310.09971, section 4; 2411.11188).

One update serves all kinds of agents (`kinds`); they differ in their heads (`values`) and in the terms they weigh.
B batch, T time, N steps that count (`TensorBatch.loss_mask`), D state width, C critics, M drawn ones, G discounts (the
last one acts), K action samples, Z uniforms.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipelines.config.model import AgentSettings
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.lake.spaces import Spaces
from pipelines.learning.encoding import encode
from pipelines.learning.ensemble import Reduction, draw
from pipelines.learning.extra import AuxiliaryLoss
from pipelines.learning.filters import advantage_filter
from pipelines.learning.kinds import resolve
from pipelines.learning.losses import imitation_loss, maximization_loss
from pipelines.learning.popart import PopArt
from pipelines.learning.targets import n_step_targets, trace_targets
from pipelines.learning.tensors import TensorBatch, scattered
from pipelines.learning.values import CriticHeads, ExactHeads, Judged, Own, heads
from pipelines.nets.features import features
from pipelines.nets.norms import symlog
from pipelines.nets.sequence import sequence_encoder
from pipelines.nets.timestep import timestep_encoder

Metrics = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The N steps of a batch that count: states and policies with gradient, actions, legal choices (N, 1, choices)."""

    mask: Tensor
    h_ND: Tensor
    action: Tensor
    params_NGP: Tensor
    legal: Tensor | None
    importance_N: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What critics say of real steps (no gradient but in `own.least_NG`), and the loss that trains them."""

    loss: Tensor
    judged: Judged
    own: Own
    advantage_NG: Tensor  # in reward units
    weight_NG: Tensor


class Agent(nn.Module):
    """Learns off-policy from windows; acts through `pipelines.learning.acting`.

    `seed` alone decides the initial weights. Everything an update changes beside parameters (value normalisation,
    input statistics, spectral estimates, target heads) is in the state dict.
    """

    packed = False  # whether short windows share rows of the encoders (see nets/packing.py)

    def __init__(self, spaces: Spaces, settings: AgentSettings, *, seed: int = 0) -> None:
        super().__init__()
        self.spaces, self.settings, self.kind = spaces, settings, resolve(settings)
        learned = settings.gammas if self.kind.critic is not None else ()
        self.gammas = (*learned, settings.acting_gamma)
        self.register_buffer("gamma_G", torch.tensor(self.gammas), persistent=False)
        self.gamma_G: Tensor
        self.reduction: Reduction = "min" if self.kind.actor_weight > 0 else "mean"
        self.filter = advantage_filter(settings.filter)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.timestep = timestep_encoder(spaces, settings.timestep)
            self.sequence = sequence_encoder(self.timestep.output_size, settings.sequence)
            state_size = self.sequence.output_size
            policy_size = state_size + shown_size(spaces, settings.actor.columns)
            self.heads = heads(state_size, policy_size, spaces.action, self.gammas, settings, self.kind)
            self.extra = nn.ModuleList(AuxiliaryLoss(s, spaces, state_size) for s in settings.auxiliary_losses)
        if settings.action_mask:
            LegalActions(settings.action_mask, spaces)  # refuses a column that cannot say it
        self.target_heads: CriticHeads | None = None
        self.popart: PopArt | None = None
        self.rescaled_too: list[CriticHeads] = []  # copies that others keep: PopArt preserves their outputs as well
        if isinstance(self.heads, CriticHeads):
            if settings.trace == "tree-backup" and not isinstance(self.heads, ExactHeads):
                raise UsageError(
                    "agent.trace 'tree-backup' needs a value for each of a few actions: Discrete ones, scalar critics",
                    hint="use agent.trace=peng",
                )
            self.target_heads = copy.deepcopy(self.heads).requires_grad_(False)
            self.popart = PopArt(len(self.gammas), settings.popart)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves and the clip norm counts: everything but the target heads."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def update_targets(self) -> None:
        """Move the target heads a step of `target_tau` towards the heads; after the optimiser's step."""
        if self.target_heads is not None:
            torch._foreach_lerp_(
                [*self.target_heads.parameters()], [*self.heads.parameters()], self.settings.target_tau
            )

    def encode(self, batch: TensorBatch) -> Tensor:
        """States of all T + 1 rows, (B, T+1, D)."""
        return encode(self.timestep, self.sequence, batch, packed=self.packed)

    def legal(self, observation: dict[str, Tensor]) -> Tensor | None:
        """Which choices an observation allows, (..., choices) bool; None: all."""
        name = self.settings.action_mask
        return observation[name] > 0 if name else None

    def policy_input(self, h: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
        """Join states (..., D) with the columns that the policy head sees directly, symlog-compressed."""
        columns = self.settings.actor.columns
        shown = [symlog(features(observation[name], self.spaces.observation[name])) for name in columns]
        return torch.cat((h, *shown), -1) if shown else h

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
        encoded twice (the first time without gradient), if targets are to be had from them.
        """
        self._update_statistics(batches)
        counted = sum(int(batch.loss_mask.sum()) for batch in batches)
        single = len(batches) == 1
        states: list[Tensor | None] = [None] * len(batches)
        targets: list[Tensor | None] = [None] * len(batches)
        if self.target_heads is not None:
            with torch.set_grad_enabled(single and torch.is_grad_enabled()):
                encoded = [self.encode(batch) for batch in batches]
            found = [self.targets(batch, h.detach(), generator) for batch, h in zip(batches, encoded, strict=True)]
            if counted:
                self._update_popart(torch.cat(found))
            # NaN, so that no loss takes an infinite target for a large one: the update is to be skipped
            targets = [torch.where(target_NG.isfinite(), target_NG, torch.nan) for target_NG in found]
            states = [*encoded] if single else states
            del encoded
        for batch, target_NG, h_BTD in zip(batches, targets, states, strict=True):
            h_BTD = self.encode(batch) if h_BTD is None else h_BTD
            yield self._loss(batch, h_BTD, target_NG, max(counted, 1), generator)

    def _loss(
        self, batch: TensorBatch, h_BTD: Tensor, target_NG: Tensor | None, steps: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Metrics]:
        at = self.steps(batch, h_BTD)
        verdict = None if target_NG is None else self.judge(at, target_NG, generator)
        log_prob_NG = self.log_prob(at)
        total = actor = self._actor_loss(at, log_prob_NG, verdict) / steps
        losses = {"actor_loss": actor}
        if verdict is not None:
            losses["critic_loss"] = verdict.loss / steps
            total = total + self.settings.critic_weight * losses["critic_loss"]
        for place, (extra, settings) in enumerate(zip(self.extra, self.settings.auxiliary_losses, strict=True)):
            losses[f"auxiliary_loss_{place}"] = extra(h_BTD, batch) / steps
            total = total + settings.weight * losses[f"auxiliary_loss_{place}"]
        metrics = self._metrics(at, log_prob_NG, steps, {"loss": total, **losses})
        if verdict is not None and target_NG is not None:
            metrics |= self._value_metrics(verdict, target_NG, steps)
            if batch.importance is not None:
                metrics["td_errors"] = self._td_errors(batch, verdict, target_NG)
        return total, metrics

    def steps(self, batch: TensorBatch, h_BTD: Tensor) -> Steps:
        """The steps of `batch` that count, whose states are `h_BTD`."""
        mask, importance_N = batch.loss_mask, None
        h_ND = h_BTD[:, :-1][mask]
        if batch.importance is not None:
            importance_N = batch.importance[:, None].expand_as(mask)[mask]
        return Steps(
            mask=mask,
            h_ND=h_ND,
            action=batch.action[:, 1:][mask],
            params_NGP=self.heads.actor(self._policy_rows(h_ND, batch, slice(None, -1), mask)),
            legal=self._legal_rows(batch, slice(None, -1), mask),
            importance_N=importance_N,
        )

    def judge(self, at: Steps, target_NG: Tensor, generator: torch.Generator | None = None) -> Verdict:
        """The critics' loss against targets, the policy's own values, and the weights of imitation."""
        critics, popart = self._critics()
        noise_NGKZ, drawn_MNG = self._draws(len(at.h_ND), self.kind.actor_samples, generator)
        target_NG = popart.normalize(target_NG) if critics.normalized else target_NG
        scale_N = torch.ones_like(target_NG[:, 0]) if at.importance_N is None else at.importance_N
        loss, judged = critics.judge(at.h_ND, at.action, target_NG, scale_N)
        maximised = drawn_MNG if self.kind.actor_weight > 0 else None
        own = critics.own_values(judged, at.action, at.params_NGP, at.legal, noise_NGKZ, maximised)
        advantage_NG = self._advantages(judged, own)
        weight_NG = self._imitation_weights(at.mask, advantage_NG)
        return Verdict(loss=loss, judged=judged, own=own, advantage_NG=advantage_NG, weight_NG=weight_NG)

    def log_prob(self, at: Steps) -> Tensor:
        """Log-probabilities of the actions taken (N, G)."""
        taken = at.action[:, None].expand(-1, len(self.gammas), *at.action.shape[1:])
        return self.heads.policy.log_prob(at.params_NGP, taken, at.legal)

    def _actor_loss(self, at: Steps, log_prob_NG: Tensor, verdict: Verdict | None) -> Tensor:
        """Summed over steps."""
        weight_NG = torch.ones_like(log_prob_NG) if verdict is None else verdict.weight_NG
        if at.importance_N is not None:
            weight_NG = weight_NG * at.importance_N[:, None]
        loss = self.kind.bc_weight * imitation_loss(log_prob_NG, weight_NG)
        if verdict is not None and verdict.own.least_NG is not None:
            critics, popart = self._critics()
            value_NG = verdict.own.least_NG
            value_NG = value_NG if critics.normalized else popart.normalize(value_NG)
            loss = loss + self.kind.actor_weight * maximization_loss(value_NG, at.importance_N)
        return loss

    @torch.no_grad()
    def targets(self, batch: TensorBatch, h_BTD: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """y of the steps that count (N, G), in units of scaled rewards, by the present statistics. All valid steps are
        summed and bootstrapped from."""
        critics, _ = self._critics()
        assert self.target_heads is not None
        settings, heads, mask = self.settings, self.target_heads, batch.mask
        next_h_ND = h_BTD[:, 1:][mask]
        noise_NGKZ, drawn_MNG = self._draws(len(next_h_ND), self.kind.critic_samples, generator)
        actor = (heads if settings.target_actor else critics).actor
        params_NGP = actor(self._policy_rows(next_h_ND, batch, slice(1, None), mask))
        legal = self._legal_rows(batch, slice(1, None), mask)
        rewards = batch.reward[:, 1:] * settings.reward_scale, batch.terminated
        if settings.trace == "tree-backup":
            assert isinstance(heads, ExactHeads)
            following = torch.cat((batch.action[:, 2:], batch.action[:, -1:]), 1)[mask]
            value_NG, taken_NG, prob_NG = heads.next_and_taken_values(
                next_h_ND, params_NGP, legal, drawn_MNG, self.reduction, following
            )
            value_BTG, taken_BTG = self._scaled_rewards(value_NG, mask), self._scaled_rewards(taken_NG, mask)
            trace_BTG = settings.trace_decay * scattered(prob_NG, mask)
            target_BTG = trace_targets(*rewards, value_BTG, taken_BTG, trace_BTG, self.gamma_G, mask)
            return target_BTG[batch.loss_mask]
        value_NG = heads.next_values(next_h_ND, params_NGP, legal, noise_NGKZ, drawn_MNG, self.reduction)
        value_BTG = self._scaled_rewards(value_NG, mask)
        if settings.trace == "peng":
            trace_BTG = torch.full_like(value_BTG, settings.trace_decay)
            target_BTG = trace_targets(*rewards, value_BTG, value_BTG, trace_BTG, self.gamma_G, mask)
        else:
            target_BTG = n_step_targets(*rewards, value_BTG, self.gamma_G, mask, n=settings.n_step)
        return target_BTG[batch.loss_mask]

    def _scaled_rewards(self, value_NG: Tensor, mask_BT: Tensor) -> Tensor:
        """The critics' values at the steps of the mask, in units of scaled rewards, in the shape of the batch (B, T,
        G)."""
        critics, popart = self._critics()
        return scattered(popart.denormalize(value_NG) if critics.normalized else value_NG, mask_BT)

    @torch.no_grad()
    def _advantages(self, judged: Judged, own: Own) -> Tensor:
        """Advantages of the actions taken (N, G), in reward units. PopArt's mean cancels and is never added, so that
        small differences of large values keep their sign."""
        critics, popart = self._critics()
        advantage_NG = judged.data_CNG.mean(0) - own.all_CNG.mean(0)
        advantage_NG = advantage_NG * popart.sigma_G if critics.normalized else advantage_NG
        return advantage_NG / self.settings.reward_scale

    @torch.no_grad()
    def _imitation_weights(self, mask_BT: Tensor, advantage_NG: Tensor) -> Tensor:
        """f(advantage) at the steps that count (N, G); the filter sees the batch in its own shape, with the mask."""
        return self.filter(scattered(advantage_NG, mask_BT), mask_BT[..., None])[mask_BT]

    @torch.no_grad()
    def _update_statistics(self, batches: Sequence[TensorBatch]) -> None:
        self.timestep.update_statistics(batches)
        self.sequence.update_statistics()
        for extra in self.extra:
            assert isinstance(extra, AuxiliaryLoss)
            extra.update_statistics(batches)

    def _update_popart(self, targets_NG: Tensor) -> None:
        critics, popart = self._critics()
        assert self.target_heads is not None
        scale_G, shift_G = popart.update(targets_NG)
        for each in (critics, self.target_heads, *self.rescaled_too):
            each.rescale(scale_G, shift_G)

    def _critics(self) -> tuple[CriticHeads, PopArt]:
        assert isinstance(self.heads, CriticHeads)
        assert self.popart is not None
        return self.heads, self.popart

    def _draws(self, rows: int, samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Uniforms for action samples (N, G, K, Z) and drawn critics (M, N, G), row by row in one draw, so that
        micro-batches see what the batch would."""
        actions = samples * self.heads.noise_size
        device = self.gamma_G.device if generator is None else generator.device
        shape = (rows, len(self.gammas), actions + self.settings.critic.ensemble)
        noise = torch.rand(shape, generator=generator, device=device).to(self.gamma_G.device)
        drawn_MNG = draw(noise[..., actions:].permute(2, 0, 1), self.settings.critic.subset)
        return noise[..., :actions].unflatten(-1, (samples, self.heads.noise_size)), drawn_MNG

    def _policy_rows(self, h_ND: Tensor, batch: TensorBatch, rows: slice, mask_BT: Tensor) -> Tensor:
        """What the policy head sees at the steps of the mask, whose states are `h_ND`."""
        columns = self.settings.actor.columns
        return self.policy_input(h_ND, {name: batch.observation[name][:, rows][mask_BT] for name in columns})

    def _legal_rows(self, batch: TensorBatch, rows: slice, mask_BT: Tensor) -> Tensor | None:
        """Legal choices at the steps of the mask (N, 1, choices)."""
        legal = self.legal(dict(batch.observation))
        return None if legal is None else legal[:, rows][mask_BT][:, None]

    @torch.no_grad()
    def _td_errors(self, batch: TensorBatch, verdict: Verdict, target_NG: Tensor) -> Tensor:
        """Mean absolute TD error of each window (B,), of the acting discount, in reward units; NaN without one."""
        value_CN = self.reward_units(verdict.judged.data_CNG)[..., -1]
        error_N = (value_CN - target_NG[:, -1] / self.settings.reward_scale).abs().mean(0)
        error_BT = scattered(error_N, batch.loss_mask)
        return error_BT.sum(1) / batch.loss_mask.sum(1)

    def reward_units(self, value: Tensor) -> Tensor:
        """The critics' values (..., G) in the units of the environment's rewards."""
        critics, popart = self._critics()
        value = popart.denormalize(value) if critics.normalized else value
        return value / self.settings.reward_scale

    @torch.no_grad()
    def _metrics(self, at: Steps, log_prob_NG: Tensor, steps: int, losses: Metrics) -> Metrics:
        """Sums over the micro-batch's steps divided by the update's, of the acting discount."""
        acting = at.params_NGP[:, -1].detach(), None if at.legal is None else at.legal[:, -1]
        return {name: loss.detach() for name, loss in losses.items()} | {
            "entropy": self.heads.policy.entropy(*acting).sum() / steps,
            "log_prob": log_prob_NG[:, -1].sum() / steps,
        }

    @torch.no_grad()
    def _value_metrics(self, verdict: Verdict, target_NG: Tensor, steps: int) -> Metrics:
        """As `_metrics`, in reward units; `NAME@GAMMA` for each discount beside the acting one."""
        share = len(target_NG) / steps
        value_CNG, target_NG = self.reward_units(verdict.judged.data_CNG), target_NG / self.settings.reward_scale
        _, popart = self._critics()
        by_discount = {
            "q": value_CNG.mean(0).sum(0) / steps,
            "v": self.reward_units(verdict.own.all_CNG).mean(0).sum(0) / steps,
            "target": target_NG.sum(0) / steps,
            "td_error": (value_CNG - target_NG).abs().mean(0).sum(0) / steps,
            "ensemble_disagreement": (value_CNG.amax(0) - value_CNG.amin(0)).sum(0) / steps,
            "filter_acceptance": verdict.weight_NG.sum(0) / steps,
            "popart_mu": popart.mu_G * (share / self.settings.reward_scale),
            "popart_sigma": popart.sigma_G * (share / self.settings.reward_scale),
        }
        metrics: Metrics = {}
        for name, values_G in by_discount.items():
            *others, metrics[name] = values_G.clone().unbind()
            metrics |= {f"{name}@{gamma:g}": value for gamma, value in zip(self.gammas, others, strict=False)}
        return metrics


def shown_size(spaces: Spaces, columns: Sequence[str]) -> int:
    """Count the features of the columns that the policy head sees directly. UsageError for one that is not observed."""
    absent = [name for name in columns if name not in spaces.observation]
    if absent:
        raise UsageError(
            f"agent.actor.columns names what is not observed: {', '.join(absent)}",
            hint=f"observed are: {', '.join(spaces.observation)}",
        )
    return sum(spaces.observation[name].flat_size for name in columns)
