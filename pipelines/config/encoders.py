"""Settings of the encoders: timestep encoder (token to vector) and sequence encoder (vectors to states).

A table with a `kind` names a built-in, an installed plug-in or "module:attr"; plug-ins take their own `options`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from pipelines.config.base import SettingsModel, known
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


class ImageSettings(SettingsModel):
    """Encoding of images (height, width, channels)."""

    kind: Literal["auto", "nature", "impala", "grid"] = "auto"
    """nature: 8/4/3 kernels with strides, from 36 pixels; impala: residual blocks; grid: small kernels; auto: nature or
    grid, by size."""
    features: Positive = 256
    """Features per image."""
    extras: Positive = 12
    """Features of all other inputs together, if there are images."""
    random_shift: Annotated[int, Field(ge=0)] = 0
    """Maximum shift of images in pixels while learning (DrQ; 4 is usual; 0: off)."""
    random_shift_share: Probability = 0.75
    """Share of windows that are shifted, each as a whole."""


class TokenSettings(SettingsModel):
    """Encoding of sequences of numbers (texts, instructions, goals): embedding and a small GRU."""

    vocabulary: Positive = 256
    """Rows of the embedding; larger numbers share rows (remainder)."""
    embedding: Positive = 32
    """Size of a number's embedding."""
    hidden: Positive = 64
    """State size of the GRU, and features per sequence."""


class TimestepSettings(SettingsModel):
    """Timestep encoder: one token (observation, previous reward and action) to a vector."""

    kind: str = "auto"
    """auto: route every column by its space; or a plug-in."""
    columns: dict[str, Route] = Field(default_factory=dict)
    """Columns with another route than by their space: image, tokens, flat, or hidden (not an input)."""
    hidden: Widths = (512, 512)
    """Widths of the hidden layers (flat inputs)."""
    output: Positive = 256
    """Size of the vector."""
    activation: Activation = "leaky-relu"
    """After hidden layers and convolutions."""
    symlog: bool = True
    """Compress flat inputs by sign(x) log(1 + |x|)."""
    normalize: bool = True
    """Standardise flat inputs by running statistics, within +-10."""
    normalize_rate: Probability = 1e-4
    """Step of the running statistics."""
    hide_reward: bool = False
    """Leave out the previous reward (ablation)."""
    hide_action: bool = False
    """Leave out the previous action (ablation)."""
    image: ImageSettings = ImageSettings()
    """Image columns."""
    tokens: TokenSettings = TokenSettings()
    """Columns of sequences."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a plug-in."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(TIMESTEP_ENCODERS, kind)

    @model_validator(mode="after")
    def _options(self) -> TimestepSettings:
        if self.options and self.kind == "auto":
            raise ValueError("options are for plug-ins; 'auto' takes none")
        return self


class BlockSettings(SettingsModel):
    """Residual blocks of the Transformer, and of its baseline without attention."""

    d_model: Positive = 256
    """Width of the residual stream, and size of the output."""
    num_layers: Positive = 3
    """Number of blocks."""
    d_ff: Positive = 1024
    """Width of the feed-forward part."""
    dropout: Probability = 0.05
    """On the embedding and on the feed-forward output, while training."""
    activation: Activation = "leaky-relu"
    """Inside the feed-forward part."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    normformer: bool = True
    """Two more norms: inside the feed-forward part, and after attention."""
    sigma_reparam: bool = True
    """Divide linears by their spectral norm, times a learned gain."""


class TransformerSettings(BlockSettings):
    """Causal Transformer over the tokens of a trajectory."""

    kind: Literal["transformer"] = "transformer"
    num_heads: Positive = 8
    """Attention heads."""
    dropout_attention: Probability = 0.0
    """On attention weights, while training."""
    dropout_qkv: Probability = 0.0
    """On queries, keys and values, while training."""
    head_scale: bool = True
    """Learn a factor for each head's output."""
    position: Literal["sinusoid", "learned", "rope"] = "sinusoid"
    """Encoding of the absolute time index: added sinusoid, added learned table, rotary."""
    max_time: Positive = 1024
    """Rows of the learned table: an episode of n steps has n + 1 time indices; longer ones are refused."""
    window: Positive | None = None
    """Sliding window: tokens a query sees, itself included; unset: all."""
    sink: Annotated[int, Field(ge=0)] = 0
    """Attention sink: first tokens of a context that stay visible outside of the window."""
    logit_clip: Annotated[float, Field(gt=0)] | None = None
    """Attention scores s become c tanh(s / c); unset: no clip."""
    attention: Literal["auto", "dense", "sdpa", "banded", "flex", "flash", "varlen"] = "auto"
    """Attention backend, where usable; auto: the fastest (see amago doctor)."""

    @model_validator(mode="after")
    def _heads(self) -> TransformerSettings:
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        if self.position == "rope" and self.d_model // self.num_heads % 2:
            raise ValueError("rope needs an even head size (d_model / num_heads)")
        return self


class GRUSettings(SettingsModel):
    """Gated recurrent unit."""

    kind: Literal["gru"] = "gru"
    num_layers: Positive = 2
    """Stacked layers."""
    hidden: Positive = 256
    """State size of a layer."""
    output: Positive = 256
    """Size of the output."""


class MinGRUSettings(SettingsModel):
    """Gated recurrent unit whose gates do not depend on the state, so that a window is one scan."""

    kind: Literal["mingru"] = "mingru"
    d_model: Positive = 256
    """Width of the residual stream, and size of the output."""
    num_layers: Positive = 3
    """Number of blocks."""
    expand: Positive = 2
    """State size of a layer, as a multiple of the width."""


class MambaSettings(SettingsModel):
    """Selective state spaces."""

    kind: Literal["mamba"] = "mamba"
    d_model: Positive = 256
    """Width of the residual stream, and size of the output."""
    num_layers: Positive = 3
    """Number of blocks."""
    state: Positive = 16
    """States of each channel."""
    conv: Positive = 4
    """Tokens that the short convolution sees."""
    expand: Positive = 2
    """Channels, as a multiple of the width."""
    scan: Literal["auto", "torch"] = "auto"
    """auto: fused kernels of mamba-ssm where installed, on CUDA; torch: never."""


class FeedForwardSettings(BlockSettings):
    """No memory: the Transformer's blocks without attention, on each token by itself."""

    kind: Literal["feedforward"] = "feedforward"


class IdentitySettings(SettingsModel):
    """No memory: the timestep encoder's vector, unchanged."""

    kind: Literal["identity"] = "identity"


class SequencePluginSettings(SettingsModel):
    """A plug-in sequence encoder: `factory(input_size, settings)`."""

    kind: str
    """Entry point name or module:attr."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the plug-in."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        return known(SEQUENCE_ENCODERS, kind)


WITHOUT_BLOCKS = ("gru", "identity")
WITHOUT_MEMORY = ("feedforward", "identity")
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
