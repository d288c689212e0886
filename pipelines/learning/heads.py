"""Heads on top of a state: the policy, and critics whose values are exact where actions can be enumerated, and
estimated from sampled actions elsewhere.

Values are in the critics' units: normalised, or scaled rewards (`Heads.normalized`). C critics, N rows, G discounts, A
actions, F action features, K samples, Z uniforms, M drawn critics, W hidden width of the critics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from pipelines.config.model import AgentSettings
from pipelines.lake.spaces import Box, Space
from pipelines.learning.agent_types import AgentType
from pipelines.learning.objectives import (
    DataValues,
    PolicyValues,
    Reduction,
    cross_entropy,
    reduce,
    reduce_both,
    squared_error,
)
from pipelines.nets.actor import Actor, Categorical, Distribution, make_distribution
from pipelines.nets.critic import ActionInput, ActionValues, TwoHot
from pipelines.nets.inputs import to_features


class Heads(nn.Module):
    """Policy head, and critics in subclasses: the part of the agent that has a target copy."""

    normalized = True
    noise_size = 0  # uniforms for one sample of a row and discount

    def __init__(self, policy_size: int, policy: Distribution, num_discounts: int, settings: AgentSettings) -> None:
        super().__init__()
        self.policy = policy
        self.actor = Actor(policy_size, num_discounts, policy.num_params, settings.actor)
        self.critic: nn.Module | None = None


class CriticHeads(Heads, ABC):
    """Policy head and critics."""

    critic: ActionValues | ActionInput

    def rescale(self, scale_G: Tensor, shift_G: Tensor) -> None:
        """Change the critics' outputs x to scale x + shift, per discount, if they are in normalised units."""
        if self.normalized:
            self.critic.rescale(scale_G, shift_G)

    @abstractmethod
    def next_values(
        self,
        h_ND: Tensor,
        params_NGP: Tensor,
        legal: Tensor | None,
        noise_NGKZ: Tensor,
        drawn_MNG: Tensor,
        how: Reduction,
    ) -> Tensor:
        """Return values of a policy's actions by the drawn critics (N, G), without gradient."""

    @abstractmethod
    def critic_loss(
        self, h_ND: Tensor, action: Tensor, target_NG: Tensor, scale_N: Tensor | None
    ) -> tuple[Tensor, DataValues]:
        """Return the critics' loss for the dataset actions (mean over critics and discounts, sum over rows, each times
        `scale_N`, None: 1), and their values."""

    @abstractmethod
    def policy_values(
        self, data: DataValues, action: Tensor, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor,
        drawn_MNG: Tensor | None,
    ) -> PolicyValues:  # fmt: skip
        """Return values of the policy's own actions, and their minimum over the critics `drawn_MNG`, if given."""


