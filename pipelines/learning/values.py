"""How state values come out of heads: exactly where actions can be enumerated, from a sampled action elsewhere.

Values are in normalised units. C critics, N rows, G discounts, A actions, F action features, Z uniforms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipelines.config.model import AgentSettings
from pipelines.lake.spaces import Discrete, Space
from pipelines.nets.actor import Actor
from pipelines.nets.critic import ActionInput, ActionValues, Ensemble
from pipelines.nets.distributions import Categorical, Distribution, distribution
from pipelines.nets.features import features


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the losses need to know of real steps.

    `data_CNG`: values of the actions taken; gradient to critics and state. `policy_CNG`: values of the policy's own;
    gradient to the policy only. `log_prob_NG` of the actions taken, `entropy_NG` without gradient.
    """

    data_CNG: Tensor
    policy_CNG: Tensor
    log_prob_NG: Tensor
    entropy_NG: Tensor


class Heads(nn.Module, ABC):
    """Policy and values on top of a state: the part of the agent that has a target copy."""

    actor: Actor
    critic: Ensemble
    policy: Distribution
    noise_size: int  # uniforms needed per row and discount

    def rescale(self, scale_G: Tensor, shift_G: Tensor) -> None:
        """Let the critics' outputs x become scale x + shift, per discount."""
        self.critic.rescale(scale_G, shift_G)

    @abstractmethod
    def next_values(self, h_ND: Tensor, noise_NGZ: Tensor) -> Tensor:
        """Values of the policy's actions (C, N, G)."""

    @abstractmethod
    def evaluate(self, h_ND: Tensor, action: Tensor, noise_NGZ: Tensor) -> Evaluation:
        """`action`: the stored actions taken at the N rows."""


class ExactHeads(Heads):
    """Discrete actions: V is the expectation of a table of values under the policy, no action is sampled."""

    noise_size = 0
    policy: Categorical

    def __init__(self, state_size: int, space: Discrete, gammas: tuple[float, ...], settings: AgentSettings) -> None:
        super().__init__()
        self.policy = Categorical(space, settings.actor)
        self.actor = Actor(state_size, len(gammas), self.policy.num_params, settings.actor)
        self.critic = ActionValues(state_size, len(gammas), space.n, settings.critic)

    def next_values(self, h_ND: Tensor, noise_NGZ: Tensor) -> Tensor:
        return _expectation(self.critic(h_ND), self.policy.probs(self.actor(h_ND)))

    def evaluate(self, h_ND: Tensor, action: Tensor, noise_NGZ: Tensor) -> Evaluation:
        table_CNGA = self.critic(h_ND)
        probs_NGA = self.policy.probs(self.actor(h_ND))
        index_NG1 = action.long()[:, None, None].expand(-1, probs_NGA.shape[1], 1)
        data_CNG1 = table_CNGA.gather(-1, index_NG1.expand(len(table_CNGA), -1, -1, -1))
        seen_NGA = probs_NGA.detach()
        return Evaluation(
            data_CNG=data_CNG1[..., 0],
            policy_CNG=_expectation(table_CNGA.detach(), probs_NGA),
            log_prob_NG=probs_NGA.gather(-1, index_NG1)[..., 0].log(),
            entropy_NG=-(seen_NGA * seen_NGA.clamp_min(1e-12).log()).sum(-1),
        )


class SampledHeads(Heads):
    """Any action space: V is the value of one action drawn from the policy, through which its gradient flows."""

    def __init__(self, state_size: int, space: Space, gammas: tuple[float, ...], settings: AgentSettings) -> None:
        super().__init__()
        self.space = space
        self.policy = distribution(space, settings.actor)
        self.noise_size = self.policy.noise_size
        self.actor = Actor(state_size, len(gammas), self.policy.num_params, settings.actor)
        self.critic = ActionInput(state_size, space.flat_size, gammas, settings.critic)

    def next_values(self, h_ND: Tensor, noise_NGZ: Tensor) -> Tensor:
        return self.critic(h_ND, self.policy.sample(self.actor(h_ND), noise_NGZ))

    def evaluate(self, h_ND: Tensor, action: Tensor, noise_NGZ: Tensor) -> Evaluation:
        params_NGP = self.actor(h_ND)
        own_NGF = self.policy.sample(params_NGP, noise_NGZ)
        taken = action[:, None].expand(-1, params_NGP.shape[1], *action.shape[1:])
        with torch.no_grad():
            entropy_NG = self.policy.entropy(params_NGP)
        return Evaluation(
            data_CNG=self.critic(h_ND, features(action, self.space)),
            policy_CNG=self.critic(h_ND.detach(), own_NGF, frozen=True),
            log_prob_NG=self.policy.log_prob(params_NGP, taken),
            entropy_NG=entropy_NG,
        )


def heads(state_size: int, space: Space, gammas: tuple[float, ...], settings: AgentSettings) -> Heads:
    """The heads that fit the action space."""
    if isinstance(space, Discrete):
        return ExactHeads(state_size, space, gammas, settings)
    return SampledHeads(state_size, space, gammas, settings)


def _expectation(table_CNGA: Tensor, probs_NGA: Tensor) -> Tensor:
    return (table_CNGA * probs_NGA).sum(-1)
