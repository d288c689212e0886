"""Settings of the network and of the learning algorithm: all that a checkpoint needs to be rebuilt.

The timestep encoder maps a token to a vector, the sequence encoder maps vectors to states, and actor and critics are
heads on the states. A table with a `kind` names a built-in, an installed plug-in or "module:attr"; plug-ins take their
own `options`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from pipelines.config.base import SettingsModel, check_known
from pipelines.registry import Registry

TIMESTEP_ENCODERS = Registry("timestep encoder", {"auto": "pipelines.nets.timestep:TimestepEncoder"})
SEQUENCE_ENCODERS = Registry(
    "sequence encoder",
    {
        "transformer": "pipelines.nets.transformer:Transformer",
        "gru": "pipelines.nets.rnn:GRU",
        "mingru": "pipelines.nets.rnn:MinGRU",
        "mamba": "pipelines.nets.mamba:Mamba",
        "feedforward": "pipelines.nets.transformer:FeedForward",
        "identity": "pipelines.nets.transformer:Identity",
    },
)
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

Positive = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Widths = tuple[Positive, ...]
Route = Literal["image", "tokens", "flat", "hidden"]
Activation = Literal["leaky-relu", "relu", "gelu", "silu", "mish"]
_Discount = Annotated[float, Field(ge=0, lt=1)]


class ImageSettings(SettingsModel):
    """Encoding of images (height, width, channels)."""

    kind: Literal["auto", "nature", "impala", "grid"] = "auto"
    """nature: 8/4/3 kernels with strides, from 36 pixels; impala: residual blocks; grid: small kernels; auto: nature or
    grid, by size."""
    layers: tuple[tuple[Positive, Positive, Positive], ...] = ()
    """Channels, kernel and stride of each convolution, in place of those of nature and grid; empty: as the kind."""
    features: Positive = 256
    """Features per image."""
    extras: Positive = 12
    """Features of all other inputs together, if there are images."""
    random_shift: Annotated[int, Field(ge=0)] = 0
    """Maximum shift of images in pixels while learning (DrQ; 4 is usual; 0: off)."""
    random_shift_share: Probability = 0.75
    """Share of windows that are shifted, each as a whole."""

    @model_validator(mode="after")
    def _layers(self) -> ImageSettings:
        if self.layers and self.kind == "impala":
            raise ValueError("layers are for nature and grid; impala has its own")
        return self


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

    kind: Annotated[str, check_known(TIMESTEP_ENCODERS)] = "auto"
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
    """Standardise flat inputs by running statistics."""
    normalize_limit: Annotated[float, Field(gt=0)] = 10.0
    """Standardised inputs are clamped to +- this; rare rewards may be many deviations from the mean."""
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

    @model_validator(mode="after")
    def _options(self) -> TimestepSettings:
        if self.options and self.kind == "auto":
            raise ValueError("options are for plug-ins; 'auto' takes none")
        return self


class TransformerSettings(SettingsModel):
    """Causal Transformer over the tokens of a trajectory."""

    kind: Literal["transformer"] = "transformer"
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
    num_heads: Positive = 8
    """Attention heads."""
    dropout_attention: Probability = 0.0
    """On attention weights, while training."""
    dropout_qkv: Probability = 0.0
    """On queries, keys and values, while training."""
    head_scale: bool = True
    """Learn a factor for each head's output."""
    position: Literal["sinusoid", "learned", "rope", "both"] = "sinusoid"
    """Encoding of the time index: sinusoid, an added one; learned, an added table; rope, rotary, which shows distances;
    both: an added sinusoid, and rotary in every other head."""
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
        if self.position in ("rope", "both") and self.d_model // self.num_heads % 2:
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
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, before each block and after the last."""
    scan: Literal["auto", "torch"] = "auto"
    """auto: fused kernels of mamba-ssm where installed, on CUDA; torch: never."""


class FeedForwardSettings(SettingsModel):
    """No memory: residual blocks as wide as a Transformer's, on each token by itself."""

    kind: Literal["feedforward"] = "feedforward"
    d_model: Positive = 256
    """Width of the residual stream, and size of the output."""
    num_layers: Positive = 3
    """Number of blocks."""
    d_ff: Positive = 1024
    """Width inside a block."""
    dropout: Probability = 0.05
    """After each activation and on the output, while training."""
    activation: Activation = "leaky-relu"
    """After each linear layer but the last."""
    norm: Literal["layer", "rms", "none"] = "layer"
    """LayerNorm, RMSNorm or none before the activations of a block; LayerNorm follows the last layer anyway."""


class IdentitySettings(SettingsModel):
    """No memory: the timestep encoder's vector, unchanged."""

    kind: Literal["identity"] = "identity"


class SequencePluginSettings(SettingsModel):
    """A plug-in sequence encoder: `factory(input_size, settings)`."""

    kind: Annotated[str, check_known(SEQUENCE_ENCODERS)]
    """Entry point name or module:attr."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the plug-in."""


WITHOUT_BLOCKS = ("gru", "identity")
WITHOUT_MEMORY = ("feedforward", "identity")


def _tag_sequence(value: Any) -> str:
    kind = value.get("kind", "transformer") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in SEQUENCE_ENCODERS.built_in else "plugin"


SequenceSettings = Annotated[
    Annotated[TransformerSettings, Tag("transformer")]
    | Annotated[GRUSettings, Tag("gru")]
    | Annotated[MinGRUSettings, Tag("mingru")]
    | Annotated[MambaSettings, Tag("mamba")]
    | Annotated[FeedForwardSettings, Tag("feedforward")]
    | Annotated[IdentitySettings, Tag("identity")]
    | Annotated[SequencePluginSettings, Tag("plugin")],
    Discriminator(_tag_sequence),
]


