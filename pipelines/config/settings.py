"""The settings document: what a recipe, a file, `--set` and named options add up to.

One document describes a whole run. Each stage reads its own table and the tables it depends on
(`STAGE_TABLES`); the resolved document is written into the run as `config.toml` and can be run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from pipelines.config.base import SettingsModel, count_or_auto
from pipelines.config.exploration import ExplorationSettings
from pipelines.config.model import AgentSettings
from pipelines.config.relabelling import RelabelSettings, ReplaySettings
from pipelines.config.sizes import SizeName
from pipelines.config.source import SourceSettings

StageName = Literal["ingest", "collect", "relabel", "train", "evaluate", "export"]
# Where a stage of a chain has its settings, if not in the table of its name.
TABLES: Mapping[str, str] = {"ingest": "source"}

# Which tables fix what a stage adds to a run: a change in one of them makes it another experiment.
STAGE_TABLES: Mapping[str, tuple[str, ...]] = {
    "collect": ("env", "exploration", "collect", "lake", "source"),
    "train": ("size", "agent", "train"),
    "run": (
        "profile",
        "size",
        "env",
        "exploration",
        "agent",
        "collect",
        "source",
        "lake",
        "relabel",
        "train",
        "stages",
    ),
}
# In a chain, environments and model live through all epochs: only these keys may differ from entry to entry.
STAGE_OVERRIDES: Mapping[str, frozenset[str]] = {
    "collect": frozenset({"steps", "policy", "greedy"}),
    "ingest": frozenset(),
    "train": frozenset({"steps", "lakes"}),
}
# Targets and pacing may change between two invocations of one experiment.
EXTENSIBLE = frozenset(
    {
        "collect.steps",
        "collect.workers",
        "collect.on_env_error",
        "collect.env_timeout_seconds",
        "collect.policy",
        "collect.follow",
        "collect.reload_seconds",
        "collect.seal_seconds",
        "source.steps",
        "source.check",
        "lake.max_steps",
        "lake.max_bytes",
        "lake.grace_seconds",
        "lake.compact",
        "train.steps",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.log_every",
        "train.max_skipped",
        "train.threads",
        "train.verify",
        "train.packing",
        "train.activation_checkpointing",
        "train.compile",
        "train.follow",
        "train.refresh_seconds",
        "train.prefetch",
        "epochs",
        "size",  # what it decides is compared
    }
)
# What `collect` may change in a run: another behaviour is another collector, which counts its own steps.
BEHAVIOUR = ("exploration.", "collect.greedy", "collect.explore")


class EnvSettings(SettingsModel):
    """`[env]`: the environment's name; every other key is a parameter of that environment."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = ""
    """As `amago envs` lists it, `gym:ID`, or `module:attr`."""

    @model_validator(mode="after")
    def _parameters_of_something(self) -> EnvSettings:
        if self.params and not self.name:
            raise ValueError(f"name is not set, so its parameters are unknown: {', '.join(self.params)}")
        return self

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the environment itself."""
        return dict(self.model_extra or {})


class CollectSettings(SettingsModel):
    """`[collect]`: rolling out a policy into a lake."""

    steps: Annotated[int | Literal["auto"], count_or_auto(1, 2**63 - 1)] = "auto"
    """Environment steps in all (over all actors); in a chain, per epoch. `auto`: 10,000; outside a chain two of the
    longest episodes, if those are more."""
    actors: Annotated[int | Literal["auto"], count_or_auto(1, 65_536)] = "auto"
    """Environments stepped at once. `auto`: 16, more where they are quick, as a batch (up to 128) or in workers (256);
    outside a chain so few that each ends two episodes or more. Fixed as a run begins."""
    workers: Annotated[int | Literal["auto"], count_or_auto(0, 1_024)] = "auto"
    """Processes that step environments, also in `evaluate` (0: this one). `auto`: as many as a trial finds useful."""
    on_env_error: Literal["stop", "restart"] = "stop"
    """When an environment breaks: stop, or begin a new episode in a fresh one. What its actor had begun is dropped."""
    env_timeout_seconds: float = Field(0.0, ge=0)
    """Longest time of a step or a reset, also in `evaluate`; what takes longer counts as broken (0: there is no limit).
    Environments are then stepped in worker processes."""
    policy: str = "auto"
    """`random`, `expert`, `RUN[@CHECKPOINT]`, or `module:attr`; `auto`: the agent of a chain, else `random`."""
    follow: str = ""
    """A run whose newest checkpoint acts, newer ones as they appear; at random until it has one. Empty: `policy`."""
    reload_seconds: float = Field(2.0, gt=0)
    """How often a newer checkpoint of the followed run is looked for."""
    greedy: bool = False
    """Take the policy's most likely action instead of sampling (exploration noise still applies)."""
    explore: bool | Literal["auto"] = "auto"
    """Apply the schedule of `[exploration]` to the policy's actions. `auto`: in a chain; elsewhere a policy acts as it
    is (epsilon 0)."""
    seal_seconds: float = Field(10.0, gt=0)
    """A segment is sealed at this age at the latest; logged trajectories are safe before that."""


