"""Settings of the encoders: what turns a token into a vector, and a trajectory of vectors into states.

A table with a `kind` names a built-in, an installed plug-in or "module:attr"; plug-ins take their own `options`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from pipelines.nearest import did_you_mean
from pipelines.registry import Registry

TIMESTEP_ENCODERS = Registry("timestep encoder", {"auto": "pipelines.nets.timestep:TimestepEncoder"})
SEQUENCE_ENCODERS = Registry(
    "sequence encoder",
    {
        "transformer": "pipelines.nets.transformer:Transformer",
        "gru": "pipelines.nets.rnn:GRU",
        "mingru": "pipelines.nets.mingru:MinGRU",
        "mamba": "pipelines.nets.mamba:Mamba",
        "feedforward": "pipelines.nets.feedforward:FeedForward",
        "identity": "pipelines.nets.feedforward:Identity",
    },
)

Positive = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Widths = tuple[Positive, ...]
Route = Literal["image", "tokens", "flat", "hidden"]
Activation = Literal["leaky-relu", "relu", "gelu", "silu", "mish"]


class ModelSettings(BaseModel):
    """Frozen and strict: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def known(registry: Registry, kind: str) -> str:
    """`kind`, if it may name a member of `registry`; ValueError if not."""
    if ":" not in kind and kind not in registry.names():
        otherwise = f"known: {', '.join(registry.names())}, or module:attr"
        raise ValueError(
            f"unknown {registry.kind} '{kind}'; {did_you_mean(kind, registry.names(), otherwise=otherwise)}"
        )
    return kind


class ImageSettings(ModelSettings):
    """How images (height, width, channels) become features."""

    kind: Literal["auto", "nature", "impala", "grid"] = Field(
        default="auto",
        description="nature: 8/4/3 kernels with strides, from 36 pixels on; impala: residual blocks; "
        "grid: small kernels; auto: nature or grid, by size",
    )
    features: Positive = Field(default=256, description="features per image")
    extras: Positive = Field(
        default=12, description="features of everything that is not an image, if images are present"
    )
    random_shift: Annotated[int, Field(ge=0)] = Field(
        default=0, description="pixels by which images are shifted at most while learning (DrQ; 4 is usual; 0: not)"
    )
    random_shift_share: Probability = Field(
        default=0.75, description="share of windows that are shifted, each as a whole"
    )


class TokenSettings(ModelSettings):
    """How sequences of numbers (texts, instructions, goals) become features: embedding and a small GRU."""

    vocabulary: Positive = Field(
        default=256, description="rows of the embedding; greater numbers share rows (remainder)"
    )
    embedding: Positive = Field(default=32, description="size of a number's embedding")
    hidden: Positive = Field(default=64, description="state size of the GRU, and features per sequence")


class TimestepSettings(ModelSettings):
    """What turns one token (observation, previous reward and action) into a vector."""

    kind: str = Field(default="auto", description="auto routes every column by its space; or a plug-in")
    columns: dict[str, Route] = Field(
        default_factory=dict,
        description="columns that go another way than by their space: image, tokens, flat, or hidden (not seen)",
    )
    hidden: Widths = Field(default=(512, 512), description="widths of the hidden layers (flat inputs)")
    output: Positive = Field(default=256, description="size of the vector")
    activation: Activation = Field(default="leaky-relu", description="after hidden layers and convolutions")
    symlog: bool = Field(default=True, description="compress flat inputs by sign(x) log(1 + |x|)")
    normalize: bool = Field(default=True, description="standardise flat inputs by running statistics, within +-10")
    normalize_rate: Probability = Field(default=1e-4, description="step of the running statistics")
    hide_reward: bool = Field(default=False, description="do not show the previous reward (ablation)")
    hide_action: bool = Field(default=False, description="do not show the previous action (ablation)")
    image: ImageSettings = Field(default_factory=ImageSettings, description="image columns")
    tokens: TokenSettings = Field(default_factory=TokenSettings, description="columns of sequences")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of a plug-in")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(TIMESTEP_ENCODERS, kind)

    @model_validator(mode="after")
    def _options(self) -> TimestepSettings:
        if self.options and self.kind == "auto":
            raise ValueError("options are for plug-ins; 'auto' takes none")
        return self


