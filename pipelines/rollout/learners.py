"""Learners: policies that learn while they collect, so that the lake receives histories of learning.

Every actor has a learner of its own, which starts from nothing; all of them are updated at once, in arrays. N actors, A
actions, S distinct observations so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from pipelines.config.settings import LEARNER, LearnerSettings
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.log import read_log
from pipelines.lake.reading import Reader, join_pieces
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED
from pipelines.lake.spaces import Discrete, Space, Spaces
from pipelines.lake.store import Lake
from pipelines.nearest import did_you_mean
from pipelines.rollout.policies import Policy

_MOST_NUMBERS = 64  # in an observation
_MOST_BYTES = 1 << 30  # of all tables
_FIRST_STATES = 64
_FEW_VISITS = 3  # of an observation by each learner: with fewer, most of its actions were never tried
_LEAST_UPDATES = 1_000  # of each learner, before it is said that its observations do not recur
_STREAM, _TIES = 5, 8  # streams separate from other policies with the same seed


@runtime_checkable
class HistoryLearner(Policy, Protocol):
    """A policy that receives the result of every step. `version` (N,) int64: updates of each actor's learner; `epsilon`
    (N,): the rate at which each now explores."""

    @property
    def version(self) -> np.ndarray: ...

    @property
    def epsilon(self) -> np.ndarray: ...

    def learn(
        self,
        actors: np.ndarray,
        observation: Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        ended: np.ndarray,
        over: np.ndarray,
        following: Mapping[str, np.ndarray],
    ) -> None:
        """Learn from a step of each of the distinct `actors` (m,): from `observation` (m, ...), `action` (m, ...) led
        to `reward` (m,) and to `following` (m, ...). `ended` (m,) bool: nothing more is paid from there. `over` (m,)
        bool: the episode has ended, or was cut off."""

    def choose_best(self, actor: int, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Choose the best actions (m, ...) for observations (m, ...), as far as the learner of `actor` knows."""


