"""Evaluation: a fixed number of complete episodes, all of which are counted.

Actor i of N plays episodes i, i + N, i + 2N, ... up to the requested number, however long they are: counting whichever
episodes end first would favour short ones. Results are ordered by episode number, and the task of an episode follows
from its number, the seed and the split alone, so two policies are compared task by task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from pipelines.envs.env import Env, EnvSpec
from pipelines.envs.exploration import Exploration
from pipelines.errors import Interrupted, UsageError
from pipelines.events import Listener, Progress, Waiting, silent
from pipelines.rollout.episodes import Episode
from pipelines.rollout.group import Memory
from pipelines.rollout.policies import Policy
from pipelines.rollout.rollout import Rollout

_PROGRESS_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class EpisodeResults:
    """E episodes in the order of their numbers. `success` (E,) bool or None: of the last attempt.

    `attempts` (E, A) bool, or None for single-attempt tasks: the attempts that every episode finished.
    `attempt_returns` (E, A): their returns, also of tasks without success. `achieved` (E, K) bool: which of the
    environment's achievements each episode had. `outcomes` (E,) of games: 1 won, 0.5 drawn, 0 lost.
    """

    spec: EnvSpec
    returns: np.ndarray
    lengths: np.ndarray
    success: np.ndarray | None
    attempts: np.ndarray | None
    tasks: tuple[str, ...]
    seconds: float
    attempt_returns: np.ndarray | None = None
    achieved: np.ndarray | None = None
    outcomes: np.ndarray | None = None

    @property
    def episodes(self) -> int:
        return len(self.returns)

    @property
    def steps(self) -> int:
        """The number of environment steps of the counted episodes."""
        return int(self.lengths.sum())

    @classmethod
    def join(cls, spec: EnvSpec, played: Iterable[Episode], seconds: float) -> EpisodeResults:
        """Order the results of all episodes, which may have been played in parts."""
        ordered = sorted(played, key=lambda episode: episode.number)
        attempts = attempt_returns = None
        if spec.num_attempts != 1:
            shared = min(len(episode.attempt_returns) for episode in ordered)
            attempt_returns = np.array([episode.attempt_returns[:shared] for episode in ordered])
            if spec.has_success:
                attempts = np.array([episode.attempts[:shared] for episode in ordered], dtype=bool)
        return cls(
            spec=spec,
            returns=np.array([episode.total_reward for episode in ordered]),
            lengths=np.array([episode.length for episode in ordered]),
            success=np.array([bool(episode.success) for episode in ordered]) if spec.has_success else None,
            attempts=attempts,
            attempt_returns=attempt_returns,
            tasks=tuple(episode.task for episode in ordered),
            seconds=seconds,
            achieved=np.stack([episode.achieved for episode in ordered]) if spec.achievements else None,
            outcomes=np.array([episode.outcome for episode in ordered]) if spec.seats else None,
        )


def evaluate(
    env: Env,
    policy: Policy,
    *,
    episodes: int,
    exploration: Exploration | None = None,
    listener: Listener = silent,
    stage: str = "evaluate",
    stop: Callable[[], bool] | None = None,
) -> EpisodeResults:
    """Play episodes 0..episodes - 1 of `env` (fresh: not reset before) to their ends with `policy`.

    StageFailed if the environment raises; Interrupted if `stop()` returns true: there is no partial result.
    """
    began = perf_counter()
    played = play_episodes(
        env, policy, episodes=episodes, exploration=exploration, listener=listener, stage=stage, stop=stop
    )
    return EpisodeResults.join(env.spec, played, perf_counter() - began)


def play_episodes(
    env: Env,
    policy: Policy,
    *,
    episodes: int,
    exploration: Exploration | None = None,
    listener: Listener = silent,
    stage: str = "evaluate",
    stop: Callable[[], bool] | None = None,
    memory: Memory = "episode",
) -> list[Episode]:
    """Play those of the episodes 0..episodes - 1 that fall to the actors of `env`, as `evaluate` does.

    `memory`: whether the policy remembers an episode, or each attempt alone.
    """
    if episodes < 1:
        raise UsageError("evaluate needs at least one episode", hint="set evaluate.episodes")
    found: dict[int, Episode] = {}
    first, total = env.episodes.offset, env.episodes.total
    numbers = [number for number in range(episodes) if first <= number % total < first + env.num_envs]

    def note(episode: Episode) -> None:
        if episode.number < episodes:
            found[episode.number] = episode

    rollout = Rollout(env, policy, exploration=exploration, on_episode=note, memory=memory)
    stepping = Waiting(what=f"a step of environment '{env.spec.name}'", stoppable=False)
    listener(stepping)
    reported = perf_counter()
    while len(found) < len(numbers):
        if stop is not None and stop():
            raise Interrupted(f"evaluation stopped after {len(found)} of {len(numbers)} episodes")
        rollout.step()
        now = perf_counter()
        if now - reported >= _PROGRESS_SECONDS:
            reported = now
            listener(Progress(stage=stage, done=len(found), total=len(numbers), unit="episodes"))
            listener(stepping)
    listener(Progress(stage=stage, done=len(numbers), total=len(numbers), unit="episodes"))
    return [found[number] for number in numbers]
