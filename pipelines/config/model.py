"""Settings of the network and of the learning algorithm: what a checkpoint needs to be rebuilt.

A table with a `kind` names a built-in, an installed plug-in or "module:attr"; plug-ins take their own `options`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from pipelines.registry import Registry

TIMESTEP_ENCODERS = Registry("timestep encoder", {"auto": "pipelines.nets.timestep:TimestepEncoder"})
SEQUENCE_ENCODERS = Registry(
    "sequence encoder",
    {
        "transformer": "pipelines.nets.transformer:Transformer",
        "gru": "pipelines.nets.rnn:GRU",
        "feedforward": "pipelines.nets.feedforward:FeedForward",
        "identity": "pipelines.nets.feedforward:Identity",
    },
)
FILTERS = Registry(
    "filter",
    {
        "binary": "pipelines.learning.filters:binary",
        "exp": "pipelines.learning.filters:exp",
        "leaky-ramp": "pipelines.learning.filters:leaky_ramp",
    },
)

Positive = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Discount = Annotated[float, Field(ge=0, lt=1)]
Widths = tuple[Positive, ...]


class ModelSettings(BaseModel):
    """Frozen and strict: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _known(registry: Registry, kind: str) -> str:
    if ":" not in kind and kind not in registry.names():
        raise ValueError(f"unknown {registry.kind} '{kind}'; known: {', '.join(registry.names())}, or module:attr")
    return kind


class ImageSettings(ModelSettings):
    """How uint8 images (height, width, channels) become features."""

    kind: Literal["auto", "nature", "grid"] = Field(
        default="auto",
        description="nature: 8/4/3 kernels with strides, from 36 pixels on; grid: small kernels; auto: by size",
    )
    features: Positive = Field(default=256, description="features per image")
    extras: Positive = Field(
        default=12, description="features of everything that is not an image, if images are present"
    )


class TimestepSettings(ModelSettings):
    """What turns one token (observation, previous reward and action) into a vector."""

    kind: str = Field(default="auto", description="auto routes every column by its space; or a plug-in")
    hidden: Widths = Field(default=(512, 512), description="widths of the hidden layers (flat inputs)")
    output: Positive = Field(default=256, description="size of the vector")
    symlog: bool = Field(default=True, description="compress flat inputs by sign(x) log(1 + |x|)")
    normalize: bool = Field(default=True, description="standardise flat inputs by running statistics")
    normalize_rate: Probability = Field(default=1e-4, description="step of the running statistics")
    image: ImageSettings = Field(default_factory=ImageSettings, description="image columns")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of a plug-in")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return _known(TIMESTEP_ENCODERS, kind)

    @model_validator(mode="after")
    def _options(self) -> TimestepSettings:
        if self.options and self.kind == "auto":
            raise ValueError("options are for plug-ins; 'auto' takes none")
        return self


class TransformerSettings(ModelSettings):
    """Causal Transformer over the tokens of a trajectory."""

    kind: Literal["transformer"] = "transformer"
    d_model: Positive = Field(default=256, description="width of the residual stream")
    num_layers: Positive = Field(default=3, description="number of blocks")
    num_heads: Positive = Field(default=8, description="attention heads")
    d_ff: Positive = Field(default=1024, description="width of the feed-forward part")
    dropout: Probability = Field(
        default=0.05, description="on the embedding and on the feed-forward output, while training"
    )
    position: Literal["sinusoid", "learned", "rope"] = Field(
        default="sinusoid", description="how the absolute time index enters: added sinusoid, added table, rotation"
    )
    max_time: Positive = Field(
        default=1024, description="rows of the learned table; later time indices share the last row"
    )
    window: Positive | None = Field(default=None, description="tokens a query sees, itself included; none: all")
    attention: Literal["auto", "sdpa", "dense"] = Field(default="auto", description="attention backend")

    @model_validator(mode="after")
    def _heads(self) -> TransformerSettings:
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        if self.position == "rope" and self.d_model // self.num_heads % 2:
            raise ValueError("rope needs an even head size (d_model / num_heads)")
        return self


class GRUSettings(ModelSettings):
    """Gated recurrent unit."""

    kind: Literal["gru"] = "gru"
    num_layers: Positive = Field(default=2, description="stacked layers")
    hidden: Positive = Field(default=256, description="state size of a layer")
    output: Positive = Field(default=256, description="size of the output")


class FeedForwardSettings(ModelSettings):
    """No memory: each token by itself through an MLP."""

    kind: Literal["feedforward"] = "feedforward"
    hidden: Widths = Field(default=(256,), description="widths of the hidden layers")
    output: Positive = Field(default=256, description="size of the output")


