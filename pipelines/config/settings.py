"""The settings document: the combination of a recipe, a file, `--set` and named options.

One document describes a whole run. Each stage reads its own table and the tables it depends on (see `changes`); the
resolved document is written into the run as `config.toml` and can be run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from pipelines.config.base import BEHAVIOUR, PACING, TARGET, SettingsModel, check_count_or_auto, check_known
from pipelines.config.model import WITHOUT_BLOCKS, AgentSettings
from pipelines.config.sizes import SizeName
from pipelines.registry import Registry

_StageName = Literal["ingest", "collect", "relabel", "train", "evaluate", "export"]
# Settings table of a stage in a chain, if not the table of its name.
TABLES: Mapping[str, str] = {"ingest": "source"}

EXPLORATIONS = Registry(
    "exploration",
    {name: f"pipelines.envs.exploration:{name}" for name in ("plain", "bilevel", "windowed", "none")},
)
_ONLY_FOR = {
    "late_start": ("bilevel",),
    "late_end": ("bilevel",),
    "edge": ("windowed",),
    "inner_epsilon": ("windowed",),
}


def _wrap_text(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given


_Names = Annotated[tuple[str, ...], BeforeValidator(_wrap_text)]
_Tasks = tuple[str, ...] | Annotated[int, Field(ge=1, le=65_536)]


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
        """Parameters of the environment itself."""
        return dict(self.model_extra or {})


class PPOSettings(SettingsModel):
    """`[collect.learner.ppo]`: proximal policy optimisation, by networks of each actor's own."""

    steps: int = Field(256, ge=2, le=65_536)
    """Steps of an actor from which its networks learn at once; then they are forgotten."""
    passes: int = Field(4, ge=1, le=100)
    """How often each of these steps is learned."""
    batch_size: int = Field(64, ge=2)
    """Steps in a batch."""
    learning_rate: float = Field(1e-3, gt=0, le=1)
    """Step size of Adam."""
    discount: float = Field(0.99, ge=0, lt=1)
    """Discount of later rewards."""
    trace_decay: float = Field(0.95, ge=0, le=1)
    """Lambda of the generalised advantages."""
    clip: float = Field(0.2, gt=0)
    """How far the probability of an action may move, as a share, before its gradient is dropped."""
    entropy_weight: float = Field(0.01, ge=0)
    """Weight of the policy's entropy, which keeps it trying."""
    hidden: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = (64, 64)
    """Widths of the layers of the policy and the value network."""


LEARNER = "learner:"  # with this begin names of policies that learn while they collect


class LearnerSettings(SettingsModel):
    """`[collect.learner]`: a learner of each actor's own, which starts from nothing and learns while it collects."""

    learning_rate: float = Field(0.5, gt=0, le=1)
    """Step of q-learning towards the target of an update."""
    discount: float = Field(0.9, ge=0, lt=1)
    """Discount of later rewards in q-learning."""
    epsilon_last: float = Field(0.0, ge=0, le=1)
    """Rate of random actions of q-learning in the end; it falls linearly from 1."""
    epsilon_steps: int = Field(4_000, ge=1)
    """Updates of a learner after which the rate is `epsilon_last`."""
    ppo: PPOSettings = PPOSettings()
    """How `learner:ppo` learns."""


class ExplorationSettings(SettingsModel):
    """Exploration rate epsilon per actor and step: the probability of a random action, or the standard deviation of
    added noise (Box).

    `plain` anneals epsilon over training. `bilevel` also anneals it within every rollout, for tasks of a fixed horizon.
    `windowed` applies it only in the first and last `edge` steps of a rollout. `none` does not explore. `module:attr`
    is a custom schedule (see pipelines/envs/exploration.py).
    """

    kind: Annotated[str, check_known(EXPLORATIONS)] = "plain"
    """Schedule: plain, bilevel, windowed, none, or module:attr."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a custom schedule."""
    start: float = Field(1.0, ge=0)
    """Epsilon at the beginning of training (bilevel: at a rollout's first step)."""
    end: float = Field(0.05, ge=0)
    """Epsilon once `steps` have passed (bilevel: at a rollout's first step)."""
    steps: int = Field(1_000_000, ge=1)
    """Steps of one actor over which `start` falls linearly to `end`."""
    randomize: bool = True
    """Multiply epsilon by a factor from U[0, 1), drawn for every rollout."""
    explorers: float = Field(0.0, ge=0, le=1)
    """Share of rollouts that explore as at the beginning of training, however long it has lasted, and without the
    factor of `randomize`: what the policy would not find is still met."""
    persistence: float = Field(1.0, ge=1)
    """Longest time, in steps, over which random actions persist: the noise of Box actions is correlated over this time
    and a random choice is repeated so many steps on average. Every rollout draws its own time, log-uniformly from 1 to
    this. 1: independent noise in every step. Not with `agent.action_mask`.
    """
    late_start: float = Field(0.8, ge=0)
    """bilevel: epsilon at a rollout's last step, at the beginning of training."""
    late_end: float = Field(0.01, ge=0)
    """bilevel: epsilon at a rollout's last step, once `steps` have passed."""
    edge: int = Field(3, ge=0)
    """windowed: steps at either end of a rollout in which the full epsilon applies."""
    inner_epsilon: float | None = Field(None, ge=0)
    """windowed: constant epsilon between the edges; unset: 0.5 / (horizon - 1), half a random step a
    rollout.
    """

    @model_validator(mode="before")
    @classmethod
    def _nothing_ignored(cls, data: Any) -> Any:
        """Refuse a key that the chosen schedule does not read (unless it restates the default)."""
        if not isinstance(data, dict):
            return data
        kind = data.get("kind", "plain")
        for key, kinds in _ONLY_FOR.items():
            if key in data and kind not in kinds and data[key] != cls.model_fields[key].default:
                raise ValueError(f'\'{key}\' applies to kind = "{kinds[0]}" only, not to "{kind}"')
        return data


