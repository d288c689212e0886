"""Plans of acting: what a process needs in order to collect, or to play the episodes of an evaluation.

A plan is made once, by the stage, and is passed on whole: to the collector or evaluator of this process, and, pickled,
to those of other processes, each with its share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipelines.config.places import find_bundle, split_checkpoint
from pipelines.config.policy_files import load_record
from pipelines.config.run_directory import RunDirectory, describe_process
from pipelines.config.settings import (
    CollectSettings,
    EvaluateSettings,
    LakeSettings,
    LearnerSettings,
    Settings,
)
from pipelines.envs.env import Env, EnvSpec
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, silent
from pipelines.lake import collectors
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Spaces, make_grid
from pipelines.lake.storage import is_remote
from pipelines.lake.store import Lake
from pipelines.learning.checkpoint import Checkpoint
from pipelines.nets.actor import Categorical, make_distribution
from pipelines.rollout.environment import make_env, make_evaluation_env, workers
from pipelines.rollout.follower import CheckpointFollower, find_policy_source
from pipelines.rollout.learners import is_learner, make_learner
from pipelines.rollout.opponents import Groups, OpponentLoader, name_opponents, refuse_workers
from pipelines.rollout.policies import Acting, Policy, RandomPolicy, load_policy, require_log_prob, trained
from pipelines.rollout.rollout import Cutting

_CONTEXTS = 8  # in a piece, and kept of an episode for a new policy's memory

MakePolicy = Callable[[Env, int], Acting]
"""Makes the policy for the actors of an environment, with a seed."""


class KnownRun(Protocol):
    """A run's directory and identity."""

    @property
    def path(self) -> Path: ...

    @property
    def identity(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RunName:
    """A run's directory and identity, on a host that may not have the directory."""

    path: Path
    identity: str


@dataclass(frozen=True)
class NamedPolicy:
    """A policy that any process can load by its name. Learners begin as `seed` says, also in a collect that resumes."""

    name: str
    greedy: bool
    action_mask: str
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    seed: int = 0

    @classmethod
    def of(cls, settings: Settings, wanted: CollectSettings) -> NamedPolicy:
        """Name the policy of a collect. UsageError for a learner whose actors change tasks."""
        if is_learner(wanted.policy):
            if not wanted.tasks:
                raise UsageError(
                    f"'{wanted.policy}' learns one task for each actor, but episodes draw their tasks",
                    hint="give collect.tasks, names of tasks or a number of them",
                )
            if wanted.explore is True:
                raise UsageError(f"'{wanted.policy}' explores by itself", hint="leave out collect.explore")
        return cls(wanted.policy, wanted.greedy, settings.agent.action_mask, wanted.learner, settings.seed)

    def __call__(self, env: Env, seed: int) -> Acting:
        if is_learner(self.name):
            learner = make_learner(
                self.name, env.spec.spaces, self.learner, num_actors=env.num_envs, seed=self.seed, acting=seed
            )
            return Acting(policy=learner, policy_id=self.name, version=0)
        return load_policy(self.name, env, seed=seed, greedy=self.greedy, action_mask=self.action_mask)


class Seeds(NamedTuple):
    """Independent seeds of all random draws of a process."""

    env: int
    policy: int
    exploration: int


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """A collector: how it acts, and where its episodes go, into the lake at `place` under `name`.

    `behaviour` describes how it acts, for the collector's record; None in a chain, which explores on its schedule
    unless `collect.explore` is false. `replace`: remove an existing lake before the first episode is written. `policy`
    makes the first policy; None: as the settings say.

    `number`: which of `collect.collectors` it is, if there are several; `before`: the steps it has stored (None: to be
    counted); `together`: the steps that all of them have stored. Exploration is annealed over the steps of all.
    """

    settings: Settings
    place: Path | str
    name: str
    run: KnownRun | None = None
    behaviour: Mapping[str, Any] | None = None
    replace: bool = False
    policy: MakePolicy | None = None
    number: int | None = None
    before: int | None = None
    together: int = 0

    def share(self, number: int, **changes: Any) -> CollectionPlan:
        """Derive the plan of one of several collectors, which leaves the upkeep of the lake to their driver."""
        settings = self.settings.model_copy(update={"lake": LakeSettings(compact=False)})
        place = self.place if isinstance(self.place, str) else self.place.absolute()
        return replace(self, settings=settings, place=place, replace=False, number=number, **changes)

    @property
    def actors(self) -> int:
        """The number of actors, which the stage has decided on."""
        assert isinstance(self.settings.collect.actors, int)
        return self.settings.collect.actors

    @property
    def sharers(self) -> int:
        """The number of collectors that share the work, and the schedule of exploration."""
        return 1 if self.number is None else self.settings.collect.collectors

    def count_workers(self) -> int:
        """Count the processes that step the environments."""
        return workers(self.settings.env, self.settings.collect, actors=self.actors)

    def draw_seeds(self, before: int) -> Seeds:
        """Draw the seeds of a collector that has stored `before` steps, so that a resumed one does not repeat itself,
        nor any of several another."""
        return Seeds(*draw_seeds(self.settings.seed, before, number=self.number))

    def make_env(self, *, seed: int, workers: int, listener: Listener) -> Env:
        """Make the environments of all actors, each of which holds its task if tasks are named. InputMissing for a task
        that the environment does not have."""
        env, tasks = self.settings.env, self.settings.collect.tasks
        assert not isinstance(tasks, int)  # the stage has drawn them
        made = make_env(
            env,
            actors=self.actors,
            seed=seed,
            workers=workers,
            timeout_seconds=self.settings.collect.env_timeout_seconds,
            listener=listener,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(made.close)
            refuse_workers(made, workers)
            if not tasks:
                stack.pop_all()
                return made
            try:  # actor i plays episodes i, i + actors, ...: always task i modulo their number
                made.play_only(tasks)
            except InputMissing as error:
                hint = "name tasks as the column 'task' of its trajectories does, or leave out collect.tasks"
                raise InputMissing(error.message, hint=hint) from error
            stack.pop_all()
        return made

    def make_exploration(self, spec: EnvSpec, *, seed: int, before: int) -> Exploration | None:
        """Make the schedule of exploration, after `before` steps; None without exploration."""
        explore, mask = self.settings.collect.explore, self.settings.agent.action_mask
        by_schedule = self.behaviour is None and explore == "auto" and not is_learner(self.settings.collect.policy)
        if not (explore is True or by_schedule):
            return None
        schedule = {"steps": max(self.settings.exploration.steps // self.sharers, 1)}
        actor = self.settings.agent.actor
        is_on_grid = actor.distribution == "grid" and isinstance(spec.spaces.action, Box)
        exploration = Exploration(
            self.settings.exploration.model_copy(update=schedule),
            spec.spaces.action,
            self.actors,
            horizon=spec.horizon,
            seed=seed,
            legal=LegalActions(mask, spec.spaces) if mask else None,
            grid=make_grid(spec.spaces.action, actor.grid_points) if is_on_grid else None,
        )
        # A collector that was added later begins where the others are, not at the start of the schedule.
        exploration.steps = max(before, self.together // self.sharers) // self.actors
        return exploration

    def make_policy(self, env: Env, *, seed: int, listener: Listener) -> tuple[Acting, CheckpointFollower | None]:
        """Make the first policy, and what replaces it if it follows a training."""
        wanted, mask = self.settings.collect, self.settings.agent.action_mask
        if self.policy is not None:
            return self.policy(env, seed), None
        if not wanted.follow:
            return NamedPolicy.of(self.settings, wanted)(env, seed), None
        if wanted.policy != "auto":
            raise UsageError(
                f"both collect.policy = '{wanted.policy}' and collect.follow = '{wanted.follow}' are to act",
                hint="give --policy or --follow",
            )
        follower = CheckpointFollower(
            find_policy_source(wanted.follow),
            env,
            seed=seed,
            greedy=wanted.greedy,
            seconds=None if wanted.reload_seconds == "auto" else wanted.reload_seconds,
            listener=listener,
            action_mask=mask,
        )
        return follower.first(), follower

    def name_opponents(self, listener: Listener) -> Groups:
        """Name the opponents as of now; none where the settings name none."""
        return name_opponents(self.settings.collect.opponents, None if self.run is None else self.run.path, listener)

    def make_schema(self, spaces: Spaces) -> Schema:
        """Make the schema of what is stored."""
        return make_schema(spaces, self.settings.collect)

    def choose_cutting(self, horizon: int | None) -> Cutting:
        """Choose how episodes of at most `horizon` steps (None: unknown) are stored in pieces."""
        context, steps = self.settings.train.context_length_for(horizon), self.settings.collect.chunk_steps
        if steps == 0:
            return Cutting()
        if steps == "auto":
            steps = _CONTEXTS * context
            steps = 0 if horizon is not None and horizon <= steps else steps
        return Cutting(steps=steps, kept=_CONTEXTS * context, context=context if self.behaviour is None else 0)

    def describe(self, run: KnownRun | None, horizon: int | None) -> dict[str, Any]:
        """Describe the collector for its record in the lake."""
        wanted = self.settings.collect
        return {
            "run": None if run is None else collectors.place(run.path) | {"id": run.identity},
            "env": self.settings.env.model_dump(mode="json"),
            "seed": self.settings.seed,
            "process": describe_process(),
            "horizon": horizon,
            "behaviour": self.behaviour,
            "learner": wanted.learner.model_dump(mode="json") if is_learner(wanted.policy) else None,
        }


class PolicyForm(Protocol):
    """A form of a bundle that can act in place of its weights."""

    def policy(self, env: Env, *, greedy: bool, seed: int) -> Acting: ...


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """An evaluation: the tasks that are played, and the policy that plays them, a checkpoint or the `form` of a bundle.

    `tasks` are played in turn; without any, each kind of task is played equally often. `opponents` play the other seats
    (see `rollout.opponents`; none: random play). `place`: the actors of this
    process, if it is one of `sharers` that play together (None: all actors). An actor's tasks and the samples of its
    policy do not depend on the process that plays the others.
    """

    settings: Settings
    checkpoint: Checkpoint
    tasks: tuple[str, ...] = ()
    opponents: Groups = ()
    form: PolicyForm | None = None
    place: slice | None = None
    sharers: int = 1

    @property
    def wanted(self) -> EvaluateSettings:
        return self.settings.evaluate

    @property
    def total(self) -> int:
        """The number of actors of all processes."""
        return min(self.wanted.actors, self.wanted.episodes)

    def with_evaluate(self, wanted: EvaluateSettings) -> EvaluationPlan:
        """Replace the table `evaluate`."""
        return replace(self, settings=self.settings.model_copy(update={"evaluate": wanted}))

    def share(self, count: int) -> list[EvaluationPlan]:
        """Share the actors out to `count` processes."""
        ends = [self.total * number // count for number in range(count + 1)]
        return [replace(self, place=slice(*ends[number : number + 2]), sharers=count) for number in range(count)]

    def make_env(self, listener: Listener) -> Env:
        """Make the environments of these actors."""
        settings, place = self.settings, self.place or slice(0, self.total)
        actors = place.stop - place.start
        count = workers(settings.env, settings.collect, actors=actors, together=self.sharers)
        made = make_evaluation_env(
            settings.env,
            self.wanted,
            actors=actors,
            tasks=self.tasks,
            workers=count,
            timeout_seconds=settings.collect.env_timeout_seconds,
            offset=place.start,
            total=self.total,
            listener=listener,
        )
        return self._seat_opponents(made, count)

    def _seat_opponents(self, env: Env, workers: int) -> Env:
        """Have the opponents play in `env`, which is closed if they cannot."""
        with contextlib.ExitStack() as stack:
            stack.callback(env.close)
            refuse_workers(env, workers)
            if self.opponents:
                loader = OpponentLoader(env, seed=self.wanted.seed, action_mask=self.settings.agent.action_mask)
                env.play_against(loader.load(self.opponents))
            stack.pop_all()
        return env

    def make_drawn_env(self, listener: Listener, *, actors: int | None = None) -> Env:
        """Make environments in this process, to be drawn; as many actors as are evaluated play the same episodes."""
        count = self.total if actors is None else actors
        made = make_evaluation_env(
            self.settings.env, self.wanted, actors=count, tasks=self.tasks, drawn=True, listener=listener
        )
        return self._seat_opponents(made, 0)

    def make_policy(self, env: Env) -> Acting:
        """Make the policy for the actors of `env`."""
        seed, own = self.wanted.seed, self.settings.agent
        greedy = self.wanted.acts_greedily(by_default=self.checkpoint.greedy)
        if self.form is not None:
            return self.form.policy(env, greedy=greedy, seed=seed)
        temperature = self.wanted.temperature
        return trained(self.checkpoint, env, policy_id="", seed=seed, greedy=greedy, temperature=temperature, own=own)


def make_schema(spaces: Spaces, wanted: CollectSettings) -> Schema:
    """Make the schema of what is stored in an environment of these spaces."""
    return Schema(spaces, labelled=bool(wanted.label), logp=wanted.logp)


def make_labeller(settings: Settings, env: Env, *, seed: int) -> Policy | None:
    """Make the policy whose actions are stored as labels; None without labels. UsageError for a learner, and for an
    expert that the environment does not have."""
    name = settings.collect.label
    if not name:
        return None
    if is_learner(name):
        hint = "give expert, RUN[@CHECKPOINT], BUNDLE or module:attr"
        raise UsageError(f"collect.label = '{name}': a learner does not learn from what others do", hint=hint)
    return load_policy(name, env, seed=seed, greedy=True, action_mask=settings.agent.action_mask).policy


def require_probabilities(settings: Settings, env: Env) -> None:
    """Raise UsageError if a stage of a chain is to store log-probabilities that its policy does not know."""
    wanted, actions = settings.collect, env.spec.spaces.action
    if not wanted.logp:
        return
    if wanted.policy == "auto":  # the agent, which is not made yet, knows them if random play on its choices does
        distribution = make_distribution(actions, settings.agent.actor)
        policy: Policy = RandomPolicy(distribution.space if isinstance(distribution, Categorical) else actions, seed=0)
    else:
        policy = NamedPolicy.of(settings, wanted)(env, 0).policy
    single = settings.model_copy(update={"collect": wanted.model_copy(update={"actors": 1})})
    plan = CollectionPlan(settings=single, place="", name="")
    require_log_prob(policy, plan.make_exploration(env.spec, seed=0, before=0))


def draw_seeds(seed: int, position: int, *, count: int = 3, number: int | None = None) -> list[int]:
    """Draw independent seeds for all random draws of a process; `position` keeps a resumed one from repeating itself,
    and `number` several collectors from repeating each other."""
    words = [seed, position] if number is None else [seed, position, 1 + number]  # zeros at the end have no effect
    return [int(s) for s in np.random.SeedSequence(words).generate_state(count) >> 1]


def name_in_run(behaviour: Mapping[str, Any], directory: RunDirectory) -> str:
    """Name a collector of a run. A run has a single environment, so its random collector and its chain's collector have
    fixed names."""
    plain = behaviour == describe_behaviour(Settings())
    return directory.identity if plain else f"{directory.identity}-{collectors.digest(behaviour)}"


def describe_behaviour(settings: Settings) -> dict[str, Any]:
    """Describe how a collector outside a chain chooses its actions, as plain data."""
    wanted = settings.collect
    assert not isinstance(wanted.tasks, int)  # the stage has drawn them
    policy = _describe_policy(wanted.policy)
    return {
        "policy": "" if wanted.follow else "random" if policy == "auto" else policy,
        "follow": wanted.follow
        if is_remote(wanted.follow) or not wanted.follow
        else str(Path(wanted.follow).resolve()),
        "greedy": wanted.greedy,
        **({"tasks": list(wanted.tasks), "copies": wanted.copies} if wanted.tasks else {}),
        **({"label": _describe_policy(wanted.label)} if wanted.label else {}),
        **({"logp": True} if wanted.logp else {}),
        **({"opponents": [_describe_policy(name) for name in wanted.opponents]} if wanted.opponents else {}),
        **({"learner": wanted.learner.model_dump(mode="json")} if is_learner(policy) else {}),
        "exploration": settings.exploration.model_dump(mode="json") if wanted.explore is True else None,
        "action_mask": settings.agent.action_mask,
    }


def _describe_policy(name: str) -> str:
    """Name a policy so that another one has another name: a run by its place, a bundle by its content, so that it may
    be moved."""
    path, checkpoint = split_checkpoint(name)
    if RunDirectory(path).exists():
        return f"{Path(path).resolve()}{'@' if checkpoint else ''}{checkpoint}"
    directory = find_bundle(name)
    return name if directory is None else f"bundle:{load_record(directory)['checksum']}"


def plan_evaluation(
    settings: Settings, checkpoint: Checkpoint, directory: RunDirectory, listener: Listener = silent
) -> EvaluationPlan:
    """Plan the evaluation of a checkpoint of the run in `directory`: on which tasks, and against whom."""
    tasks = _find_tasks(settings.evaluate, settings.env.name, directory, listener)
    opponents = name_opponents(settings.evaluate.opponents, directory.path, listener)
    return EvaluationPlan(settings=settings, checkpoint=checkpoint, tasks=tuple(tasks), opponents=opponents)


def _find_tasks(wanted: EvaluateSettings, env: str, directory: RunDirectory, listener: Listener) -> list[str]:
    """Find the tasks that `evaluate.tasks` selects in the run's lakes: its own and those it was trained on.

    InputMissing if there are none, or more than the number of episodes to play.
    """
    if not wanted.tasks.strip():
        return []
    from pipelines.lake.sql.selection import tasks

    places = [directory.lake, *(lake["lake"] for lake in directory.load_record().get("lakes", ()))]
    lakes = {lake.id: lake for place in places if (lake := Lake.find(place)) is not None}
    if not lakes:
        raise InputMissing(f"run '{directory.path}' has no lake whose tasks could be chosen")
    found = {name for lake in lakes.values() for name in tasks(lake, wanted.tasks, env=env, listener=listener)}
    if not found:
        raise InputMissing(f"no trajectory of '{env}' matches --tasks", hint="see amago lake info")
    if len(found) > wanted.episodes:
        raise UsageError(
            f"{len(found)} tasks are chosen, {wanted.episodes} episodes are to be played",
            hint=f"give --episodes {len(found)} or more, or choose fewer tasks",
        )
    return sorted(found)