class IdentitySettings(ModelSettings):
    """No memory: the timestep encoder's vector as it is."""

    kind: Literal["identity"] = "identity"


class SequencePluginSettings(ModelSettings):
    """A sequence encoder from elsewhere: `factory(input_size, settings)`."""

    kind: str = Field(description="entry point name or module:attr")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the plug-in")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return _known(SEQUENCE_ENCODERS, kind)


def _sequence_tag(value: Any) -> str:
    kind = value.get("kind", "transformer") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in ("transformer", "gru", "feedforward", "identity") else "plugin"


SequenceSettings = Annotated[
    Annotated[TransformerSettings, Tag("transformer")]
    | Annotated[GRUSettings, Tag("gru")]
    | Annotated[FeedForwardSettings, Tag("feedforward")]
    | Annotated[IdentitySettings, Tag("identity")]
    | Annotated[SequencePluginSettings, Tag("plugin")],
    Discriminator(_sequence_tag),
]


class ActorSettings(ModelSettings):
    """The policy head: one distribution per discount."""

    hidden: Widths = Field(default=(256, 256), description="widths of the hidden layers")
    probability_floor: Probability = Field(
        default=1e-3, description="least probability of a discrete action; at most a tenth is spread over all actions"
    )
    probability_ceiling: Probability = Field(default=0.99, description="greatest probability of a discrete action")
    min_log_std: float = Field(default=-5.0, description="lower bound of log standard deviation (Box actions)")
    max_log_std: float = Field(default=2.0, description="upper bound of log standard deviation (Box actions)")
    action_clip: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.99, description="Box actions are clipped to +- this before their log-probability is taken"
    )


class CriticSettings(ModelSettings):
    """The ensemble of value heads."""

    hidden: Annotated[Widths, Field(min_length=1)] = Field(
        default=(256, 256), description="widths of the hidden layers"
    )
    ensemble: Positive = Field(default=4, description="number of critics")
    subset: Positive = Field(default=2, description="critics drawn, without replacement, for each value that is needed")

    @model_validator(mode="after")
    def _subset(self) -> CriticSettings:
        if self.subset > self.ensemble:
            raise ValueError(f"subset {self.subset} is more than the ensemble of {self.ensemble}")
        return self


class PopArtSettings(ModelSettings):
    """Normalisation of values, per discount."""

    beta: Probability = Field(default=5e-4, description="step of the running moments")
    initial_nu: Annotated[float, Field(gt=0)] = Field(default=100.0, description="second moment at the start")
    min_sigma: Annotated[float, Field(gt=0)] = Field(default=1e-4, description="lower bound of the scale")
    max_sigma: Annotated[float, Field(gt=0)] = Field(default=1e6, description="upper bound of the scale")


class FilterSettings(ModelSettings):
    """The weight of an action seen in data, from its advantage."""

    kind: str = Field(default="binary", description="binary, exp, leaky-ramp, or module:attr")
    options: dict[str, float] = Field(default_factory=dict, description="arguments of the filter")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return _known(FILTERS, kind)


class AgentSettings(ModelSettings):
    """The actor-critic agent: network, losses, targets."""

    kind: Literal["actor-critic"] = "actor-critic"
    timestep: TimestepSettings = Field(default_factory=TimestepSettings, description="timestep encoder")
    sequence: SequenceSettings = Field(default_factory=TransformerSettings, description="sequence encoder")
    actor: ActorSettings = Field(default_factory=ActorSettings, description="policy head")
    critic: CriticSettings = Field(default_factory=CriticSettings, description="value heads")
    popart: PopArtSettings = Field(default_factory=PopArtSettings, description="value normalisation")
    filter: FilterSettings = Field(default_factory=FilterSettings, description="weights of the imitation term")
    gammas: tuple[Discount, ...] = Field(
        default=(0.1, 0.9, 0.95, 0.97, 0.99, 0.995), description="discounts learned beside the acting one"
    )
    acting_gamma: Discount = Field(default=0.999, description="the discount whose policy acts")
    reward_multiplier: Annotated[float, Field(gt=0)] = Field(default=10.0, description="rewards are multiplied by this")
    num_steps: Positive = Field(default=1, description="rewards summed before the bootstrap (n-step targets)")
    online_weight: Annotated[float, Field(ge=0)] = Field(default=1.0, description="weight of the value-maximising term")
    offline_weight: Annotated[float, Field(ge=0)] = Field(default=0.1, description="weight of the imitation term")
    critic_weight: Annotated[float, Field(ge=0)] = Field(default=10.0, description="weight of the critic loss")
    target_tau: Probability = Field(default=0.003, description="step of the target heads towards the heads, an update")
