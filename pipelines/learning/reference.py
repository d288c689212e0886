"""A frozen policy that the agent's is held near, as in fine-tuning.

The agent acts without it, and no checkpoint has its weights. The policy of a discount is held near the reference's of
the same discount, or near its acting one where it learned no such discount. B batch, N steps that count, G discounts, P
outputs of a policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipelines.errors import UsageError
from pipelines.learning.batch import TensorBatch

if TYPE_CHECKING:
    from pipelines.learning.agent import Agent
    from pipelines.learning.objectives import ValidSteps


class ReferencePolicy:
    """The reference of an agent's policy. UsageError if the two are of different families, or of one without a closed
    form of the divergence; their spaces are the same."""

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
        self._heads = [agent.gammas.index(gamma) if gamma in agent.gammas else acting for gamma in of.gammas]

    def divergence(self, steps: ValidSteps, batch: TensorBatch) -> Tensor:
        """Compute KL(policy || reference) at the steps that count (N, G), with gradient to the policy."""
        agent = self.agent
        with torch.no_grad():
            h_ND = steps.index.take_before(agent.encode(batch))
            shown = {name: steps.index.take_before(batch.observation[name]) for name in agent.settings.actor.columns}
            params_NGP = agent.heads.actor(agent.policy_input(h_ND, shown))[:, self._heads]
        return self._policy.divergence(steps.params_NGP, agent.heads.policy, params_NGP, steps.legal)