class SourceSettings(SettingsModel):
    """`[source]`: what `collect --from` imports into a lake."""

    name: str = ""
    """`hdf5:FILE`, `d4rl:FILE-or-NAME`, `robomimic:FILE`, `d3rlpy:FILE`, `xland:FILE`, `vintix:FILE-or-DIR`,
    `minari:DIR-or-ID`, `npz:DIR-or-FILE`, `lerobot:DIR`, `parquet:GLOB`, `arrow:GLOB` (without KIND: as the suffix or
    the folder shows), `module:attr`; empty: none. A place may be hf://ORG/NAME[@REVISION][/PATH]."""
    lake: str = ""
    """Destination: a lake, `{run}/offline` for one of the run that never expires; empty: the run's own."""
    steps: Annotated[int, TARGET] = Field(0, ge=0)
    """Import whole trajectories until this many steps are in the lake (0: all)."""
    task: str = ""
    """`task` of the trajectories, if the source does not say; empty: its own name."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Map our columns to the file's, e.g. obs.x = "position"; `name[0:27]` takes some columns of an array."""
    layout: Literal["transitions", "arrival"] = "transitions"
    """Rows of a table: `transitions` hold a step and what it led to; `arrival` has T + 1 rows for T actions."""
    action_low: float | tuple[float, ...] = -1.0
    """Lower bound of the source environment's actions, if neither it nor --env says so."""
    action_high: float | tuple[float, ...] = 1.0
    """Upper bound of the source environment's actions."""
    num_actions: int = Field(0, ge=0)
    """Choices of a discrete action, if not otherwise known (0: one more than the maximum found)."""
    clip_actions: bool = False
    """Clip actions that are out of bounds, instead of refusing them."""
    horizon: Annotated[int | Literal["auto"], check_count_or_auto(0, 1_000_000_000)] = "auto"
    """Steps after which the source's environment was reset, where a file marks no timeouts (0: every end is marked);
    auto: the time limit of `--env` or of D4RL's environment."""
    longest: int = Field(10_000, ge=1)
    """A longer trajectory is stored in pieces; each but the last is truncated, and the next begins where it ends."""
    missing_final: Literal["repeat", "drop"] = "repeat"
    """Where the last observation of a terminated trajectory is missing, repeat the one before or drop the last step."""
    max_length: int = Field(256, ge=1)
    """Maximum length of texts and sequences whose space sets no limit."""
    check: Annotated[bool, PACING] = True
    """Read everything once before the first trajectory is stored, so that a bad source is refused as a whole."""


class GoalSettings(SettingsModel):
    """`[relabel.goal]`: what reaching a goal means, if the environment's own rule does not define it."""

    rule: str = ""
    """Goal rule: of an environment by name, or `module:attr`; empty: that of the trajectories' environment."""
    tolerance: float | None = Field(None, ge=0)
    """Instead of a rule: a goal is reached within this (Euclidean) distance."""
    reward: float = 1.0
    """With `tolerance`: reward of a step at the goal."""
    step_reward: float = 0.0
    """With `tolerance`: reward of any other step."""
    ends: bool = True
    """With `tolerance`: whether reaching the goal terminates the episode."""
    achieved: str = ""
    """Column of achieved goals; empty: the one that the rule names."""
    goals: str = ""
    """Column of desired goals; empty: the one that the rule names."""


class RelabelSettings(SettingsModel):
    """`[relabel]`: derive new goals, rewards or labels as an overlay."""

    relabeler: str | tuple[str, ...] = "hindsight"
    """`NAME`, `NAME:ARGUMENT` (as `hindsight:final`) or `module:attr`; several are applied one after the other."""
    strategy: str = "future"
    """Argument of `hindsight`, if it is named without one."""
    where: str = ""
    """SQL predicate over the `trajectories` table; empty: all."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the matching trajectories to relabel."""
    copies: int = Field(1, ge=1, le=64)
    """Relabelled versions of each trajectory."""
    goal: GoalSettings = GoalSettings()

    @property
    def relabelers(self) -> tuple[str, ...]:
        """Relabelers to apply, in order, each with its argument."""
        return tuple(f"hindsight:{self.strategy}" if name == "hindsight" else name for name in self._names)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.relabeler,) if isinstance(self.relabeler, str) else self.relabeler

    @model_validator(mode="after")
    def _copies_differ(self) -> RelabelSettings:
        if self.copies > 1 and self.relabelers == ("hindsight:final",):
            raise ValueError("'copies' of hindsight:final would all be alike; take 1, or hindsight:future or :random")
        for kind in ("label", "column"):
            if self.copies > 1 and any(name.startswith(f"{kind}:") for name in self.relabelers):
                raise ValueError(f"'copies' of {kind}s would all be alike; take 1")
        return self

    @model_validator(mode="after")
    def _strategy_is_used(self) -> RelabelSettings:
        if self.strategy != "future" and "hindsight" not in self._names:
            raise ValueError(f"'strategy' is that of hindsight; write NAME:{self.strategy} for another relabeler")
        return self


