"""Settings of the network and of the learning algorithm: what a checkpoint needs to be rebuilt.

A table with a `kind` names a built-in, an installed plug-in or "module:attr"; plug-ins take their own `options`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipelines.config.encoders import (
    Activation,
    ModelSettings,
    Positive,
    Probability,
    SequenceSettings,
    TimestepSettings,
    TransformerSettings,
    Widths,
    known,
)
from pipelines.registry import Registry

FILTERS = Registry(
    "filter",
    {
        "binary": "pipelines.learning.filters:binary",
        "exp": "pipelines.learning.filters:exp",
        "leaky-relu": "pipelines.learning.filters:leaky_relu",
    },
)
LOSSES = Registry("loss", {"next-step": "pipelines.learning.auxiliary:NextStep"})
AGENTS = Registry(
    "agent",
    {
        "actor-critic": "pipelines.learning.kinds:ACTOR_CRITIC",
        "multi-task": "pipelines.learning.kinds:MULTI_TASK",
        "behaviour-cloning": "pipelines.learning.kinds:BEHAVIOUR_CLONING",
    },
)

Discount = Annotated[float, Field(ge=0, lt=1)]


class ActorSettings(ModelSettings):
    """The policy head: one distribution per discount."""

    hidden: Widths = Field(default=(256, 256), description="widths of the hidden layers")
    activation: Activation = Field(default="leaky-relu", description="after hidden layers")
    columns: tuple[str, ...] = Field(
        default=(),
        description="observation columns that the policy head sees directly, beside the state; critics do not",
    )
    residual: bool = Field(
        default=False, description="hidden layers are inside of residual blocks, as wide as the first of them"
    )
    probability_floor: Probability = Field(
        default=1e-3,
        description="least probability of each choice, mixed into the policy (for all choices at most a tenth)",
    )
    bit_probability_floor: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.01, description="least probability of each value of a bit (MultiBinary actions), mixed in likewise"
    )
    min_log_std: float = Field(default=-5.0, description="lower bound of log standard deviation (Box actions)")
    max_log_std: float = Field(default=2.0, description="upper bound of log standard deviation (Box actions)")
    action_clip: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.99, description="Box actions are clipped to +- this before their log-probability is taken"
    )
    distribution: Literal["tanh-gaussian", "beta", "gaussian-mixture"] = Field(
        default="tanh-gaussian", description="family of Box actions"
    )
    modes: Positive = Field(default=5, description="Gaussians of a mixture")
    gumbel: bool = Field(
        default=False,
        description="choices and bits that a critic judges are drawn by Gumbel-softmax; else straight through",
    )
    gumbel_temperature: Annotated[float, Field(gt=0)] = Field(default=1.0, description="its temperature")

    @model_validator(mode="after")
    def _blocks(self) -> ActorSettings:
        if self.residual and not self.hidden:
            raise ValueError("residual blocks need a hidden layer")
        return self


class CriticSettings(ModelSettings):
    """The ensemble of value heads."""

    hidden: Annotated[Widths, Field(min_length=1)] = Field(
        default=(256, 256), description="widths of the hidden layers"
    )
    ensemble: Positive = Field(default=4, description="number of critics")
    subset: Positive = Field(default=2, description="critics drawn, without replacement, for each value that is needed")
    kind: Literal["scalar", "two-hot"] | None = Field(
        default=None, description="a number with value normalisation, or a distribution over bins; none: as the agent"
    )
    bins: Annotated[int, Field(ge=2)] = Field(default=128, description="bins of a two-hot critic")
    symlog: bool = Field(
        default=True, description="bins are even in symlog space; false: in values, whose low and high must be given"
    )
    low: float = Field(default=-1e5, description="value of the first bin, in multiplied rewards")
    high: float = Field(default=1e5, description="value of the last bin")
    labels: Literal["two-hot", "hl-gauss"] = Field(
        default="hl-gauss", description="a target's label: a Gaussian's mass on all bins, or shares of the nearest two"
    )
    label_sigma: Annotated[float, Field(gt=0)] = Field(default=2.5, description="deviation of that Gaussian, in bins")

    @model_validator(mode="after")
    def _subset(self) -> CriticSettings:
        if not self.symlog and not {"low", "high"} <= self.model_fields_set:
            raise ValueError("bins that are even in values need the range of values: set low and high")
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        if self.subset > self.ensemble:
            raise ValueError(f"subset {self.subset} is more than the ensemble of {self.ensemble}")
        return self


class PopArtSettings(ModelSettings):
    """Normalization of values, per discount."""

    enabled: bool = Field(default=True, description="normalize values; false: critics learn scaled rewards as they are")
    beta: Annotated[float, Field(gt=0, le=1)] = Field(
        default=5e-4, description="step of the running moments, after a start-corrected beginning"
    )
    min_sigma: Annotated[float, Field(gt=0)] = Field(default=1e-4, description="lower bound of the scale")
    max_sigma: Annotated[float, Field(gt=0)] = Field(default=1e6, description="upper bound of the scale")


class FilterSettings(ModelSettings):
    """Weight of a dataset action in behaviour cloning, by its advantage."""

    kind: str = Field(default="binary", description="binary, exp, leaky-relu, or module:attr")
    options: dict[str, float] = Field(default_factory=dict, description="arguments of the filter")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(FILTERS, kind)


class AuxiliaryLossSettings(ModelSettings):
    """An auxiliary loss, built in or the user's own."""

    kind: str = Field(description="next-step, an entry point's name or module:attr (see pipelines/learning/extra.py)")
    weight: float = Field(default=1.0, description="factor of the loss")
    options: dict[str, Any] = Field(default_factory=dict, description="its arguments")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(LOSSES, kind)


