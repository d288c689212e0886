"""The loop in which a policy acts in an environment: one batch of N actors, kept alive between calls.

If the environment has several parts, the policy acts for one while others are stepped, and a slow part does not hold up
the others. A failure in an environment costs the episodes of its actors; `on_env_error` determines whether the others
continue.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pipelines.envs.env import ActorsFailed, Env, EnvFailure, try_call
from pipelines.envs.exploration import Exploration
from pipelines.errors import StageFailed
from pipelines.events import Listener, Progress, Waiting, silent
from pipelines.lake.spaces import Box
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.rollout.episodes import Episode, EpisodeQueue, EpisodeStats, FinishedEpisodes, RolloutStats, Sink
from pipelines.rollout.group import ActorGroup, ChosenStep, JoinedGroups, Memory, both, mean_epsilon, next_to_end
from pipelines.rollout.learners import HistoryLearner
from pipelines.rollout.policies import Policy, require_log_prob

UNFINISHED = "unfinished"  # tag of an episode cut short by the end of the rollout
OnError = Literal["stop", "restart"]
_PROGRESS_SECONDS = 0.2
_MOST_STRIKES = 5  # consecutive failures of an actor's environment
_LEAST_AHEAD, _MOST_AHEAD = 2, 64  # steps that a part may be ahead of others


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """The storing of running episodes in pieces: every `steps` steps (0: not while they run), and if `context` > 0, at
    the end of each call of `Collector.collect`. `kept`: steps of a cut episode that a new policy's memory is rebuilt
    from.

    At the end of a call, pieces of at least `context` steps are cut where episodes are cut anyway. If more than a
    quarter of all steps so far would then still be in running episodes, all of them are cut, so that even the first
    epoch of long episodes has something to train on. Otherwise they are left alone: a window does not see what was
    before its piece.
    """

    steps: int = 0
    context: int = 0
    kept: int = 0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recording of a rollout's episodes: `sink` receives them (columns of `lake.schema`) in small batches, all of
    them before `run` or `settle` returns.

    Episodes unfinished at `finish` are dropped, or, with `keep_unfinished`, stored as truncated, tagged `unfinished`,
    with no success (they did not fail), and left out of all means. With `histories`, the episodes of each actor are a
    history. Counts and means are those of whole episodes, even where pieces of them are stored. `labeller`: a policy
    whose actions are stored as labels, and not executed. `logp`: with the log-probabilities of executed actions, which
    UsageError refuses for a policy or an exploration that does not know them.
    """

    sink: Sink
    seed: int = 0
    keep_unfinished: bool = False
    histories: bool = False
    cutting: Cutting = Cutting()
    labeller: Policy | None = None
    logp: bool = False


