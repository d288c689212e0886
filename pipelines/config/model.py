"""Settings of the network and of the learning algorithm: all that a checkpoint needs to be rebuilt.

A table with a `kind` names a built-in, an installed plug-in or "module:attr"; plug-ins take their own `options`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipelines.config.base import SettingsModel, known
from pipelines.config.encoders import (
    Activation,
    Positive,
    Probability,
    SequenceSettings,
    TimestepSettings,
    TransformerSettings,
    Widths,
)
from pipelines.registry import Registry

FILTERS = Registry(
    "filter",
    {
        "binary": "pipelines.learning.objectives:binary",
        "exp": "pipelines.learning.objectives:exp",
        "leaky-relu": "pipelines.learning.objectives:leaky_relu",
    },
)
LOSSES = Registry("loss", {"next-step": "pipelines.learning.auxiliary:NextStep"})
AGENTS = Registry(
    "agent",
    {
        "actor-critic": "pipelines.learning.agent_types:ACTOR_CRITIC",
        "multi-task": "pipelines.learning.agent_types:MULTI_TASK",
        "behaviour-cloning": "pipelines.learning.agent_types:BEHAVIOUR_CLONING",
    },
)

_Discount = Annotated[float, Field(ge=0, lt=1)]


class ActorSettings(SettingsModel):
    """Policy head: one distribution per discount."""

    hidden: Widths = (256, 256)
    """Widths of the hidden layers."""
    activation: Activation = "leaky-relu"
    """After hidden layers."""
    columns: tuple[str, ...] = ()
    """Observation columns that the policy head receives directly, in addition to the state; critics do not."""
    residual: bool = False
    """Make the hidden layers residual, all as wide as the first."""
    probability_floor: Probability = 1e-3
    """Minimum probability of each choice, mixed into the policy (a tenth at most over all choices)."""
    bit_probability_floor: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Minimum probability of each value of a bit (MultiBinary actions), mixed in likewise."""
    min_log_std: float = -5.0
    """Lower bound of the log standard deviation (Box actions)."""
    max_log_std: float = 2.0
    """Upper bound of the log standard deviation (Box actions)."""
    action_clip: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Box actions are clipped to +- this before their log-probability is computed."""
    distribution: Literal["tanh-gaussian", "beta", "gaussian-mixture", "grid"] = "tanh-gaussian"
    """Distribution family of Box actions. "grid": a choice among the points of a grid over the box, for which critics
    have a value each, as for Discrete actions; for boxes of a few dimensions."""
    modes: Positive = 5
    """Gaussians of a mixture."""
    grid_points: Annotated[int, Field(ge=2, le=99)] = 3
    """Points of a grid in each dimension, evenly spaced from bound to bound."""
    gumbel: bool = False
    """Sample the choices and bits that critics evaluate by Gumbel-softmax; otherwise straight-through."""
    gumbel_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the Gumbel-softmax."""

    @model_validator(mode="after")
    def _blocks(self) -> ActorSettings:
        if self.residual and not self.hidden:
            raise ValueError("residual blocks need a hidden layer")
        return self


class CriticSettings(SettingsModel):
    """Ensemble of value heads."""

    hidden: Annotated[Widths, Field(min_length=1)] = (256, 256)
    """Widths of the hidden layers."""
    ensemble: Positive = 4
    """Number of critics."""
    subset: Positive = 2
    """Critics drawn, without replacement, whenever a value is needed."""
    kind: Literal["scalar", "two-hot"] | None = None
    """A number with value normalisation, or a distribution over bins; unset: as the agent type."""
    bins: Annotated[int, Field(ge=2)] = 128
    """Bins of a two-hot critic."""
    symlog: bool = True
    """Space bins evenly in symlog space; false: in values, which needs `low` and `high`."""
    low: float = -1e5
    """Value of the first bin, in scaled rewards."""
    high: float = 1e5
    """Value of the last bin."""
    labels: Literal["two-hot", "hl-gauss"] = "hl-gauss"
    """Label of a target: a Gaussian's mass on all bins, or shares of the nearest two."""
    label_sigma: Annotated[float, Field(gt=0)] = 2.5
    """Standard deviation of that Gaussian, in bins."""

    @model_validator(mode="after")
    def _subset(self) -> CriticSettings:
        if not self.symlog and not {"low", "high"} <= self.model_fields_set:
            raise ValueError("bins that are even in values need the range of values: set low and high")
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        if self.subset > self.ensemble:
            raise ValueError(f"subset {self.subset} is more than the ensemble of {self.ensemble}")
        return self


