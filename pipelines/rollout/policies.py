"""Policies: the interface, the random, expert and scripted ones, and those of checkpoints, loaded by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipelines.config import amago_weights
from pipelines.config.model import AgentSettings
from pipelines.config.places import AMAGO, find_bundle, split_checkpoint
from pipelines.config.run_directory import RunDirectory
from pipelines.envs.draws import SharedDraws
from pipelines.envs.env import Env, EnvSpec, EpisodeCounter
from pipelines.envs.exploration import Exploration, random_actions
from pipelines.envs.legal import LegalActions
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete, Space, Spaces, convert_to_stored
from pipelines.lake.store import describe_difference
from pipelines.learning import bundle
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.amago_inputs import make_checkpoint
from pipelines.learning.checkpoint import Checkpoint, load_agent
from pipelines.registry import Registry

_POLICIES = Registry("policy", {})
_STREAM = 2  # a stream separate from exploration with the same seed
_ActFunction = Callable[[Mapping[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@runtime_checkable
class Policy(Protocol):
    """Acts for N actors at once.

    `observation`: columns (N, ...); `prev_action` (N, ...) and `prev_reward` (N,) are the transition that led to it,
    and zero at the start of an episode; `time` (N,) int64 is the step within the episode: 0 resets the actor's memory.
    Actions are returned in the conventions of `lake.spaces`.

    `collect.logp` needs a policy of choices that also has `num_choices` and `log_prob` (`ChoicePolicy`).

    A policy may also have `split(sizes) -> bool`. If it returns True, `act(..., part=k)` acts for the k-th group of
    consecutive actors alone, with the same result as for all together. Groups may be some steps ahead of one another;
    all are at the same step when a policy is set.
    """

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray: ...


class Actors(Protocol):
    """The actors that a policy is made for: those of an environment, or of recorded episodes."""

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def num_envs(self) -> int: ...

    @property
    def episodes(self) -> EpisodeCounter: ...


@runtime_checkable
class ChoicePolicy(Policy, Protocol):
    """A policy of choices that knows how probable they were. `num_choices`: None where its actions are no choices."""

    @property
    def num_choices(self) -> int | None: ...

    def log_prob(self, actions: np.ndarray, part: int | None = None) -> np.ndarray:
        """Compute the log-probabilities (N,) of any `actions` where `act` last acted (for group `part`)."""
        ...


class RandomPolicy:
    """Uniform over the action space, or over the actions that `legal` allows."""

    def __init__(self, space: Space, *, seed: int, legal: LegalActions | None = None) -> None:
        self._space, self._legal = space, legal
        self._rng = np.random.default_rng([seed, _STREAM])
        self._num_actors = 0
        self._seen: Mapping[str, np.ndarray] = {}
        self._tape = SharedDraws(lambda: self._drawn(self._num_actors))

    def split(self, sizes: Sequence[int]) -> bool:
        """Return False if observations contain an action mask: then all actors must act together."""
        self._num_actors = sum(sizes)
        self._tape.split(sizes)
        return self._legal is None

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
        part: int | None = None,
    ) -> np.ndarray:
        self._seen = observation
        if self._legal is not None:
            return self._legal.draw(observation, self._rng)
        return self._drawn(len(time)) if part is None else self._tape.take(part)[self._tape.places[part]]

    @property
    def num_choices(self) -> int | None:
        """The number of choices; None for other spaces."""
        return self._space.n if isinstance(self._space, Discrete) else None

    def log_prob(self, actions: np.ndarray, part: int | None = None) -> np.ndarray:
        """Compute the log-probabilities (N,) of `actions` at the observation of the last `act`."""
        if self._legal is None:
            return np.full(len(actions), -np.log(self.num_choices or 1))
        with np.errstate(divide="ignore"):
            log_prob: np.ndarray = np.log(self._legal.probability(self._seen, actions))
        return log_prob

    def _drawn(self, num_actors: int) -> np.ndarray:
        return random_actions(self._space, num_actors, self._rng)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]


class ExpertPolicy:
    """The environment's own expert, which sees hidden state. UsageError if the environment has none."""

    def __init__(self, env: Env) -> None:
        if not env.has_expert:
            raise UsageError(f"environment '{env.spec.name}' has no expert")
        self._env = env

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        actions = self._env.expert()
        assert actions is not None
        return fit_actions(actions, self._env.spec.spaces.action, f"the expert of environment '{self._env.spec.name}'")