class LakeSettings(SettingsModel):
    """`[lake]`: what a collector does for the lake that it fills, and that others may fill too, while it collects."""

    max_steps: int = Field(0, ge=0)
    """Steps to keep: above, the oldest segments expire, whole ones; up to one more stays (0: all are kept)."""
    max_bytes: int = Field(0, ge=0)
    """Bytes of live segments to keep, likewise (0: all are kept)."""
    grace_seconds: float = Field(60.0, ge=0)
    """How long files stay that are out of sight: readers look at the lake more often than that."""
    compact: bool = True
    """Merge small segments once there are 16 or more of about one size: sampling from few files is faster."""


# What `train.context_length` is where it is "auto": as long as the longest episode, up to a bound.
CONTEXT_LENGTH, LONGEST_CONTEXT = 128, 256


class TrainSettings(SettingsModel):
    """`[train]`: gradient updates on windows drawn from a lake."""

    steps: int = Field(1_000, ge=1)
    """Gradient updates in all; in a chain, per epoch."""
    batch_size: int = Field(24, ge=1)
    """Windows per update."""
    context_length: Annotated[int | Literal["auto"], count_or_auto(1, 2**31 - 1)] = "auto"
    """Steps of a training window, and the context length of the acting policy. `auto`: the longest possible episode, up
    to 256 (128 if unknown); fixed when training begins."""
    burn_in: int = Field(0, ge=0)
    """First steps of a window that give the encoder a memory but do not count in the losses, unless the window begins
    its trajectory; for recurrent encoders."""
    loss_mask: str = ""
    """Observation column that says which steps count in the losses: not those that observe 0 in it; empty: all do."""
    learning_rate: float = Field(1e-4, gt=0)
    """Of AdamW, after the warm-up."""
    weight_decay: float = Field(1e-3, ge=0)
    """Of AdamW, on kernels alone: biases, gains, norms, positions and embeddings do not decay."""
    warmup_steps: int = Field(500, ge=0)
    """Updates over which the learning rate rises linearly."""
    decay_steps: int = Field(0, ge=0)
    """Update at which a linear decay to a tenth ends (0: constant after the warm-up)."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay per update of an exponential moving average of the weights, used by evaluation and export (0: off)."""
    grad_clip: float = Field(1.0, gt=0)
    """Global norm at which gradients are clipped."""
    max_skipped: int = Field(10, ge=1)
    """Updates in a row that may be skipped because their gradient is not finite; at that number training fails."""
    grad_accumulation: int = Field(1, ge=1)
    """Micro-batches per update; each has batch_size / grad_accumulation windows."""
    lakes: tuple[str, ...] = ()
    """What is mixed, `LAKE[:WEIGHT[..LAST]]` each, `{run}/lake` for the run's own; empty: all that a chain fills."""
    where: str = ""
    """SQL predicate over the `trajectories` table: what is drawn from; empty: all."""
    weight: str = ""
    """SQL expression over it: relative weight of a trajectory, on top of the other ways to weigh; empty: 1."""
    relabel: ReplaySettings = ReplaySettings()
    """Other goals and rewards, made up as windows are drawn."""
    weighting: Literal["timestep", "trajectory", "task"] = "timestep"
    """Draw so that every time step counts alike, every trajectory, or every task (and each of its steps)."""
    half_life: float = Field(0.0, ge=0)
    """Environment steps collected since after which a trajectory counts half (0: age does not matter)."""
    per_alpha: float = Field(0.0, ge=0, le=2)
    """Alpha of prioritized replay: a trajectory is drawn in proportion to (its mean TD error) ** alpha (0: off)."""
    per_beta: float = Field(0.4, ge=0, le=1)
    """Beta of prioritized replay: how much of the sampling bias the loss corrects by importance weights (1: all)."""
    anneal_steps: int = Field(0, ge=0)
    """Updates over which the weights of several lakes move, where a range is given (`--from-lake A:0.8..0.2`); in a
    chain 0 means: over the epochs of the entry."""
    follow: bool = False
    """Keep training on new data as collectors write it; wait if a lake is still empty."""
    refresh_seconds: float = Field(2.0, gt=0)
    """Between two looks at the lakes, when they are followed."""
    prefetch: int = Field(1, ge=0, le=16)
    """Batches read ahead by a thread of their own (0: none; priorities need none)."""
    placement: Literal["uniform", "full"] = "uniform"
    """Windows of trajectories longer than `context_length`: `uniform`, at any place, cut at the ends, so that every
    step appears equally often; `full`, only where a whole window fits, so that ends appear less often."""
    checkpoint_every: int = Field(500, ge=1)
    """Updates between checkpoints (one is always written at the end of the stage)."""
    keep_checkpoints: int = Field(3, ge=1)
    """Newest checkpoints to keep; `best` is always kept."""
    log_every: int = Field(25, ge=1)
    """Updates between lines of metrics.jsonl."""
    precision: Literal["float32", "bf16"] = "float32"
    """Numbers that networks compute in, learning and acting; weights, losses and statistics are float32 in any case."""
    packing: bool = False
    """Let windows shorter than the longest share rows of the encoders, so that padding costs nothing."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the sequence encoder's blocks, and images as stored; recompute the activations in the
    backward: less memory, more time."""
    compile: bool = False
    """Compile the encoders, where there is a compiler."""
    tf32: bool = False
    """Let CUDA round factors of float32 products to TF32."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`."""
    verify: bool = False
    """Compare the checksums of a segment when it is read for the first time, which reads all of it; a damaged one is
    passed over."""
    threads: int = Field(0, ge=0)
    """CPU threads of the networks, learning or acting (0: OMP_NUM_THREADS, else all available cores); small networks
    are fastest with 1."""

    @model_validator(mode="after")
    def _some_steps_count(self) -> TrainSettings:
        if self.context_length != "auto" and self.burn_in >= self.context_length:
            raise ValueError(
                f"burn_in {self.burn_in} leaves no step of a window of {self.context_length} to learn from"
            )
        return self

    @property
    def resolved_context_length(self) -> int:
        """The context length as a number, even before `auto` is resolved."""
        return max(CONTEXT_LENGTH, self.burn_in + 1) if self.context_length == "auto" else self.context_length