class QLearning:
    """Tabular Q-learning (Watkins 1989): epsilon-greedy, ties broken at random, epsilon falling linearly from 1.

    Observations differ if any of their values does. UsageError if actions are not discrete, or observations large;
    StageFailed if the tables outgrow a gigabyte, as they do where observations do not recur.
    """

    def __init__(self, spaces: Spaces, settings: LearnerSettings, *, num_actors: int, seed: int, acting: int) -> None:
        if not isinstance(spaces.action, Discrete):
            raise UsageError(
                f"{LEARNER}q-learning needs discrete actions, not {_describe(spaces.action)}",
                hint="choose another environment, or another --policy",
            )
        for name, space in spaces.observation.items():
            if math.prod(space.shape) > _MOST_NUMBERS:
                raise UsageError(
                    f"{LEARNER}q-learning needs observations of at most {_MOST_NUMBERS} numbers; '{name}' is "
                    f"{_describe(space)}",
                    hint="choose an environment with smaller observations",
                )
        self._settings = settings
        self._types = {name: spaces.observation[name].dtype for name in sorted(spaces.observation)}
        self._seed, self._rng = seed, np.random.default_rng([acting, _STREAM])
        self._states: dict[bytes, int] = {}
        self._values = np.zeros((num_actors, _FIRST_STATES, spaces.action.n))
        self.version = np.zeros(num_actors, dtype=np.int64)

    @property
    def epsilon(self) -> np.ndarray:
        progress = np.minimum(self.version / self._settings.epsilon_steps, 1.0)
        return 1.0 + progress * (self._settings.epsilon_last - 1.0)

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        prev_action: np.ndarray,
        prev_reward: np.ndarray,
        time: np.ndarray,
    ) -> np.ndarray:
        state = self._find(observation)  # first: it may make the tables larger
        num_actors, _, num_actions = self._values.shape
        values = self._values[np.arange(num_actors), state]
        explores, pick = self._rng.random((2, num_actors))
        order = self._rng.random(values.shape)
        best = np.where(values == values.max(axis=1, keepdims=True), order, -1.0).argmax(axis=1)
        return np.where(explores < self.epsilon, (pick * num_actions).astype(np.int64), best)

    def learn(
        self,
        actors: np.ndarray,
        observation: Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        ended: np.ndarray,
        over: np.ndarray,
        following: Mapping[str, np.ndarray],
    ) -> None:
        state, after = self._find(observation), self._find(following)
        rest = np.where(ended, 0.0, self._values[actors, after].max(axis=1))
        place = actors, state, action
        error = reward.astype(np.float64) + self._settings.discount * rest - self._values[place]
        self._values[place] += self._settings.learning_rate * error
        self.version[actors] += 1

    def choose_best(self, actor: int, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        state = self._find(observation)
        values = self._values[actor]
        # Ties are broken at random, but alike whenever the state is asked for.
        order = np.random.default_rng([self._seed, _TIES]).random(values.shape)
        best = np.where(values == values.max(axis=1, keepdims=True), order, -1.0).argmax(axis=1)
        return np.asarray(best[state])

    def find_problem(self) -> str:
        """Explain why the learners hardly learn, if their observations hardly recur; else return an empty text."""
        updates, states = float(self.version.mean()), len(self._states)
        if updates < _LEAST_UPDATES or updates >= _FEW_VISITS * states:
            return ""
        return (
            f"{LEARNER}q-learning has met {states:,} different observations in {updates:,.0f} steps of each actor: too "
            "many for a table to learn much of each; leave out of the observation what does not recur, such as a clock"
        )

    def _find(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Number observations (m, ...) by their values: (m,)."""
        columns = [np.ascontiguousarray(observation[name], dtype=dtype) for name, dtype in self._types.items()]
        flat = [column.reshape(len(column), -1).view(np.uint8) for column in columns]
        rows = np.ascontiguousarray(np.concatenate(flat, axis=1))
        known = self._states
        found = [known.setdefault(row, len(known)) for row in rows.view(f"V{rows.shape[1]}")[:, 0].tolist()]
        if len(known) > self._values.shape[1]:
            self._grow()
        return np.array(found, dtype=np.int64)

    def _grow(self) -> None:
        num_actors, _, num_actions = self._values.shape
        states = 2 * len(self._states)
        if num_actors * states * num_actions * self._values.itemsize > _MOST_BYTES:
            raise StageFailed(
                f"the tables of {LEARNER}q-learning have outgrown {_MOST_BYTES >> 20:,} MiB: "
                f"{len(self._states):,} observations",
                hint="choose an environment whose observations recur, or fewer actors",
            )
        larger = np.zeros((num_actors, states, num_actions))
        larger[:, : self._values.shape[1]] = self._values
        self._values = larger


def replay_histories(lake: Lake, collector: str, policy: Policy, num_actors: int) -> np.ndarray:
    """Let a learner learn again what the collector has stored, in order, and return the place of each actor's next
    episode in its history (num_actors,) int64.

    A learner keeps nothing of its own on a disk: the lake holds all that it learned from. Only steps that a crash kept
    from being stored are not learned again. InputMissing if episodes of a learner have expired since.
    """
    from pipelines.lake.sql.catalog import query  # imports duckdb, which starts threads: see `ForkServer`

    quoted = collector.replace("'", "''")
    text = f"""select history, history_index, uid, first_step from trajectories
        where collector = '{quoted}' and history is not null and base_uid is null
        order by history_index, history, first_step"""
    following = np.zeros(num_actors, dtype=np.int64)
    rounds: dict[int, list[tuple[int, str, int]]] = {}
    for history, index, uid, first_step in query(lake, text)[1]:
        rounds.setdefault(index, []).append((find_actor(history, collector), uid, first_step))
    gone = InputMissing(
        f"episodes that '{collector}' learned from have gone from lake '{lake.name}'",
        hint="collect histories again, into another run (--run NAME); a lake must not expire episodes of learners",
    )
    # The last episodes leave no gap.
    if isinstance(policy, HistoryLearner) and read_log(lake.storage).steps.get(collector, 0):
        raise gone
    reader = Reader(lake)
    for index, pieces in sorted(rounds.items()):
        actors, first = np.unique([actor for actor, *_ in pieces], return_index=True)
        if isinstance(policy, HistoryLearner):
            if (following[actors] < index).any() or any(pieces[place][2] for place in first.tolist()):
                raise gone
            _learn_again(policy, reader, pieces)
        following[actors] = index + 1
    return following


def find_actor(history: str, collector: str) -> int:
    """Return the number of the actor that played a history of a collector."""
    return int(history.removeprefix(f"{collector}/").partition("/")[0])


def _learn_again(learner: HistoryLearner, reader: Reader, pieces: Sequence[tuple[int, str, int]]) -> None:
    """Repeat what `learner` did in one episode of each actor, all at the same step of their episodes."""
    episodes: dict[int, list[Mapping[str, np.ndarray]]] = {}
    schema = reader.lake.only_schema()
    names = [column.name for column in schema.columns]
    for actor, uid, _ in pieces:
        episodes.setdefault(actor, []).append(reader.read_columns(uid, names))
    joined = {actor: join_pieces(parts) for actor, parts in episodes.items()}
    length = {actor: len(columns[REWARD]) - 1 for actor, columns in joined.items()}
    observed = list(schema.spaces.observation)
    for t in range(max(length.values())):
        actors = [actor for actor in joined if length[actor] > t]
        before, after = (
            {name: np.stack([joined[actor][name][row] for actor in actors]) for name in observed} for row in (t, t + 1)
        )
        action, reward, terminated, reset = (
            np.stack([joined[actor][name][t + 1] for actor in actors]) for name in (ACTION, REWARD, TERMINATED, RESET)
        )
        over = np.array([t + 1 == length[actor] for actor in actors])
        learner.learn(np.array(actors), before, action, reward, (terminated | reset) != 0, over, after)


def is_learner(policy: str) -> bool:
    """Check whether the name of a policy is that of a learner."""
    return policy.startswith(LEARNER)


def make_learner(
    name: str, spaces: Spaces, settings: LearnerSettings, *, num_actors: int, seed: int, acting: int | None = None
) -> HistoryLearner:
    """Make a learner for each actor. What they are at first, and the order in which they learn, follow from `seed`; the
    actions that they draw from `acting` (None: `seed`, too). UsageError if there is none called `name`, or if it cannot
    learn in `spaces`."""
    kind = name.removeprefix(LEARNER)
    if kind not in _LEARNERS:
        known = [f"{LEARNER}{each}" for each in _LEARNERS]
        raise UsageError(
            f"unknown learner '{name}'", hint=did_you_mean(name, known, otherwise=f"known: {', '.join(known)}")
        )
    acting = seed if acting is None else acting
    if kind == "ppo":
        from pipelines.rollout.ppo import PPO  # torch takes a second to import

        return PPO(spaces, settings, num_actors=num_actors, seed=seed, acting=acting)
    return QLearning(spaces, settings, num_actors=num_actors, seed=seed, acting=acting)


_LEARNERS = "q-learning", "ppo"


def _describe(space: Space) -> str:
    shape: Sequence[int] = space.shape
    sizes = " x ".join(map(str, shape)) or "1"
    return f"{type(space).__name__} of {sizes} {getattr(space, 'dtype', 'number')} ({math.prod(shape)} in all)"
