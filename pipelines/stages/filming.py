"""Videos of an evaluation's episodes, and episodes to watch, both played as `evaluate` plays them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.envs import rendering
from pipelines.envs.env import Env, EnvSpec
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.evaluation.films import Film, PictureReel, film_episodes
from pipelines.evaluation.values import Values
from pipelines.events import Listener, Notice, silent
from pipelines.formats.video_writer import choose_suffix, write_video
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.bundle import Bundle
from pipelines.rollout.plan import EvaluationPlan, plan_evaluation
from pipelines.training.learner import use_threads


class EpisodeVideos:
    """The videos that an evaluation's settings ask for: files `STEM-EPISODE.mp4` (or .gif) in the directory `to`."""

    def __init__(self, plan: EvaluationPlan, *, to: Path, stem: str) -> None:
        self._plan, self._to, self._stem = plan, to, stem
        self._episodes = range(min(plan.wanted.video, plan.wanted.episodes))
        self.paths = self._found() or []

    def _found(self) -> list[Path] | None:
        """Find the videos in the order of their episodes, if all are there."""
        for ending in (".mp4", ".gif"):
            paths = [self._to / f"{self._stem}-{episode}{ending}" for episode in self._episodes]
            if paths and all(path.is_file() for path in paths):
                return paths
        return None

    @property
    def _missing(self) -> bool:
        return bool(self._episodes) and not self.paths

    def require(self, listener: Listener = silent) -> None:
        """Raise, before anything is played, what would be wrong afterwards: there is no encoder, or no drawing."""
        if not self._missing:
            return
        choose_suffix()
        with contextlib.closing(self._plan.make_drawn_env(listener, actors=1)) as env:
            rendering.picture(env, env.reset())

    def write(self, listener: Listener = silent, *, strict: bool = True) -> bool:
        """Play the episodes and write their videos, unless they are there; return whether any were written. Errors are
        warnings unless `strict`.
        """
        if not self._missing:
            return False
        try:
            self._write(listener)
        except (InputMissing, StageFailed) as error:
            if strict:
                raise
            listener(Notice(stage="evaluate", text=f"no videos: {error.message}", level="warning"))
        return bool(self.paths)

    def _write(self, listener: Listener) -> None:
        ending = choose_suffix()
        with contextlib.closing(self._plan.make_drawn_env(listener)) as env:
            films, spec = _film(self._plan, env, rendering.picture, PictureReel, self._episodes, listener), env.spec
        for episode, each in zip(self._episodes, films, strict=True):
            frames = each.add_captions(has_success=spec.has_success, attempts=spec.num_attempts)
            self.paths.append(write_video(self._to / f"{self._stem}-{episode}{ending}", frames, each.fps))
            each.frames.close()


@dataclass(frozen=True, kw_only=True)
class WatchedEpisode:
    """An episode to be shown in a terminal: its film, whose frames are texts, and what plays it."""

    film: Film
    spec: EnvSpec
    update: int


def watch(
    settings: Settings, *, run: Path, episode: int = 0, colors: bool = False, listener: Listener = silent
) -> WatchedEpisode:
    """Play one evaluation episode, by its number, and return it as text. `colors`: an environment without a text of its
    own is drawn in 24-bit colours.
    """
    directory = RunDirectory.open(run)
    checkpoint = checkpoints.load(directory.checkpoints, settings.evaluate.checkpoint)
    plan = plan_evaluation(settings, checkpoint, directory, listener)

    def draw(env: Env, observation: Any, actor: int) -> str:
        return rendering.text(env, observation, actor, colors=colors)

    with contextlib.closing(plan.make_drawn_env(listener, actors=1)) as env:
        env.load_state_dict({"next_episode": episode})
        [watched] = _film(plan, env, draw, list, [episode], listener)
        return WatchedEpisode(film=watched, spec=env.spec, update=checkpoint.update)


def _film(
    plan: EvaluationPlan,
    env: Env,
    drawing: Callable[[Env, Any, int], Any],
    reel: Callable[[], Any],
    episodes: Sequence[int],
    listener: Listener,
) -> list[Film]:
    """Play episodes of an evaluation, and return their films."""
    use_threads(plan.settings.train.threads)
    policy, values = plan.make_policy(env).policy, None
    if not isinstance(plan.checkpoint, Bundle):  # which has no critics
        with contextlib.suppress(UsageError):  # nor has every agent
            run = plan.checkpoint.path.resolve().parent.parent
            values = Values(f"{run}@{plan.checkpoint.update}", own=plan.settings.agent)
    memory = plan.wanted.memory
    return film_episodes(
        env, policy, drawing, episodes=episodes, values=values, listener=listener, reel=reel, memory=memory
    )