class PopArtSettings(SettingsModel):
    """Value normalisation, per discount."""

    enabled: bool = True
    """Normalise values; false: critics learn scaled rewards directly."""
    beta: Annotated[float, Field(gt=0, le=1)] = 5e-4
    """Step of the running moments, after a start-corrected beginning."""
    min_sigma: Annotated[float, Field(gt=0)] = 1e-4
    """Lower bound of the scale."""
    max_sigma: Annotated[float, Field(gt=0)] = 1e6
    """Upper bound of the scale."""


class FilterSettings(SettingsModel):
    """Weight of a dataset action in behaviour cloning, by its advantage."""

    kind: str = "binary"
    """binary, exp, leaky-relu, or module:attr."""
    options: dict[str, float] = Field(default_factory=dict)
    """Arguments of the filter."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(FILTERS, kind)


class AuxiliaryLossSettings(SettingsModel):
    """Auxiliary loss, built in or the user's own."""

    kind: str
    """next-step, an entry point's name, or module:attr (see pipelines/learning/auxiliary.py)."""
    weight: float = 1.0
    """Factor of the loss."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(LOSSES, kind)


class AgentSettings(SettingsModel):
    """Agent: network, losses, targets. Unset weights and samples are those of its type
    (pipelines/learning/agent_types.py)."""

    kind: str = "actor-critic"
    """Agent type: actor-critic, multi-task, behaviour-cloning, or module:attr (see
    pipelines/learning/agent_types.py)."""
    timestep: TimestepSettings = TimestepSettings()
    """Timestep encoder."""
    sequence: SequenceSettings = TransformerSettings()
    """Sequence encoder."""
    actor: ActorSettings = ActorSettings()
    """Policy head."""
    critic: CriticSettings = CriticSettings()
    """Value heads."""
    popart: PopArtSettings = PopArtSettings()
    """Value normalisation."""
    filter: FilterSettings = FilterSettings()
    """Advantage filter of behaviour cloning."""
    gammas: tuple[_Discount, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)
    """Discounts learned in addition to the acting one."""
    acting_gamma: _Discount = 0.999
    """Acting discount: the discount whose policy acts."""
    reward_scale: Annotated[float, Field(gt=0)] = 10.0
    """Factor of all rewards while learning (scaled rewards)."""
    n_step: Positive = 1
    """Rewards summed before the bootstrap value (n-step targets)."""
    trace: Literal["none", "peng", "tree-backup", "retrace"] = "none"
    """Targets: none: n-step; peng: Q(lambda) without correction; tree-backup: as far as the policy would have taken the
    dataset actions; retrace: as far as the policy takes them at least as often as uniform play does."""
    trace_decay: Probability = 0.95
    """Lambda of the traces."""
    actor_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the actor loss, -Q of the policy's own actions; unset: as the agent type."""
    bc_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of (advantage-filtered) behaviour cloning; unset: as the agent type."""
    entropy_weight: Annotated[float, Field(ge=0)] | Literal["auto"] = 0.0
    """Weight of an entropy bonus: keeps the policy from choosing before the critics distinguish actions. In units of
    advantages where critics have a value for each action, of normalised values elsewhere. "auto" (Box actions alone):
    adjusted so that the entropy stays at minus one nat a dimension."""
    critic_weight: Annotated[float, Field(ge=0)] = 10.0
    """Weight of the critic loss."""
    critic_samples: Positive | None = None
    """Actions sampled for the value of a next state; unset: as the agent type."""
    actor_samples: Positive | None = None
    """Actions sampled for the policy's own value; unset: as the agent type."""
    target_actor: bool = True
    """Take next actions from the target policy instead of the online one."""
    action_mask: str = ""
    """Observation column with a number for each choice, 0 where it is illegal; empty: all are legal."""
    auxiliary_losses: tuple[AuxiliaryLossSettings, ...] = ()
    """Auxiliary losses."""
    target_tau: Probability = 0.003
    """Step of the target heads towards the heads, per update."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(AGENTS, kind)
