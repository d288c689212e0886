"""How values and losses come out of heads: exactly where actions can be enumerated, from sampled actions elsewhere.

Values are in the critics' units: normalised, or those of multiplied rewards (`Heads.normalized`). C critics, N rows, G
discounts, A actions, F action features, K samples, Z uniforms, M drawn critics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipelines.config.model import AgentSettings
from pipelines.lake.spaces import Discrete, Space
from pipelines.learning.ensemble import Reduction, reduce, reduce_both
from pipelines.learning.kinds import Kind
from pipelines.nets.actor import Actor
from pipelines.nets.critic import ActionInput, ActionValues
from pipelines.nets.distributions import Categorical, Policy, distribution
from pipelines.nets.features import features


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a pass over the actions taken leaves for the policy's: their values, and what the two have in common (a
    table of values, or the states' part of the first layer). No gradient."""

    data_CNG: Tensor
    shared: Tensor


@dataclass(frozen=True, kw_only=True)
class Own:
    """Values of the policy's own actions: `least_NG` over drawn critics, with gradient to the policy only, where a
    value is maximised; `all_CNG` without gradient."""

    least_NG: Tensor | None
    all_CNG: Tensor


class Heads(nn.Module):
    """Policy on top of a state, and values in subclasses: the part of the agent that has a target copy."""

    normalized = True
    noise_size = 0  # uniforms for one sample of a row and discount

    def __init__(self, policy_size: int, policy: Policy, num_discounts: int, settings: AgentSettings) -> None:
        super().__init__()
        self.policy = policy
        self.actor = Actor(policy_size, num_discounts, policy.num_params, settings.actor)
        self.critic: nn.Module | None = None


class CriticHeads(Heads, ABC):
    """Policy and values."""

    critic: ActionValues | ActionInput

    def rescale(self, scale_G: Tensor, shift_G: Tensor) -> None:
        """Let the critics' outputs x become scale x + shift, per discount, if they are in normalised units."""
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
        """Values of a policy's actions by the drawn critics (N, G), without gradient."""

    @abstractmethod
    def judge(self, h_ND: Tensor, action: Tensor, target_NG: Tensor, scale_N: Tensor) -> tuple[Tensor, Judged]:
        """Critic loss of the stored actions taken at the N rows, each times its scale: mean over critics and
        discounts, sum over rows."""

    @abstractmethod
    def own_values(
        self, judged: Judged, action: Tensor, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor,
        drawn_MNG: Tensor | None,
    ) -> Own:  # fmt: skip
        """Values of the policy's own actions; `drawn_MNG`: the critics of which the least is maximised, if one is."""