class EvaluateSettings(SettingsModel):
    """`[evaluate]`: whole episodes on held-out tasks."""

    episodes: int = Field(100, ge=1)
    """Episodes, each run to its end and counted."""
    actors: int = Field(50, ge=1, le=65_536)
    """Environments stepped as one batch (never more than episodes)."""
    checkpoint: str = "latest"
    """`latest`, `best`, or an update number."""
    greedy: bool = True
    """Most likely action instead of a sampled one."""
    split: Literal["train", "test"] = "test"
    """Which tasks: held-out ones by default, where the environment has a split."""
    seed: int = 1_000_003
    """Seed of the evaluation tasks, apart from the run's own."""
    tasks: str = ""
    """SQL predicate over the `trajectories` table of the run's lakes: only tasks of those it holds for are played."""
    mark_best: bool = False
    """Point `checkpoints/best` at the evaluated checkpoint when it beats the best so far."""
    reference: str = "auto"
    """Task of D4RL by which returns are normalised, e.g. `hopper`; `auto`: by the environment's name; `none`."""
    best_by: str = "return_mean"
    """Figure by which checkpoints are compared, e.g. `per_attempt[-1]`."""
    label: str = ""
    """Name of this evaluation in a chain's closing table; empty: not shown there."""
    require: str = ""
    """Gate such as `return_mean >= 0.9`; not met: exit 5."""