class ReplaySettings(SettingsModel):
    """`[train.relabel]`: relabelled versions of windows, made as they are drawn and stored nowhere.

    Version k of a trajectory is the one that `amago relabel` stores as its k-th copy for the same seed.
    """

    relabeler: tuple[str, ...] = ()
    """As `relabel.relabeler`; empty: none."""
    share: float = Field(0.5, gt=0, le=1)
    """Share of relabelled windows, among those of trajectories that have versions."""
    where: str = ""
    """SQL predicate over the `trajectories` table that selects the originals that have versions; empty: all."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the matching trajectories that have versions."""
    copies: int = Field(1_000_000, ge=1, le=1_000_000_000)
    """Versions of each, drawn uniformly."""
    goal: GoalSettings = GoalSettings()


class CollectSettings(SettingsModel):
    """`[collect]`: rolling out a policy into a lake."""

    steps: Annotated[int | Literal["auto"], check_count_or_auto(1, 2**63 - 1), TARGET] = "auto"
    """Environment steps in all (over all actors); in a chain, per epoch. `auto`: 10,000; outside a chain two of the
    longest episodes, if those are more."""
    actors: Annotated[int | Literal["auto"], check_count_or_auto(1, 65_536)] = "auto"
    """Environments stepped at once. `auto`: 16, more if they are fast, as a batch (up to 128) or in workers (256);
    outside a chain never so many that one would finish fewer than two episodes. Fixed when a run begins."""
    workers: Annotated[int | Literal["auto"], check_count_or_auto(0, 1_024), PACING] = "auto"
    """Processes that step environments, also in `evaluate` (0: this process). `auto`: chosen by a short trial."""
    on_env_error: Annotated[Literal["stop", "restart"], PACING] = "stop"
    """When an environment fails: stop, or begin a new episode in a fresh one; the unfinished episode is dropped."""
    chunk_steps: Annotated[int | Literal["auto"], check_count_or_auto(0, 2**31 - 1), TARGET] = "auto"
    """Steps after which a piece of a running episode is stored, for training to draw from; a chain also stores running
    pieces at the end of a `collect` stage (0: whole episodes only). `auto`: 8 x `train.context_length`, and only at the
    end of a stage if no episode is longer than that."""
    env_timeout_seconds: Annotated[float, PACING] = Field(0.0, ge=0)
    """Time limit of a step or a reset, also in `evaluate`; beyond it the environment has failed (0: no limit).
    Environments are then stepped in worker processes."""
    policy: Annotated[str, TARGET] = "auto"
    """`random`, `expert`, `RUN[@CHECKPOINT]`, `BUNDLE`, `module:attr`; `auto`: the agent of a chain, else `random`."""
    follow: Annotated[str, TARGET] = ""
    """RUN, or a LAKE or LAKE/RUN with published policies, whose newest checkpoint acts (random until there is one)."""
    reload_seconds: Annotated[Annotated[float, Field(gt=0)] | Literal["auto"], PACING] = "auto"
    """Interval between checks for a newer checkpoint of the followed run. `auto`: 2, of an object store 10."""
    greedy: Annotated[bool, BEHAVIOUR] = False
    """Take the policy's most likely action instead of sampling (exploration noise still applies)."""
    explore: Annotated[bool | Literal["auto"], BEHAVIOUR] = "auto"
    """Apply the schedule of `[exploration]` to the policy's actions. `auto`: only in a chain (epsilon 0 elsewhere)."""
    tasks: Annotated[_Tasks, BeforeValidator(_wrap_text), BEHAVIOUR] = ()
    """Tasks that actors hold for the whole run, `copies` actors each: names, as in the column `task` of the lake, a
    JSON file of them, `FILE.json`, or a number of different tasks, as the environment draws them; empty: every episode
    draws its task. They determine the number of actors, and the episodes of an actor are stored as a history."""
    copies: Annotated[int, BEHAVIOUR] = Field(1, ge=1, le=65_536)
    """Actors that hold each of `tasks`."""
    label: Annotated[str, BEHAVIOUR] = ""
    """Policy whose action at every step is stored as its label, for `agent.target = "label"`: `expert`,
    `RUN[@CHECKPOINT]`, `BUNDLE` or `module:attr`. It sees what the acting policy does. Empty: no labels."""
    logp: Annotated[bool, BEHAVIOUR] = False
    """Store the log-probability of every executed action, exploration included, in the column `logp`, for `agent.trace`
    = "vtrace" or "retrace": of random play with Discrete actions, and of agents with Discrete actions or a grid."""
    opponents: Annotated[_Names, BEHAVIOUR] = ()
    """Who plays the other seats of a game, one of these in each episode, with equal shares: `random`, `expert`,
    `RUN[@CHECKPOINT]`, `BUNDLE`, `module:attr`, or SQL over the table `checkpoints` (`update`, `time`, `elo`) of the
    run that collects, such as `select update from checkpoints order by update desc limit 8`, which is asked again in
    every `collect` stage of a chain. Empty: `random`."""
    learner: Annotated[LearnerSettings, BEHAVIOUR] = LearnerSettings()
    """How a policy `learner:NAME` learns."""
    seal_seconds: Annotated[float, PACING] = Field(10.0, gt=0)
    """Maximum age at which a segment is sealed; logged trajectories are durable before that. One second while a trainer
    on the same host, or on the same disk, follows the lake."""
    collectors: Annotated[int, PACING] = Field(1, ge=1, le=4_096)
    """Collectors that play at once, each with `actors` of its own and its share of the steps. With several, each is a
    process of its own (see `engine`)."""
    engine: Annotated[Literal["local", "ray"], PACING] = "local"
    """Where several collectors or evaluators run: in processes of this host, or in actors of a Ray cluster."""
    ray: Annotated[str, PACING] = "auto"
    """Ray cluster: `auto`, the one that this host belongs to, or else one on this host for as long as the command runs;
    `local`, always the latter; or the address HOST:PORT of a Ray head."""
    cpus: Annotated[float, PACING] = Field(1.0, ge=0)
    """CPUs that Ray reserves for each collector or evaluator."""
    gpus: Annotated[float, PACING] = Field(0.0, ge=0)
    """GPUs that Ray reserves for each collector or evaluator."""
    restarts: Annotated[int, PACING] = Field(5, ge=0)
    """How many times in a row a collector is started again after its process has died, without having stored a step in
    between."""

    @model_validator(mode="after")
    def _copies_are_of_tasks(self) -> CollectSettings:
        if self.copies > 1 and not self.tasks:
            raise ValueError("'copies' are actors that hold each of 'tasks', and there are none; give --tasks N")
        return self


