"""The loop in which a policy acts in an environment: one batch of N actors, kept alive between calls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.envs.env import Env, StepResult
from pipelines.envs.exploration import Exploration
from pipelines.errors import AmagoError, StageFailed
from pipelines.events import Listener, Progress, silent
from pipelines.lake.schema import TERMINATED, TRUNCATED, Schema
from pipelines.lake.spaces import Box, zeros
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.rollout.policy_client import Policy
from pipelines.rollout.recorder import Recorder

Sink = Callable[[Trajectories], object]
UNFINISHED = "unfinished"  # tag of an episode that the rollout's end cut short
_PROGRESS_SECONDS = 0.2
_FIRST_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode. `number` counts over all actors (see `envs.env`); `success`: of the last
    attempt.
    """

    actor: int
    number: int
    task: str
    length: int
    total_reward: float
    success: bool | None
    attempts: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What one call of `run` did. Means are over the episodes that ended in it (nan: none did)."""

    steps: int
    trajectories: int
    return_mean: float
    success_mean: float
    seconds: float
    env_seconds: float
    policy_seconds: float

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


class Rollout:
    """N actors, their policy, exploration and unfinished episodes.

    `sink` receives the episodes that end in a step, together (columns of `lake.schema`); `on_episode` the summary of
    each. `policy_version` may be set between calls: an episode is recorded under the version that acted at its end.
    Episodes unfinished at `finish` are dropped, or, with `keep_unfinished`, stored as truncated, tagged `unfinished`,
    with no success (they did not fail), and left out of all means.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        *,
        exploration: Exploration | None = None,
        sink: Sink | None = None,
        on_episode: Callable[[Episode], None] | None = None,
        seed: int = 0,
        policy_id: str = "",
        policy_version: int = -1,
        collector: str = "",
        keep_unfinished: bool = False,
    ) -> None:
        self.env, self.policy, self.exploration = env, policy, exploration
        self.policy_id, self.policy_version = policy_id, policy_version
        self.total_steps = self.total_trajectories = 0
        self._sink, self._on_episode = sink, on_episode
        self._seed, self._collector, self._keep_unfinished = seed, collector, keep_unfinished
        n, action = env.num_envs, env.spec.spaces.action
        self._action_is_box = isinstance(action, Box)
        self._recorder: Recorder | None = None
        if sink is not None:
            rows = min(2 * (env.spec.horizon or _FIRST_ROWS) + 2, _FIRST_ROWS)
            self._recorder = Recorder(Schema(env.spec.spaces), n, rows=rows)
        self._observation: Mapping[str, np.ndarray] | None = None
        self._action = zeros(action, (n,))
        self._reward = np.zeros(n, dtype=np.float32)
        self._time = np.zeros(n, dtype=np.int64)
        self._return, self._epsilon, self._began = np.zeros((3, n))
        self._attempts: list[list[bool]] = [[] for _ in range(n)]
        self._clear_counters()

    def _clear_counters(self) -> None:
        self._returns: list[float] = []
        self._successes: list[bool] = []
        self._env_seconds = self._policy_seconds = 0.0

    def run(
        self,
        *,
        steps: int,
        listener: Listener = silent,
        stage: str = "collect",
        stop: Callable[[], bool] | None = None,
        between: Callable[[], object] | None = None,
    ) -> RolloutStats:
        """At least `steps` environment steps over all actors (fewer than `num_envs` more), or until `stop()`.
        `between` is called before each step of all actors; it may replace the policy.

        StageFailed, with the cause attached, when the environment or a scripted policy raises, or when a
        reward is not finite; episodes that ended before are already with the sink.
        """
        self._clear_counters()
        n = self.env.num_envs
        begun = told = time.perf_counter()
        done = 0
        while done < steps and not (stop is not None and stop()):
            if between is not None:
                between()
            self.step()
            done += n
            now = time.perf_counter()
            if now - told >= _PROGRESS_SECONDS:
                told = now
                listener(self._progress(stage, done, steps))
        stats = RolloutStats(
            steps=done,
            trajectories=len(self._returns),
            return_mean=_mean(self._returns),
            success_mean=_mean(self._successes),
            seconds=time.perf_counter() - begun,
            env_seconds=self._env_seconds,
            policy_seconds=self._policy_seconds,
        )
        listener(self._progress(stage, done, steps))
        return stats

    def step(self) -> None:
        """One step of every actor; actors whose episode ends are handed over and begin their next."""
        observation = self._begun()
        began = time.perf_counter()
        actions, epsilon = self._act(observation)
        acted = time.perf_counter()
        self._policy_seconds += acted - began
        result = self._guarded(lambda: self.env.step(actions))
        if not np.isfinite(result.reward).all():
            actor = int(np.flatnonzero(~np.isfinite(result.reward))[0])
            raise StageFailed(
                f"environment '{self.env.spec.name}' gave reward {result.reward[actor]} (actor {actor}, "
                f"step {self._time[actor]} of its episode)"
            )
        self._env_seconds += time.perf_counter() - acted
        if self._recorder is not None:
            self._recorder.add(
                result.observation, actions, result.reward, result.terminated, result.truncated, result.reset
            )
        self._observation, self._action, self._reward = result.observation, actions, result.reward
        self._time += 1
        self._return += result.reward
        self._epsilon += epsilon
        self.total_steps += self.env.num_envs
        self._account(result)

    def _begun(self) -> Mapping[str, np.ndarray]:
        if self._observation is None:
            self._observation = self._guarded(self.env.reset)
            self._began[:] = time.time()
            if self._recorder is not None:
                self._recorder.begin(np.arange(self.env.num_envs), self._observation)
        return self._observation

    def _act(self, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | float]:
        actions = self.policy.act(observation, self._action, self._reward, self._time)
        if actions.shape != self._action.shape:
            raise StageFailed(
                f"the policy gave actions of shape {actions.shape}, environment '{self.env.spec.name}' takes "
                f"{self._action.shape}"
            )
        if self._action_is_box:
            actions = np.clip(actions, -1.0, 1.0)
        epsilon: np.ndarray | float = 0.0
        if self.exploration is not None:
            actions, epsilon = self.exploration(actions, self._time, observation)
        return actions.astype(self._action.dtype, copy=False), epsilon

    def _account(self, result: StepResult) -> None:
        """Note attempts that ended; hand over episodes that ended and begin new ones."""
        for actor in np.flatnonzero(result.attempt_end).tolist():
            self._attempts[actor].append(bool(result.success[actor]))
        over = result.terminated | result.truncated
        if not over.any():
            return
        ended = np.flatnonzero(over)
        self._hand_over(ended)
        self._observation = observation = self._guarded(lambda: self.env.reset(over))
        if self._recorder is not None:
            self._recorder.begin(ended, observation)
        self._action, self._reward = self._action.copy(), self._reward.copy()
        for state in (self._action, self._reward, self._time, self._return, self._epsilon):
            state[ended] = 0
        self._began[ended] = time.time()
        for actor in ended.tolist():
            self._attempts[actor] = []

    def _hand_over(self, actors: np.ndarray, *, unfinished: bool = False) -> None:
        """Give the episodes of `actors` to the sink, once, even if the sink is interrupted."""
        lengths = self._time[actors]
        tasks, goals, spec = self.env.tasks(actors), self.env.goal_texts(actors), self.env.spec
        outcomes = [tuple(self._attempts[actor]) for actor in actors.tolist()]
        success = [(seen[-1] if seen else False) if spec.has_success else None for seen in outcomes]
        attempts = outcomes if spec.has_success and spec.num_attempts != 1 else [()] * len(actors)
        if self._recorder is not None and self._sink is not None:
            columns, rows = self._recorder.episodes(actors)
            if unfinished:
                last = np.cumsum(rows) - 1
                columns[TRUNCATED][last] = columns[TERMINATED][last] == 0
            now, tags = time.time(), {UNFINISHED: "true"} if unfinished else {}
            epsilon, began = (self._epsilon[actors] / lengths).tolist(), self._began[actors].tolist()
            infos = [
                TrajectoryInfo(
                    env=spec.name,
                    task=tasks[i],
                    policy_id=self.policy_id,
                    policy_version=self.policy_version,
                    collector=self._collector,
                    seed=self._seed,
                    success=None if unfinished else success[i],
                    attempts=attempts[i],
                    epsilon=epsilon[i],
                    goal_text=goals[i],
                    t_start=began[i],
                    t_end=now,
                    tags=tags,
                )
                for i in range(len(actors))
            ]
            self._time[actors] = 0  # from here on they are the sink's
            self._sink(Trajectories(columns, rows, infos))
        self.total_trajectories += len(actors)
        if unfinished:
            return
        returns = self._return[actors].tolist()
        self._returns += returns
        self._successes += [outcome for outcome in success if outcome is not None]
        if self._on_episode is None:
            return
        for i, actor in enumerate(actors.tolist()):
            episode = Episode(
                actor=actor,
                number=int(self.env.episodes.current[actor]),
                task=tasks[i],
                length=int(lengths[i]),
                total_reward=returns[i],
                success=success[i],
                attempts=attempts[i],
            )
            self._on_episode(episode)

    def finish(self) -> int:
        """End the rollout: unfinished episodes are dropped, or stored as truncated. Returns how many were
        stored.
        """
        begun = np.flatnonzero(self._time > 0)
        stored = 0
        if self._keep_unfinished and self._recorder is not None and len(begun):
            self._hand_over(begun, unfinished=True)
            stored = len(begun)
        self._observation = None
        self._time[:] = 0
        return stored

    def prefixes(self) -> list[dict[str, np.ndarray]]:
        """For each actor, the rows its policy has already acted on in the present episode (T rows, T = its
        time).
        """
        if self._recorder is None:
            raise ValueError("a rollout without a sink keeps no rows")
        return [self._recorder.prefix(actor) for actor in range(self.env.num_envs)]

    def state_dict(self) -> dict[str, Any]:
        """Exploration's position and the next task; unfinished episodes are not part of it."""
        return {
            "env": self.env.state_dict(),
            "exploration": None if self.exploration is None else self.exploration.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with `state`; call before the first step."""
        self.env.load_state_dict(state["env"])
        if self.exploration is not None and state["exploration"] is not None:
            self.exploration.load_state_dict(state["exploration"])

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AmagoError:
            raise
        except Exception as error:
            raise StageFailed(f"environment '{self.env.spec.name}' failed: {type(error).__name__}: {error}") from error

    def _progress(self, stage: str, done: int, steps: int) -> Progress:
        means = {"return_mean": _mean(self._returns), "success_mean": _mean(self._successes)}
        shown = {name: value for name, value in means.items() if not math.isnan(value)}
        return Progress(stage=stage, done=min(done, steps), total=steps, unit="steps", metrics=shown)


def _mean(values: list[Any]) -> float:
    return float(np.mean(values)) if values else math.nan