class ExportSettings(SettingsModel):
    """`[export]`: a policy bundle that acts without the lake or the run, or trajectories for other tools."""

    to: str = ""
    """Directory to write; empty: `RUN/export`, for trajectories `RUN/dataset`."""
    format: str = "safetensors"
    """safetensors: the policy; minari, parquet, npz, hdf5 or `module:attr`: trajectories of the lake."""
    where: str = ""
    """Of trajectories: SQL predicate over the `trajectories` table; empty: all."""
    author: str = ""
    """Of a dataset of Minari: who made it; several with commas."""
    description: str = ""
    """Of a dataset of Minari: what it holds; empty: the environments and how many episodes."""
    checkpoint: str = "latest"
    """`latest`, `best`, or an update number."""


class StageSettings(SettingsModel):
    """One entry of `[[stages]]`: a stage, when it runs, and keys that override the stage's own table."""

    model_config = ConfigDict(frozen=True, extra="allow")

    stage: StageName
    """What runs; the entry's other keys override those of this stage's table."""
    every: int = Field(1, ge=1)
    """Run on every n-th epoch counted from `start_epoch`."""
    start_epoch: int = Field(0, ge=-1_000_000)
    """First epoch (0-based) in which it runs; negative counts from the end (-1: the last)."""
    stop_epoch: int | None = None
    """First epoch in which it no longer runs."""

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Settings(SettingsModel):
    """All settings of a run, validated: `amago settings` lists them. ValidationError (pydantic) lists every problem.

    >>> Settings.model_validate({"env": {"name": "tmaze", "corridor": 3}, "seed": 7})
    Settings(seed=7, env=EnvSettings(name='tmaze', corridor=3))
    """

    about: str = ""
    """What the recipe shows, in a line."""
    expected: str = ""
    """The score to expect, and whose it is; empty: not known."""
    profile: str = ""
    """Which of the recipe's `profiles` is laid over it; empty: none. In a run's configuration: which one was."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds networks, tasks, exploration and sampling, each through a stream of its own."""
    size: SizeName = ""
    """Size of the network, with the learning rate and threads that suit it: `tiny`, `small`, `base` or `large`. Other
    settings of the same file override it; `--size` overrides them. Empty: `base`, the defaults; but the commands
    `train` and `run` choose `tiny` where there is no GPU and no setting of the network is given."""
    epochs: int = Field(1, ge=1)
    """Rounds of a chain."""
    env: EnvSettings = EnvSettings()
    exploration: ExplorationSettings = ExplorationSettings()
    agent: AgentSettings = AgentSettings()
    collect: CollectSettings = CollectSettings()
    source: SourceSettings = SourceSettings()
    lake: LakeSettings = LakeSettings()
    relabel: RelabelSettings = RelabelSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    export: ExportSettings = ExportSettings()
    stages: tuple[StageSettings, ...] = ()

    def for_stage(self, entry: StageSettings) -> Settings:
        """These settings with the entry's overrides applied to its stage's table."""
        if not entry.overrides:
            return self
        name = TABLES.get(entry.stage, entry.stage)
        table = getattr(self, name)
        merged = type(table).model_validate({**table.model_dump(), **entry.overrides})
        return self.model_copy(update={name: merged})