class LakeSettings(SettingsModel):
    """`[lake]`: maintenance of the lake by its collector while it collects; others may write to it at the same time."""

    max_steps: Annotated[int, TARGET] = Field(0, ge=0)
    """Maximum steps to keep: beyond it, the oldest whole segments expire, except the one at the limit (0: no limit)."""
    max_bytes: Annotated[int, TARGET] = Field(0, ge=0)
    """Maximum bytes of live segments to keep, likewise (0: no limit)."""
    grace_seconds: Annotated[float, PACING] = Field(60.0, ge=0)
    """How long files of expired segments stay: readers must refresh more often than that."""
    compact: Annotated[bool, PACING] = True
    """Merge small segments once there are 16 or more of similar size: sampling from few files is faster."""


# Value of `train.context_length = "auto"` if the longest episode is unknown, and its upper bound.
_CONTEXT_LENGTH, LONGEST_CONTEXT = 128, 256
_HISTORY_EPISODES = 4  # in an automatic context of a history, as in Algorithm Distillation


class TrainSettings(SettingsModel):
    """`[train]`: gradient updates on windows drawn from a lake."""

    steps: Annotated[int, TARGET] = Field(1_000, ge=1)
    """Gradient updates in all; in a chain, per epoch."""
    batch_size: int = Field(24, ge=1)
    """Windows per update."""
    context_length: Annotated[int | Literal["auto"], check_count_or_auto(1, 2**31 - 1)] = "auto"
    """Steps of a training window, and the context length of the acting policy. `auto`: the longest possible episode, or
    four of them for a history, up to 256 (128 if unknown); fixed when training begins."""
    context: Literal["trajectory", "history"] = "trajectory"
    """`trajectory`: a window shows one trajectory; `history`: it goes on with the next episodes of the same actor and
    task, which `collect.tasks` stores, so that the agent learns to improve from episode to episode."""
    history_order: Literal["time", "return", "shuffle"] = "time"
    """Order of the episodes in a window of a history: as they were played, by increasing return, or at random."""
    history_stride: int = Field(1, ge=1)
    """Every how many-th episode of that order a window shows: with more, it shows faster progress."""
    history_horizon: Literal["episode", "history"] = "episode"
    """How far rewards count: to the end of an episode, or on into the following ones of its window. The latter rewards
    exploration that pays in a later episode."""
    burn_in: int = Field(0, ge=0)
    """First steps of a window that only warm up the encoder's memory and do not count in the losses, unless the window
    begins its trajectory; for recurrent encoders."""
    loss_mask: str = ""
    """Observation column that masks the losses: steps that observe 0 in it do not count; empty: all do."""
    actor_mask: str = ""
    """Observation column that masks the policy's terms of the loss alone: steps that observe 0 in it count for critics
    and values only; empty: all that count do so for both."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What moves the matrices in the blocks of the sequence encoder, if it has any. AdamW moves all other weights."""
    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate after the warm-up."""
    weight_decay: float = Field(1e-3, ge=0)
    """Weight decay, on kernels only: biases, gains, norms, positions and embeddings do not decay."""
    warmup_steps: int = Field(500, ge=0)
    """Updates of linear learning-rate warm-up."""
    decay_steps: int = Field(0, ge=0)
    """Update at which a linear decay to a tenth ends (0: constant after the warm-up)."""
    entropy_decay_steps: int = Field(0, ge=0)
    """Update at which a linear decay to nothing of the entropy bonus `agent.entropy_weight` ends (0: constant)."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay per update of an exponential moving average of the weights, used by evaluation and export (0: off)."""
    grad_clip: float = Field(1.0, gt=0)
    """Global norm at which gradients are clipped."""
    max_skipped: Annotated[int, PACING] = Field(10, ge=1)
    """Fail after this many consecutive updates have been skipped because of a gradient that is not finite."""
    grad_accumulation: int = Field(1, ge=1)
    """Micro-batches per update; each has batch_size / grad_accumulation windows."""
    lakes: tuple[str, ...] = ()
    """Lakes to mix, `LAKE[:WEIGHT[..LAST]]` each, `{run}/lake` for the run's own; empty: all that a chain fills."""
    where: str = ""
    """SQL predicate over the `trajectories` table that selects the trajectories to draw from; empty: all."""
    weight: str = ""
    """SQL expression over the same table: a trajectory's relative weight, multiplied by all other weights; empty: 1."""
    like: str = ""
    """RUN[@CHECKPOINT]: draw from exactly the trajectories that this checkpoint drew from, its lakes and its `where`,
    whatever these lakes have gained since. Only for `amago train`; the number of the checkpoint is recorded."""
    relabel: ReplaySettings = ReplaySettings()
    """Relabelling on the fly, as windows are drawn."""
    weighting: Literal["timestep", "trajectory", "task"] = "timestep"
    """Draw so that every time step has equal weight, every trajectory, or every task (and each of its steps)."""
    half_life: float = Field(0.0, ge=0)
    """Age, in environment steps collected since, at which a trajectory has half the weight (0: age has no effect)."""
    per_alpha: float = Field(0.0, ge=0, le=2)
    """Alpha of prioritized replay: a trajectory is drawn in proportion to (its mean TD error) ** alpha (0: off)."""
    per_beta: float = Field(0.4, ge=0, le=1)
    """Beta of prioritized replay: how much of the sampling bias the loss corrects by importance weights (1: all)."""
    anneal_steps: int = Field(0, ge=0)
    """Updates over which the weights of several lakes move, where a range is given (`--from-lake A:0.8..0.2`); in a
    chain 0 means: over the epochs of the entry."""
    follow: Annotated[bool, PACING] = False
    """Keep training on new data as collectors write it; wait if a lake is still empty."""
    refresh_seconds: Annotated[float, PACING] = Field(2.0, gt=0)
    """Longest interval between refreshes of followed lakes. Lakes in directories are read five times a second, or as
    often as that takes 5% of the time."""
    publish: Annotated[bool | Literal["auto"], PACING] = "auto"
    """Publish checkpoint weights in the first lake, for `collect --follow LAKE`. `auto`: only in an object store."""
    shard: Annotated[Literal["none", "host"], PACING] = "none"
    """Where ranks of several hosts train together: `host`, each host's ranks draw from segments of their own, so that a
    host caches its share of the lake only."""
    prefetch: Annotated[int, PACING] = Field(1, ge=0, le=16)
    """Batches prefetched by a background thread (0: none; not used with prioritized replay)."""
    placement: Literal["uniform", "full"] = "uniform"
    """Windows of trajectories longer than `context_length`: `uniform`, at any place, cut at the ends, so that every
    step appears equally often; `full`, only where a whole window fits, so that ends appear less often."""
    checkpoint_every: Annotated[int, PACING] = Field(500, ge=1)
    """Updates between checkpoints (one is always written at the end of the stage)."""
    keep_checkpoints: Annotated[int, PACING] = Field(3, ge=1)
    """Newest checkpoints to keep; `best` is always kept."""
    log_every: Annotated[int, PACING] = Field(25, ge=1)
    """Updates between lines of metrics.jsonl."""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """Precision of networks; weights, losses and statistics are always float32. `tf32` lets CUDA round the factors of
    float32 products; `auto` is bf16 on a GPU since Ampere, else float32. Collecting outside a chain, evaluating and
    serving are float32."""
    packing: Annotated[bool, PACING] = False
    """Let windows shorter than the longest share rows of the encoders, so that padding costs nothing."""
    activation_checkpointing: Annotated[bool, PACING] = False
    """Keep only the inputs of the sequence encoder's blocks, and images as stored, and recompute activations in the
    backward: less memory, more time."""
    compile: Annotated[bool, PACING] = False
    """Compile the encoders, where there is a compiler."""
    cuda_graphs: Annotated[bool, PACING] = True
    """On CUDA, record the kernels of an update, and repeat them at once for batches of the same shape, such as those of
    full windows. Not with several micro-batches or ranks, packing or recomputation."""
    ranks: Annotated[int, PACING] = Field(1, ge=1, le=4096)
    """Processes of this host that train together, each on its share of every batch; a launcher's number comes first."""
    sharding: Annotated[Literal["none", "fsdp"], PACING] = "none"
    """What each rank keeps of the agent: `none`, all of it; `fsdp` (experimental), only its share of the weights of the
    sequence encoder's blocks, of their gradients and optimiser state (FSDP2). A single process has all of it."""
    rank_timeout: Annotated[float, PACING] = Field(300.0, gt=0)
    """Seconds that a rank waits for the others before it gives up, when several processes train together."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`."""
    verify: Annotated[bool, PACING] = False
    """Verify the checksums of a segment when it is first read, which reads all of it; damaged ones are skipped."""
    threads: Annotated[int, PACING] = Field(0, ge=0)
    """CPU threads of networks, learning or acting (0: OMP_NUM_THREADS, else all available cores); small networks are
    fastest with 1."""

    @model_validator(mode="after")
    def _some_steps_count(self) -> TrainSettings:
        if self.context_length != "auto" and self.burn_in >= self.context_length:
            raise ValueError(
                f"burn_in {self.burn_in} leaves no step of a window of {self.context_length} to learn from"
            )
        return self

    @model_validator(mode="after")
    def _histories_as_they_are(self) -> TrainSettings:
        given = {"order": self.history_order, "stride": self.history_stride, "horizon": self.history_horizon}
        for (name, value), default in zip(given.items(), ("time", 1, "episode"), strict=True):
            if self.context != "history" and value != default:
                raise ValueError(f"history_{name} is about windows of histories: set context to 'history', or leave it")
        if self.context == "history" and self.relabel.relabeler:
            raise ValueError(
                "relabel is not possible together with context 'history'; store the versions instead: amago relabel"
            )
        return self

    @model_validator(mode="after")
    def _fixed_or_followed(self) -> TrainSettings:
        if self.like and self.follow:
            raise ValueError("like is a fixed set of trajectories, and follow would add to it: give one of them")
        return self

    @model_validator(mode="after")
    def _sharded_as_it_is(self) -> TrainSettings:
        if self.sharding == "fsdp" and self.compile:
            raise ValueError("compile is not possible together with sharding 'fsdp'")
        if self.sharding == "fsdp" and self.optimizer == "muon":
            raise ValueError("optimizer 'muon' needs whole matrices, of which sharding 'fsdp' leaves a rank some rows")
        return self

    @property
    def resolved_context_length(self) -> int:
        """The context length as a number, even before `auto` is resolved."""
        return self.context_length_for(None)

    def context_length_for(self, horizon: int | None) -> int:
        """Choose the context length for episodes of at most `horizon` steps (None: unknown)."""
        if self.context_length != "auto":
            return self.context_length
        if horizon is not None and self.context == "history":
            horizon *= _HISTORY_EPISODES
        return max(_CONTEXT_LENGTH if horizon is None else min(horizon, LONGEST_CONTEXT), self.burn_in + 1)