class Rollout:
    """N actors, their policy, exploration and unfinished episodes.

    `recording`: how episodes are stored (None: they are not); `on_episode` receives the summary of each. `policy`,
    `policy_id`, `policy_version` and `collector` may be set between calls: an episode is recorded under the version
    that acted at its end.

    If environments of some actors fail, their episodes are dropped; with `on_env_error` "restart" they start again and
    `on_failure` is called, unless one of them failed five times in a row, or its worker process within a hundred steps.
    `memory`: whether the policy remembers an episode, or each attempt alone.
    `env_errors` counts failures, `episodes_dropped` lost episodes; `total_steps` excludes them.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        *,
        exploration: Exploration | None = None,
        recording: Recording | None = None,
        on_episode: Callable[[Episode], None] | None = None,
        on_failure: Callable[[EnvFailure], None] | None = None,
        on_env_error: OnError = "stop",
        memory: Memory = "episode",
    ) -> None:
        self.env, self.exploration = env, exploration
        self.policy_id, self.policy_version, self.collector = "", -1, ""
        self.total_steps = self.env_errors = self.episodes_dropped = 0
        self._finished = EpisodeQueue(None if recording is None else recording.sink, on_episode)
        self._summarised = on_episode is not None
        self._on_failure, self._on_error = on_failure, on_env_error
        self._recording, cutting = recording, Cutting() if recording is None else recording.cutting
        self._labeller = None if recording is None else recording.labeller
        self._chunk_steps = cutting.steps
        self._action_is_box = isinstance(env.spec.spaces.action, Box)
        self._groups: list[ActorGroup] = []
        first = 0
        for part in env.parts:
            place = slice(first, first + part.num_envs)
            self._groups.append(
                ActorGroup(
                    part,
                    len(self._groups),
                    place,
                    recorded=recording is not None,
                    kept_steps=cutting.kept,
                    histories=recording is not None and recording.histories,
                    labelled=self._labeller is not None,
                    logp=recording is not None and recording.logp,
                    memory=memory,
                )
            )
            first += part.num_envs
        self._rounds, self._overlapping = 0, False
        self.policy = policy
        self._clear_counters()

    def _clear_counters(self) -> None:
        self._finished.stats = EpisodeStats()
        self._env_seconds = self._policy_seconds = 0.0
        for group in self._groups:
            group.explored = 0.0, 0
        self._before = self.total_steps, self.env_errors, self.episodes_dropped
        self._began, self._first_round = time.perf_counter(), self._rounds

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.settle()
        wants_logp = self._recording is not None and self._recording.logp
        self._choices = require_log_prob(policy, self.exploration) if wants_logp else None
        self._policy, sizes = policy, [group.env.num_envs for group in self._groups]
        splitting = [policy, *(each for each in (self._labeller, self.exploration) if each is not None)]
        splits = [getattr(each, "split", None) for each in splitting]  # a user's policy may have none
        self._overlapping = len(sizes) > 1 and all(split is not None and split(sizes) for split in splits)

    @property
    def stepping(self) -> Waiting:
        """What to say before steps that may hang: they cannot be stopped."""
        return Waiting(what=f"a step of environment '{self.env.spec.name}'", stoppable=False)

    def run(
        self,
        *,
        steps: int,
        listener: Listener = silent,
        stage: str = "collect",
        stop: Callable[[], bool] | None = None,
        between: Callable[[], object] | None = None,
    ) -> RolloutStats:
        """Take at least `steps` environment steps over all actors (fewer than `num_envs` more), or until `stop()`.
        `between` and `stop` are called before each step of all actors; `between` may replace the policy, which then
        acts for all from that step on.

        StageFailed, with the cause attached, if a scripted policy raises, or an environment fails (see the class);
        episodes that ended before have reached the sink.
        """
        self._clear_counters()
        reported = time.perf_counter()
        listener(self.stepping)
        try:
            while not (stop is not None and stop()):
                if self._done + self._due >= steps:
                    self.settle()
                    if self._done >= steps:  # otherwise some were lost
                        break
                if between is not None:
                    between()
                self.step()
                now = time.perf_counter()
                if now - reported >= _PROGRESS_SECONDS:
                    reported = now
                    listener(self._progress(stage, steps))
                    listener(self.stepping)
            self.settle()
        except BaseException:
            self._finished.flush()
            raise
        stats = self.stats()
        listener(self._progress(stage, steps))
        return stats

    @property
    def _done(self) -> int:
        return self.total_steps - self._before[0]

    def stats(self) -> RolloutStats:
        """Count the steps and episodes of the last call of `run` so far."""
        return RolloutStats(
            steps=self._done,
            trajectories=self._finished.stats.episodes,
            return_mean=self._finished.stats.return_mean,
            success_mean=self._success_mean,
            epsilon=mean_epsilon(self._groups),
            seconds=time.perf_counter() - self._began,
            env_seconds=self._env_seconds,
            policy_seconds=self._policy_seconds,
            env_errors=self.env_errors - self._before[1],
            episodes_dropped=self.episodes_dropped - self._before[2],
        )

    def continue_histories(self, indices: np.ndarray) -> None:
        """Number the next episode of each actor in its history (N,); call before the first step."""
        for group in self._groups:
            group.history_index = indices[group.place].copy()

    def begin(self) -> None:
        """Start the first episode of every actor, unless `step` has. Errors as for `run`."""
        for group in self._groups:
            if group.observation is None:
                self._mend(group, self._reset(group, np.ones(group.env.num_envs, dtype=bool)))

    def step(self) -> None:
        """Take one step of every actor; actors whose episode ends start their next one.

        If the policy acts for parts of the actors, each part continues as soon as it is ready. At least one part has
        completed the step on return; others may be some steps behind (`_ahead`), and finished episodes wait for their
        turn.
        """
        self.begin()
        if self._overlapping:
            self._rounds += 1
            self._go_on(behind=self._ahead - 1)
            return
        self._catch_up()
        groups = self._groups
        step = self._act(groups[0] if len(groups) == 1 else JoinedGroups(groups), None)
        self._rounds += 1
        for group in groups:
            self._start(group, step.of(group.place))
        if len(groups) == 1:
            self._catch_up()
        self._hand_over(if_due=True)

    @property
    def _ahead(self) -> int:
        """The number of steps that a part may be ahead of another, which may be in a long reset: about a second's
        worth, because the slow part must catch up before a run ends."""
        a_second = (self._rounds - self._first_round) / max(time.perf_counter() - self._began, 1e-9)
        return int(min(max(a_second, _LEAST_AHEAD), _MOST_AHEAD))

    def settle(self) -> None:
        """Complete every step in progress, for all actors, and pass on the finished episodes."""
        self._catch_up()
        self._hand_over()

    def _catch_up(self) -> None:
        if self._overlapping:
            self._go_on(behind=0)
        for group in self._groups:
            self._end(group)

    def _go_on(self, *, behind: int) -> None:
        """Let each part proceed independently until one has completed all rounds, and the others are at most `behind`
        behind."""
        while True:
            for group in self._groups:
                if group.pending is None and group.rounds < self._rounds:
                    self._start(group, self._act(group, group.number))
            rounds = [group.rounds for group in self._groups]
            if max(rounds) == self._rounds and min(rounds) >= self._rounds - behind:
                return
            self._hand_over(if_due=True)
            began = time.perf_counter()
            group = next_to_end(self._groups)
            self._env_seconds += time.perf_counter() - began
            self._end(group)

    @property
    def _due(self) -> int:
        """The number of actor steps still missing in rounds that have started."""
        return sum((self._rounds - group.rounds) * group.env.num_envs for group in self._groups)

    def _act(self, actors: ActorGroup | JoinedGroups, part: int | None) -> ChosenStep:
        """Choose the actions for a group, or for all actors."""
        began = time.perf_counter()
        observation = actors.observation
        assert observation is not None
        given = {} if part is None else {"part": part}
        explored = self._policy.epsilon if isinstance(self._policy, HistoryLearner) else 0.0
        actions = self._policy.act(observation, actors.action, actors.reward, actors.memory_steps, **given)
        actions = self._check_actions(actions, actors.action, "the policy")
        if self._labeller is not None:
            labels = self._labeller.act(observation, actors.action, actors.reward, actors.time, **given)
            actors.label(self._check_actions(labels, actors.action, "the policy of collect.label"))
        epsilon: np.ndarray | float = explored
        if self.exploration is not None:
            actions, epsilon = self.exploration(actions, actors.time, observation, part)
        actions = actions.astype(actors.action.dtype, copy=False)
        logp = None
        if self._choices is not None:
            logp = self._choices.log_prob(actions, **given)
            if self.exploration is not None:
                logp = self.exploration.mix(logp, actions, np.asarray(epsilon), observation)
        self._policy_seconds += time.perf_counter() - began
        return ChosenStep(actions, epsilon, logp)

    def _check_actions(self, actions: np.ndarray, like: np.ndarray, whose: str) -> np.ndarray:
        """Return actions within their bounds. StageFailed if they are not of the shape of `like`."""
        if actions.shape != like.shape:
            raise StageFailed(
                f"{whose} gave actions of shape {actions.shape}, environment '{self.env.spec.name}' takes {like.shape}"
            )
        return np.clip(actions, -1.0, 1.0) if self._action_is_box else actions

    def _start(self, group: ActorGroup, step: ChosenStep) -> None:
        began = time.perf_counter()
        group.env.begin_step(step.actions)
        group.pending = step
        group.waits_on.update(group.env.waits_on)
        self._env_seconds += time.perf_counter() - began

    def _end(self, group: ActorGroup, *, last: bool = False) -> None:
        """Complete the group's step, if one is in progress; `last`: do not start new episodes."""
        if group.pending is None:
            return
        step, turn = group.pending, (group.rounds, group.number)
        group.pending, group.rounds = None, group.rounds + 1
        group.waits_on.clear()
        began = time.perf_counter()
        result, error = try_call(group.env, group.env.end_step)
        self._env_seconds += time.perf_counter() - began
        failed = np.zeros(group.env.num_envs, dtype=bool)
        if result is not None:
            found = group.not_finite(result)
            if found:
                error = ActorsFailed([*(error.failures if error else ()), *found], result)
            # A piece is cut before the next step is added, so that none is left empty when an episode or the rollout
            # ends there.
            if self._chunk_steps and len(due := group.running(self._chunk_steps)):
                self._finished.put(turn, group.cut(due, self._info(), self._count_updates(group, due)))
            observed = group.observation
            group.add(step, result)
            self.total_steps += len(failed)
        if error is not None:
            failed[[actor for failure in error.failures for actor in failure.actors]] = True
            self._drop(group, failed)
        if result is not None and isinstance(self._policy, HistoryLearner):
            assert observed is not None
            learns = np.flatnonzero(~failed)
            steps = {name: values[learns] for name, values in observed.items()}
            ended = (result.terminated | result.reset)[learns]
            after = {name: values[learns] for name, values in result.observation.items()}
            over = (result.terminated | result.truncated)[learns]
            actors, rewards = group.place.start + learns, result.reward[learns]
            self._policy.learn(actors, steps, step.actions[learns], rewards, ended, over, after)
        if result is not None:
            over = (result.terminated | result.truncated) & ~failed
            if over.any():
                self._finished.put(turn, self._taken(group, np.flatnonzero(over)))
                group.strikes[over] = 0
                error = both(error, None if last else self._reset(group, over))
        self._mend(group, error, last=last)

    def _reset(self, group: ActorGroup, mask: np.ndarray) -> ActorsFailed | None:
        """Start episodes, and return the failures."""
        began = time.perf_counter()
        observation, error = try_call(group.env, lambda: group.env.reset(mask), mask)
        self._env_seconds += time.perf_counter() - began
        if observation is not None:
            group.begin(np.flatnonzero(mask), observation)
        return error

    def _drop(self, group: ActorGroup, failed: np.ndarray) -> None:
        self.episodes_dropped += int((group.time[failed] > 0).sum())
        self.total_steps -= group.drop(np.flatnonzero(failed))

    def _mend(self, group: ActorGroup, error: ActorsFailed | None, *, last: bool = False) -> None:
        """Count and report failures, whose episodes are dropped, and start new ones; raise `error` if restarting is
        disabled or does not help."""
        while error is not None:
            self.env_errors += sum(not failure.reported for failure in error.failures)
            mask = np.zeros(group.env.num_envs, dtype=bool)
            mask[[actor for failure in error.failures for actor in failure.actors]] = True
            group.strikes += mask
            if last:
                return
            if self._on_error == "stop":
                raise error
            in_a_row = {f: max(group.strikes[list(f.actors)].max(), f.in_a_row) for f in error.failures if f.actors}
            failure = next((f for f, times in in_a_row.items() if times >= _MOST_STRIKES), None)
            if failure is not None:
                again = replace(failure, message=f"{failure.message}; this was the {_MOST_STRIKES}th time in a row")
                raise ActorsFailed([again]) from error.__cause__
            for failure in error.failures:
                if self._on_failure is not None and not failure.reported:
                    self._on_failure(failure)
            error = self._reset(group, mask)

    def _taken(self, group: ActorGroup, actors: np.ndarray, *, unfinished: bool = False) -> FinishedEpisodes:
        shared = self._info(tags={UNFINISHED: "true"} if unfinished else {})
        own = self._count_updates(group, actors)
        return group.take(actors, shared, own, summarised=self._summarised, unfinished=unfinished)

    def _count_updates(self, group: ActorGroup, actors: np.ndarray) -> dict[str, list[int]]:
        """Count the updates of each actor's learner, if the policy is one, as a field of trajectories."""
        if not isinstance(self._policy, HistoryLearner):
            return {}
        return {"policy_version": self._policy.version[group.place][actors].tolist()}

    def _info(self, tags: Mapping[str, str] | None = None) -> TrajectoryInfo:
        """Collect the facts that trajectories which are taken now have in common."""
        return TrajectoryInfo(
            env=self.env.spec.name,
            policy_id=self.policy_id,
            policy_version=self.policy_version,
            collector=self.collector,
            seed=0 if self._recording is None else self._recording.seed,
            tags=tags or {},
        )

    def cut(self, least: int = 1) -> int:
        """Store the running pieces of at least `least` steps, whose episodes go on; return how many there were."""
        self.settle()
        stored = 0
        for group in self._groups:
            if len(actors := group.running(least)):
                pieces = group.cut(actors, self._info(), self._count_updates(group, actors))
                self._finished.put((group.rounds, group.number), pieces)
                stored += len(actors)
        self._finished.flush()
        return stored

    @property
    def unstored_steps(self) -> int:
        """The steps of running episodes that the sink has not received."""
        return sum(int(group.steps_in_flight.sum()) for group in self._groups)

    def _hand_over(self, *, if_due: bool = False) -> None:
        """Pass on finished episodes for which no earlier turn is still open."""
        self._finished.flush(min((group.rounds, group.number) for group in self._groups), if_due=if_due)

    def finish(self) -> int:
        """End the rollout: drop unfinished episodes, or store them as truncated. Returns how many were stored."""
        stored = 0
        for group in self._groups:
            self._end(group, last=True)
        self._finished.flush()
        for group in self._groups:
            keeps = self._recording is not None and self._recording.keep_unfinished
            if keeps and len(begun := group.running(1)):
                self._finished.put((group.rounds, group.number), self._taken(group, begun, unfinished=True))
                stored += len(begun)
            group.observation = None
            group.time[:] = 0
        self._finished.flush()
        return stored

    def prefixes(self) -> list[dict[str, np.ndarray]]:
        """Copy, for each actor, the rows of its current episode that its policy has acted on: as many as its time, or
        the last of them if the episode was cut."""
        self.settle()
        recorders = [group.recorder for group in self._groups if group.recorder is not None]
        if not recorders:
            raise ValueError("a rollout without a sink keeps no rows")
        return [recorder.prefix(actor) for recorder in recorders for actor in range(len(recorder.lengths))]

    @property
    def time(self) -> np.ndarray:
        """The time of each actor in its episode, (N,) int64."""
        return np.concatenate([group.time for group in self._groups])

    def state_dict(self) -> dict[str, Any]:
        """Describe exploration's position and the next task; unfinished episodes are not included."""
        return {
            "env": self.env.state_dict(),
            "exploration": None if self.exploration is None else self.exploration.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; call before the first step."""
        self.env.load_state_dict(state["env"])
        if self.exploration is not None and state["exploration"] is not None:
            self.exploration.load_state_dict(state["exploration"])

    @property
    def unfinished(self) -> int:
        """The number of episodes in progress."""
        return sum(int((group.time > 0).sum()) for group in self._groups)

    @property
    def unfinished_steps(self) -> int:
        """The number of steps in episodes in progress."""
        return sum(int(group.time.sum()) for group in self._groups)

    @property
    def _success_mean(self) -> float:
        return self._finished.stats.success_mean if self.env.spec.has_success else math.nan

    def _progress(self, stage: str, steps: int) -> Progress:
        seconds = time.perf_counter() - self._began
        shown = {
            "return_mean": self._finished.stats.return_mean,
            "success_mean": self._success_mean,
            "epsilon": mean_epsilon(self._groups),
            "policy_share": self._policy_seconds / seconds,
            "env_share": self._env_seconds / seconds,
        }
        known = {name: value for name, value in shown.items() if not math.isnan(value)}
        return Progress(stage=stage, done=min(self._done, steps), total=steps, unit="steps", metrics=known)
