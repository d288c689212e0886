"""Agent types: the few choices in which agents differ, all served by one update.

| type | actor weight | behaviour-cloning weight | critics | K critic / actor |
|---|---|---|---|---|
| actor-critic (arXiv 2310.09971) | 1.0 | 0.1 | scalar; one output per action if Discrete | 1 / 1 |
| multi-task (arXiv 2411.11188) | 0.0 | 1.0 | two-hot, of (state, action, discount) | 1 / 3 |
| behaviour-cloning | 0 | 1, unfiltered | none; the acting discount alone | - |

A custom one is an `AgentType` that `agent.kind = "module:attr"` names:

    DPG = AgentType(critic="scalar", actor_weight=1.0, bc_weight=0.0, actor_samples=2)     # kind = "mine:DPG"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pipelines.config.model import AGENTS, AgentSettings
from pipelines.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class AgentType:
    """Choices of an agent. `table`: scalar critics of Discrete actions have an output for each action.
    `label_smoothing`: critics receive choices and bits within [label_smoothing, 1 - label_smoothing]."""

    critic: Literal["scalar", "two-hot"] | None
    actor_weight: float
    bc_weight: float
    critic_samples: int = 1
    actor_samples: int = 1
    table: bool = True
    label_smoothing: float = 0.0


ACTOR_CRITIC = AgentType(critic="scalar", actor_weight=1.0, bc_weight=0.1)
MULTI_TASK = AgentType(
    critic="two-hot", actor_weight=0.0, bc_weight=1.0, actor_samples=3, table=False, label_smoothing=0.01
)
BEHAVIOUR_CLONING = AgentType(critic=None, actor_weight=0.0, bc_weight=1.0)


def resolve(settings: AgentSettings) -> AgentType:
    """Return the agent type with the settings' overrides; without critics there is no actor weight. UsageError for a
    plug-in that is not an `AgentType`."""
    found = AGENTS.get(settings.kind)
    if not isinstance(found, AgentType):
        raise UsageError(
            f"agent '{settings.kind}' is not an AgentType but a {type(found).__name__}",
            hint="name an instance of pipelines.learning.agent_types.AgentType",
        )
    names = ("bc_weight",) if found.critic is None else (
        "actor_weight", "bc_weight", "critic_samples", "actor_samples"
    )  # fmt: skip
    overrides = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    if found.critic is not None and settings.critic.kind is not None:
        overrides["critic"] = settings.critic.kind
    return replace(found, **overrides)