Part = Literal["timestep", "sequence", "actor", "critics", "auxiliary"]


class InitSettings(SettingsModel):
    """`[init]`: the weights that a new run begins with, a warm start. It has the network of the source where no recipe
    or option gives another, and a new optimiser."""

    source: str = ""
    """RUN[@CHECKPOINT], a policy bundle, zoo:NAME, hf://ORG/NAME[@REVISION], or amago:PATH, a state dict of AMAGO;
    empty: random weights. A run's newest checkpoint unless `@best` or a number is given. The number, or the commit, is
    recorded. Where the source keeps averaged weights, these are taken."""
    parts: Annotated[tuple[Part, ...], Field(min_length=1)] = ("timestep", "sequence", "actor", "critics", "auxiliary")
    """Which parts to take. The statistics of inputs belong to `timestep`, those of values to `critics`."""
    strict: bool = True
    """Refuse a source that lacks a tensor of these parts, or has it in another shape; false: list them, and begin these
    at random."""

    @model_validator(mode="after")
    def _parts_of_something(self) -> InitSettings:
        if not self.source and self.model_fields_set & {"parts", "strict"} and self != InitSettings():
            raise ValueError("parts and strict are about weights to begin with: name their source, --init")
        return self


class EvaluateSettings(SettingsModel):
    """`[evaluate]`: whole episodes on held-out tasks."""

    episodes: int = Field(100, ge=1)
    """Number of complete episodes to play."""
    attempts: int = Field(1, ge=1, le=100_000)
    """Play each episode so many times at the same task without clearing the agent's memory, as one episode of so many
    attempts: shows whether the agent improves from one to the next."""
    memory: Literal["episode", "attempt"] = "episode"
    """How long the agent remembers: an episode, or one attempt of it, after which its memory is cleared. What it gains
    from attempt to attempt by the first, but not by the second, is due to memory."""
    actors: int = Field(50, ge=1, le=65_536)
    """Environments stepped as one batch (at most `episodes`), over all evaluators."""
    evaluators: int = Field(1, ge=1, le=4_096)
    """Processes that evaluate, each with its share of the actors; see `collect.engine`. The episodes are the same."""
    checkpoint: str = "latest"
    """`latest`, `best`, or an update number."""
    greedy: bool | Literal["auto"] = "auto"
    """Take the policy's most likely action instead of sampling. `auto`: sample discrete actions, take the most likely
    continuous one; the other way is played on a quarter of the episodes, and reported where it differs."""
    temperature: float = Field(1.0, ge=1e-3, le=1e3)
    """Sample choices by the policy's probabilities to the power 1 / temperature: below 1 nearer to the most likely
    action, above 1 nearer to random play. Only where actions are sampled, and discrete or points of a grid."""
    split: Literal["auto", "train", "test"] = "auto"
    """Tasks to play, if the environment keeps some for testing. `auto`: those for training where the best checkpoint is
    chosen by the score, else those for testing."""
    seed: int = Field(1_000_003, ge=0, lt=2**31)
    """Seed of the evaluation tasks, independent of the run's."""
    tasks: str = ""
    """SQL predicate over the `trajectories` table of the run's lakes: play only tasks of matching trajectories."""
    mark_best: bool | Literal["auto"] = "auto"
    """Point `checkpoints/best`, which is always kept, at the evaluated checkpoint when it beats the best so far.
    `auto`: in a chain, whenever the newest checkpoint is evaluated; the last update is then evaluated twice, also on
    tasks for testing."""
    opponents: _Names = ()
    """Who plays the other seats of a game, as `collect.opponents`. Empty: `random`."""
    reference: str = "auto"
    """Task of D4RL by which returns are normalised, e.g. `hopper`; `auto`: by the environment's name; `none`."""
    best_by: str = "return_mean"
    """Metric by which checkpoints are compared, e.g. `per_attempt[-1]`."""
    label: str = ""
    """Name of this evaluation in a chain's closing table; empty: not shown there."""
    video: int = Field(0, ge=0)
    """Number of episodes, from the first, to film into `RUN/videos`. Films do not change the scores."""
    require: str = ""
    """Gate such as `return_mean >= 0.9`; the command exits with 5 if it is not met."""

    @property
    def task_split(self) -> Literal["train", "test"]:
        """The split to play, where it is not chosen: choosing a checkpoint by tasks for testing would spoil them."""
        if self.split != "auto":
            return self.split
        return "train" if self.mark_best is True else "test"

    def acts_greedily(self, *, by_default: bool) -> bool:
        """Whether to take the most likely actions; `by_default`: what "auto" means for the policy's action space."""
        return by_default if self.greedy == "auto" else self.greedy

    @model_validator(mode="after")
    def _require_sampling(self) -> EvaluateSettings:
        if self.greedy is True and self.temperature != 1:
            raise ValueError(
                "temperature has no effect on greedy actions; sample them (greedy = false) or leave it out"
            )
        return self