class ExactHeads(CriticHeads):
    """Heads for choices, Discrete actions or points of a grid: V is the expectation of a table of values under the
    policy; no action is sampled."""

    critic: ActionValues
    policy: Categorical

    def __init__(
        self, state_size: int, policy_size: int, policy: Categorical, gammas: tuple[float, ...], settings: AgentSettings
    ) -> None:
        super().__init__(policy_size, policy, len(gammas), settings)
        self.critic = ActionValues(state_size, len(gammas), policy.num_params, settings.critic)

    def next_values(
        self,
        h_ND: Tensor,
        params_NGP: Tensor,
        legal: Tensor | None,
        noise_NGKZ: Tensor,
        drawn_MNG: Tensor,
        how: Reduction,
    ) -> Tensor:
        return reduce(_take_expectation(self.critic(h_ND), self.policy.probs(params_NGP, legal)), drawn_MNG, how)

    def next_and_taken_values(
        self,
        h_ND: Tensor,
        params_NGP: Tensor,
        legal: Tensor | None,
        drawn_MNG: Tensor,
        how: Reduction,
        action: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values of a policy's actions and of the dataset actions, by the same critics, and the probabilities of
        the latter under the policy (N, G), without gradient."""
        probs_NGA, table_CNGA = self.policy.probs(params_NGP, legal), self.critic(h_ND)
        index_NG1 = self.policy.index(action)[:, None, None].expand(*table_CNGA.shape[1:3], 1)
        taken_CNG = table_CNGA.gather(-1, index_NG1.expand(len(table_CNGA), -1, -1, -1))[..., 0]
        value_NG, taken_NG = reduce_both(_take_expectation(table_CNGA, probs_NGA), taken_CNG, drawn_MNG, how)
        return value_NG, taken_NG, probs_NGA.gather(-1, index_NG1)[..., 0]

    def critic_loss(
        self, h_ND: Tensor, action: Tensor, target_NG: Tensor, scale_N: Tensor | None
    ) -> tuple[Tensor, DataValues]:
        index_N = self.policy.index(action)

        def table_loss(rows: slice, table_CnGA: Tensor) -> tuple[Tensor, Tensor]:
            index_CnG1 = index_N[rows, None, None].expand(*table_CnGA.shape[:3], 1)
            q_CnG = table_CnGA.gather(-1, index_CnG1)[..., 0]
            loss, slope_CnG = squared_error(q_CnG, target_NG[rows], None if scale_N is None else scale_N[rows, None])
            return loss, torch.zeros_like(table_CnGA).scatter_(-1, index_CnG1, slope_CnG[..., None])

        loss, table_CNGA = self.critic.fused_loss(h_ND, table_loss)
        q_CNG = table_CNGA.gather(-1, index_N[:, None, None].expand(*table_CNGA.shape[:3], 1))[..., 0]
        return loss / table_CNGA.shape[::2].numel(), DataValues(q_CNG=q_CNG, shared=table_CNGA)

    def policy_values(
        self, data: DataValues, action: Tensor, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor,
        drawn_MNG: Tensor | None,
    ) -> PolicyValues:  # fmt: skip
        q_CNG = _take_expectation(data.shared, self.policy.probs(params_NGP, legal))
        min_q_NG = None if drawn_MNG is None else reduce(q_CNG, drawn_MNG, "min")
        return PolicyValues(min_q_NG=min_q_NG, q_CNG=q_CNG.detach())


class _SampledHeads(CriticHeads):
    """Heads for any action space: V is the mean value of K actions sampled from the policy, with gradient to it."""

    critic: ActionInput

    def __init__(
        self, state_size: int, policy_size: int, policy: Distribution, space: Space, gammas: tuple[float, ...],
        settings: AgentSettings, type: AgentType,
    ) -> None:  # fmt: skip
        super().__init__(policy_size, policy, len(gammas), settings)
        self.space, self.noise_size = space, policy.noise_size
        self.label_smoothing = 0.0 if isinstance(space, Box) else type.label_smoothing
        critic = settings.critic.model_copy(update={"kind": type.critic})
        self.critic = ActionInput(state_size, space.flat_size, gammas, critic)
        self.normalized = self.critic.readout.normalized

    def next_values(
        self,
        h_ND: Tensor,
        params_NGP: Tensor,
        legal: Tensor | None,
        noise_NGKZ: Tensor,
        drawn_MNG: Tensor,
        how: Reduction,
    ) -> Tensor:
        action_NGKF = self._smoothed(self._samples(params_NGP, legal, noise_NGKZ))
        needed_CNG = torch.zeros((self.critic.members, *drawn_MNG.shape[1:]), dtype=torch.bool, device=h_ND.device)
        needed_CNG.scatter_(0, drawn_MNG, value=True)
        value_CNGK = self.critic(self.critic.states(h_ND), action_NGKF, needed_CNG[..., None])
        return reduce(value_CNGK.mean(-1), drawn_MNG, how)

    def critic_loss(
        self, h_ND: Tensor, action: Tensor, target_NG: Tensor, scale_N: Tensor | None
    ) -> tuple[Tensor, DataValues]:
        target_GN, readout = target_NG.t().contiguous(), self.critic.readout

        def output_loss(rows: slice, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            target_Gn, scale_n = target_GN[:, rows], None if scale_N is None else scale_N[rows]
            if isinstance(readout, TwoHot):
                scale_R1 = None if scale_n is None else scale_n.expand_as(target_Gn).reshape(-1, 1)
                loss, q_CR, slope_CRZ = cross_entropy(readout, outputs, target_Gn.flatten(), scale_R1)
                return loss, q_CR.unflatten(1, target_Gn.shape), slope_CRZ
            loss, slope_CGn = squared_error(outputs, target_Gn, scale_n)
            return loss, outputs, slope_CGn

        state_CNW = self.critic.states(h_ND.detach())
        taken_NF = self._smoothed(to_features(action, self.space))
        loss, q_CNG = self.critic.fused_loss(h_ND, state_CNW, taken_NF, output_loss)
        return loss / q_CNG.shape[::2].numel(), DataValues(q_CNG=q_CNG, shared=state_CNW)

    def policy_values(
        self, data: DataValues, action: Tensor, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor,
        drawn_MNG: Tensor | None,
    ) -> PolicyValues:  # fmt: skip
        if drawn_MNG is not None:
            own_NGKF = self._samples(params_NGP, legal, noise_NGKZ)
            min_q_NG, q_CNG = self.critic.min_q(data.shared, self._smoothed(own_NGKF), drawn_MNG)
            if self.policy.hard:
                only_taken_NG = self._is_taken(action, self.policy.to_stored(own_NGKF.detach())).all(-1)
                q_CNG = torch.where(only_taken_NG, data.q_CNG, q_CNG)
            return PolicyValues(min_q_NG=min_q_NG, q_CNG=q_CNG)
        with torch.no_grad():
            own_NGKF = self._samples(params_NGP.detach(), legal, noise_NGKZ)
            if not self.policy.hard:
                q_CNG = self.critic(data.shared, own_NGKF).mean(-1)
            else:
                q_CNG = self._distinct_values(data, action, own_NGKF)
            return PolicyValues(min_q_NG=None, q_CNG=q_CNG)

    def _distinct_values(self, data: DataValues, action: Tensor, own_NGKF: Tensor) -> Tensor:
        """Return mean values of sampled choices (C, N, G), evaluating each distinct sample once, and none that equals
        the dataset action."""
        stored = self.policy.to_stored(own_NGKF)
        is_taken_NGK = self._is_taken(action, stored)
        flat = _flatten_entries(stored)
        same_NGKK = (flat[:, :, :, None] == flat[:, :, None]).all(-1)
        is_first_NGK = ~same_NGKK.tril(-1).any(-1) & ~is_taken_NGK
        value_CNGK = self.critic(data.shared, self._smoothed(own_NGKF), is_first_NGK)
        times_NGK = same_NGKK.sum(-1) * is_first_NGK
        total_CNG = (value_CNGK * times_NGK).sum(-1) + data.q_CNG * is_taken_NGK.sum(-1)
        return torch.where(is_taken_NGK.all(-1), data.q_CNG, total_CNG / own_NGKF.shape[2])

    def _is_taken(self, action: Tensor, own: Tensor) -> Tensor:
        """Return whether stored actions (N, G, K, ...) equal the dataset actions, (N, G, K). Where all do, their value
        must be bit-identical: an advantage that is only rounding error would pass the filter."""
        return (_flatten_entries(own) == _flatten_entries(action[:, None, None].to(own.dtype))).all(-1)

    def _samples(self, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor) -> Tensor:
        """Sample actions as features (N, G, K, F)."""
        return self.policy.sample(params_NGP[:, :, None], noise_NGKZ, None if legal is None else legal[:, :, None])

    def _smoothed(self, action: Tensor) -> Tensor:
        """Return features as the critics receive them, with label smoothing."""
        smoothing = self.label_smoothing
        return smoothing + (1 - 2 * smoothing) * action if smoothing else action


def make_heads(
    state_size: int, policy_size: int, space: Space, gammas: tuple[float, ...], settings: AgentSettings, type: AgentType
) -> Heads:
    """Construct the heads for an action space and an agent type; the policy head may have more inputs than a state."""
    policy = make_distribution(space, settings.actor)
    if type.critic is None:
        return Heads(policy_size, policy, len(gammas), settings)
    if isinstance(policy, Categorical) and type.table and type.critic == "scalar":
        return ExactHeads(state_size, policy_size, policy, gammas, settings)
    return _SampledHeads(state_size, policy_size, policy, space, gammas, settings, type)


def _flatten_entries(action_NGK: Tensor) -> Tensor:
    """Put the entries of stored actions along one last dimension (N, G, K, entries)."""
    return action_NGK[..., None] if action_NGK.dim() == 3 else action_NGK.flatten(3)


def _take_expectation(table_CNGA: Tensor, probs_NGA: Tensor) -> Tensor:
    return (table_CNGA * probs_NGA).sum(-1)
