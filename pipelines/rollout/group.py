"""Actors that step together, the state of their unfinished episodes, and the recorder of their steps."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from pipelines.envs.env import ActorsFailed, Env, EnvFailure, StepResult, rows_not_finite
from pipelines.lake.schema import ACTION, LABEL, LOGP, RESET, REWARD, TERMINATED, TRUNCATED, Schema
from pipelines.lake.spaces import zeros
from pipelines.lake.trajectory import Infos, Trajectories, TrajectoryInfo
from pipelines.rollout.episodes import Episode, EpisodeStats, FinishedEpisodes

_FIRST_ROWS = 1024
_LEAST_ROWS = 64
OPPONENT = "opponent"  # tag of an episode of a game: who played the other seats
Memory = Literal["episode", "attempt"]
_MOMENT_MS = 1_000  # between two checks of the waiting time


class Recorder:
    """Buffers of `num_actors` episodes in progress. Columns (rows, N, ...) by the names and types of
    `schema`. After cuts, the last `kept` rows of an episode stay readable by `prefix`.

    All actors step together, so storage is time-major: one row of the buffer contains one step of all actors, written
    with one assignment per column. An actor's episode is the sequence of rows since its first; it is copied out when it
    ends, which frees the actor's place in the newest row for the first observation of its next episode. A running
    episode may be cut: the rows so far are copied out as a piece, and the newest one becomes row 0 of the next piece.
    When the buffer is full, rows that no running episode needs are dropped, or the buffer doubles.
    """

    def __init__(self, schema: Schema, num_actors: int, *, rows: int = _LEAST_ROWS, kept: int = 0) -> None:
        self.schema, self._kept = schema, kept
        self._observed = [column.name for column in schema.columns if column.role == "observation"]
        self._buffers = {
            column.name: np.zeros((max(rows, 2), num_actors, *column.shape), dtype=column.dtype)
            for column in schema.columns
        }
        self._rows = max(rows, 2)
        self._first = np.zeros(num_actors, dtype=np.int64)  # of the running piece
        self._begun = np.zeros(num_actors, dtype=np.int64)  # of the episode, or the first row that is still here
        self._now = 0

    @property
    def lengths(self) -> np.ndarray:
        """The number of actions recorded in each actor's running piece (N,)."""
        return self._now - self._first

    def begin(self, actors: np.ndarray, observation: Mapping[str, np.ndarray]) -> None:
        """Write row 0 of new episodes for `actors` (m,), with their rows of `observation` (N, ...)."""
        for name, buffer in self._buffers.items():
            buffer[self._now, actors] = observation[name][actors] if name in observation else 0
        self._first[actors] = self._begun[actors] = self._now

    def add(
        self,
        observation: Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        reset: np.ndarray,
        logp: np.ndarray | None = None,
    ) -> None:
        """Record the row that `action` led to, for all actors."""
        self._now += 1
        if self._now == self._rows:
            self._make_room()
        now, buffers = self._now, self._buffers
        for name in self._observed:
            buffers[name][now] = observation[name]
        buffers[ACTION][now] = action
        buffers[REWARD][now] = reward
        buffers[TERMINATED][now] = terminated
        buffers[TRUNCATED][now] = truncated
        buffers[RESET][now] = reset
        if self.schema.labelled:
            buffers[LABEL][now] = 0  # until `label` is called for this row
        if logp is not None:
            buffers[LOGP][now] = logp

    def label(self, labels: np.ndarray) -> None:
        """Record the labels (N, ...) of the newest row, from which all actors are about to act."""
        self._buffers[LABEL][self._now] = labels

    def episodes(self, actors: np.ndarray) -> tuple[dict[str, np.ndarray], list[int]]:
        """Copy all rows of the running pieces of `actors` (m,), concatenated, and their lengths T + 1."""
        rows = self._now + 1 - self._first[actors]
        step = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows - self._first[actors], rows)
        place = step * len(self._first) + np.repeat(actors, rows)  # in the buffer as one row after another, which is
        taken = {  # several times as fast as by two indices
            name: buffer.reshape(-1, *buffer.shape[2:]).take(place, axis=0) for name, buffer in self._buffers.items()
        }
        return taken, rows.tolist()

    def prefix(self, actor: int) -> dict[str, np.ndarray]:
        """Copy the episode's rows before the newest, on which the policy has already acted: all T of them,
        or the last of them if the episode was cut."""
        first = int(self._oldest()[actor])
        return {name: buffer[first : self._now, actor].copy() for name, buffer in self._buffers.items()}

    def cut(self, actors: np.ndarray) -> None:
        """Begin the next piece of the episodes of `actors` (m,) with their newest row."""
        self._first[actors] = self._now

    def _oldest(self) -> np.ndarray:
        """Find the first row (N,) of each episode that is needed: for its running piece, or among the `kept` ones."""
        return np.maximum(self._begun, np.minimum(self._first, self._now - self._kept))

    def _make_room(self) -> None:
        """Move running episodes to the front; double the buffer if they fill half of it."""
        self._begun = self._oldest()
        oldest = int(self._begun.min())
        kept = self._now - oldest
        grow = 2 * kept > self._rows
        for name, buffer in self._buffers.items():
            if grow:
                larger = np.zeros((2 * self._rows, *buffer.shape[1:]), dtype=buffer.dtype)
                larger[:kept] = buffer[oldest : self._now]
                self._buffers[name] = larger
            else:
                buffer[:kept] = buffer[oldest : self._now]
        self._rows *= 2 if grow else 1
        self._now -= oldest
        self._first -= oldest
        self._begun -= oldest