class TrackSettings(SettingsModel):
    """`[track]`: experiment trackers that a run is sent to while it runs."""

    to: tuple[str, ...] = ()
    """Trackers: `tensorboard[:DIR]`, `wandb[:[ENTITY/]PROJECT]`, `mlflow[:EXPERIMENT]`, `trackio[:PROJECT]`, or
    `module:attr[:ARGUMENT]`."""


_POLICY_FORMS = ("bundle", "onnx", "torch", "aoti", "page")
"""Formats of `[export]` that are forms of the policy; all others are for trajectories."""


class ExportSettings(SettingsModel):
    """`[export]`: a policy bundle that acts without the lake or the run, or trajectories in formats of other tools."""

    to: str = ""
    """Directory to write, or hf://ORG/NAME to upload a policy; empty: `RUN/export`, for trajectories `RUN/dataset`."""
    format: Annotated[tuple[str, ...], BeforeValidator(_wrap_text)] = ("bundle",)
    """Forms of the policy: bundle, with onnx, torch and aoti, which act without this package, and page, in which it
    plays; or one of minari, parquet, npz, hdf5 and `module:attr`: trajectories of the lake."""
    episodes: int = Field(32, ge=0, le=10_000)
    """Episodes that the policy and each of its forms onnx, torch and aoti plays, to compare their scores (0: none)."""
    weights: Literal["float32", "float16", "int8"] = "float32"
    """How the form onnx stores its matrices; it computes in float32. The proof has wider limits for smaller ones."""
    card: bool = False
    """Write a model card beside the policy, README.md as the Hugging Face Hub expects it, with the run's picture."""
    licence: str = Field("", max_length=100)
    """Licence that the card names, by the Hub's identifier, e.g. mit; empty: none."""
    onnxruntime_web: str = ""
    """Directory of npm's package onnxruntime-web, which a page contains; empty: fetched with npm, once."""
    where: str = ""
    """SQL predicate over the `trajectories` table, for exports of trajectories; empty: all."""
    author: str = ""
    """Author of a Minari dataset; several separated by commas."""
    description: str = ""
    """Description of a Minari dataset; empty: the environments and the number of episodes."""
    checkpoint: str = "latest"
    """`latest`, `best`, or an update number."""

    @property
    def of_policy(self) -> bool:
        """Whether the policy is exported, not trajectories."""
        return self.format[0] in _POLICY_FORMS

    @model_validator(mode="after")
    def _one_kind(self) -> ExportSettings:
        if not self.format or (len(self.format) > 1 and not set(self.format) <= set(_POLICY_FORMS)):
            raise ValueError(f"format: give forms of the policy ({', '.join(_POLICY_FORMS)}), or one for trajectories")
        if self.weights != "float32" and not {"onnx", "page"} & set(self.format):
            raise ValueError(f"weights: {self.weights} is for the form onnx; add it to format")
        return self


