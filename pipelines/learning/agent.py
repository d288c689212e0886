"""An agent: one encoder trained by every loss, heads with target copies (arXiv 2310.09971, section 4; 2411.11188).

One update serves all agent types (`agent_types`); they differ in their heads (`heads`) and in the weights of the loss
terms (`objectives`).
B batch, T time, N valid steps that count (`TensorBatch.loss_mask`), D state width, C critics, M drawn critics, G
discounts (the acting one last), K action samples, Z uniforms.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from pipelines.config.model import AgentSettings
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Spaces
from pipelines.learning.agent_types import resolve
from pipelines.learning.auxiliary import AuxiliaryLoss
from pipelines.learning.batch import StepIndex, TensorBatch, encode
from pipelines.learning.heads import CriticHeads, ExactHeads, make_heads
from pipelines.learning.objectives import (
    TERMS,
    CriticOutput,
    LossInputs,
    Reduction,
    ValidSteps,
    advantage_filter,
    draw,
    n_step_targets,
    trace_targets,
    vtrace_values,
)
from pipelines.learning.popart import AdvantageScale, PopArt, Temperature
from pipelines.nets import ranks
from pipelines.nets.actor import Categorical, Distribution
from pipelines.nets.inputs import join_rows, symlog, to_features
from pipelines.nets.linear import prepare_weights
from pipelines.nets.sequence import make_sequence_encoder
from pipelines.nets.timestep import make_timestep_encoder

Metrics = dict[str, Tensor]
_CORRECTED = ("tree-backup", "retrace", "vtrace")  # traces that need the policy's probability of the dataset actions


_LARGEST_LOG = 80.0  # whose exponential is finite: an infinite one times a probability of 0 would be NaN


class Agent(nn.Module):
    """An agent that learns off-policy from windows, and acts through `pipelines.learning.acting`.

    `seed` alone determines the initial weights. All other state that an update changes (value normalisation, input
    statistics, spectral estimates, target heads) is in the state dict.
    """

    packed = False  # whether short windows share rows of the encoders (see nets/packing.py)

    def __init__(self, spaces: Spaces, settings: AgentSettings, *, seed: int = 0) -> None:
        super().__init__()
        self.spaces, self.settings, self.agent_type = spaces, settings, resolve(settings)
        learned = settings.gammas if self.agent_type.critic is not None else ()
        self.gammas = (*learned, settings.acting_gamma)
        self.register_buffer("gamma_G", torch.tensor(self.gammas), persistent=False)
        self.gamma_G: Tensor
        self.reduction: Reduction = "min" if self.agent_type.actor_weight > 0 else "mean"
        self.filter = advantage_filter(settings.filter)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.timestep = make_timestep_encoder(spaces, settings.timestep)
            self.sequence = make_sequence_encoder(self.timestep.output_size, settings.sequence)
            self.shortcut = settings.shortcut and settings.sequence.kind != "identity"
            state_size = self.sequence.output_size + self.shortcut * self.timestep.output_size
            policy_size = state_size + _count_shown_features(spaces, settings.actor.columns)
            self.heads = make_heads(state_size, policy_size, spaces.action, self.gammas, settings, self.agent_type)
            self.auxiliary = nn.ModuleList(AuxiliaryLoss(s, spaces, state_size) for s in settings.auxiliary_losses)
        if settings.action_mask:
            LegalActions(settings.action_mask, spaces)  # refuses a column that cannot be a mask
        self.make_player()  # refuses a temperature of actions that are no choices
        self.target_heads: CriticHeads | None = None
        self._target_pairs: tuple[list[Tensor], list[Tensor]] | None = None  # parameters of the targets, and their own
        self.popart: PopArt | None = None
        self.advantage_scale: AdvantageScale | None = None  # of table critics
        self.temperature: Temperature | None = None
        self.entropy_share: Tensor | None = None  # of the bonus, (), where it decays
        self.reference: ReferencePolicy | None = None  # of training alone, which sets it
        if settings.entropy_weight == "auto":
            if not isinstance(spaces.action, Box) or isinstance(self.heads.policy, Categorical):
                raise UsageError(
                    "agent.entropy_weight 'auto' needs a density over Box actions",
                    hint="use a number, such as agent.entropy_weight=0.1",
                )
            self.temperature = Temperature(len(self.gammas), spaces.action.flat_size)
        self.rescaled_too: list[CriticHeads] = []  # copies kept elsewhere, whose outputs PopArt preserves too
        if isinstance(self.heads, CriticHeads):
            if settings.trace in _CORRECTED and not isinstance(self.heads, ExactHeads):
                raise UsageError(
                    f"agent.trace '{settings.trace}' needs a value for each action: "
                    "Discrete actions or a grid, and scalar critics",
                    hint="use agent.trace=peng",
                )
            self.target_heads = copy.deepcopy(self.heads).requires_grad_(False)
            self._target_pairs = [*self.target_heads.parameters()], [*self.heads.parameters()]
            self.popart = PopArt(self.gammas, settings.popart, reward_scale=settings.reward_scale)
            if isinstance(self.heads, ExactHeads):
                self.advantage_scale = AdvantageScale(len(self.gammas))

    def make_player(self, temperature: float = 1.0) -> Distribution:
        """Return the policy by which the agent plays (`Distribution.for_play`), sampled at its own temperature times
        `temperature`. UsageError if that is not 1 and actions are no choices."""
        return self.heads.policy.for_play(temperature * self.settings.actor.temperature)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters that the optimiser updates and the clip norm counts: all but the target
        heads."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    @torch.no_grad()
    def update_targets(self) -> None:
        """Move the target heads by `target_tau` towards the heads; call it after the optimiser's step."""
        if self._target_pairs is not None:
            torch._foreach_lerp_(*self._target_pairs, self.settings.target_tau)

    def encode(self, batch: TensorBatch) -> Tensor:
        """Compute the states of all T + 1 rows, (B, T+1, D)."""
        return encode(self.timestep, self.sequence, batch, packed=self.packed, shortcut=self.shortcut)

    def legal(self, observation: dict[str, Tensor]) -> Tensor | None:
        """Return the action mask of an observation, (..., choices) bool; None: all choices are legal."""
        name = self.settings.action_mask
        return observation[name] > 0 if name else None

    def policy_input(self, h: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
        """Concatenate states (..., D) with the columns that the policy head sees directly, symlog-compressed."""
        columns = self.settings.actor.columns
        shown = [symlog(to_features(observation[name], self.spaces.observation[name])) for name in columns]
        return torch.cat((h, *shown), -1) if shown else h

    def loss(self, batch: TensorBatch, generator: torch.Generator | None = None) -> tuple[Tensor, Metrics]:
        """Compute the loss of an update on one batch, and its metrics (0-d tensors without gradient; with importance
        weights also `td_errors` (B,), the mean absolute TD error of each window).

        Updates the running statistics. `generator` draws actions and ensemble members; dropout draws from torch's
        global generator.
        """
        return next(self.losses([batch], [generator]))

    def losses(
        self,
        batches: Sequence[TensorBatch],
        generators: Sequence[torch.Generator | None] | None = None,
        dropout_seeds: Sequence[int] | None = None,
    ) -> Iterator[tuple[Tensor, Metrics]]:
        """Yield one update's loss in micro-batches: call backward on each before the next; gradients, losses and
        metrics add up to those of one batch with all windows.

        `generators`: one for each micro-batch (None: torch's global generator). `dropout_seeds`: seeds of torch's
        global generator before each micro-batch is encoded (None: it is used as it is).

        Statistics are updated once, on all micro-batches of all ranks, before the first loss. For this, an agent with
        critics encodes several micro-batches twice (the first time without gradient).
        """
        self._update_statistics(batches)
        # Gradients are averaged over ranks: dividing by the mean count of a rank makes them those of all steps' mean.
        own = sum(len(batch.counted) for batch in batches)
        counted = ranks.sum_number(own, self.gamma_G.device) / ranks.count_joined()
        # The policy's terms are means over their own steps, however few these are.
        actor_scale = 1.0
        if batches[0].actor_counted is not None:
            own = sum(len(batch.actor_counted) for batch in batches if batch.actor_counted is not None)
            taught = ranks.sum_number(own, self.gamma_G.device) / ranks.count_joined()
            actor_scale = counted / taught if taught else 0.0
        single = len(batches) == 1
        drawn_by = generators or [None] * len(batches)
        states: list[Tensor | None] = [None] * len(batches)
        targets: list[Tensor | None] = [None] * len(batches)
        if self.target_heads is not None:
            with torch.set_grad_enabled(single and torch.is_grad_enabled()):
                encoded = [self._encode(place, batches, dropout_seeds) for place in range(len(batches))]
            found = [
                self.targets(batch, h.detach(), generator)
                for batch, h, generator in zip(batches, encoded, drawn_by, strict=True)
            ]
            if counted:
                self._update_popart(join_rows(found))
            # An infinite target becomes NaN, so that the update is skipped whatever the loss does with large targets
            targets = [torch.add(target_NG, target_NG, alpha=0) for target_NG in found]
            states = [*encoded] if single else states
            del encoded
        squares: list[Tensor] = []
        entropies: list[Tensor] = []
        for place, (batch, target_NG, h_BTD) in enumerate(zip(batches, targets, states, strict=True)):
            h_BTD = self._encode(place, batches, dropout_seeds) if h_BTD is None else h_BTD
            steps = self.valid_steps(batch, h_BTD, actor_scale=actor_scale)
            with self.heads.policy.share_probs():
                summed = self._loss(batch, steps, h_BTD, target_NG, counted or 1.0, drawn_by[place], squares, entropies)
            if self.advantage_scale is not None and place == len(batches) - 1:
                rewards = join_rows([each.valid.take_after(each.reward) for each in batches])
                self.advantage_scale.update(join_rows(squares), rewards * self.settings.reward_scale)
            if self.temperature is not None and place == len(batches) - 1:
                self.temperature.update(join_rows(entropies))
            yield summed

    def _encode(self, place: int, batches: Sequence[TensorBatch], dropout_seeds: Sequence[int] | None) -> Tensor:
        """Encode a micro-batch; with seeds, by the same dropout each time."""
        if dropout_seeds is not None:
            _seed_global_generator(self.gamma_G.device, dropout_seeds[place])
        prepare_weights(self.timestep, self.sequence, self.heads.actor)
        return self.encode(batches[place])

    def _loss(
        self,
        batch: TensorBatch,
        steps: ValidSteps,
        h_BTD: Tensor,
        target_NG: Tensor | None,
        count: float,
        generator: torch.Generator | None,
        squares: list[Tensor],
        entropies: list[Tensor],
    ) -> tuple[Tensor, Metrics]:
        """Sum the terms of the loss over the micro-batch, divided by the update's `count` of steps. The mean squared
        advantages (N, G) of the actions, if critics are tables, are appended to `squares`, and the policy's entropies
        (N, G), where their weight is adjusted, to `entropies`."""
        critics = None if target_NG is None else self.evaluate(steps, target_NG, generator)
        if self.advantage_scale is not None and critics is not None:
            squares.append(self._squared_advantages(critics.data.shared, steps.legal))
        weight_G = self._entropy_weights()
        entropy_NG = None if weight_G is None else self.heads.policy.action_entropy(steps.params_NGP, steps.legal)
        if self.temperature is not None and entropy_NG is not None:
            taught = batch.actor_counted
            found_NG = entropy_NG.detach()
            entropies.append(found_NG if taught is None else taught.take(steps.index.scatter(found_NG)))
        divergence_NG, ratio_NG = (None, None) if self.reference is None else self.reference.compare(steps, batch)
        inputs = LossInputs(
            settings=self.settings, type=self.agent_type, policy=self.heads.policy, steps=steps, critics=critics,
            divergence_NG=divergence_NG, ratio_NG=ratio_NG,
            log_prob_NG=self.log_prob(steps), min_q_NG=self._normalized_min_q(critics), entropy_NG=entropy_NG,
            entropy_weight_G=weight_G,
        )  # fmt: skip
        terms = [(name, term.compute(inputs), term.weight(self.settings)) for name, term in TERMS.items()]
        for place, (auxiliary, settings) in enumerate(zip(self.auxiliary, self.settings.auxiliary_losses, strict=True)):
            terms.append((f"auxiliary_loss_{place}", auxiliary(h_BTD, batch), settings.weight))
        (_, first, weight), *others = [(name, term, weight) for name, term, weight in terms if term is not None]
        total = first if weight == 1 else weight * first
        for _, term, weight in others:
            total = torch.add(total, term, alpha=weight)
        sums = {"loss": total} | {name: term for name, term, _ in terms if term is not None}
        metrics = self._metrics(inputs, critics, count, sums)
        if critics is not None and target_NG is not None:
            metrics |= self._value_metrics(critics, count)
            if batch.importance is not None:
                metrics["td_errors"] = self._td_errors(batch, critics, target_NG)
        return total / count, metrics

    def _entropy_weights(self) -> Tensor | float | None:
        """Return the weight of the entropy bonus, for each discount (G,) where it is adjusted; None without a bonus."""
        if self.temperature is not None:
            return self.temperature.weight_G
        weight = self.settings.entropy_weight
        assert not isinstance(weight, str)
        return weight * self.entropy_share if weight and self.entropy_share is not None else weight or None

    def valid_steps(self, batch: TensorBatch, h_BTD: Tensor, *, actor_scale: float = 1.0) -> ValidSteps:
        """Select the valid steps of `batch` that count, given the states `h_BTD`. `actor_scale`: weight of those that
        count for the policy, if not all do."""
        index, importance_N, action = batch.counted, None, batch.counted.take_after(batch.action)
        h_ND = index.take_before(h_BTD)
        if batch.importance is not None:
            importance_N = index.take(batch.importance[:, None].expand_as(index.mask_BT))
        actor_N = importance_N
        if batch.actor_counted is not None:
            actor_N = index.take(batch.actor_counted.mask_BT) * actor_scale
            actor_N = actor_N if importance_N is None else actor_N * importance_N
        return ValidSteps(
            index=index,
            h_ND=h_ND,
            action=action,
            imitated=action if batch.label is None else index.take_before(batch.label),
            params_NGP=self.heads.actor(self._policy_rows(h_ND, batch, index.take_before)),
            legal=self._legal_rows(batch, index.take_before),
            importance_N=importance_N,
            actor_N=actor_N,
        )

    def evaluate(self, steps: ValidSteps, target_NG: Tensor, generator: torch.Generator | None = None) -> CriticOutput:
        """Compute the critics' loss against targets, the policy's values, and the weights of behaviour cloning."""
        critics, popart = self._critics()
        noise_NGKZ, drawn_MNG = self._draws(len(steps.h_ND), self.agent_type.actor_samples, generator)
        target_NG = popart.normalize(target_NG) if critics.normalized else target_NG
        loss, data = critics.critic_loss(steps.h_ND, steps.action, target_NG, steps.importance_N)
        minimised = drawn_MNG if self.agent_type.actor_weight > 0 else None
        policy = critics.policy_values(data, steps.action, steps.params_NGP, steps.legal, noise_NGKZ, minimised)
        q_NG, v_NG = data.q_CNG.mean(0), policy.q_CNG.mean(0)
        advantage_NG = self._advantages(q_NG, v_NG)
        weight_NG = self._cloning_weights(steps.index, advantage_NG)
        return CriticOutput(
            loss=loss, data=data, policy=policy, target_NG=target_NG, q_NG=q_NG, v_NG=v_NG, advantage_NG=advantage_NG,
            weight_NG=weight_NG,
        )  # fmt: skip

    def log_prob(self, steps: ValidSteps) -> Tensor:
        """Compute log-probabilities of the imitated actions (N, G)."""
        imitated = steps.imitated[:, None].expand(-1, len(self.gammas), *steps.imitated.shape[1:])
        return self.heads.policy.log_prob(steps.params_NGP, imitated, steps.legal)

    def _normalized_min_q(self, output: CriticOutput | None) -> Tensor | None:
        """Return the value that the actor loss maximises (N, G): of table critics in units of advantages, of others in
        PopArt's; None if there is none."""
        if output is None or output.policy.min_q_NG is None:
            return None
        critics, popart = self._critics()
        value_NG = output.policy.min_q_NG
        if self.advantage_scale is not None:
            return value_NG * (popart.sigma_G / self.advantage_scale.scale(popart.sigma_G))
        return value_NG if critics.normalized else popart.normalize(value_NG)

    @torch.no_grad()
    def targets(self, batch: TensorBatch, h_BTD: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Compute targets y of the steps that count (N, G), in units of scaled rewards, with the current statistics.
        Rewards and bootstrap values of all valid steps enter."""
        critics, _ = self._critics()
        assert self.target_heads is not None
        settings, heads, index = self.settings, self.target_heads, batch.valid
        next_h_ND = index.take_after(h_BTD)
        noise_NGKZ, drawn_MNG = self._draws(len(next_h_ND), self.agent_type.critic_samples, generator)
        actor = (heads if settings.target_actor else critics).actor
        prepare_weights(actor)
        params_NGP = actor(self._policy_rows(next_h_ND, batch, index.take_after))
        legal = self._legal_rows(batch, index.take_after)
        rewards = batch.reward[:, 1:] * settings.reward_scale, batch.terminated
        if settings.trace in _CORRECTED:
            assert isinstance(heads, ExactHeads)
            following = index.take(_later(batch.action))
            value_NG, taken_NG, prob_NG = heads.next_and_taken_values(
                next_h_ND, params_NGP, legal, drawn_MNG, self.reduction, following
            )
            value_BTG, taken_BTG = self._scaled_rewards(value_NG, index), self._scaled_rewards(taken_NG, index)
            if settings.trace != "tree-backup":  # 1 / mu(a), or as if the data were uniform play
                inverse = self._choices(legal)
                if batch.logp is not None:
                    inverse = index.take(_later(batch.logp)).neg().clamp_max(_LARGEST_LOG).exp()[:, None]
                prob_NG = (prob_NG * inverse).clamp_max(1.0)
            trace_BTG = settings.trace_decay * index.scatter(prob_NG)
            if settings.trace == "vtrace":
                rho_BTG = index.scatter(prob_NG)
                value_BTG, taken_BTG = vtrace_values(*rewards, value_BTG, rho_BTG, self.gamma_G, batch.mask)
            target_BTG = trace_targets(*rewards, value_BTG, taken_BTG, trace_BTG, self.gamma_G, batch.mask)
            return batch.counted.take(target_BTG)
        value_NG = heads.next_values(next_h_ND, params_NGP, legal, noise_NGKZ, drawn_MNG, self.reduction)
        value_BTG = self._scaled_rewards(value_NG, index)
        if settings.trace == "peng":
            trace_BTG = torch.full_like(value_BTG, settings.trace_decay)
            target_BTG = trace_targets(*rewards, value_BTG, value_BTG, trace_BTG, self.gamma_G, batch.mask)
        else:
            target_BTG = n_step_targets(*rewards, value_BTG, self.gamma_G, batch.mask, n=settings.n_step)
        return batch.counted.take(target_BTG)

    def _choices(self, legal: Tensor | None) -> Tensor | int:
        """Count the actions that are possible (N, 1): the inverse of their probability in uniform play."""
        count: int = self.heads.policy.num_params
        if legal is None:
            return count
        some = legal.sum(-1)
        return torch.where(some > 0, some, count)

    def _scaled_rewards(self, value_NG: Tensor, index: StepIndex) -> Tensor:
        """Convert critic values at these steps to units of scaled rewards, in the batch's shape (B, T, G)."""
        critics, popart = self._critics()
        return index.scatter(popart.denormalize(value_NG) if critics.normalized else value_NG)

    @torch.no_grad()
    def _advantages(self, q_NG: Tensor, v_NG: Tensor) -> Tensor:
        """Compute advantages of the dataset actions (N, G), in reward units. PopArt's mean cancels and is never added,
        so that small differences of large values keep their sign."""
        return (q_NG - v_NG) * self._reward_scales()

    def _reward_scales(self) -> Tensor | float:
        """Compute the reward units in a unit of the critics, (G,) where they are normalised."""
        critics, popart = self._critics()
        return (popart.sigma_G if critics.normalized else 1.0) / self.settings.reward_scale

    @torch.no_grad()
    def _squared_advantages(self, table_CNGA: Tensor, legal: Tensor | None) -> Tensor:
        """Compute the variance over actions of the critics' mean values (N, G), in units of scaled rewards; without
        those that an action mask excludes, unless it excludes all."""
        _, popart = self._critics()
        table_NGA = table_CNGA.mean(0) * popart.sigma_G[:, None]
        if legal is None:  # torch's `var` takes four times as long on a CPU
            return (table_NGA - table_NGA.mean(-1, keepdim=True)).square().mean(-1)
        weight = torch.where(legal.any(-1, keepdim=True), legal, True).to(table_NGA.dtype)
        weight = weight / weight.sum(-1, keepdim=True)
        mean_NG1 = (table_NGA * weight).sum(-1, keepdim=True)
        return ((table_NGA - mean_NG1).square() * weight).sum(-1)

    @torch.no_grad()
    def _cloning_weights(self, index: StepIndex, advantage_NG: Tensor) -> Tensor:
        """Compute f(advantage) at the steps that count (N, G); the filter receives the batch's shape, with the mask."""
        return index.take(self.filter(index.scatter(advantage_NG), index.mask_BT[..., None]))

    @torch.no_grad()
    def _update_statistics(self, batches: Sequence[TensorBatch]) -> None:
        self.timestep.update_statistics(batches)
        self.sequence.update_statistics()
        for auxiliary in self.auxiliary:
            assert isinstance(auxiliary, AuxiliaryLoss)
            auxiliary.update_statistics(batches)

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
        """Draw uniforms for action samples (N, G, K, Z) and critics (M, N, G), row by row in one draw, so that
        micro-batches get the same numbers as the whole batch."""
        actions = samples * self.heads.noise_size
        device = self.gamma_G.device if generator is None else generator.device
        shape = (rows, len(self.gammas), actions + self.settings.critic.ensemble)
        noise = torch.rand(shape, generator=generator, device=device).to(self.gamma_G.device)
        drawn_MNG = draw(noise[..., actions:].permute(2, 0, 1), self.settings.critic.subset)
        return noise[..., :actions].unflatten(-1, (samples, self.heads.noise_size)), drawn_MNG

    def _policy_rows(self, h_ND: Tensor, batch: TensorBatch, take: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the policy head's inputs at the rows that `take` selects, whose states are `h_ND`."""
        columns = self.settings.actor.columns
        return self.policy_input(h_ND, {name: take(batch.observation[name]) for name in columns})

    def _legal_rows(self, batch: TensorBatch, take: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return action masks at the rows that `take` selects (N, 1, choices)."""
        legal = self.legal(dict(batch.observation))
        return None if legal is None else take(legal)[:, None]

    @torch.no_grad()
    def _td_errors(self, batch: TensorBatch, critics: CriticOutput, target_NG: Tensor) -> Tensor:
        """Compute the mean absolute TD error of each window (B,), of the acting discount, in reward units; NaN for a
        window without steps that count."""
        value_CN = self.reward_units(critics.data.q_CNG)[..., -1]
        error_N = (value_CN - target_NG[:, -1] / self.settings.reward_scale).abs().mean(0)
        error_BT = batch.counted.scatter(error_N)
        return error_BT.sum(1) / batch.loss_mask.sum(1)

    def reward_units(self, value: Tensor) -> Tensor:
        """Convert critic values (..., G) to the environment's reward units."""
        critics, popart = self._critics()
        value = popart.denormalize(value) if critics.normalized else value
        return value / self.settings.reward_scale

    @torch.no_grad()
    def _metrics(self, inputs: LossInputs, critics: CriticOutput | None, count: float, sums: Metrics) -> Metrics:
        """Divide the sums of the losses' terms, and of figures of the acting discount, over the micro-batch's steps by
        the update's `count`. All in a few operations, of which each would cost a device as much as a large one."""
        steps, policy = inputs.steps, self.heads.policy
        legal = None if steps.legal is None else steps.legal[:, -1]
        entropy_N = policy.entropy(steps.params_NGP, steps.legal)[:, -1]
        by_step = {"entropy": entropy_N, "log_prob": inputs.log_prob_NG[:, -1]}
        if isinstance(policy, Categorical) and policy.num_params > 1:
            by_step["entropy_share"] = entropy_N / policy.max_entropy(legal)
            if isinstance(self.heads, ExactHeads) and critics is not None:
                by_step |= self._compare_actions(inputs, critics.data.shared, legal)
        summed = torch.stack([*by_step.values()]).sum(1)
        if "action_gap" in by_step:  # in reward units: the last two figures
            scale = self._reward_scales()
            summed[-2:].mul_(scale if isinstance(scale, float) else scale[-1])
        figures = torch.cat((torch.stack([*sums.values()]), summed)) / count
        metrics = dict(zip((*sums, *by_step), figures.unbind(), strict=True))
        if self.temperature is not None:  # shares of the update add up to the weight
            metrics["entropy_weight"] = self.temperature.weight_G[-1] * (len(entropy_N) / count)
        return metrics

    @torch.no_grad()
    def _value_metrics(self, output: CriticOutput, count: float) -> Metrics:
        """As `_metrics`, in reward units; `NAME@GAMMA` for each discount except the acting one."""
        critics, popart = self._critics()
        steps, q_CNG = len(output.q_NG), output.data.q_CNG
        by_step = {
            "q": output.q_NG,
            "v": output.v_NG,
            "target": output.target_NG,
            "td_error": (q_CNG - output.target_NG).abs().mean(0),
            "ensemble_disagreement": q_CNG.amax(0) - q_CNG.amin(0),
            "filter_acceptance": output.weight_NG,
        }
        sums = torch.stack([*by_step.values()]).sum(1)
        popart_2G = torch.stack((popart.mu_G, popart.sigma_G)) / self.settings.reward_scale
        # Sums change their units, which is less work than steps. The weights have none, and differences no mean.
        sums[:-1].mul_(popart_2G[1] if critics.normalized else 1 / self.settings.reward_scale)
        if critics.normalized:
            sums[:3].add_(popart_2G[0], alpha=steps)
        names = *by_step, "popart_mu", "popart_sigma"
        labels = *(f"@{gamma:g}" for gamma in self.gammas[:-1]), ""
        values = (torch.cat((sums, popart_2G * steps)) / count).flatten().unbind()
        return {f"{name}{label}": value for (name, label), value in zip(product(names, labels), values, strict=True)}

    def _compare_actions(self, inputs: LossInputs, table_CNGA: Tensor, legal: Tensor | None) -> Metrics:
        """Compare the critics' values of all actions, of the acting discount, at each step; gap and spread in the
        critics' units."""
        assert isinstance(inputs.policy, Categorical)
        policy_N = inputs.policy.most_likely(inputs.steps.params_NGP[:, -1].detach(), legal)
        best_N, gap_N, spread_N = rank_actions(table_CNGA[:, :, -1], legal)
        return {
            "agreement": (policy_N == best_N).to(gap_N.dtype),
            "action_gap": gap_N,
            "action_spread": spread_N,
        }


class ReferencePolicy:
    """A frozen policy that the agent's is held near, as in fine-tuning.

    The agent acts without it, and no checkpoint has its weights. The policy of a discount is held near the reference's
    of the same discount, or near its acting one where it learned no such discount. UsageError if the two are of
    different families, or of one without a closed form of the divergence; their spaces are the same.
    """

    def __init__(self, agent: Agent, *, of: Agent) -> None:
        ours, theirs = of.heads.policy, agent.heads.policy
        if not ours.is_comparable(theirs):
            raise UsageError(
                f"agent.reference: the divergence of a {type(ours).__name__} from a {type(theirs).__name__} "
                "cannot be computed",
                hint="use the reference's agent.actor.distribution, which may be any but gaussian-mixture",
            )
        self.agent, self._policy = agent.requires_grad_(False).eval(), ours
        acting = len(agent.gammas) - 1
        self._most = of.settings.reference_ratio
        self._heads = [agent.gammas.index(gamma) if gamma in agent.gammas else acting for gamma in of.gammas]

    def compare(self, steps: ValidSteps, batch: TensorBatch) -> tuple[Tensor, Tensor | None]:
        """Compute KL(policy || reference) at the steps that count (N, G), with gradient to the policy, and how many
        times as often as the data's policy the reference takes the data's actions (N, G), at most
        `agent.reference_ratio`; None if that is 0. With these ratios as weights, cloning imitates the reference's
        actions, although the data's policy took them (importance sampling, truncated as in IMPALA; Espeholt et al.
        2018, section 4.1)."""
        agent, policy = self.agent, self.agent.heads.policy
        with torch.no_grad():
            h_ND = steps.index.take_before(agent.encode(batch))
            shown = {name: steps.index.take_before(batch.observation[name]) for name in agent.settings.actor.columns}
            params_NGP = agent.heads.actor(agent.policy_input(h_ND, shown))[:, self._heads]
            ratio_NG = None
            if self._most:
                assert batch.logp is not None  # `require_columns` has refused a lake without
                action = steps.action[:, None].expand(-1, len(self._heads), *steps.action.shape[1:])
                more_NG = policy.log_prob(params_NGP, action, steps.legal) - steps.index.take_after(batch.logp)[:, None]
                ratio_NG = more_NG.clamp_max(math.log(self._most)).exp()
        return self._policy.divergence(steps.params_NGP, policy, params_NGP, steps.legal), ratio_NG


def rank_actions(table: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the values (C, ..., A) of at least two actions: (the action of the highest mean over critics (...,), its
    mean minus the second best's, the standard deviation over critics of its values). The action mask `legal` (..., A)
    excludes actions; where it allows one, the gap is 0, and where it allows none, all count."""
    mean = table.mean(0)
    if legal is not None:
        mean = mean.masked_fill(~legal & legal.any(-1, keepdim=True), -torch.inf)
    top, index = mean.topk(2, dim=-1)
    gap = top[..., 0] - top[..., 1]
    if legal is not None:
        gap = torch.where(top[..., 1].isfinite(), gap, 0.0)
    best = index[..., 0]
    values = table.gather(-1, best[..., None].expand(*table.shape[:-1], 1))[..., 0]
    return best, gap, (values - top[..., 0]).square().mean(0).sqrt()


def _seed_global_generator(device: torch.device, seed: int) -> None:
    """Seed the generator that dropout draws from on `device`. `torch.manual_seed` reseeds all kinds of devices, and
    formats a stack trace for each kind that is not in use: a millisecond."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _count_shown_features(spaces: Spaces, columns: Sequence[str]) -> int:
    """Count the features of the columns that the policy head sees directly. UsageError for an unknown column."""
    absent = [name for name in columns if name not in spaces.observation]
    if absent:
        raise UsageError(
            f"agent.actor.columns: no such observation: {', '.join(absent)}",
            hint=f"the observation has: {', '.join(spaces.observation)}",
        )
    return sum(spaces.observation[name].flat_size for name in columns)


def _later(column_BR: Tensor) -> Tensor:
    """Select the row of each step's next action (B, T, ...) from all rows (B, T + 1, ...). The last step has no next
    action; its value has no effect."""
    return torch.cat((column_BR[:, 2:], column_BR[:, -1:]), 1)
