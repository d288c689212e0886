"""What tells agents apart: a handful of choices that one shared update reads.

| kind | online | offline | critics | K critic / actor |
|---|---|---|---|---|
| actor-critic (arXiv 2310.09971) | 1.0 | 0.1 | scalar; for Discrete actions a table | 1 / 1 |
| multi-task (arXiv 2411.11188) | 0.0 | 1.0 | two-hot, of (state, action, discount) | 1 / 3 |
| behaviour-cloning | 0 | 1, unfiltered | none; the acting discount alone | - |

One of your own is a `Kind` that `agent.kind = "module:attr"` names:

    DPG = Kind(critic="scalar", online_weight=1.0, offline_weight=0.0, actor_samples=2)     # kind = "mine:DPG"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pipelines.config.model import AGENTS, AgentSettings
from pipelines.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The choices. `table`: critics of Discrete actions have a value for each, where they are scalar. `soften`: critics
    are shown choices and bits within [soften, 1 - soften]."""

    critic: Literal["scalar", "two-hot"] | None
    online_weight: float
    offline_weight: float
    critic_samples: int = 1
    actor_samples: int = 1
    table: bool = True
    soften: float = 0.0


ACTOR_CRITIC = Kind(critic="scalar", online_weight=1.0, offline_weight=0.1)
MULTI_TASK = Kind(critic="two-hot", online_weight=0.0, offline_weight=1.0, actor_samples=3, table=False, soften=0.01)
BEHAVIOUR_CLONING = Kind(critic=None, online_weight=0.0, offline_weight=1.0)


def resolve(settings: AgentSettings) -> Kind:
    """Return the kind with what the settings say otherwise. Without critics nothing is maximised. UsageError for a
    plug-in that is not a `Kind`."""
    kind = AGENTS.get(settings.kind)
    if not isinstance(kind, Kind):
        raise UsageError(
            f"agent '{settings.kind}' is not a Kind but of type {type(kind).__name__}",
            hint="let it name an instance of pipelines.learning.kinds.Kind",
        )
    names = ("offline_weight",) if kind.critic is None else (
        "online_weight", "offline_weight", "critic_samples", "actor_samples"
    )  # fmt: skip
    said = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    if kind.critic is not None and settings.critic.kind is not None:
        said["critic"] = settings.critic.kind
    return replace(kind, **said)