@dataclass(frozen=True)
class ChosenStep:
    """The actions (N, ...) of a step, the exploration rates that applied, and the log-probabilities (N,) with which the
    actions were taken, where these are stored."""

    actions: np.ndarray
    epsilon: np.ndarray | float
    logp: np.ndarray | None = None

    def of(self, place: slice) -> ChosenStep:
        """Take the part of some actors."""
        epsilon = self.epsilon if isinstance(self.epsilon, float) else self.epsilon[place]
        return ChosenStep(self.actions[place], epsilon, None if self.logp is None else self.logp[place])


class ActorGroup:
    """The actors of one part of an environment; `place` is their slice of all actors of a rollout.

    `time` counts the steps of each actor's episode, 0 if none is running; `chunk` the pieces of it that were cut off so
    far. `kept_steps`: of an episode that was cut, rows that stay readable. `strikes`: consecutive failures of each
    actor's environment. `history_index`: the place of each actor's episode in its history; None if episodes are not
    stored as histories. `memory`: whether the policy remembers an episode or an attempt. `pending`: the step in
    progress; `waits_on`: pending results (see `Env.waits_on`). `rounds`: completed steps. `explored`: sum and number of
    the exploration rates of all steps of all actors.
    """

    def __init__(
        self,
        env: Env,
        number: int,
        place: slice,
        *,
        recorded: bool,
        kept_steps: int = 0,
        histories: bool = False,
        labelled: bool = False,
        logp: bool = False,
        memory: Memory = "episode",
    ) -> None:
        self.env, self.number, self.place, self.rounds = env, number, place, 0
        n, spaces = env.num_envs, env.spec.spaces
        self.recorder: Recorder | None = None
        if recorded:
            rows = min(2 * (env.spec.horizon or _FIRST_ROWS) + 2, _FIRST_ROWS)
            self.recorder = Recorder(Schema(spaces, labelled=labelled, logp=logp), n, rows=rows, kept=kept_steps)
        self.observation: Mapping[str, np.ndarray] | None = None
        self.action = zeros(spaces.action, (n,))
        self.reward = np.zeros(n, dtype=np.float32)
        self.time, self.chunk, self._forgotten = np.zeros((3, n), dtype=np.int64)
        self._forgets = memory == "attempt"
        self.history_index = np.zeros(n, dtype=np.int64) if histories else None
        self._names = [""] * n  # of episodes that were cut
        self._told = [0] * n  # attempts in the pieces that were cut off
        self.total, self.epsilon, self.began = np.zeros((3, n))
        self.explored = 0.0, 0
        self.attempts: list[list[bool]] = [[] for _ in range(n)]
        self._paid: list[list[float]] = [[] for _ in range(n)]  # cumulative return at the end of each attempt
        self.strikes = np.zeros(n, dtype=np.int64)
        self.pending: ChosenStep | None = None
        self.waits_on: set[int] = set()
        self._floats = [name for name, space in spaces.observation.items() if space.dtype.startswith("float")]

    def begin(self, actors: np.ndarray, observation: Mapping[str, np.ndarray]) -> None:
        """Start episodes of `actors` (m,) with their rows of `observation` (N, ...)."""
        self.observation = observation
        if self.recorder is not None:
            self.recorder.begin(actors, observation)
        self.action, self.reward = self.action.copy(), self.reward.copy()  # the policy may hold references to them
        for state in (self.action, self.reward, self.time, self._forgotten, self.chunk, self.total, self.epsilon):
            state[actors] = 0
        self.began[actors] = time.time()
        for actor in actors.tolist():
            self.attempts[actor], self._paid[actor] = [], []
            self._names[actor], self._told[actor] = "", 0

    def running(self, least: int) -> np.ndarray:
        """Find the actors whose running piece has at least `least` >= 1 steps."""
        assert self.recorder is not None
        return np.flatnonzero((self.time > 0) & (self.recorder.lengths >= least))

    @property
    def steps_in_flight(self) -> np.ndarray:
        """The steps (N,) of each running episode that were not taken or cut off yet."""
        return self.time if self.recorder is None else np.where(self.time > 0, self.recorder.lengths, 0)

    def label(self, labels: np.ndarray) -> None:
        """Record the labels (N, ...) of the observations that are acted on next."""
        assert self.recorder is not None
        self.recorder.label(labels)

    def add(self, step: ChosenStep, result: StepResult) -> None:
        """Record a step of all actors."""
        actions, epsilon = step.actions, step.epsilon
        if self.recorder is not None:
            ends = result.terminated, result.truncated, result.reset
            self.recorder.add(result.observation, actions, result.reward, *ends, step.logp)
        self.observation, self.action, self.reward = result.observation, actions, result.reward
        self.time += 1
        if self._forgets:
            self._forget(result.reset)
        self.total += result.reward
        self.epsilon += epsilon
        rate = epsilon * len(self.time) if isinstance(epsilon, float) else float(epsilon.sum())
        self.explored = self.explored[0] + rate, self.explored[1] + len(self.time)
        for actor in np.flatnonzero(result.attempt_end).tolist():
            self.attempts[actor].append(bool(result.success[actor]))
            self._paid[actor].append(float(self.total[actor]))

    def _forget(self, reset: np.ndarray) -> None:
        """Let the policy take what follows the step at which an attempt began, (N,) bool, for an episode of its own."""
        self.action, self.reward = self.action.copy(), self.reward.copy()
        self.action[reset], self.reward[reset], self._forgotten[reset] = 0, 0.0, self.time[reset]

    @property
    def memory_steps(self) -> np.ndarray:
        """The steps (N,) that the policy may remember, 0 where its memory must be cleared."""
        return np.maximum(self.time - self._forgotten, 0)

    def take(
        self,
        actors: np.ndarray,
        shared: TrajectoryInfo,
        own: Mapping[str, list[Any]],
        *,
        summarised: bool,
        unfinished: bool = False,
    ) -> FinishedEpisodes:
        """Remove and return the episodes of `actors`. `shared`: fields common to their trajectories, `own`: those in
        which they differ; `summarised`: include a summary of each; `unfinished`: they are cut short, and are left out
        of the statistics."""
        spec, lengths = self.env.spec, self.time[actors]
        tasks, returns = self.env.tasks(actors), self.total[actors].tolist()
        outcomes = [tuple(self.attempts[actor]) for actor in actors.tolist()]
        success = [(seen[-1] if seen else False) if spec.has_success else None for seen in outcomes]
        attempts = outcomes if spec.has_success and spec.num_attempts != 1 else [()] * len(actors)
        trajectories = None
        if self.recorder is not None:
            known = {"success": success} if spec.has_success and not unfinished else {}
            trajectories = self._record_parts(actors, shared, tasks, {**own, **known}, truncated=unfinished)
        self.time[actors] = 0
        if self.history_index is not None:
            self.history_index[actors] += 1
        if unfinished:
            return FinishedEpisodes(number=len(actors), stats=EpisodeStats(), trajectories=trajectories)
        achieved = self.env.achieved(actors) if summarised else np.zeros((0, 0), dtype=bool)
        standings = self.env.outcomes(actors).tolist() if spec.seats else [None] * len(actors)
        episodes = tuple(
            Episode(
                actor=self.place.start + actor,
                number=int(self.env.episodes.current[actor]),
                task=tasks[i],
                length=int(lengths[i]),
                total_reward=returns[i],
                success=success[i],
                attempts=attempts[i],
                attempt_returns=tuple(after - before for before, after in pairwise((0.0, *self._paid[actor])))
                if spec.num_attempts != 1
                else (),
                achieved=achieved[i],
                outcome=standings[i],
            )
            for i, actor in enumerate(actors.tolist() if summarised else ())
        )
        tally = EpisodeStats(
            episodes=len(actors), returns=sum(returns), successes=sum(map(bool, success)) if spec.has_success else 0
        )
        return FinishedEpisodes(number=len(actors), stats=tally, episodes=episodes, trajectories=trajectories)

    def cut(self, actors: np.ndarray, shared: TrajectoryInfo, own: Mapping[str, list[Any]]) -> FinishedEpisodes:
        """Cut off the running pieces of `actors`, whose episodes go on; `shared` and `own` as for `take`. A piece is
        truncated after its newest row, from which learning bootstraps, and with which the next piece begins."""
        assert self.recorder is not None
        for actor in actors.tolist():
            self._names[actor] = self._names[actor] or uuid4().hex
        known = {**own, "continues": [True] * len(actors)}
        trajectories = self._record_parts(actors, shared, self.env.tasks(actors), known, truncated=True)
        self.recorder.cut(actors)
        self.chunk[actors] += 1
        self.epsilon[actors], self.began[actors] = 0.0, time.time()
        for actor in actors.tolist():
            self._told[actor] = len(self.attempts[actor])
        return FinishedEpisodes(number=len(actors), stats=EpisodeStats(), trajectories=trajectories)

    def _record_parts(
        self,
        actors: np.ndarray,
        shared: TrajectoryInfo,
        tasks: Sequence[str],
        known: Mapping[str, list[Any]],
        *,
        truncated: bool,
    ) -> Trajectories:
        """Copy the running pieces of `actors` with their facts, `known` among them; `truncated`: their last rows are
        to be marked, as the environment has not ended the episodes."""
        assert self.recorder is not None
        spec, lengths, numbers = self.env.spec, self.recorder.lengths[actors], actors.tolist()
        columns, rows = self.recorder.episodes(actors)
        if truncated:
            final = np.cumsum(rows) - 1
            columns[TRUNCATED][final] = columns[TERMINATED][final] == 0
        each: dict[str, Sequence[Any] | np.ndarray] = {"task": tasks}
        each |= {"epsilon": self.epsilon[actors] / lengths, "t_start": self.began[actors]}
        each |= {"t_end": np.full(len(actors), time.time())}
        seeds = list(self.env.seeds(actors))
        each |= {"seed": seeds} if None not in seeds else {}
        if spec.has_success and spec.num_attempts != 1:
            attempts = [tuple(self.attempts[actor][self._told[actor] :]) for actor in numbers]
            each |= {"attempts": attempts} if any(attempts) else {}
        goals = self.env.goal_texts(actors)
        each |= {"goal_text": goals} if any(goals) else {}
        if self.history_index is not None:
            own = [
                f"{shared.collector}/{self.place.start + actor}/{task}"
                for actor, task in zip(numbers, tasks, strict=True)
            ]
            each |= {"history": own, "history_index": self.history_index[actors].tolist()}
        if spec.seats:
            each |= {"tags": [{**shared.tags, OPPONENT: name} for name in self.env.opponents(actors)]}
        names = [self._names[actor] for actor in numbers]
        if any(names):
            first = (self.time[actors] - lengths).tolist()
            each |= {"episode": names, "chunk": self.chunk[actors].tolist(), "first_step": first}
        return Trajectories(columns, rows, Infos(shared, {**each, **known}))

    def drop(self, actors: np.ndarray) -> int:
        """Discard what is not stored of the episodes of `actors`, and return how many steps that is."""
        lost = int(self.steps_in_flight[actors].sum())
        self.time[actors] = 0
        return lost

    def not_finite(self, result: StepResult) -> list[EnvFailure]:
        """Report each actor with a reward or an observation that is not finite."""
        found = []
        columns = {"reward": result.reward} | {name: result.observation[name] for name in self._floats}
        for name, column in columns.items():
            for actor in rows_not_finite(column):
                value = column[actor] if column.ndim == 1 else "that is not finite"
                message = (
                    f"environment '{self.env.spec.name}' gave {name} {value} (actor {self.place.start + actor}, "
                    f"step {self.time[actor] + 1} of episode {self.env.episodes.current[actor]})"
                )
                found.append(EnvFailure(actors=(actor,), message=message))
        return found