class ActorSettings(SettingsModel):
    """Policy head: one distribution per discount."""

    hidden: Widths = (256, 256)
    """Widths of the hidden layers."""
    activation: Activation = "leaky-relu"
    """After hidden layers."""
    columns: tuple[str, ...] = ()
    """Observation columns that the policy head receives directly, in addition to the state; critics do not."""
    residual: bool = False
    """`hidden` is the width of a residual stream, then the inner width of each residual block."""
    probability_floor: Probability = 1e-3
    """Minimum probability of each choice, mixed into the policy that learns and explores (a tenth at most over all
    choices). Evaluations and exported policies play without it."""
    probability_ceiling: Annotated[float, Field(gt=0, le=1)] | None = None
    """Clamp the probability of each choice between the floor and this and normalise, as AMAGO does (0.99), in place of
    mixing; a clamped choice has no gradient. Unset: mix."""
    bit_probability_floor: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Minimum probability of each value of a bit (MultiBinary actions), likewise."""
    min_log_std: float = -5.0
    """Lower bound of the log standard deviation (Box actions)."""
    max_log_std: float = 2.0
    """Upper bound of the log standard deviation (Box actions)."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Where the trained policy plays (evaluations, exports, serving, another run's opponent), sample its choices by its
    probabilities to the power 1 / temperature: below 1 nearer to the most likely action. It learns by
    sampling at 1."""
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
        if self.probability_ceiling is not None and self.probability_ceiling < self.probability_floor:
            raise ValueError(
                f"probability_ceiling {self.probability_ceiling} is below probability_floor {self.probability_floor}"
            )
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
    reward_mean: float = 0.0
    """Mean reward of a step before learning, where only a time limit ends episodes: values of scalar critics start at
    its discounted sum, reward_mean / (1 - gamma). From 0 they would take some 1 / (1 - gamma) steps of the targets to
    get there."""


class FilterSettings(SettingsModel):
    """Weight of a dataset action in behaviour cloning, by its advantage."""

    kind: Annotated[str, check_known(FILTERS)] = "binary"
    """binary, exp, leaky-relu, or module:attr."""
    options: dict[str, float] = Field(default_factory=dict)
    """Arguments of the filter."""


class AuxiliaryLossSettings(SettingsModel):
    """Auxiliary loss, built in or the user's own."""

    kind: Annotated[str, check_known(LOSSES)]
    """next-step, an entry point's name, or module:attr (see pipelines/learning/auxiliary.py)."""
    weight: float = 1.0
    """Factor of the loss."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss."""


class AgentSettings(SettingsModel):
    """Agent: network, losses, targets. Unset weights and samples are those of its type
    (pipelines/learning/agent_types.py)."""

    kind: Annotated[str, check_known(AGENTS)] = "actor-critic"
    """Agent type: actor-critic, multi-task, behaviour-cloning, or module:attr (see
    pipelines/learning/agent_types.py)."""
    timestep: TimestepSettings = TimestepSettings()
    """Timestep encoder."""
    sequence: SequenceSettings = TransformerSettings()
    """Sequence encoder."""
    shortcut: bool = False
    """The heads see the embedding of the step's own observation beside what the sequence encoder makes of it (Ni et al.
    2022, arXiv 2110.05038), for actions that depend on exact numbers; without memory both are the same."""
    actor: ActorSettings = ActorSettings()
    """Policy head."""
    critic: CriticSettings = CriticSettings()
    """Value heads."""
    popart: PopArtSettings = PopArtSettings()
    """Value normalisation."""
    target: Literal["action", "label"] = "action"
    """What behaviour cloning imitates: the action that was taken, or its label (see `collect.label`), which is imitated
    whatever its advantage."""
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
    trace: Literal["none", "peng", "tree-backup", "retrace", "vtrace"] = "none"
    """Targets: none: n-step; peng: Q(lambda) without correction; tree-backup: as far as the policy would have taken the
    dataset actions; retrace: as far as the policy takes them at least as often as the data's policy did (see
    `collect.logp`), or, where the data does not say, as uniform play does; vtrace: V-trace, which needs to know."""
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
    reference: str = ""
    """A frozen policy that the agent's is held near by the divergence KL(policy || reference): RUN[@CHECKPOINT], a
    policy bundle, zoo:NAME or hf://ORG/NAME; empty: none. A run's newest checkpoint unless `@best` or a number is
    given. The number, or the commit, is recorded."""
    reference_weight: Annotated[float, Field(gt=0)] = 0.1
    """Weight of that divergence, in nats."""
    reference_ratio: Annotated[float, Field(ge=0)] = 0.0
    """Imitate an action as often as the reference takes it, not as often as the data shows it: its weight in behaviour
    cloning is multiplied by the ratio of both probabilities, or by this number if that is less. For data with
    `collect.logp`. 0: no ratio."""
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

    @property
    def needs_logp(self) -> bool:
        """Whether the steps must have the log-probability with which their action was taken."""
        return self.trace == "vtrace" or self.reference_ratio > 0

    @model_validator(mode="after")
    def _ratio_has_a_reference(self) -> AgentSettings:
        if self.reference_weight != 0.1 and not self.reference:
            raise ValueError("reference_weight weighs the divergence from a reference; name one, or leave it out")
        if self.reference_ratio and not self.reference:
            raise ValueError("reference_ratio compares with a reference; name one, or leave it out")
        if self.reference_ratio and self.target == "label":
            raise ValueError("reference_ratio weighs actions that were taken; labels (target = 'label') have none")
        return self
