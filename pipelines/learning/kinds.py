"""What tells agents apart: a handful of choices that one shared update reads.

| kind | online | offline | critics | K critic / actor |
|---|---|---|---|---|
| actor-critic (arXiv 2310.09971) | 1.0 | 0.1 | scalar; for Discrete actions a table | 1 / 1 |
| multi-task (arXiv 2411.11188) | 0.0 | 1.0 | two-hot, of (state, action, discount) | 1 / 3 |
| behaviour-cloning | 0 | 1, unfiltered | none; the acting discount alone | - |

One of your own is a `Kind` that `agent.kind = "module:attr"` names:

    DPG = Kind(critic="scalar", actor_weight=1.0, bc_weight=0.0, actor_samples=2)     # kind = "mine:DPG"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pipelines.config.model import AGENTS, AgentSettings
from pipelines.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The choices. `table`: scalar critics of Discrete actions have an output for each action. `label_smoothing`:
    critics receive choices and bits within [label_smoothing, 1 - label_smoothing]."""

    critic: Literal["scalar", "two-hot"] | None
    actor_weight: float
    bc_weight: float
    critic_samples: int = 1
    actor_samples: int = 1
    table: bool = True
    label_smoothing: float = 0.0


ACTOR_CRITIC = Kind(critic="scalar", actor_weight=1.0, bc_weight=0.1)
MULTI_TASK = Kind(critic="two-hot", actor_weight=0.0, bc_weight=1.0, actor_samples=3, table=False, label_smoothing=0.01)
BEHAVIOUR_CLONING = Kind(critic=None, actor_weight=0.0, bc_weight=1.0)


def resolve(settings: AgentSettings) -> Kind:
    """Return the kind with what the settings say otherwise. Without critics nothing is maximised. UsageError for a
    plug-in that is not a `Kind`."""
    kind = AGENTS.get(settings.kind)
    if not isinstance(kind, Kind):
        raise UsageError(
            f"agent '{settings.kind}' is not a Kind but of type {type(kind).__name__}",
            hint="let it name an instance of pipelines.learning.kinds.Kind",
        )
    names = ("bc_weight",) if kind.critic is None else (
        "actor_weight", "bc_weight", "critic_samples", "actor_samples"
    )  # fmt: skip
    said = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    if kind.critic is not None and settings.critic.kind is not None:
        said["critic"] = settings.critic.kind
    return replace(kind, **said)