class BlockSettings(ModelSettings):
    """Residual blocks of the Transformer, and of the baseline that is one without attention."""

    d_model: Positive = Field(default=256, description="width of the residual stream, and size of the output")
    num_layers: Positive = Field(default=3, description="number of blocks")
    d_ff: Positive = Field(default=1024, description="width of the feed-forward part")
    dropout: Probability = Field(
        default=0.05, description="on the embedding and on the feed-forward output, while training"
    )
    activation: Activation = Field(default="leaky-relu", description="inside the feed-forward part")
    norm: Literal["layer", "rms"] = Field(default="layer", description="LayerNorm or RMSNorm")
    normformer: bool = Field(default=True, description="more norms: inside the feed-forward part, and after attention")
    sigma_reparam: bool = Field(default=True, description="linears divided by their spectral norm, times a gain")


class TransformerSettings(BlockSettings):
    """Causal Transformer over the tokens of a trajectory."""

    kind: Literal["transformer"] = "transformer"
    num_heads: Positive = Field(default=8, description="attention heads")
    dropout_attention: Probability = Field(default=0.0, description="on attention weights, while training")
    dropout_qkv: Probability = Field(default=0.0, description="on queries, keys and values, while training")
    head_scale: bool = Field(default=True, description="a learned factor for each head's output")
    position: Literal["sinusoid", "learned", "rope"] = Field(
        default="sinusoid", description="how the absolute time index enters: added sinusoid, added table, rotation"
    )
    max_time: Positive = Field(
        default=1024,
        description="rows of the learned table: an episode of n steps has n + 1 time indices; longer ones are refused",
    )
    window: Positive | None = Field(default=None, description="tokens a query sees, itself included; none: all")
    sink: Annotated[int, Field(ge=0)] = Field(
        default=0, description="first tokens of a context that stay visible beside the window"
    )
    logit_clip: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="attention scores s become c tanh(s / c); none: as they are"
    )
    attention: Literal["auto", "dense", "sdpa", "banded", "flex", "flash", "varlen"] = Field(
        default="auto", description="attention backend, where it can be used; auto: the fastest (see amago doctor)"
    )

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


class MinGRUSettings(ModelSettings):
    """Gated recurrent unit whose gates do not see the state, so that a window is one scan."""

    kind: Literal["mingru"] = "mingru"
    d_model: Positive = Field(default=256, description="width of the residual stream, and size of the output")
    num_layers: Positive = Field(default=3, description="number of blocks")
    expand: Positive = Field(default=2, description="state size of a layer, in widths")


class MambaSettings(ModelSettings):
    """Selective state spaces."""

    kind: Literal["mamba"] = "mamba"
    d_model: Positive = Field(default=256, description="width of the residual stream, and size of the output")
    num_layers: Positive = Field(default=3, description="number of blocks")
    state: Positive = Field(default=16, description="states of each channel")
    conv: Positive = Field(default=4, description="tokens that the short convolution sees")
    expand: Positive = Field(default=2, description="channels, in widths")
    scan: Literal["auto", "torch"] = Field(
        default="auto", description="auto: fused kernels of mamba-ssm where installed, on CUDA; torch: never"
    )


class FeedForwardSettings(BlockSettings):
    """No memory: each token by itself through the Transformer's blocks without attention."""

    kind: Literal["feedforward"] = "feedforward"


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
        return known(SEQUENCE_ENCODERS, kind)


_BUILT_IN = ("transformer", "gru", "mingru", "mamba", "feedforward", "identity")


def _sequence_tag(value: Any) -> str:
    kind = value.get("kind", "transformer") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in _BUILT_IN else "plugin"


SequenceSettings = Annotated[
    Annotated[TransformerSettings, Tag("transformer")]
    | Annotated[GRUSettings, Tag("gru")]
    | Annotated[MinGRUSettings, Tag("mingru")]
    | Annotated[MambaSettings, Tag("mamba")]
    | Annotated[FeedForwardSettings, Tag("feedforward")]
    | Annotated[IdentitySettings, Tag("identity")]
    | Annotated[SequencePluginSettings, Tag("plugin")],
    Discriminator(_sequence_tag),
]