class FunctionPolicy:
    """A plain function with the arguments of `Policy.act`."""

    def __init__(self, function: _ActFunction) -> None:
        self._function = function

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        return self._function(observation, prev_action, prev_reward, time)


class CheckedPolicy:
    """A policy that is not ours: StageFailed where it raises, or gives an action outside of the space."""

    def __init__(self, policy: Policy, name: str, space: Space) -> None:
        self._policy, self._name, self._space = policy, name, space

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.__dict__["_policy"], attribute)

    def act(self, *seen: Any, **given: Any) -> np.ndarray:
        try:
            actions = self._policy.act(*seen, **given)
        except AmagoError:
            raise
        except Exception as error:  # whatever somebody else's code may raise; -v shows its traceback
            raise StageFailed(f"policy '{self._name}' failed: {type(error).__name__}: {error}") from error
        return fit_actions(actions, self._space, f"policy '{self._name}'")


def fit_actions(given: Any, space: Space, whose: str) -> np.ndarray:
    """Convert actions (N, ...), counted from 0 if discrete, to stored form: numbers of a Box are moved into its bounds.
    StageFailed unless they are of the space; their number is not checked."""
    try:
        actions = np.asarray(given)
        if isinstance(space, Box):
            actions = np.clip(actions, -1.0, 1.0)
        elif isinstance(space, Discrete):
            space = replace(space, start=0)
        elif isinstance(space, MultiDiscrete):
            space = replace(space, start=None)
        return convert_to_stored(actions, space, actions.shape[: actions.ndim - len(space.shape)])
    except (TypeError, ValueError) as error:
        raise StageFailed(
            f"{whose} gave actions that are not of their space: {error}",
            hint="choices count from 0; numbers lie in [-1, 1], which is rescaled to the environment's bounds",
        ) from error


def require_log_prob(policy: Policy, exploration: Exploration | None) -> ChoicePolicy:
    """Return `policy`. UsageError if the log-probabilities of its actions under `exploration` are not known."""
    if exploration is not None and exploration.settings.persistence > 1:
        raise UsageError(
            "collect.logp: the probability of an action is unknown where random actions persist",
            hint="set exploration.persistence=1, or leave out collect.logp",
        )
    if not isinstance(policy, ChoicePolicy) or policy.num_choices is None:
        raise UsageError(
            "collect.logp: this policy does not give the probabilities of its actions",
            hint="those of random play with Discrete actions are known, and of agents with Discrete actions or a grid",
        )
    if exploration is not None and exploration.num_choices != policy.num_choices:
        raise UsageError(
            f"collect.logp: the policy chooses among {policy.num_choices} points of a grid, but exploration does not",
            hint="set agent.actor.distribution=grid and agent.actor.grid_points as the policy has them",
        )
    return policy


