"""One of several evaluators: a task that plays the episodes of its share of the actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.config.settings import Settings
from pipelines.envs.env import Env, EnvSpec
from pipelines.evaluation.runner import play_episodes
from pipelines.events import Listener
from pipelines.lake.spaces import is_greedy_by_default
from pipelines.learning.checkpoint import Checkpoint
from pipelines.rollout.episodes import Episode
from pipelines.rollout.policies import Acting, trained
from pipelines.stages.environment import make_evaluation_env, workers
from pipelines.stages.tasks import Channel
from pipelines.training.learner import use_threads

if TYPE_CHECKING:
    from pipelines.export.forms import FormFile


@dataclass(frozen=True, kw_only=True)
class PlayedShare:
    """The episodes that one evaluator has played."""

    spec: EnvSpec
    episodes: list[Episode]
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluatorTask:
    """The actors `place` of `total`, by a checkpoint, or by the `form` of a bundle; `check` refuses environments.
    `count`: number of evaluators.

    What actors play, and how the policy samples, does not depend on who plays the others.
    """

    settings: Settings
    checkpoint: Checkpoint
    place: slice
    total: int
    tasks: tuple[str, ...]
    count: int
    form: FormFile | None = None
    check: Callable[[EnvSpec], None]

    def __call__(self, channel: Channel) -> PlayedShare:
        """Play as a task."""
        return self.play(channel.listen)

    def play(self, listener: Listener) -> PlayedShare:
        """Play all episodes of these actors."""
        settings, wanted, began = self.settings, self.settings.evaluate, time.process_time()
        use_threads(settings.train.threads)
        actors = self.place.stop - self.place.start
        env = make_evaluation_env(
            settings.env,
            wanted,
            actors=actors,
            tasks=self.tasks,
            workers=workers(settings.env, settings.collect, actors=actors, together=self.count),
            timeout_seconds=settings.collect.env_timeout_seconds,
            offset=self.place.start,
            total=self.total,
            listener=listener,
        )
        try:
            self.check(env.spec)
            acting = self._acting(env)
            started = time.perf_counter()
            episodes = play_episodes(env, acting.policy, episodes=wanted.episodes, listener=listener)
            seconds = time.perf_counter() - started
        finally:
            env.close()
        cpu_seconds = time.process_time() - began
        return PlayedShare(spec=env.spec, episodes=episodes, seconds=seconds, cpu_seconds=cpu_seconds)

    def _acting(self, env: Env) -> Acting:
        wanted, own = self.settings.evaluate, self.settings.agent
        greedy = wanted.acts_greedily(by_default=is_greedy_by_default(env.spec.spaces.action))
        if self.form is not None:
            return self.form.policy(env, greedy=greedy, seed=wanted.seed)
        return trained(self.checkpoint, env, policy_id="", seed=wanted.seed, greedy=greedy, own=own)