def next_to_end(groups: Sequence[ActorGroup]) -> ActorGroup:
    """Wait, and return the group furthest behind among those whose step has ended or which cannot report that."""
    begun = [group for group in groups if group.pending is not None]
    while all(group.waits_on for group in begun):
        poll = select.poll()
        for place in set().union(*(group.waits_on for group in begun)):
            poll.register(place, select.POLLIN)
        heard = {place for place, _ in poll.poll(_MOMENT_MS)}
        for group in begun if not heard else ():
            group.env.on_wait()
        for group in begun:
            group.waits_on -= heard
    return min((group for group in begun if not group.waits_on), key=lambda group: group.rounds)


def mean_epsilon(groups: Sequence[ActorGroup]) -> float:
    """Average the exploration rate over all steps of `groups`; 0 before the first."""
    rates, steps = zip(*(group.explored for group in groups), strict=True)
    return sum(rates) / max(sum(steps), 1)


def both(first: ActorsFailed | None, second: ActorsFailed | None) -> ActorsFailed | None:
    """Merge two failures, keeping the cause of the first."""
    if first is None or second is None:
        return first or second
    joined = ActorsFailed([*first.failures, *second.failures])
    joined.__cause__ = first.__cause__
    return joined


class JoinedGroups:
    """Several groups, as a policy sees them: concatenated."""

    def __init__(self, groups: Sequence[ActorGroup]) -> None:
        names, self._groups = list(groups[0].observation or ()), groups
        self.observation: Mapping[str, np.ndarray] | None = {
            name: np.concatenate([group.observation[name] for group in groups if group.observation is not None])
            for name in names
        }
        self.action, self.reward, self.time, self.memory_steps = (
            np.concatenate([getattr(group, name) for group in groups])
            for name in ("action", "reward", "time", "memory_steps")
        )

    def label(self, labels: np.ndarray) -> None:
        """Record the labels of all actors."""
        for group in self._groups:
            group.label(labels[group.place])
