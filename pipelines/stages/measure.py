"""Measurements for a run without a recipe: the environment in random play, and what acting and updates cost.

Costs are CPU seconds of this process where all of the work happens in it, which other load on the host changes little;
otherwise, with worker processes, several threads or a GPU, they are seconds of the clock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipelines.config.settings import CollectSettings, EnvSettings, Settings
from pipelines.data.batch import Batch
from pipelines.envs.env import Env, Observation
from pipelines.envs.goals import GOAL_RULES, GOAL_SEQUENCES, GoalReward
from pipelines.envs.make import is_users
from pipelines.errors import InputMissing
from pipelines.events import Listener, Progress
from pipelines.formats.base import Importer
from pipelines.lake.schema import ACTION, LOGP, REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.spaces import Box, Discrete, Ragged, Space, Spaces
from pipelines.lake.trajectory import Trajectories
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.checkpoint import resolve_device
from pipelines.nets.inputs import to_features
from pipelines.rollout.environment import make_env, with_actors, workers
from pipelines.rollout.episodes import Episode
from pipelines.rollout.policies import Policy, make_random_policy
from pipelines.rollout.rollout import OnError, Recording, Rollout
from pipelines.stages.choices import DataFacts, EnvFacts, Rates, round_digits
from pipelines.training.learner import Learner

_ACTORS, _BATCHED_ACTORS = 8, 64  # in random play
_WARMUP_UPDATES, _LEAST_UPDATES = 3, 5
_RECORDED_STEPS = 40  # of every actor, for the windows of these updates
_OPENING_STEPS, _OPENING_SECONDS = 512, 0.5  # of an episode that is played twice, and of the second time
_RECORDED_ACTORS, _SAMPLE_BYTES = 64, 128 << 20  # side by side, of a dataset; what is looked into step by step
_LEAST_COMPARED = 8  # steps of both; or those of the same action after others
# Models of random play: most rounds of all actors and numbers observed; least rows of either part; rectifiers; errors,
# as shares of the variance of changes, of what is observed next and of rewards, that are large, and that need not be
# halved; penalties.
_MODEL_ROUNDS, _MODEL_SIZE, _MODEL_LEAST, _MODEL_FEATURES = 600, 512, 250, 300
_MOST_UNKNOWN, _MOST_UNKNOWN_NEXT, _MOST_UNKNOWN_REWARD = 0.7, 0.3, 0.5
_MODEL_NEGLIGIBLE, _MODEL_PENALTIES = 0.01, (0.01, 1.0, 100.0)
_LEAST_REWARDED = 3  # actors with another reward than usual
_OFTEN = 0.25  # share of steps with a reward
_STAGE = "measure"


def measure_env(
    env: EnvSettings,
    collect: CollectSettings,
    *,
    seconds: float,
    least: float = 0.0,
    device: str = "auto",
    action_mask: str = "",
    seed: int = 0,
    listener: Listener,
) -> EnvFacts:
    """Play `env` at random for up to `seconds`, until every actor has ended an episode, but for `least` seconds.

    Means are over the first episodes of all actors alike: counting whichever end first would favour short ones. An
    environment of the user's own runs in a process that it may crash. Errors are those of the environment.
    """
    processes = int(is_users(env.name or "") or collect.env_timeout_seconds > 0)
    limit = collect.env_timeout_seconds
    with contextlib.closing(
        make_env(env, actors=1, seed=seed, workers=processes, timeout_seconds=limit, listener=listener)
    ) as one:
        actors = _ACTORS if one.steps_one_by_one else _BATCHED_ACTORS
        one_by_one = one.steps_one_by_one
        again = _play_opening(one, action_mask, seed=seed + 1, on_env_error=collect.on_env_error, listener=listener)
    with contextlib.closing(
        make_env(env, actors=actors, seed=seed, workers=processes, timeout_seconds=limit, listener=listener)
    ) as played:
        spec = played.spec
        mask = action_mask or spec.action_mask
        probe = _Probe(make_random_policy(spec.spaces, seed=seed, action_mask=mask).policy, played)
        clock = time.perf_counter if processes else time.process_time
        rollout = Rollout(
            played, probe, on_episode=(seen := _PlayedEpisodes(actors)).note, on_env_error=collect.on_env_error
        )
        seen.play(rollout, least, seconds, clock, listener)
    observation = spec.spaces.observation
    first_episodes, lengths = seen.first_episodes, seen.lengths
    returns = np.array([episode.total_reward for episode in first_episodes])
    is_paid_often = again is not None and probe.reward_share >= _OFTEN
    rewards_at_once, forgets_actions = again.compare(probe.opening) if again and is_paid_often else (False, False)
    success = [bool(episode.success) for episode in first_episodes]
    return EnvFacts(
        name=env.name,
        action=type(spec.spaces.action).__name__,
        action_size=spec.spaces.action.flat_size,
        observation_size=sum(space.flat_size for space in observation.values()),
        has_images=any(isinstance(space, Box) and space.is_image for space in observation.values()),
        has_text=any(isinstance(space, Ragged) for space in observation.values()),
        horizon=spec.horizon,
        num_attempts=spec.num_attempts,
        has_success=spec.has_success,
        action_mask=spec.action_mask,
        has_goal_rule=env.name in GOAL_RULES.names(),
        # Crafter shows goals only where it is asked to.
        has_goal_sequence=env.name in GOAL_SEQUENCES.names() and GOAL_SEQUENCES.get(env.name).goals in observation,
        goal_reward=probe.goal_reward,
        one_by_one=one_by_one,
        action_repeat=env.params.get("action_repeat") or 1,
        step_change=round_digits(probe.motion.step_change),
        inertia=round_digits(probe.motion.inertia),
        shows_state=None
        if len({episode.task for episode in seen.episodes.values()}) > 1
        else probe.transitions.show_state(rewards_are_known=probe.goal_reward is not None),
        episodes=len(returns),
        length_mean=round_digits(float(np.mean(lengths))),
        length_min=min(lengths),
        length_max=max(lengths),
        return_mean=float(returns.mean()) if len(returns) else None,
        return_error=float(returns.std() / math.sqrt(len(returns))) if len(returns) else None,
        success_mean=float(np.mean(success)) if len(success) and spec.has_success else None,
        observation_max=round_digits(probe.observation_max),
        observation_min=round_digits(probe.observation_min),
        reward_max=round_digits(probe.reward_max),
        pays_alike=0 < probe.reward_low == probe.reward_high,
        only_costs=probe.reward_low < 0 and probe.reward_high <= 0,
        rewards_at_once=rewards_at_once,
        forgets_actions=forgets_actions,
        step_seconds=round_digits(seen.seconds / seen.steps),
        has_gpu=resolve_device(device).type != "cpu",
    )


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What was found in a dataset: `facts` of its environment, `data` of itself, and some steps as `columns` of
    `spaces`."""

    facts: EnvFacts
    data: DataFacts
    spaces: Spaces
    columns: Mapping[str, np.ndarray]