def make_scripted_policy(name: str, *, spaces: Spaces, num_actors: int, seed: int) -> Policy:
    """Load the policy named `module:attr`.

    A class is instantiated with `spaces=`, `num_actors=` and `seed=`; an object with `act` is used directly; any other
    callable is used as `act`. InputMissing if it does not exist, UsageError if it is none of these.
    """
    try:
        target: Any = _POLICIES.get(name)
    except AmagoError:
        raise
    except Exception as error:
        raise StageFailed(f"policy '{name}' cannot be imported: {type(error).__name__}: {error}") from error
    if inspect.isclass(target):
        factory: Callable[..., Any] = target
        try:
            target = factory(spaces=spaces, num_actors=num_actors, seed=seed)
        except Exception as error:
            raise StageFailed(f"policy '{name}' cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(target, Policy):
        return CheckedPolicy(target, name, spaces.action)
    if callable(target):
        return CheckedPolicy(FunctionPolicy(target), name, spaces.action)
    raise UsageError(
        f"policy '{name}' is a {type(target).__name__}",
        hint="give a class, an object with act, or a function",
    )


@dataclass(frozen=True, kw_only=True)
class Acting:
    """A policy, its name, the number of its gradient updates (-1 if it is not trained), its run, and the observation
    column of its action mask."""

    policy: Policy
    policy_id: str
    version: int = -1
    run: Path | None = None
    action_mask: str = ""


def load_policy(name: str, env: Actors, *, seed: int, greedy: bool = False, action_mask: str = "") -> Acting:
    """Load the policy called `name`: random, expert, RUN[@CHECKPOINT], BUNDLE, amago:PATH or module:attr.
    `action_mask` is the column that masks the random policy's actions.

    InputMissing if it does not exist, or was trained for other spaces.
    """
    spaces = env.spec.spaces
    if name in ("auto", "random"):
        return make_random_policy(spaces, seed=seed, action_mask=action_mask)
    if name == "expert":
        if not isinstance(env, Env):
            raise UsageError(f"recorded episodes of '{env.spec.name}' have no expert")
        return Acting(policy=ExpertPolicy(env), policy_id="expert")
    is_file = name.startswith(AMAGO)
    if is_file or RunDirectory(split_checkpoint(name)[0]).exists() or find_bundle(name) is not None:
        found = load_trained(name, spaces=spaces)
        acting = trained(found.checkpoint, env, policy_id=found.identity, seed=seed, greedy=greedy)
        return replace(acting, run=found.run)
    if ":" not in name:
        raise InputMissing(
            f"no run or bundle at '{split_checkpoint(name)[0]}' whose policy could act",
            hint="give random, expert, RUN[@CHECKPOINT], BUNDLE, amago:PATH or module:attr",
        )
    policy = make_scripted_policy(name, spaces=spaces, num_actors=env.num_envs, seed=seed)
    return Acting(policy=policy, policy_id=name)


def make_random_policy(spaces: Spaces, *, seed: int, action_mask: str = "") -> Acting:
    """Make the random policy. UsageError if there is no column `action_mask`."""
    legal = LegalActions(action_mask, spaces) if action_mask else None
    policy = RandomPolicy(spaces.action, seed=seed, legal=legal)
    return Acting(policy=policy, policy_id="random", action_mask=action_mask)


@dataclass(frozen=True, kw_only=True)
class NamedCheckpoint:
    """The checkpoint of a run, or a bundle or a file of AMAGO (`run` None), at `place`; `identity`: the name of its
    policy in lakes."""

    checkpoint: Checkpoint
    identity: str
    place: Path
    run: Path | None = None


def load_trained(name: str, *, spaces: Spaces | None = None, settings: AgentSettings | None = None) -> NamedCheckpoint:
    """Load the checkpoint named RUN[@CHECKPOINT], the bundle of that name, or amago:PATH for `spaces`, whose agent has
    these `settings` if given. InputMissing if there is none, IntegrityError if it is damaged."""
    if name.startswith(AMAGO):
        weights = amago_weights.read(name)
        if spaces is None:
            raise InputMissing(
                f"'{name}' does not name its spaces", hint=f"begin a run with it: amago train --init {name}"
            )
        theirs = make_checkpoint(weights, spaces, settings)
        return NamedCheckpoint(checkpoint=theirs, identity=weights.identity, place=weights.path)
    path, which = split_checkpoint(name)
    directory = find_bundle(name)
    if directory is not None and not RunDirectory(path).exists():
        found = bundle.read(directory)
        return NamedCheckpoint(checkpoint=found, identity=found.identity, place=directory)
    run = RunDirectory.open(path)
    checkpoint = checkpoints.load(run.checkpoints, which or "latest")
    return NamedCheckpoint(checkpoint=checkpoint, identity=run.identity, place=run.path, run=run.path)


def trained(
    checkpoint: Checkpoint, env: Actors, *, policy_id: str, seed: int, greedy: bool, temperature: float = 1.0,
    own: AgentSettings | None = None, explores: bool = False,
) -> Acting:  # fmt: skip
    """Make the policy of a checkpoint for all actors of `env`; `own` as for `load_agent`, `temperature` and `explores`
    as for `AgentPolicy`."""
    require_spaces(checkpoint, env)
    agent = load_agent(checkpoint, own=own)
    if env.spec.horizon is not None:
        agent.sequence.require_time(env.spec.horizon - 1)
    with checkpoint.understood():
        policy = AgentPolicy(
            agent,
            num_actors=env.num_envs,
            capacity=checkpoint.record["context_length"],
            greedy=greedy,
            seed=seed,
            offset=env.episodes.offset,
            total=env.episodes.total,
            temperature=temperature,
            explores=explores,
        )
    return Acting(
        policy=policy,
        policy_id=policy_id,
        version=checkpoint.update,
        action_mask=agent.settings.action_mask,
    )


def require_spaces(checkpoint: Checkpoint, env: Actors) -> None:
    """Raise InputMissing, listing the differences, unless the checkpoint was trained for the spaces of `env`."""
    with checkpoint.understood():
        ours = Spaces.from_json(checkpoint.record["spaces"])
    if ours != env.spec.spaces:
        raise InputMissing(
            f"{checkpoint.label} was trained for other spaces than those of '{env.spec.name}': "
            + "; ".join(describe_difference(ours, env.spec.spaces, ("trained for", "given"))),
        )
