"""The table of choices for a run without a recipe: which setting, which value, and why.

Pure functions of what was measured and of the budget: no file is read, nothing is timed. Every number that tuning may
change is a constant at the top. A setting that the user gives is kept, and the rows below it follow from it.

A replay ratio is the number of time steps in updates per environment step that was collected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipelines.config.model import WITHOUT_MEMORY, AgentSettings
from pipelines.envs.goals import GoalReward
from pipelines.learning.agent_types import AgentType, resolve

# Network: the first size whose budget, in minutes of one CPU core, is long enough; with a GPU one size for all.
SIZE_BY_MINUTES = ((15.0, "tiny"), (240.0, "small"), (math.inf, "base"))
SIZE_ON_GPU = "base"
SIZE_OF_STEPS = "tiny"  # of a budget in environment steps, on a CPU

# Windows and batches, in time steps.
TOKENS, TOKENS_ON_GPU = 512, 8192  # of an update
# Continuous control improves with the number of updates more than with their size: after 300 CPU seconds, the return in
# HalfCheetah was 850 and 971 by 5,400 updates of 512 time steps, and 1,439 to 1,985 (three seeds) by 11,000 of 128.
TOKENS_OF_BOX = 128
LEAST_WINDOWS = 8  # of an update
WINDOWS_OF_GAME, TOKENS_OF_GAME = 24, 2_560  # likewise, where actions are forgotten at once: the fewer of both
WHOLE_EPISODE = 128  # an episode up to this length is remembered whole
WHOLE_ATTEMPTS = 256  # likewise, where a task is attempted several times in an episode
# Likewise, where actions change their own reward and the next observation at most: all that matters is what was seen.
WHOLE_GAME = 1024
CONTEXT, CONTEXT_OF_TEXT = 32, 64  # of longer episodes
# Likewise, of vectors that do not show the state: 0.95 in NoisyPositionOnlyCartPoleEasy, 0.78 by a memory of 32 steps.
CONTEXT_OF_HIDDEN = 128
CONTEXT_OF_IMAGES = 16
CONTEXT_OF_BOX = 8
UNKNOWN_EPISODE = 64  # context length where the longest episode is not known

# Time steps. Actions of a system with inertia are repeated so often that what is observed moves by about FINE_STEP of
# its spread: credit, memory and exploration reach as far in fewer decisions. In the control suite's cartpole-swingup,
# after 300 CPU seconds: 215 by single steps; 674, 621 and 221 by four (three seeds). In MountainCar -200 by single
# steps, whose effects the critics could not resolve, and -104 by two after half of that time.
FINE_STEP, MOST_REPEAT, INERTIA = 0.2, 4, 0.5
LEAST_DECISIONS = 100  # in the longest episode

# Actors.
ACTORS, BATCHED_ACTORS = 16, 128  # of environments stepped one by one, and as one batch
EPISODES_PER_ACTOR = 4  # least number of episodes that an actor plays in the run
FIRST_COLLECT_SHARE = 0.15  # most of the budget before every actor has filled a window
ROUND_SECONDS = 1.5e-3  # guess of what acting costs in a step of all actors, before it is measured
ACTING_SHARE = 0.4  # guess of the share of the time spent on collecting, before it is measured

# Exploration.
EXPLORATION_SHARE = 0.25  # of the planned steps of an actor, until epsilon is at its end
EXPLORATION_START, EXPLORATION_START_BOX, EXPLORATION_END = 1.0, 0.5, 0.05
EXPLORATION_START_WARM = 0.2  # of a run that begins with the weights of another
PERSISTENCE = 8.0  # longest time over which random choices are repeated, in steps
# Where random play has met nothing, that of vectors, in which a system moves: of 200 steps of MountainCar, whose swing
# lasts about 100, 0.7% of the episodes reach the goal with 8, 6% with 32. Grids would be walked in circles.
PERSISTENCE_FAR = 32.0
# Share of the episodes that explore as at the beginning, throughout the run. Where episodes are long and rewards rare,
# a first part of exploration has too few of them: MountainCarContinuous met its goal 4 times in 62,400 steps, and
# learned nothing; Acrobot had -500 with .0625 and -122 with .25, LunarLander 145 and 249 (one seed each). Where every
# step pays the same until an early end, nothing is to be discovered, and random play shows failures alone: after two
# minutes CartPole had 500, 500, 493 and 500 with few, 97, 493 and 174 with many.
# Tasks of several attempts have none: within an episode epsilon falls, too. Dark key-to-door (4x4, three minutes, seeds
# 31 and 32) had success 0.61 and 0.43 in the last attempt, before 0.42 and 0.32; lakes are as before (three seeds).
EXPLORERS, FEW_EXPLORERS = 0.25, 0.0625
EARLY_END = 0.5  # of the longest episode: a mean length that is an early end

# Agent.
LEAST_HORIZON, MOST_HORIZON = 50, 1_000  # of the acting discount, in steps
SHORT_HORIZON = 10  # of the shortest discount
TIMED_HORIZON = 100  # of continuous control that only time ends
# Where an action determines its own reward alone. CountRecallEasy after the same 100,000 steps: -.30, and -.41 with a
# horizon of the whole episode; by 24 windows an update and positions of both kinds, too, -.18.
GAMMA_AT_ONCE = 0.1
TARGET_UPDATES, LEAST_TAU, MOST_TAU = 15.0, 0.01, 0.02  # tau = TARGET_UPDATES / planned updates, within these
TRACE_DECAY, TRACE_DECAY_OF_ATTEMPTS = 0.95, 1.0
# Of choices, in units of advantages: those of most steps are far below the usual where slips and rare rewards decide.
# On FrozenLake8x8 (two minutes, seeds 22 and 23) it held the policy open although the critics agreed on its action in
# 85% of the steps: return .06 and .10 sampled, .76 and .78 greedy. With a bonus that falls to nothing: .57 and .56
# sampled. LunarLander, Acrobot, the double pendulum and DoorKey learn as before. The first of several attempts is a
# search, which chance helps: point-robot, one seed, had .49 .84 .99 by attempt instead of .66 .81 1.00.
ENTROPY_WEIGHT = 0.1
N_STEP = 3
# Of a dataset: the first 144,000 steps of an agent that learns to run as HalfCheetah (mean return 395), 24,000 updates.
# The policy's own values with filtered imitation had 3,284 and 3,407 (two seeds; weight .3: 3,536 and 2,963; .1: 2,908,
# and 283 after two thirds), imitation alone 3,109, imitation of all that was recorded 177. Late steps of that agent
# (4,629): 5,520, imitation alone 5,346, weight .3 4,712 after 5,614. One-step returns had 1,142 after a third, those of
# three steps 2,627. LunarLander's first 90,000 steps (-121): 266, and 134 with three discounts up to .999.
IMITATION_WEIGHT = 1.0
DATA_HORIZON = 100
DATA_LAKE = "{run}/offline"
EPOCHS_BEFORE_PLAY = 20  # and as many with it
# Points in each dimension by the number of dimensions of Box actions. The same updates learn much more from the values
# of a few known actions: LunarLanderContinuous had 221 after 177 CPU seconds, and -25 by a density over the box.
GRID_POINTS, LEAST_GRID_POINTS = {1: 5, 2: 3}, 2
SMALL_OBSERVATION, BOUNDED_OBSERVATION, SMALL_REWARD = 1.5, 20.0, 10.0  # largest magnitudes seen
FAINT_OBSERVATION = 0.2  # largest magnitude of a number that a network would hardly see beside others of order one
PREDICTION_WEIGHT, CRITIC_WEIGHT_OF_ATTEMPTS = 4.0, 1.0
# Few updates must be large ones. Returns after the same updates with learning rates of 1e-4, 3e-4 and 1e-3: Pendulum
# -1,180, -901, -136; HalfCheetah with 3e-4 and 1e-3 -66, 1,209. In a run of more than RATE_UPDATES, the rate is less by
# the square root of their number, down to what a long run uses.
MOST_RATE, RATE_UPDATES, LEAST_RATE = 1e-3, 6_000, 1e-4
EMA_DECAY = 0.99
WARMUP_SHARE, MOST_WARMUP = 0.1, 100  # of the planned updates
HALF_LIFE_SHARE = 0.25  # of the planned environment steps

# Of windows that show other goals than were asked for. FetchReach returned -1.8 after two minutes with .8, -2.2 with
# .5, and -49 without any.
HINDSIGHT_SHARE = 0.8
# Where goals come in order, all windows show some that were reached among them: MazeRunner returned 2.81 and 2.70 of 3
# after five minutes (two seeds), and 1.89 without.
SEQUENCE_SHARE = 1.0

# Time.
REPLAY_RATIO, LEAST_REPLAY, MOST_REPLAY = 16.0, 4.0, 64.0
LEAST_UPDATE_SHARE, MOST_UPDATE_SHARE = 0.4, 0.85  # of the time of collecting and updating
OVERHEAD = 1.1  # of collecting and updating: writing, sealing, sampling and logging
EPOCH_SECONDS = 4.0
EPOCH_OVERHEAD = 0.15  # seconds of refreshing the lake, and of a checkpoint
LEAST_EPOCHS, MOST_EPOCHS = 5, 60
EPOCHS_OF_STEPS = 40
FIRST_EPOCH_SECONDS = 15.0  # so that a first score comes within a minute
CLOSING_SECONDS = 3.0  # of the report
LEAST_TIME_SHARE = 0.3  # of the budget that remains for the run, however long measuring took

# Evaluation.
EVALUATION_SHARE, FINAL_SHARE = 0.1, 0.05
EVALUATIONS, LEAST_EVALUATIONS = 20, 3
# There are fewer evaluations before they have fewer than the usual number of episodes. The least numbers are small, as
# episodes of 1,000 slow steps would otherwise take most of a short budget.
LEAST_EPISODES, USUAL_EPISODES, MOST_EPISODES = 4, 16, 100
LEAST_FINAL_EPISODES, MOST_FINAL_EPISODES = 10, 200
EVALUATION_SEED = 77
LONG_EPISODE = 1_000  # beyond it, the limit of an episode says little about its length


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run may use: minutes of this machine, or environment steps. Exactly one of them is set, except for a run
    that learns from a dataset: minutes, and the environment steps that it takes after that (None: none). Stages by hand
    have the steps that are recorded."""

    minutes: float | None = None
    steps: int | None = None

    @property
    def text(self) -> str:
        """The budget as the option that gives it."""
        given = {"--minutes": self.minutes and f"{self.minutes:g}", "--steps": self.steps}
        return " ".join(f"{option} {value}" for option, value in given.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class EnvFacts:
    """What was measured of an environment, in random play.

    `action_size`: numbers of an action (a Discrete one: its choices). `horizon`: longest episode that is possible
    (None: unknown); `action_mask`: column of the action mask ("": none); `has_goal_rule`: there is a rule of its
    name for what reaching a goal is, `has_goal_sequence`: or for goals in order; `goal_reward`: what the
    environment says of it; `length_mean`, `length_min` and `length_max` of the episodes seen, or of those in
    progress if none ended; `episodes` ended, and `return_mean`, `return_error` (its standard error) and
    `success_mean` are over them (None: none ended). `observation_max`, `reward_max`: largest magnitudes;
    `observation_min`: of the number observed that has the smallest one (0: none is known).
    `pays_alike`: every step had the same reward, above 0; `only_costs`: rewards were below 0, or 0. `rewards_at_once`:
    rewards are frequent, follow from the action before alone, and actions do not change what is observed later, as far
    as two ways to play the same episode show; `forgets_actions`: or they change the next observation, and none later.
    `one_by_one`: actors are stepped one after another. `action_repeat`: how often an action is played in a step.
    `step_change` (a share of the spread of what is observed) and `inertia` (a correlation): how far a step moves it,
    and whether movement goes on; 0: not known. `shows_state`: an observation of one task and the action predict what is
    observed next and the reward, and the steps before add little (None: not known).
    `step_seconds`: CPU seconds of a step of one actor, resets included.
    """

    name: str
    action: str
    observation_size: int
    action_size: int = 1
    has_images: bool = False
    has_text: bool = False
    horizon: int | None = None
    num_attempts: int | None = 1
    has_success: bool = False
    action_mask: str = ""
    has_goal_rule: bool = False
    has_goal_sequence: bool = False
    goal_reward: GoalReward | None = None
    one_by_one: bool = True
    episodes: int = 0
    length_mean: float = 0.0
    length_min: int = 0
    length_max: int = 0
    return_mean: float | None = None
    return_error: float | None = None
    success_mean: float | None = None
    observation_max: float = 0.0
    observation_min: float = 0.0
    reward_max: float = 0.0
    pays_alike: bool = False
    only_costs: bool = False
    rewards_at_once: bool = False
    forgets_actions: bool = False
    action_repeat: int = 1
    step_change: float = 0.0
    inertia: float = 0.0
    shows_state: bool | None = None
    step_seconds: float = 0.0
    has_gpu: bool = False

    @property
    def is_box(self) -> bool:
        """Whether actions are continuous."""
        return self.action == "Box"

    @property
    def has_goals(self) -> bool:
        """Whether it is known what reaching a goal is."""
        return self.has_goal_rule or self.has_goal_sequence or self.goal_reward is not None

    @property
    def longest(self) -> int:
        """The longest episode to expect: the limit, or the length of all; otherwise twice the longest one seen."""
        if self.horizon is not None:
            return self.horizon
        return self.length_max if self.is_fixed else max(2 * self.length_max, 1)

    @property
    def memory_limit(self) -> int:
        """The longest episode that is remembered whole, where a task is attempted once in it."""
        return WHOLE_GAME if self.forgets_actions else WHOLE_EPISODE

    @property
    def is_fixed(self) -> bool:
        """Whether all episodes seen were equally long, though no limit is known."""
        return self.episodes > 1 and self.length_min == self.length_max

    @property
    def typical(self) -> float:
        """The length of an episode to expect of an agent that learns, for estimates of time."""
        if self.horizon is None:
            return float(self.longest)
        if self.horizon <= LONG_EPISODE:
            return float(self.horizon)
        return max(float(LONG_EPISODE), math.sqrt(self.horizon * max(self.length_mean, 1.0)))

    @property
    def best_repeat(self) -> int:
        """How often an action should be played in a step, if these facts are of actions that are played once."""
        if self.has_images or self.action_mask or self.num_attempts != 1 or self.inertia < INERTIA:
            return 1
        if self.has_goals:  # whose rewards are those of single steps
            return 1
        finer = round(min(FINE_STEP / max(self.step_change, 1e-9), MOST_REPEAT))
        return max(min(finer, self.longest // LEAST_DECISIONS), 1)

    def document(self) -> dict[str, Any]:
        """Convert the facts to plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What was found in a dataset that is to be learned from, or in its beginning, unless `is_whole`: numbers of
    `trajectories` and `steps`; the mean of their returns, and that of their best tenth, `return_high`.
    `total_steps`: an estimate of all there are."""

    trajectories: int
    steps: int
    total_steps: int
    is_whole: bool
    return_mean: float
    return_high: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the chosen agent costs: seconds of an update, and of an environment step while it acts with the chosen
    actors. `in_cpu_seconds`: they are CPU seconds of one process in which all of the work happens."""

    update_seconds: float
    collect_seconds: float
    in_cpu_seconds: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A row of the table. `given`: the user's own value, which was kept."""

    setting: str
    value: Any
    reason: str
    given: bool = False


@dataclass
class Choices:
    """The table for an environment and a budget, row by row; `given` is the document of the settings that the user
    gives. `data`: what is known of the dataset that the run is to learn from, in place of what it would collect; then
    `facts` may be of no environment, but of what the dataset shows."""

    given: Mapping[str, Any]
    facts: EnvFacts
    budget: Budget
    data: DataFacts | None = None
    rows: list[Choice] = field(default_factory=list)

    def find(self, setting: str, otherwise: Any = None) -> Any:
        """Look up the user's own value of a dotted setting."""
        found: Any = self.given
        for key in setting.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return otherwise
            found = found[key]
        return found

    def choose(self, setting: str, value: Any, reason: str) -> Any:
        """Add a row, and return its value: that of the user, if there is one. What was chosen before is kept."""
        before = next((row for row in self.rows if row.setting == setting), None)
        if before is not None:
            return before.value
        own = self.find(setting)
        row = Choice(setting=setting, value=value, reason=reason)
        if own is not None:
            is_network = setting.startswith("agent.") or setting == "train.context_length"
            by_source = is_network and self.find("init.source")
            row = Choice(
                setting=setting,
                value=own,
                reason="as you or the policy of --init gave it" if by_source else "as you gave it",
                given=True,
            )
        self.rows.append(row)
        return row.value

    def document(self) -> dict[str, Any]:
        """Nest the chosen settings in a document, without those that the user gives."""
        found: dict[str, Any] = {}
        for row in self.rows:
            if row.given:
                continue
            *tables, key = row.setting.split(".")
            table = found
            for name in tables:
                table = table.setdefault(name, {})
            table[key] = row.value
        if "env" in found:
            found["env"]["name"] = self.facts.name
        return found

    def choose_agent(self) -> None:
        """Choose what must be known before an update can be timed: network, agent, windows and actors."""
        if self.facts.action_repeat > 1:
            reason = f"a step of the environment moves what is observed by {self.facts.step_change:.2g} of its spread"
            self.choose("env.action_repeat", self.facts.action_repeat, reason)
        self._choose_network()
        self._choose_memory()
        self._choose_discounts()
        self._choose_targets()
        self._choose_inputs()
        self._choose_hindsight()
        if self._plays:
            self._choose_actors()

    def _choose_hindsight(self) -> None:
        if not self.facts.has_goals:
            return
        if self.facts.has_goal_sequence:
            reason = "places that were reached by chance are put among the goals that are asked for in order"
            if self.choose("train.relabel.relabeler", ["instruction:some"], reason) == ["instruction:some"]:
                self.choose("train.relabel.share", SEQUENCE_SHARE, "every number of them, none included, is drawn")
            return
        reason = "goals that were reached by chance teach how to reach those that are asked for"
        if self.choose("train.relabel.relabeler", ["hindsight"], reason) != ["hindsight"]:
            return  # the user's own, which may need no goals
        self.choose("train.relabel.share", HINDSIGHT_SHARE, "the rest show what was asked for")
        is_defined = self.facts.has_goal_rule or self.find("train.relabel.goal.rule")
        if self.facts.goal_reward is not None and not is_defined:
            for name, value in asdict(self.facts.goal_reward).items():
                self.choose(f"train.relabel.goal.{name}", value, "what compute_reward of the environment says")

    @property
    def _plays(self) -> bool:
        """Whether the run collects steps to learn from."""
        return self.data is None or (self.budget.minutes is not None and self.budget.steps is not None)

    @property
    def _uses_grid(self) -> bool:
        """Whether continuous actions are chosen from a grid: where it has few points, or the user wants it."""
        facts = self.facts
        given = self.find("agent.actor.distribution")
        if not facts.is_box or given is not None:
            return facts.is_box and given == "grid"
        has_points = self.data is None  # recorded actions lie between them
        return has_points and facts.action_size in GRID_POINTS and self._has_tables

    @property
    def _is_density(self) -> bool:
        """Whether the policy is a density of continuous actions."""
        return self.facts.is_box and not self._uses_grid

    @property
    def _agent_type(self) -> AgentType:
        given = {"actor_weight": self.find("agent.actor_weight"), "critic": {"kind": self.find("agent.critic.kind")}}
        return resolve(AgentSettings.model_validate({"kind": self.find("agent.kind", "actor-critic"), **given}))

    @property
    def _has_tables(self) -> bool:
        """Whether critics have an output for each action, where it is a choice."""
        return self._agent_type.table and self._agent_type.critic == "scalar"

    @property
    def _is_timed_control(self) -> bool:
        """Whether a density of continuous actions is to maximise values in long episodes of one attempt that time alone
        ends."""
        facts, agent_type = self.facts, self._agent_type
        is_timed = facts.is_fixed and facts.longest > WHOLE_EPISODE and facts.num_attempts == 1 and self.data is None
        return self._is_density and is_timed and agent_type.critic == "scalar" and agent_type.actor_weight > 0

    def _choose_network(self) -> None:
        if self.facts.has_gpu:
            size, reason = SIZE_ON_GPU, "there is a GPU"
        elif self.budget.minutes is None:
            size, reason = SIZE_OF_STEPS, "there is no GPU"
        else:
            size = next(name for most, name in SIZE_BY_MINUTES if self.budget.minutes <= most)
            reason = "no GPU and little time: a larger network would make too few updates"
            reason = "no GPU, and much time" if size != "tiny" else reason
        self.choose("size", size, reason)
        reason = "learns fastest while it collects" if self.data is None else "learns which recorded actions were good"
        self.choose("agent.kind", "actor-critic", reason)

    def _choose_memory(self) -> None:
        facts = self.facts
        horizon, attempts, tokens = facts.horizon, facts.num_attempts != 1, TOKENS
        if attempts and horizon is not None:
            context = min(horizon, WHOLE_ATTEMPTS)
            reason = f"all attempts at a task, up to {horizon:,} steps"
        elif facts.has_images:
            context = min(CONTEXT_OF_IMAGES, horizon or CONTEXT_OF_IMAGES)
            reason = "an image shows much of the state, and many short windows differ more from each other"
        elif horizon is not None and horizon <= facts.memory_limit:
            context, reason = horizon, f"a whole episode has {horizon:,} steps at most"
        elif facts.is_fixed and facts.length_max <= facts.memory_limit:
            context, reason = facts.length_max, f"every episode of random play had {facts.length_max:,} steps"
        elif horizon is None and facts.length_max <= WHOLE_EPISODE:
            context = UNKNOWN_EPISODE
            reason = f"no limit of an episode is known; the longest seen had {facts.length_max:,}"
        elif self._is_density and not facts.has_text:
            context, reason = CONTEXT_OF_BOX, "continuous control needs many quick updates more than long windows"
            tokens = TOKENS_OF_BOX
        elif facts.has_text:
            context, reason = CONTEXT_OF_TEXT, "a text shows part of the state; episodes are long"
        elif facts.shows_state is False:
            context, reason = CONTEXT_OF_HIDDEN, "an observation does not show the state: what does may lie far back"
        else:
            context, reason = CONTEXT, "episodes are long, and short windows make quick updates"
        context = self.choose("train.context_length", context, reason)
        is_long = not attempts and facts.longest > WHOLE_EPISODE
        if facts.shows_state and is_long and self.find("agent.sequence") is None:
            reason = "random play shows nothing to remember, and updates without memory take half the time"
            self.choose("agent.sequence.kind", "identity", reason)
        tokens = TOKENS_ON_GPU if facts.has_gpu else tokens
        length, least = _to_number(context, WHOLE_ATTEMPTS), LEAST_WINDOWS
        if facts.forgets_actions:
            least = max(least, min(WINDOWS_OF_GAME, TOKENS_OF_GAME // length))
        windows = max(least, tokens // length)
        parts = self.find("train.ranks", 1) * self.find("train.grad_accumulation", 1)
        windows = -(-windows // parts) * parts
        reason = f"about {tokens:,} time steps an update"
        if tokens // length < least:
            reason = "windows are long, and fewer would differ too little from each other"
        if least > LEAST_WINDOWS:
            reason = "what must be remembered is learned from many windows"
        self.choose("train.batch_size", windows, reason)

    def _choose_discounts(self) -> None:
        if self._agent_type.critic is None:
            return
        if self.facts.rewards_at_once:
            reason = "no action changes more than its own reward, and later ones would only add noise"
            self.choose("agent.acting_gamma", GAMMA_AT_ONCE, reason)
            self.choose("agent.gammas", [], "there is nothing farther ahead to learn")
            return
        if self._is_timed_control:
            reason = f"looks {TIMED_HORIZON} steps ahead: only time ends an episode, no mistake does"
            self.choose("agent.acting_gamma", round_digits(1 - 1 / TIMED_HORIZON, 4), reason)
            self.choose("agent.gammas", [], "values of that discount alone: more updates in the same time")
            return
        length = self.facts.longest
        if self.data is not None:
            horizon = min(max(length, LEAST_HORIZON), DATA_HORIZON)
            reason = f"looks {horizon:,} steps ahead: farther, values of actions that nobody took would add up"
            self.choose("agent.acting_gamma", round_digits(1 - 1 / horizon, 4), reason)
            self.choose("agent.gammas", [], "values of that discount alone: more updates in the same time")
            return
        horizon = min(max(length, LEAST_HORIZON), MOST_HORIZON)
        reason = f"looks {horizon:,} steps ahead: an episode takes up to {length:,}"
        self.choose("agent.acting_gamma", round_digits(1 - 1 / horizon, 4), reason)
        middle = math.sqrt(SHORT_HORIZON * horizon)
        gammas = [round_digits(1 - 1 / SHORT_HORIZON, 4), round_digits(1 - 1 / middle, 4)]
        self.choose("agent.gammas", gammas, f"values {SHORT_HORIZON} and {middle:.0f} steps ahead, learned sooner")

    def _choose_targets(self) -> None:
        facts = self.facts
        is_on_grid = self._uses_grid
        if is_on_grid:
            points = GRID_POINTS.get(facts.action_size, LEAST_GRID_POINTS)
            reason = "the value of each of a few actions is learned sooner than a surface of values"
            self.choose("agent.actor.distribution", "grid", reason)
            number = f"{points**facts.action_size:,} actions"
            self.choose("agent.actor.grid_points", points, f"{number}: as many values in each of {facts.action_size}")
        if self.data is not None:
            self._choose_imitation()
        elif (facts.action == "Discrete" or is_on_grid) and self._has_tables:
            if not facts.rewards_at_once:
                reason = "rewards reach earlier steps, except past actions that the policy avoids"
                self.choose("agent.trace", "retrace", reason)
            reason = "holds the policy open where actions matter less than usual"
            self.choose("agent.entropy_weight", ENTROPY_WEIGHT, reason)
        elif self._agent_type.critic is not None:
            self.choose("agent.n_step", N_STEP, "short returns before the value: no critic has one for each action")
            # From 0, values of -1 a step fall to -1,000 in as many steps of the targets, and all the while their scale
            # hides what actions change. A cheetah that is to run at 2 m/s, two minutes: -1,790 (it stands at -2,000),
            # with 2 more for each step 1,205 of 2,000; with values that start at random play's, -1,195. At a velocity
            # that is shown: -1,795 before, -1,254. Where steps are also paid, values lie on both sides of 0:
            # gymnasium's cheetah had 1,298 so, and 2,120 and 2,820 from 0.
            is_costly = facts.only_costs and facts.is_fixed and facts.longest > WHOLE_EPISODE
            if is_costly and facts.return_mean and self._agent_type.critic == "scalar":
                reward = round_digits(facts.return_mean / facts.length_mean)
                reason = "values start at what random play costs: it was never paid, and ended by time alone"
                self.choose("agent.popart.reward_mean", reward, reason)
        # A cheetah that is shown the velocity at which it is to run, 150 CPU seconds: -612 and -863; before, with three
        # discounts up to .999 and cloning, -1,254. One change at a time: that discount -1,453, no cloning -1,159, both
        # without the bonus -943, discount and bonus with cloning -1,568. gymnasium's cheetah, three seeds: 2,046 to
        # 2,345, and 990 to 3,052 before. Hopper, which a fall ends, had 552, 393 so, and 973 by the longest discount.
        # Two attempts of cheetah-dir: 83 after 180 seconds, and about 0 before; but 754 after twenty minutes, and 915
        # before (one seed each).
        if self._is_timed_control:
            self.choose("agent.bc_weight", 0.0, "the policy follows values alone: noise is not worth imitating")
            self.choose("agent.entropy_weight", "auto", "keeps actions open: minus one nat of entropy a dimension")
            if self._find_sequence() not in WITHOUT_MEMORY:
                self.choose("agent.shortcut", True, "torques follow from exact numbers, which a memory blurs")
        is_transformer = self._find_sequence() == "transformer"
        # POPGym's Autoencode after 150 CPU seconds: .03, -.19 by Muon, -.44 by AdamW; lakes of 4 x 4 after 100: 3.90,
        # 3.45. Two attempts of cheetah-dir were not learned in 150 seconds, by either.
        if is_transformer and not self._is_density and self.find("train.sharding", "none") == "none":
            self.choose("train.optimizer", "muon", "what is to be remembered is found in fewer updates")
        if facts.num_attempts == 1 and (facts.horizon or math.inf) > facts.memory_limit:
            return
        if any(row.setting == "agent.trace" for row in self.rows):
            self.choose("agent.trace_decay", TRACE_DECAY_OF_ATTEMPTS, "what helps a later attempt comes late")
        if is_transformer:
            # What is played back in reverse is found by its time, which rotary positions hide; what came some steps ago
            # by its distance: after 40,000 steps RepeatPreviousEasy had .99 by rotary positions or both, -.14 by time.
            position, reason = "rope", "finds the step before by its distance"
            if facts.rewards_at_once:
                position, reason = "both", "finds what was shown by its distance or by its time"
            self.choose("agent.sequence.position", position, reason)
        if not facts.has_images:  # which cannot be predicted
            self.choose("agent.critic_weight", CRITIC_WEIGHT_OF_ATTEMPTS, "leaves room for what must be remembered")
            loss = [{"kind": "next-step", "weight": PREDICTION_WEIGHT}]
            self.choose("agent.auxiliary_losses", loss, "predicting the next observation teaches what to remember")

    def _choose_imitation(self) -> None:
        """Choose what a policy that learns from a dataset follows beside its critics."""
        if self._agent_type.critic is None:
            return
        self.choose("agent.n_step", N_STEP, "short returns before the value: rewards reach earlier steps sooner")
        if self._agent_type.actor_weight > 0:
            reason = "imitates recorded actions that were better than usual: values of others are guesses"
            self.choose("agent.bc_weight", IMITATION_WEIGHT, reason)

    def _find_sequence(self) -> Any:
        """Find the kind of sequence encoder that is given or chosen."""
        chosen = next((row.value for row in self.rows if row.setting == "agent.sequence.kind"), "transformer")
        return self.find("agent.sequence.kind", chosen)

    def _choose_inputs(self) -> None:
        facts = self.facts
        largest = f"observations are up to {facts.observation_max:.3g}"
        is_small = facts.observation_max <= SMALL_OBSERVATION and facts.reward_max <= SMALL_REWARD
        is_faint = 0 < facts.observation_min < FAINT_OBSERVATION
        reason = f"{largest}, rewards up to {facts.reward_max:.3g}"
        if is_faint:
            reason = f"one of the numbers observed is up to {facts.observation_min:.3g} only"
        self.choose("agent.timestep.normalize", is_faint or not is_small, reason)
        self.choose("agent.timestep.symlog", facts.observation_max > BOUNDED_OBSERVATION, largest)
        if facts.action_mask:
            self.choose("agent.action_mask", facts.action_mask, "it says which actions are legal")

    def _choose_actors(self) -> None:
        facts = self.facts
        most = ACTORS if facts.one_by_one else BATCHED_ACTORS
        kind = "stepped one by one" if facts.one_by_one else "stepped as one batch"
        length = self._count_first_steps()
        actors = most
        while actors > 1 and actors * length > self._limit_first_steps(actors):
            actors //= 2
        reason = f"environments {kind}"
        if actors != most:
            reason = f"each still stores {EPISODES_PER_ACTOR} episodes or windows"
        self.choose("collect.actors", actors, reason)

    def _count_first_steps(self) -> int:
        """Count the steps that an actor takes until there is something to learn from: an episode, or a window of one,
        as a chain stores running episodes in pieces when too much would be missing (`collect.chunk_steps`)."""
        longest = max(self.facts.longest, 1)
        if self.find("collect.chunk_steps", "auto") == 0:
            return longest
        context = next(row.value for row in self.rows if row.setting == "train.context_length")
        return min(longest, _to_number(context, WHOLE_EPISODE))

    def choose_schedule(self, rates: Rates | None, *, spent: float = 0.0) -> float | None:
        """Choose epochs, steps, updates and evaluations that fill the budget, and what is a share of them. Return the
        seconds that the whole command is expected to take; None for a budget in steps.

        `rates` is needed for a budget of time, of which `spent` seconds have passed.
        """
        budget = self.budget
        if self.data is not None:
            assert rates is not None
            return self._choose_data_schedule(rates, spent)
        actors, tokens, first = self._count_units()
        if budget.steps is not None:
            plan = self._plan_steps(self._count_actions(budget.steps), tokens=tokens, actors=actors, first=first)
        else:
            assert rates is not None
            plan = self._plan_time(rates, self._find_time(spent), tokens=tokens, actors=actors, first=first)
        self.choose("epochs", plan.epochs, plan.why_epochs)
        self.choose("collect.steps", plan.collect, plan.why_collect)
        self.choose("train.steps", plan.train, plan.why_train)
        steps = plan.first_collect + (plan.epochs - 1) * plan.collect
        updates = plan.first_train + (plan.epochs - 1) * plan.train
        self._choose_shares(steps=steps, updates=updates, actors=actors)
        self.choose("train.decay_steps", updates, "the learning rate falls to a tenth until the end")
        has_bonus = any(row.setting == "agent.entropy_weight" and row.value not in (0, "auto") for row in self.rows)
        if has_bonus and self.facts.num_attempts == 1:
            self.choose("train.entropy_decay_steps", updates, "the policy closes where critics agree")
        self._choose_evaluation(plan.final_episodes)
        self.choose("stages", plan.list_stages(), plan.why_stages)
        return None if rates is None else spent + CLOSING_SECONDS + plan.seconds

    def _find_time(self, spent: float) -> float:
        """Find the seconds that are left for the run after `spent`."""
        assert self.budget.minutes is not None
        seconds = 60 * self.budget.minutes
        return max(seconds - spent - CLOSING_SECONDS, LEAST_TIME_SHARE * seconds)

    def _choose_data_schedule(self, rates: Rates, spent: float) -> float:
        """Choose epochs, updates and evaluations of a run that learns from a dataset, and what is a share of them, as
        `choose_schedule` does."""
        assert self.data is not None
        seconds, update = self._find_time(spent), OVERHEAD * rates.update_seconds
        episode = rates.collect_seconds * self.facts.typical
        number = final = episodes = 0
        if episode:
            number, episodes, final = _count_evaluations(seconds, episode)
        other = number * episodes * episode + 1.25 * final * episode
        epochs = max(number, LEAST_EPOCHS)
        if self._plays:
            actors = self._count_units()[0]
            steps = self._count_actions(self.budget.steps or 0)
            other += OVERHEAD * rates.collect_seconds * steps
            first = min(EPOCHS_BEFORE_PLAY, max(steps // actors, 1))
            epochs = 2 * first
        epochs = self.choose("epochs", self.find("epochs") or epochs, "fill the time")
        left = max(seconds - other - epochs * EPOCH_OVERHEAD, LEAST_TIME_SHARE * seconds)
        reason = f"{1 / rates.update_seconds:,.2g} updates a second, {left / seconds:.0%} of the time"
        train = self.choose("train.steps", _round_down(left / epochs / update), reason)
        updates = epochs * train
        stages: list[dict[str, Any]] = [{"stage": "ingest", "stop_epoch": 1}, {"stage": "train"}]
        if self._plays:
            stages = self._list_stages_of_play(epochs)
            collect = max(steps // max(epochs - epochs // 2, 1), 1)
            self.choose("collect.steps", collect, f"{steps:,} steps in all, once half of the updates are made")
            self._choose_exploration(steps, actors)
        self._choose_learning_shares(updates)
        self.choose("train.decay_steps", updates, "the learning rate falls to a tenth until the end")
        reason = "there is no environment to evaluate in"
        if number:
            self._choose_evaluation(final)
            every = max(math.ceil(epochs / number), 1)
            stages += _list_evaluations(every, episodes)
            reason = f"{math.ceil(epochs / every)} evaluations of {episodes} episodes choose the best checkpoint"
        times = updates * self._count_tokens() / self.data.total_steps
        self.choose("stages", stages, f"a recorded step is learned from {times:.2g} times; {reason}")
        return spent + CLOSING_SECONDS + updates * update + epochs * EPOCH_OVERHEAD + other

    def _list_stages_of_play(self, epochs: int) -> list[dict[str, Any]]:
        """List the stages of a run that learns from a dataset alone in the first half of its epochs, and also plays in
        the second, where it draws half of each batch from its own play (Ball et al. 2023, arXiv 2302.02948)."""
        lake = self.choose("source.lake", DATA_LAKE, "apart from what the run plays, which is drawn as often")
        start = epochs // 2
        return [
            {"stage": "ingest", "stop_epoch": 1},
            {"stage": "train", "stop_epoch": start, "lakes": [lake]},
            {"stage": "collect", "start_epoch": start},
            {"stage": "train", "start_epoch": start, "lakes": [f"{lake}:0.5", "{run}/lake:0.5"]},
        ]

    def choose_amounts(self) -> None:
        """Choose for stages that are run by hand what `choose_schedule` does for a chain of as many environment steps:
        the updates of all its epochs are one training; for a dataset, as many as for steps that are collected. As more
        may follow, the learning rate does not fall."""
        if self.data is not None:
            updates = max(round(REPLAY_RATIO * self.data.total_steps / self._count_tokens()), 1)
            updates = self.choose("train.steps", updates, f"a recorded step is learned from {REPLAY_RATIO:g} times")
            self._choose_learning_shares(updates)
            if self.facts.name:
                most = EVALUATION_SHARE * 2 * self.data.total_steps / self.facts.typical
                self._choose_evaluation(_clamp(most, LEAST_FINAL_EPISODES, MOST_FINAL_EPISODES))
            return
        assert self.budget.steps is not None
        steps = self._count_actions(self.budget.steps)
        actors, tokens, first = self._count_units()
        plan = self._plan_steps(steps, tokens=tokens, actors=actors, first=first, in_epochs=False)
        updates = plan.first_train + (plan.epochs - 1) * plan.train
        updates = self.choose("train.steps", updates, f"in all: {plan.why_train}")
        self._choose_shares(steps=steps, updates=updates, actors=actors)
        self._choose_evaluation(plan.final_episodes)

    def _count_actions(self, steps: int) -> int:
        """Count the actions that are chosen in so many steps of the environment: the steps of collecting."""
        return max(steps // self.facts.action_repeat, 1)

    def _count_units(self) -> tuple[int, int, int]:
        """Read off the number of actors, the time steps of an update, and the least steps of the first epoch."""
        values = {row.setting: row.value for row in self.rows}
        actors, tokens = _to_number(values["collect.actors"], ACTORS), self._count_tokens()
        first = actors  # running episodes are stored in pieces
        if self.find("collect.chunk_steps", "auto") == 0:
            first = actors * self.facts.longest
        return actors, tokens, first

    def _count_tokens(self) -> int:
        """Read off the time steps of an update."""
        values = {row.setting: row.value for row in self.rows}
        context = _to_number(values["train.context_length"], min(self.facts.longest, WHOLE_ATTEMPTS))
        return values["train.batch_size"] * context

    def _choose_evaluation(self, episodes: int) -> None:
        self.choose("evaluate.episodes", episodes, "the closing score, on fresh tasks")
        self.choose("evaluate.actors", min(episodes, MOST_EPISODES), "all at once")

    def _choose_shares(self, *, steps: int, updates: int, actors: int) -> None:
        """Choose the schedules that are shares of the run."""
        self._choose_exploration(steps, actors)
        self._choose_learning_shares(updates)
        half_life = max(round(HALF_LIFE_SHARE * steps), 1)
        self.choose("train.half_life", half_life, "what an older policy did counts less")

    def _choose_learning_shares(self, updates: int) -> None:
        if self._agent_type.critic is not None:
            tau = round_digits(min(max(TARGET_UPDATES / updates, LEAST_TAU), MOST_TAU), 3)
            self.choose("agent.target_tau", tau, f"targets follow within a share of {updates:,} updates")
        if not self.find("init.source"):  # what has been learned before would be forgotten
            rate = max(min(math.sqrt(RATE_UPDATES / updates), 1.0) * MOST_RATE, LEAST_RATE)
            self.choose("train.learning_rate", round_digits(rate, 2), f"{updates:,} updates: the fewer, the larger")
        warmup = max(min(round(WARMUP_SHARE * updates), MOST_WARMUP), 1)
        self.choose("train.warmup_steps", warmup, "the learning rate rises first")
        self.choose("train.ema_decay", EMA_DECAY, "scores of averaged weights vary less")

    def _choose_exploration(self, steps: int, actors: int) -> None:
        is_noise = self._is_density
        start = EXPLORATION_START_BOX if is_noise else EXPLORATION_START
        what = "noise" if is_noise else "random actions"
        reason = f"{what} at first"
        if self.find("init.source") or self.data is not None:
            start = EXPLORATION_START_WARM
            reason = f"a little {what}, since the policy it begins with has learned already"
        self.choose("exploration.start", start, reason)
        self.choose("exploration.end", EXPLORATION_END, "and a little until the end")
        leads_on = not self.facts.rewards_at_once
        if leads_on and (self.facts.action == "Discrete" or self._uses_grid) and not self.find("agent.action_mask", ""):
            persistence, reason = PERSISTENCE, "random actions that are repeated lead farther"
            if self.facts.return_error == 0 and not self.facts.has_images and not self.facts.has_text:
                persistence, reason = PERSISTENCE_FAR, "all random episodes have the same return: it takes others"
            self.choose("exploration.persistence", persistence, reason)
            self._choose_explorers()
        each = max(round(EXPLORATION_SHARE * steps / actors), 1)
        reason = f"{EXPLORATION_SHARE:.0%} of the {steps // actors:,} steps of an actor"
        self.choose("exploration.steps", each, reason)

    def _choose_explorers(self) -> None:
        """Choose which episodes, or parts of them, explore longer than others."""
        if self.facts.num_attempts != 1 and self.facts.horizon is not None:
            self.choose("exploration.kind", "bilevel", "fewer in later attempts, which use what was found")
            return
        share, reason = EXPLORERS, "of the episodes explore as at first: they meet what the policy has given up"
        if self.facts.pays_alike and self.facts.length_mean < EARLY_END * self.facts.longest:
            share, reason = FEW_EXPLORERS, "of the episodes explore as at first: only the length of an episode pays"
        self.choose("exploration.explorers", share, reason)

    def _limit_first_steps(self, actors: int) -> float:
        """Limit the steps that pass before every actor has filled a window, or ended an episode."""
        budget = self.budget
        if budget.steps is not None:
            return self._count_actions(budget.steps) / EPISODES_PER_ACTOR
        assert budget.minutes is not None
        step = self.facts.step_seconds + ROUND_SECONDS / actors
        whole = 60 * budget.minutes * ACTING_SHARE / step
        return min(whole / EPISODES_PER_ACTOR, 60 * budget.minutes * FIRST_COLLECT_SHARE / step)

    def _plan_time(self, rates: Rates, seconds: float, *, tokens: int, actors: int, first: int) -> _Plan:
        step, update = OVERHEAD * rates.collect_seconds, OVERHEAD * rates.update_seconds
        episode = rates.collect_seconds * self.facts.typical
        number, episodes, final = _count_evaluations(seconds, episode)
        # The usual replay ratio, unless it leaves too little of the time to collecting or to learning.
        lowest, highest = (
            share / (1 - share) * step / (update / tokens) for share in (LEAST_UPDATE_SHARE, MOST_UPDATE_SHARE)
        )
        ratio = min(max(min(max(REPLAY_RATIO, lowest), highest), LEAST_REPLAY), MOST_REPLAY)
        given = self.find("epochs"), self.find("collect.steps"), self.find("train.steps")
        own_epochs, own_collect, own_train = given
        if own_collect and own_train:
            ratio = own_train * tokens / own_collect
        each = step + ratio * update / tokens  # seconds of an environment step, with the updates that it is used in
        evaluating = number * episodes * episode + 1.25 * final * episode
        epochs = own_epochs or _clamp(seconds / EPOCH_SECONDS, LEAST_EPOCHS, MOST_EPOCHS)
        left = max(seconds - evaluating - epochs * EPOCH_OVERHEAD, LEAST_TIME_SHARE * seconds)
        fitting = own_train * tokens / ratio if own_train else left / epochs / each
        collect = own_collect or _round_down(max(fitting, actors), multiple=actors)
        train = own_train or _round_down(max(collect * ratio / tokens + 0.5, 1))
        # A quick first epoch, for an early score, unless the user says what an epoch is.
        part = 1.0 if any(given) else min(FIRST_EPOCH_SECONDS / (collect * each), 1.0)
        first_collect, first_train = max(round(collect * part), 1, first), max(round(train * part), 1)
        spent_first, epoch = first_collect * step + first_train * update, collect * step + train * update
        more = left - spent_first + (epochs - 1) * EPOCH_OVERHEAD
        epochs = own_epochs or max(1 + math.floor(more / (epoch + EPOCH_OVERHEAD) + 0.5), 1)
        every = max(math.ceil(epochs / number), 1)
        number = math.ceil(epochs / every)
        evaluating = number * episodes * episode + 1.25 * final * episode
        share = train * update / epoch
        return _Plan(
            epochs=epochs,
            collect=collect,
            train=train,
            first_collect=first_collect,
            first_train=first_train,
            every=every,
            episodes=episodes,
            final_episodes=final,
            why_epochs=f"fill the time: {epoch:.2g} s each",
            why_collect=f"{1 / rates.collect_seconds:,.2g} steps a second, {1 - share:.0%} of the time",
            why_train=f"{1 / rates.update_seconds:,.2g} updates a second, {share:.0%} of the time: "
            f"a step is learned from {train * tokens / collect:.2g} times",
            why_stages=f"{number} evaluations of {episodes} episodes choose the best checkpoint, "
            f"{(number * episodes * episode) / seconds:.0%} of the time",
            seconds=spent_first + (epochs - 1) * epoch + epochs * EPOCH_OVERHEAD + evaluating,
        )

    def _plan_steps(self, steps: int, *, tokens: int, actors: int, first: int, in_epochs: bool = True) -> _Plan:
        """Plan a run of so many steps. `in_epochs`: the user's own amounts are those of an epoch, not of the run."""
        given = self.find("epochs"), self.find("collect.steps"), self.find("train.steps")
        own_epochs, own_collect, own_train = given if in_epochs else (None, None, None)
        epochs = own_epochs or min(EPOCHS_OF_STEPS, max(steps // max(actors, 1), 1))
        first_collect = min(max(first, own_collect or -(-steps // epochs)), steps)
        if own_collect:
            epochs, collect = own_epochs or 1 + (steps - first_collect) // own_collect, own_collect
        else:
            epochs = own_epochs or 1 + min(epochs - 1, (steps - first_collect) // actors)
            collect = max((steps - first_collect) // (epochs - 1), 1) if epochs > 1 else first_collect
        # The total is the budget, unless the user says both of what it consists of.
        first_collect = max(steps - (epochs - 1) * collect, first_collect if own_epochs else 1)
        train = own_train or max(round(collect * REPLAY_RATIO / tokens), 1)
        most = EVALUATION_SHARE * 2 * steps / self.facts.typical  # episodes
        number = _clamp(most / USUAL_EPISODES, LEAST_EVALUATIONS, min(EVALUATIONS, max(epochs, LEAST_EVALUATIONS)))
        return _Plan(
            epochs=epochs,
            collect=collect,
            train=train,
            first_collect=first_collect,
            first_train=train,
            every=max(math.ceil(epochs / number), 1),
            episodes=_clamp(most / number, LEAST_EPISODES, MOST_EPISODES),
            final_episodes=_clamp(most, LEAST_FINAL_EPISODES, MOST_FINAL_EPISODES),
            why_epochs="looks at new data as often",
            why_collect=f"{steps:,} steps in all",
            why_train=f"a step is learned from {REPLAY_RATIO:g} times",
            why_stages=f"about {number} evaluations choose the best checkpoint",
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Amounts of a run: of an epoch, and of the first one, which may differ."""

    epochs: int
    collect: int
    train: int
    first_collect: int
    first_train: int
    every: int
    episodes: int
    final_episodes: int
    why_epochs: str
    why_collect: str
    why_train: str
    why_stages: str
    seconds: float = 0.0

    def list_stages(self) -> list[dict[str, Any]]:
        collect: list[dict[str, Any]] = [{"stage": "collect"}]
        train: list[dict[str, Any]] = [{"stage": "train"}]
        if self.first_collect != self.collect:
            collect = [{"stage": "collect", "steps": self.first_collect, "stop_epoch": 1}]
            collect += [{"stage": "collect", "start_epoch": 1}] if self.epochs > 1 else []
        if self.first_train != self.train:
            train = [{"stage": "train", "steps": self.first_train, "stop_epoch": 1}]
            train += [{"stage": "train", "start_epoch": 1}] if self.epochs > 1 else []
        return [*collect, *train, *_list_evaluations(self.every, self.episodes)]


def _count_evaluations(seconds: float, episode: float) -> tuple[int, int, int]:
    """Count the evaluations that a run of so many seconds affords, their episodes, and those of the closing one;
    `episode`: the seconds of one."""
    final = _clamp(FINAL_SHARE * seconds / episode, LEAST_FINAL_EPISODES, MOST_FINAL_EPISODES)
    number = _clamp(EVALUATION_SHARE * seconds / (USUAL_EPISODES * episode), LEAST_EVALUATIONS, EVALUATIONS)
    return number, _clamp(EVALUATION_SHARE * seconds / (number * episode), LEAST_EPISODES, MOST_EPISODES), final


def _list_evaluations(every: int, episodes: int) -> list[dict[str, Any]]:
    """List the stages that choose the best checkpoint, and the one that plays it in the end."""
    chooser = {"stage": "evaluate", "every": every, "episodes": episodes, "seed": EVALUATION_SEED}
    chooser |= {"actors": episodes, "mark_best": True, "split": "train"}
    return [chooser, {"stage": "evaluate", "checkpoint": "best", "label": "after training", "start_epoch": -1}]


def _to_number(value: Any, otherwise: int) -> int:
    """Convert a setting to a number; `otherwise` where the user gives "auto"."""
    return value if isinstance(value, int) else otherwise


def _clamp(value: float, least: int, most: int) -> int:
    return min(max(int(value), least), most)


def _round_down(value: float, *, multiple: int = 1) -> int:
    """Round down to two significant digits, then to a multiple."""
    whole = max(int(value), 1)
    unit = 10 ** max(len(str(whole)) - 2, 0)
    whole = whole // unit * unit
    return max(whole // multiple * multiple, multiple)


def round_digits(value: float, digits: int = 2) -> float:
    """Round to significant digits; to two, a plan does not pretend to know more."""
    return float(f"{value:.{digits}g}")