class AgentSettings(ModelSettings):
    """An agent: network, losses, targets. What is none is as its kind has it (pipelines/learning/kinds.py)."""

    kind: str = Field(
        default="actor-critic",
        description="what is learned: actor-critic, multi-task, behaviour-cloning, or module:attr (see kinds.py)",
    )
    timestep: TimestepSettings = Field(default_factory=TimestepSettings, description="timestep encoder")
    sequence: SequenceSettings = Field(default_factory=TransformerSettings, description="sequence encoder")
    actor: ActorSettings = Field(default_factory=ActorSettings, description="policy head")
    critic: CriticSettings = Field(default_factory=CriticSettings, description="value heads")
    popart: PopArtSettings = Field(default_factory=PopArtSettings, description="value normalisation")
    filter: FilterSettings = Field(default_factory=FilterSettings, description="advantage filter of behaviour cloning")
    gammas: tuple[Discount, ...] = Field(
        default=(0.1, 0.9, 0.95, 0.97, 0.99, 0.995), description="discounts learned beside the acting one"
    )
    acting_gamma: Discount = Field(default=0.999, description="the discount whose policy acts")
    reward_scale: Annotated[float, Field(gt=0)] = Field(
        default=10.0, description="factor of all rewards while learning (scaled rewards)"
    )
    n_step: Positive = Field(default=1, description="rewards summed before the bootstrap (n-step targets)")
    trace: Literal["none", "peng", "tree-backup"] = Field(
        default="none",
        description="how far rewards are summed: none: n_step; peng: Q(lambda) without correction; tree-backup: "
        "as far as the policy would act as the data did",
    )
    trace_decay: Probability = Field(default=0.95, description="lambda of the traces")
    actor_weight: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="weight of the actor loss, -Q of the policy's own actions; unset: as the kind"
    )
    bc_weight: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="weight of (advantage-filtered) behaviour cloning; unset: as the kind"
    )
    critic_weight: Annotated[float, Field(ge=0)] = Field(default=10.0, description="weight of the critic loss")
    critic_samples: Positive | None = Field(
        default=None, description="actions drawn for the value of a next state; none: as the kind"
    )
    actor_samples: Positive | None = Field(
        default=None, description="actions drawn for the policy's own value; none: as the kind"
    )
    target_actor: bool = Field(
        default=True, description="the next action is of the target policy, not of the online one"
    )
    action_mask: str = Field(
        default="",
        description="observation column with a number for each choice, 0 where it is illegal; empty: all are legal",
    )
    auxiliary_losses: tuple[AuxiliaryLossSettings, ...] = Field(default=(), description="auxiliary losses")
    target_tau: Probability = Field(default=0.003, description="step of the target heads towards the heads, an update")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(AGENTS, kind)