def measure_data(
    source: Importer, env: EnvFacts | None, *, steps: int = 0, seconds: float, device: str, listener: Listener
) -> Recorded:
    """Read trajectories of `source`, up to so many `steps` (0: all), for up to `seconds`: what they returned, and the
    facts of the environment `env` with the magnitudes that occur in them; without one, all facts that they show of it.

    Errors are those of the source.
    """
    spaces = source.spaces
    found, began = _RecordedEpisodes(), time.monotonic()
    is_whole, sample, sampled = True, list[Trajectories](), 0
    for batch in source.batches():
        if found.returns and time.monotonic() - began > seconds / 2:
            is_whole = False
            break
        found.note(batch)
        if sampled < _SAMPLE_BYTES:
            sample.append(batch)
            sampled += batch.nbytes
        listener(Progress(stage=_STAGE, done=found.steps, total=steps or source.steps, unit="recorded steps"))
        if 0 < steps <= found.steps:
            break
    if not found.returns:
        raise InputMissing(f"'{source.label}' has no usable steps", hint="name a dataset with trajectories")
    joined = Trajectories.join(sample)
    seen = SeenSteps.replay(joined, spaces, seconds=seconds / 2)
    returns = np.sort(found.returns)
    total = found.steps if is_whole else max(found.steps, source.steps or 0)
    data = DataFacts(
        trajectories=len(returns),
        steps=found.steps,
        total_steps=min(total, steps) if steps else total,
        is_whole=is_whole,
        return_mean=float(returns.mean()),
        return_high=float(returns[-max(len(returns) // 10, 1) :].mean()),
    )
    only_costs = seen.reward_low < 0 and seen.reward_high <= 0
    high, low, reward = map(round_digits, (seen.observation_max, seen.observation_min, seen.reward_max))
    if env is not None:
        facts = replace(
            env,
            observation_max=max(high, env.observation_max),
            observation_min=max(low, env.observation_min),
            reward_max=max(reward, env.reward_max),
            only_costs=only_costs,
        )
        return Recorded(facts=facts, data=data, spaces=spaces, columns=joined.columns)
    observation = spaces.observation
    facts = EnvFacts(
        name="",
        action=type(spaces.action).__name__,
        action_size=spaces.action.flat_size,
        observation_size=sum(space.flat_size for space in observation.values()),
        has_images=any(isinstance(space, Box) and space.is_image for space in observation.values()),
        has_text=any(isinstance(space, Ragged) for space in observation.values()),
        horizon=max(found.lengths),
        shows_state=None if len(found.tasks) > 1 else seen.transitions.show_state(rewards_are_known=False),
        episodes=len(returns),
        length_mean=round_digits(float(np.mean(found.lengths))),
        length_min=min(found.lengths),
        length_max=max(found.lengths),
        observation_max=high,
        observation_min=low,
        reward_max=reward,
        only_costs=only_costs,
        has_gpu=resolve_device(device).type != "cpu",
    )
    return Recorded(facts=facts, data=data, spaces=spaces, columns=joined.columns)


class _RecordedEpisodes:
    """Returns, lengths and tasks of recorded episodes; a long one may be in pieces, which come one after another."""

    def __init__(self) -> None:
        self.steps = 0
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.tasks: set[str] = set()
        self._goes_on = False

    def note(self, batch: Trajectories) -> None:
        """Take some more trajectories."""
        starts = np.cumsum([0, *batch.rows[:-1]])
        totals = np.add.reduceat(batch.columns[REWARD].astype(np.float64), starts)
        for total, rows, info in zip(totals, batch.rows, batch.infos, strict=True):
            if not self._goes_on:
                self.returns.append(0.0)
                self.lengths.append(0)
            self.returns[-1] += float(total)
            self.lengths[-1] += rows - 1
            self.steps += rows - 1
            self.tasks.add(info.task)
            self._goes_on = info.continues


def _play_opening(
    env: Env, action_mask: str, *, seed: int, on_env_error: OnError, listener: Listener
) -> _Opening | None:
    """Play the beginning of the first episode by random choices of `seed`; None where actions are no choices, or where
    actors are stepped as one batch, which may take long to begin."""
    spec = env.spec
    if not (env.steps_one_by_one and isinstance(spec.spaces.action, Discrete)):
        return None
    played = _Opening(make_random_policy(spec.spaces, seed=seed, action_mask=action_mask or spec.action_mask).policy)
    rollout, began = Rollout(env, played, on_env_error=on_env_error), time.monotonic()
    listener(rollout.stepping)
    while not played.is_over and time.monotonic() - began < _OPENING_SECONDS:
        rollout.step()
    rollout.settle()
    return played


class _Opening:
    """A policy that notes what the first actor observes in its first episode, and which reward followed which action:
    for some steps, or until its end, which is None."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._seen: list[tuple[Observation, np.ndarray, float] | None] = []

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to note."""
        return len(self._seen) >= _OPENING_STEPS or (bool(self._seen) and self._seen[-1] is None)

    def compare(self, other: _Opening) -> tuple[bool, bool]:
        """Find what an action changes at most, as long as both were played: whether it is its own reward alone; and
        whether it is that and the observation after it."""
        pairs = list(zip(self._seen, other._seen, strict=False))
        fixed = answered = True
        differ, compared = 0, 0
        for step, (one, two) in enumerate(pairs):
            if one is None or two is None:
                answered &= one is two  # the last pair
                break
            is_alike = all(np.array_equal(one[0][name], two[0][name]) for name in one[0])
            is_same = not step or np.array_equal(one[1], two[1])
            fixed &= is_alike
            answered &= not is_same or (is_alike and (not step or one[2] == two[2]))
            compared += is_same and differ > 0
            differ += not is_same
        is_own = fixed and answered and len(pairs) >= _LEAST_COMPARED
        return is_own, is_own or (answered and compared >= _LEAST_COMPARED)

    def act(
        self, observation: Observation, prev_action: np.ndarray, prev_reward: np.ndarray, time: np.ndarray
    ) -> np.ndarray:
        if not self.is_over:
            if self._seen and time[0] == 0:
                self._seen.append(None)
            else:
                shown = {name: np.array(each[0]) for name, each in observation.items()}
                self._seen.append((shown, np.array(prev_action[0]), float(prev_reward[0])))
        return self._policy.act(observation, prev_action, prev_reward, time)


class _PlayedEpisodes:
    """Episodes by number, and what all steps took."""

    def __init__(self, actors: int) -> None:
        self.actors, self.steps, self.seconds = actors, 0, 0.0
        self.episodes: dict[int, Episode] = {}
        self._ended = [0] * actors

    def note(self, episode: Episode) -> None:
        """Take an episode that has ended."""
        self.episodes[episode.number] = episode
        self._ended[episode.actor] += 1

    @property
    def rounds(self) -> int:
        """How many episodes every actor has ended."""
        return min(self._ended)

    @property
    def first_episodes(self) -> list[Episode]:
        """As many episodes of each actor."""
        most = self.rounds * self.actors
        return [episode for number, episode in sorted(self.episodes.items()) if number < most]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the episodes that count; of those in progress, if none do."""
        return [episode.length for episode in self.first_episodes] or [max(self.steps // self.actors, 1)]

    def play(self, rollout: Rollout, least: float, most: float, clock: Callable[[], float], listener: Listener) -> None:
        """Step until every actor has ended an episode, for `least` to `most` seconds."""
        listener(rollout.stepping)
        rollout.step()  # resets, which may load something, are not what a step costs
        began, shown = clock(), time.monotonic()
        limit = time.monotonic() + most
        while True:
            rollout.step()
            self.steps += self.actors
            self.seconds = clock() - began
            now = time.monotonic()
            if now >= limit or (self.seconds >= least and self.rounds):
                break
            if now - shown >= 0.2:
                shown = now
                listener(Progress(stage=_STAGE, done=self.steps, total=None, unit="random steps"))
                listener(rollout.stepping)
        rollout.settle()


class SeenSteps:
    """What is found in steps of several actors: the largest magnitudes of observed numbers and of rewards, apart from
    images and choices, how often there are rewards, how observations move, and whether they show the state."""

    def __init__(self, spaces: Spaces, *, goal_reward: GoalReward | None = None, one_by_one: bool = True) -> None:
        observation = spaces.observation
        self._columns = [name for name, space in observation.items() if isinstance(space, Box) and not space.is_image]
        self._sees_all = len(self._columns) == len(observation)
        self._largest = {name: np.zeros(observation[name].shape) for name in self._columns}
        self.reward_max, self.reward_low, self.reward_high = 0.0, math.inf, -math.inf
        self.motion, self.transitions = _Motion(), _Transitions(spaces.action)
        self._goal_reward = goal_reward
        self._is_moving = one_by_one and not any(isinstance(space, Ragged) for space in observation.values())
        self._steps = self._rewarded = 0

    @classmethod
    def replay(cls, sample: Trajectories, spaces: Spaces, *, seconds: float) -> SeenSteps:
        """Go through recorded steps as if actors side by side took them, each a part of the trajectories one after
        another, for up to `seconds`."""
        times = np.concatenate([np.arange(rows) for rows in sample.rows])
        actors = max(min(_RECORDED_ACTORS, len(times) // _OPENING_STEPS), 1)
        seen, length, began = cls(spaces), len(times) // actors, time.monotonic()

        def part(values: np.ndarray) -> np.ndarray:
            return values[: actors * length].reshape(actors, length, *values.shape[1:])

        times = part(times)
        columns = {name: part(sample.columns[name]) for name in (*spaces.observation, ACTION, REWARD)}
        for row in range(length):
            if time.monotonic() - began > seconds:
                break
            now = {name: values[:, row] for name, values in columns.items()}
            seen.note(now, now[ACTION], now[REWARD], times[:, row])
        return seen

    @property
    def reward_share(self) -> float:
        """The share of steps whose reward was not 0."""
        return self._rewarded / max(self._steps, 1)

    @property
    def goal_reward(self) -> GoalReward | None:
        """What reaching a goal pays, if steps paid nothing else: a wrapper or repeated actions may change rewards."""
        found = self._goal_reward
        if found is None or not {self.reward_low, self.reward_high} <= {found.reward, found.step_reward}:
            return None
        return found

    @property
    def observation_max(self) -> float:
        """The largest magnitude of all numbers observed."""
        return max((float(largest.max(initial=0)) for largest in self._largest.values()), default=0.0)

    @property
    def observation_min(self) -> float:
        """The largest magnitude of the number that varies least, apart from numbers that were always 0."""
        seen = [float(largest[largest > 0].min(initial=np.inf)) for largest in self._largest.values()]
        return min(seen) if seen and math.isfinite(min(seen)) else 0.0

    def note(
        self, observation: Observation, prev_action: np.ndarray, prev_reward: np.ndarray, time: np.ndarray
    ) -> None:
        """Take a step of all actors: arguments of `act`."""
        for name in self._columns:
            largest = self._largest[name]
            np.maximum(largest, np.abs(observation[name]).max(axis=0), out=largest)
        if self._columns and self._is_moving:
            vectors = [observation[name].reshape(len(time), -1) for name in self._columns]
            rows = np.concatenate(vectors, axis=1).astype(np.float64)
            self.motion.note(rows, time > 0)
            if self._sees_all:
                self.transitions.note(rows, prev_action, prev_reward, time)
        self.reward_max = max(self.reward_max, float(np.abs(prev_reward).max()))
        earned = prev_reward[time > 0]
        self.reward_low = min(self.reward_low, float(earned.min(initial=np.inf)))
        self.reward_high = max(self.reward_high, float(earned.max(initial=-np.inf)))
        self._steps += int(np.count_nonzero(time))  # the reward before a first step is another episode's, and 0 here
        self._rewarded += int(np.count_nonzero(prev_reward))


class _Probe(SeenSteps):
    """A policy that notes its steps, and how the first episode begins."""

    def __init__(self, policy: Policy, env: Env) -> None:
        super().__init__(env.spec.spaces, goal_reward=env.spec.goal_reward, one_by_one=env.steps_one_by_one)
        self.opening = _Opening(policy)

    def act(
        self, observation: Observation, prev_action: np.ndarray, prev_reward: np.ndarray, time: np.ndarray
    ) -> np.ndarray:
        self.note(observation, prev_action, prev_reward, time)
        return self.opening.act(observation, prev_action, prev_reward, time)


class _Motion:
    """How the numbers observed move, over all actors and steps.

    `step_change`: the root mean square of a number's changes from step to step, as a share of its standard deviation;
    the median over the numbers that ever change within an episode (0: there is none). `inertia`: the correlation of a
    number's changes in successive steps; the largest of these numbers. Where a random action moves a point at once, it
    is about 0; where it is a force on a mass, about 1.
    """

    def __init__(self) -> None:
        self._count, self._moves = 0, 0
        self._last: np.ndarray | None = None

    def note(self, rows: np.ndarray, goes_on: np.ndarray) -> None:
        """Add the numbers `rows` (N, D) that the actors observe; those that do not go on begin an episode."""
        if self._last is None:
            self._first, self._changes = rows[0].copy(), np.zeros_like(rows)
            self._sum, self._squares, self._moved, self._along = np.zeros((4, rows.shape[1]))
        else:
            changes = (rows - self._last) * goes_on[:, None]
            self._moves += int(goes_on.sum())
            self._moved += np.square(changes).sum(axis=0)
            self._along += (changes * self._changes).sum(axis=0)
            self._changes = changes
        away = rows - self._first  # so that squares of numbers far from 0 lose no digits
        self._count += len(rows)
        self._sum += away.sum(axis=0)
        self._squares += np.square(away).sum(axis=0)
        self._last = rows

    @property
    def step_change(self) -> float:
        if not self._moves or not (moving := self._moved > 0).any():
            return 0.0
        variance = self._squares / self._count - np.square(self._sum / self._count)
        return float(np.median(np.sqrt(self._moved[moving] / self._moves / variance[moving])))

    @property
    def inertia(self) -> float:
        if not self._moves or not (moving := self._moved > 0).any():
            return 0.0
        return float((self._along[moving] / self._moved[moving]).max())


class _Transitions:
    """The first steps of random play, by which a model of the next observation and of the reward is fitted."""

    def __init__(self, action: Space) -> None:
        self._action = action
        self._rounds: list[tuple[np.ndarray, ...]] = []

    def note(self, rows: np.ndarray, action: np.ndarray, reward: np.ndarray, time: np.ndarray) -> None:
        """Add what the actors observe (N, D), after which action and reward, at which steps of their episodes."""
        if len(self._rounds) < _MODEL_ROUNDS:
            features = to_features(torch.as_tensor(np.array(action)), self._action).numpy().reshape(len(time), -1)
            self._rounds.append((rows.copy(), features, np.array(reward, dtype=np.float64), np.array(time)))

    def show_state(self, *, rewards_are_known: bool) -> bool | None:
        """Check whether an observation and the action predict the next observation and the reward; None if too little
        was seen.

        They must explain most of the variance for actors that the models were not fitted to, and two more steps must
        not halve the errors. Rewards of a few actors cannot be compared, and say nothing; `rewards_are_known` to depend
        on what is observed need no model.
        """
        if not self._rounds or (size := self._rounds[0][0].shape[1]) > _MODEL_SIZE:
            return None
        seen, action, reward, time = (np.stack(each) for each in zip(*self._rounds, strict=True))
        seen, reward = self._standardize(seen), self._standardize(reward[..., None])
        held_out = np.broadcast_to(np.arange(seen.shape[1]) % 4 == 0, time[3:].shape)
        follows = time[3:] >= 3
        held_out = held_out[follows]
        if min(np.count_nonzero(held_out), np.count_nonzero(~held_out)) < _MODEL_LEAST:
            return None

        def before(steps: int) -> np.ndarray:
            """Return observation, action and reward of so many steps before the present one."""
            part = slice(2 - steps, len(seen) - 1 - steps)
            taken = slice(3 - steps, len(seen) - steps)
            return np.concatenate((seen[part], action[taken], reward[taken]), axis=-1)[follows]

        present, after = before(0)[:, :-1], seen[3:][follows]
        past = np.concatenate((present, before(1), before(2)), axis=1)
        change = after - present[:, :size]
        moving = change.std(axis=0) > 0
        if not moving.any():
            return None
        change = change[:, moving]
        error, error_by_past = (_fit(each, change, held_out) for each in (present, past))
        # Of random numbers, new ones in every step, the change is half known: a high one falls.
        error_of_next = float(np.median(error * change.var(axis=0) / after[:, moving].var(axis=0)))
        by_present, by_past = float(np.median(error)), float(np.median(error_by_past))
        if by_present > _MOST_UNKNOWN or error_of_next > _MOST_UNKNOWN_NEXT:
            return False
        if by_past < by_present / 2 > _MODEL_NEGLIGIBLE:
            return False
        earned = reward[3:][follows]
        rewarded = np.any((np.abs(reward - np.median(reward)) > 1e-6)[..., 0], axis=0)
        if rewards_are_known or np.count_nonzero(rewarded) < _LEAST_REWARDED:
            return True
        return bool(_fit(np.concatenate((present, after), axis=1), earned, held_out)[0] <= _MOST_UNKNOWN_REWARD)

    @staticmethod
    def _standardize(values: np.ndarray) -> np.ndarray:
        deviation = values.std(axis=(0, 1))
        return (values - values.mean(axis=(0, 1))) / np.where(deviation > 0, deviation, 1.0)


def _fit(inputs: np.ndarray, targets: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Fit `targets` (M, D) by ridge regression on `inputs` (M, F) and on random rectifiers of them, without and with
    products of two; return the mean squared errors (D,) of the rows `held_out`, as shares of their variance, with the
    best of a few penalties."""
    generator = np.random.default_rng(0)
    deviation = inputs.std(axis=0)
    x = (inputs - inputs.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    one, other = np.triu_indices(x.shape[1])
    if len(one) > _MODEL_FEATURES:
        one, other = generator.integers(0, x.shape[1], (2, _MODEL_FEATURES))
    products = (x[:, one] * x[:, other]).clip(-9, 9)
    weight = generator.normal(size=(x.shape[1], _MODEL_FEATURES)) * 1.5 / math.sqrt(x.shape[1])
    bent = np.maximum(x @ weight + generator.uniform(-1, 1, _MODEL_FEATURES), 0)
    centre, errors = targets[~held_out].mean(axis=0), []
    for features in ((x, bent), (x, bent, products)):
        z = np.concatenate((*features, np.ones((len(x), 1))), axis=1)
        known, left = z[~held_out], targets - centre
        squares, sums = known.T @ known, known.T @ left[~held_out]
        for penalty in _MODEL_PENALTIES:
            fitted = np.linalg.solve(squares + penalty * np.eye(len(squares)), sums)
            errors.append(np.square(z[held_out] @ fitted - left[held_out]).mean(axis=0))
    return np.min(errors, axis=0) / np.maximum(targets[held_out].var(axis=0), 1e-9)


def measure_rates(settings: Settings, *, recorded: Recorded | None = None, seconds: float, listener: Listener) -> Rates:
    """Time updates of the settings' agent for some seconds, on windows of `recorded` or else of random play; then steps
    with it as the policy of all actors, if there is an environment."""
    processes, env = 0, None
    with contextlib.ExitStack() as stack:
        if settings.env.name:
            actors = with_actors(settings.collect, settings.env, listener=listener).actors
            assert isinstance(actors, int)
            processes = workers(settings.env, settings.collect, actors=actors, listener=listener)
            limit = settings.collect.env_timeout_seconds
            made = make_env(
                settings.env,
                actors=actors,
                seed=settings.seed,
                workers=processes,
                timeout_seconds=limit,
                listener=listener,
            )
            env = stack.enter_context(contextlib.closing(made))
        if recorded is not None:
            spaces, columns = recorded.spaces, recorded.columns
        else:
            assert env is not None
            spaces, columns = env.spec.spaces, _play_some(env, settings)
        learner = Learner(spaces, settings.agent, settings.train, seed=settings.seed)
        is_alone = learner.device.type == "cpu" and settings.train.threads == 1
        watch = _Stopwatch(learner=learner, seconds=seconds, listener=listener)
        update = watch.time_updates(columns, time.process_time if is_alone else time.perf_counter)
        clock = time.process_time if is_alone and not processes else time.perf_counter
        collect = 0.0 if env is None else watch.time_acting(env, clock) / env.num_envs
    return Rates(
        update_seconds=round_digits(update),
        collect_seconds=round_digits(collect / max(settings.collect.collectors, 1)),
        in_cpu_seconds=is_alone and not processes,
    )


def _play_some(env: Env, settings: Settings) -> Mapping[str, np.ndarray]:
    """Record a few steps of random play. What an update costs depends on the data: a text that never changes is encoded
    once, where made-up ones would take seconds."""
    stored: list[Trajectories] = []
    policy = make_random_policy(env.spec.spaces, seed=0, action_mask=settings.agent.action_mask).policy
    labelled = settings.agent.target == "label"
    recording = Recording(sink=stored.append, keep_unfinished=True, labeller=policy if labelled else None)
    rollout = Rollout(env, policy, recording=recording)
    for _ in range(_RECORDED_STEPS):
        rollout.step()
    rollout.settle()
    rollout.finish()
    names = stored[0].columns
    return {name: np.concatenate([each.columns[name] for each in stored]) for name in names}


@dataclass(frozen=True, kw_only=True)
class _Stopwatch:
    """Measures what an agent costs, each time for `seconds`."""

    learner: Learner
    seconds: float
    listener: Listener

    def time_updates(self, columns: Mapping[str, np.ndarray], clock: Callable[[], float]) -> float:
        """Measure the median seconds of an update on windows that steps of trajectories fill."""
        took: list[float] = []
        batch = self._fill_batch(columns)
        for number in range(_WARMUP_UPDATES + 1000):
            began = clock()
            self.learner.step(lambda _: batch)
            if number >= _WARMUP_UPDATES:
                took.append(clock() - began)
            self.listener(Progress(stage=_STAGE, done=number + 1, total=None, unit="updates"))
            if sum(took) >= self.seconds and len(took) >= _LEAST_UPDATES:
                break
        return float(np.median(took))

    def _fill_batch(self, found: Mapping[str, np.ndarray]) -> Batch:
        """Fill windows with these steps, repeated."""
        learner = self.learner
        windows, rows = learner.micro_batch_size, learner.settings.resolved_context_length + 1
        columns: dict[str, np.ndarray] = {}
        for column in Schema(learner.spaces, labelled=learner.agent_settings.target == "label").columns:
            values = found[column.name]
            repeated = values[np.arange(windows * rows) % len(values)]
            columns[column.name] = repeated.reshape(windows, rows, *column.shape)
        if learner.agent_settings.trace == "vtrace":  # random play does not know it on a grid
            columns[LOGP] = np.zeros((windows, rows), dtype=np.float32)
        columns[TERMINATED][:, :-1] = columns[TRUNCATED][:, :-1] = 0
        return Batch(columns=columns, lengths=np.full(windows, rows), start=np.zeros(windows, np.int64))

    def time_acting(self, env: Env, clock: Callable[[], float]) -> float:
        """Measure the seconds of a step of all actors, once their memories are as full as they get in the time."""
        learner = self.learner
        agent, context = learner.agent.eval(), learner.settings.resolved_context_length
        policy = AgentPolicy(
            agent,
            num_actors=env.num_envs,
            capacity=context,
            device=learner.device,
            precision=learner.precision,
            explores=True,
        )
        rollout = Rollout(env, policy, recording=Recording(sink=lambda trajectories: None))
        self.listener(rollout.stepping)
        rollout.step()
        times = [clock()]
        while times[-1] - times[0] < self.seconds or len(times) <= 2 * _LEAST_UPDATES:
            rollout.step()
            times.append(clock())
            self.listener(Progress(stage=_STAGE, done=len(times), total=None, unit="steps"))
        half = len(times) // 2  # memories fill in the first half
        return (times[-1] - times[half]) / (len(times) - 1 - half)