class ExactHeads(CriticHeads):
    """Discrete actions: V is the expectation of a table of values under the policy, no action is sampled."""

    critic: ActionValues
    policy: Categorical

    def __init__(
        self, state_size: int, policy_size: int, space: Discrete, gammas: tuple[float, ...], settings: AgentSettings
    ) -> None:
        super().__init__(policy_size, Categorical(space, settings.actor), len(gammas), settings)
        self.critic = ActionValues(state_size, len(gammas), space.n, settings.critic)

    def next_values(
        self,
        h_ND: Tensor,
        params_NGP: Tensor,
        legal: Tensor | None,
        noise_NGKZ: Tensor,
        drawn_MNG: Tensor,
        how: Reduction,
    ) -> Tensor:
        return reduce(_expectation(self.critic(h_ND), self.policy.probs(params_NGP, legal)), drawn_MNG, how)

    def next_and_taken_values(
        self,
        h_ND: Tensor,
        params_NGP: Tensor,
        legal: Tensor | None,
        drawn_MNG: Tensor,
        how: Reduction,
        action: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values of a policy's actions and of the stored actions, by the same critics, and the probabilities of the
        latter under the policy (N, G), without gradient."""
        probs_NGA, table_CNGA = self.policy.probs(params_NGP, legal), self.critic(h_ND)
        index_NG1 = action.long()[:, None, None].expand(*table_CNGA.shape[1:3], 1)
        taken_CNG = table_CNGA.gather(-1, index_NG1.expand(len(table_CNGA), -1, -1, -1))[..., 0]
        value_NG, taken_NG = reduce_both(_expectation(table_CNGA, probs_NGA), taken_CNG, drawn_MNG, how)
        return value_NG, taken_NG, probs_NGA.gather(-1, index_NG1)[..., 0]

    def judge(self, h_ND: Tensor, action: Tensor, target_NG: Tensor, scale_N: Tensor) -> tuple[Tensor, Judged]:
        index_N = action.long()
        loss, table_CNGA = self.critic.loss(h_ND, index_N, target_NG, scale_N)
        data_CNG = table_CNGA.gather(-1, index_N[:, None, None].expand(*table_CNGA.shape[:3], 1))[..., 0]
        return loss / table_CNGA.shape[::2].numel(), Judged(data_CNG=data_CNG, shared=table_CNGA)

    def own_values(
        self, judged: Judged, action: Tensor, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor,
        drawn_MNG: Tensor | None,
    ) -> Own:  # fmt: skip
        value_CNG = _expectation(judged.shared, self.policy.probs(params_NGP, legal))
        least_NG = None if drawn_MNG is None else reduce(value_CNG, drawn_MNG, "min")
        return Own(least_NG=least_NG, all_CNG=value_CNG.detach())


class SampledHeads(CriticHeads):
    """Any action space: V is the mean value of K actions drawn from the policy, through which its gradient flows."""

    critic: ActionInput

    def __init__(
        self, state_size: int, policy_size: int, space: Space, gammas: tuple[float, ...], settings: AgentSettings,
        kind: Kind,
    ) -> None:  # fmt: skip
        super().__init__(policy_size, distribution(space, settings.actor), len(gammas), settings)
        self.space, self.noise_size = space, self.policy.noise_size
        self.label_smoothing = kind.label_smoothing if self.policy.hard else 0.0
        critic = settings.critic.model_copy(update={"kind": kind.critic})
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
        action_NGKF = self._shown(self._samples(params_NGP, legal, noise_NGKZ))
        needed_CNG = torch.zeros((self.critic.members, *drawn_MNG.shape[1:]), dtype=torch.bool, device=h_ND.device)
        needed_CNG.scatter_(0, drawn_MNG, value=True)
        value_CNGK = self.critic(self.critic.states(h_ND), action_NGKF, needed_CNG[..., None])
        return reduce(value_CNGK.mean(-1), drawn_MNG, how)

    def judge(self, h_ND: Tensor, action: Tensor, target_NG: Tensor, scale_N: Tensor) -> tuple[Tensor, Judged]:
        state_CNW = self.critic.states(h_ND.detach())
        taken_NF = self._shown(features(action, self.space))
        loss, data_CNG = self.critic.loss(h_ND, state_CNW, taken_NF, target_NG, scale_N)
        return loss / data_CNG.shape[::2].numel(), Judged(data_CNG=data_CNG, shared=state_CNW)

    def own_values(
        self, judged: Judged, action: Tensor, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor,
        drawn_MNG: Tensor | None,
    ) -> Own:  # fmt: skip
        if drawn_MNG is not None:
            own_NGKF = self._samples(params_NGP, legal, noise_NGKZ)
            least_NG, all_CNG = self.critic.least(judged.shared, self._shown(own_NGKF), drawn_MNG)
            if self.policy.hard:
                only_taken_NG = self._is_taken(action, self.policy.stored(own_NGKF.detach())).all(-1)
                all_CNG = torch.where(only_taken_NG, judged.data_CNG, all_CNG)
            return Own(least_NG=least_NG, all_CNG=all_CNG)
        with torch.no_grad():
            own_NGKF = self._samples(params_NGP.detach(), legal, noise_NGKZ)
            if not self.policy.hard:
                all_CNG = self.critic(judged.shared, own_NGKF).mean(-1)
            else:
                all_CNG = self._distinct_values(judged, action, own_NGKF)
            return Own(least_NG=None, all_CNG=all_CNG)

    def _distinct_values(self, judged: Judged, action: Tensor, own_NGKF: Tensor) -> Tensor:
        """Mean values of drawn choices (C, N, G): each that is drawn, and is not the one taken, judged once."""
        stored = self.policy.stored(own_NGKF)
        is_taken_NGK = self._is_taken(action, stored)
        flat = _entries(stored)
        same_NGKK = (flat[:, :, :, None] == flat[:, :, None]).all(-1)
        is_first_NGK = ~same_NGKK.tril(-1).any(-1) & ~is_taken_NGK
        value_CNGK = self.critic(judged.shared, self._shown(own_NGKF), is_first_NGK)
        times_NGK = same_NGKK.sum(-1) * is_first_NGK
        total_CNG = (value_CNGK * times_NGK).sum(-1) + judged.data_CNG * is_taken_NGK.sum(-1)
        return torch.where(is_taken_NGK.all(-1), judged.data_CNG, total_CNG / own_NGKF.shape[2])

    def _is_taken(self, action: Tensor, own: Tensor) -> Tensor:
        """Whether stored actions (N, G, K, ...) are those taken, (N, G, K). Where all are, the value must be that of
        the taken one to the bit: an advantage of nothing but rounding would pass the filter."""
        return (_entries(own) == _entries(action[:, None, None].to(own.dtype))).all(-1)

    def _samples(self, params_NGP: Tensor, legal: Tensor | None, noise_NGKZ: Tensor) -> Tensor:
        """Features (N, G, K, F)."""
        return self.policy.sample(params_NGP[:, :, None], noise_NGKZ, None if legal is None else legal[:, :, None])

    def _shown(self, action: Tensor) -> Tensor:
        """Features as critics see them."""
        return self.label_smoothing + (1 - 2 * self.label_smoothing) * action if self.label_smoothing else action


def heads(
    state_size: int, policy_size: int, space: Space, gammas: tuple[float, ...], settings: AgentSettings, kind: Kind
) -> Heads:
    """Make the heads that fit the action space and the kind of agent; the policy has inputs of its own."""
    if kind.critic is None:
        return Heads(policy_size, distribution(space, settings.actor), len(gammas), settings)
    if isinstance(space, Discrete) and kind.table and kind.critic == "scalar":
        return ExactHeads(state_size, policy_size, space, gammas, settings)
    return SampledHeads(state_size, policy_size, space, gammas, settings, kind)


def _entries(action_NGK: Tensor) -> Tensor:
    """Stored actions with their entries along one last dimension (N, G, K, entries)."""
    return action_NGK[..., None] if action_NGK.dim() == 3 else action_NGK.flatten(3)


def _expectation(table_CNGA: Tensor, probs_NGA: Tensor) -> Tensor:
    return (table_CNGA * probs_NGA).sum(-1)