class StageSettings(SettingsModel):
    """One entry of `[[stages]]`: a stage, when it runs, and keys that override the stage's own table."""

    model_config = ConfigDict(frozen=True, extra="allow")

    stage: _StageName
    """Stage to run; the entry's other keys override those of its table."""
    every: int = Field(1, ge=1)
    """Run on every n-th epoch counted from `start_epoch`."""
    start_epoch: int = Field(0, ge=-1_000_000)
    """First epoch (0-based) in which it runs; negative counts from the end (-1: the last)."""
    stop_epoch: int | None = None
    """First epoch in which it no longer runs."""

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def expand_stages(entries: Any) -> Any:
    """Expand the names of stages in `stages = ["collect", "train"]` to entries without overrides."""
    if not isinstance(entries, list | tuple):
        return entries
    return [{"stage": entry} if isinstance(entry, str) else entry for entry in entries]


class Settings(SettingsModel):
    """All settings of a run, validated: `amago settings` lists them. ValidationError (pydantic) lists every problem.

    >>> Settings.model_validate({"env": {"name": "tmaze", "corridor": 3}, "seed": 7})
    Settings(seed=7, env=EnvSettings(name='tmaze', corridor=3))
    """

    about: str = ""
    """Purpose of the recipe, in a line."""
    expected: str = ""
    """Expected score, and its source; empty: unknown."""
    profile: str = ""
    """Which of the recipe's `profiles` to apply; empty: none. In a run's configuration: the one that was applied."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of networks, tasks, exploration and sampling, each with its own stream."""
    size: Annotated[SizeName, PACING] = ""
    """Size of the network, with the learning rate and threads that suit it: `tiny`, `small`, `base` or `large`. Other
    settings of the same file override it; `--size` overrides them. Empty: `base`, the defaults; but the commands
    `train` and `run` choose `tiny` where there is no GPU and no setting of the network is given."""
    epochs: Annotated[int, TARGET] = Field(1, ge=1)
    """Rounds of a chain."""
    minutes: float | None = Field(None, gt=0)
    """Budget of a recipe without stages, in minutes of this machine: the other settings are chosen for it. Nothing else
    reads it. Not set: 5, unless `steps` is."""
    steps: int | None = Field(None, ge=1)
    """The same in environment steps, instead of minutes; with a `source`, those that are taken after half of the
    minutes (not set: none)."""
    report: bool = True
    """Whether `amago run` keeps a page about the run, `report.html` in its directory, up to date."""
    env: EnvSettings = EnvSettings()
    exploration: Annotated[ExplorationSettings, BEHAVIOUR] = ExplorationSettings()
    agent: AgentSettings = AgentSettings()
    init: InitSettings = InitSettings()
    collect: CollectSettings = CollectSettings()
    source: SourceSettings = SourceSettings()
    lake: LakeSettings = LakeSettings()
    relabel: RelabelSettings = RelabelSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    export: ExportSettings = ExportSettings()
    track: Annotated[TrackSettings, PACING] = TrackSettings()
    stages: Annotated[tuple[StageSettings, ...], BeforeValidator(expand_stages)] = ()

    @model_validator(mode="after")
    def _has_blocks_to_shard(self) -> Settings:
        kind = self.agent.sequence.kind
        if self.train.sharding == "fsdp" and kind in WITHOUT_BLOCKS:
            raise ValueError(f"train.sharding 'fsdp' needs a sequence encoder of blocks, and '{kind}' has none")
        return self

    @model_validator(mode="after")
    def _has_entropy_to_decay(self) -> Settings:
        if self.train.entropy_decay_steps and self.agent.entropy_weight in (0, "auto"):
            raise ValueError("train.entropy_decay_steps needs a number above 0 as agent.entropy_weight")
        return self

    def document(self) -> dict[str, Any]:
        """Write them as a TOML document that resolves to the same settings."""
        return self.model_dump(mode="json", exclude_none=True)

    def for_stage(self, entry: StageSettings) -> Settings:
        """Apply the entry's overrides to its stage's table; returns other settings."""
        if not entry.overrides:
            return self
        name = TABLES.get(entry.stage, entry.stage)
        table = getattr(self, name)
        merged = type(table).model_validate({**table.model_dump(), **entry.overrides})
        return self.model_copy(update={name: merged})
