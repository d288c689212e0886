"""`robotics:ID`: Fetch, PointMaze, AntMaze and AdroitHand of gymnasium-robotics, with their success."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from typing import Any, ClassVar, Literal

import gymnasium
from pydantic import Field

from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.suites.suite import ProtocolSettings, refuse_from
from pipelines.envs.task_env import FAILED, NOTHING, SOLVED, TaskEnv
from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean

PREFIX = "robotics:"
_FAMILY = re.compile(r"(Fetch|PointMaze|AntMaze|AdroitHand)\w+-v(\d+)")
_OLD_PHYSICS = re.compile(r"Fetch\w+-v[0-3]|AntMaze\w+-v3")  # need mujoco_py, which is no longer maintained


class _RoboticsSettings(ProtocolSettings):
    """Parameters of `robotics:ID`."""

    PAPER: ClassVar = {"continuing_task": False}  # D4RL

    reward_type: Literal["sparse", "dense"] | None = None
    """Reward for the goal alone, or for nearness; unset: what the ID says."""
    continuing_task: bool = True
    """Mazes: play on when the goal was reached, instead of ending the episode."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Steps of an episode; unset: what the ID says."""


def list_names() -> list[str]:
    """List every ID of the four families that can be played."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # it prints a notice about rewards that another release changed
        import gymnasium_robotics

        gymnasium.register_envs(gymnasium_robotics)
    return [name for name in gymnasium.registry if _FAMILY.fullmatch(name) and not _OLD_PHYSICS.fullmatch(name)]


class Robot(TaskEnv):
    """One environment of the four families, with its success."""

    Settings = _RoboticsSettings
    has_success = True

    @classmethod
    def make(cls, name: str, settings: _RoboticsSettings, *, num_envs: int, seed: int, split: str) -> Env:
        kind, known = name.removeprefix(PREFIX), list_names()
        if kind not in known:
            hint = did_you_mean(
                kind,
                known,
                prefix=PREFIX,
                otherwise=f"for others than the four families, gym:gymnasium_robotics:{kind}",
                cutoff=0.75,
            )
            raise UsageError(f"unknown environment '{name}'", hint=hint)
        if kind.startswith("Fetch"):
            refuse_from("mujoco", (3, 12), name=name, why="gymnasium-robotics sets joints in a way that it refuses")
        kwargs: dict[str, Any] = {"disable_env_checker": True, "render_mode": "rgb_array"}
        if "Maze_" in kind:
            kwargs["continuing_task"] = settings.continuing_task
        if settings.reward_type is not None:
            kwargs["reward_type"] = settings.reward_type
        if settings.max_episode_steps is not None:
            kwargs["max_episode_steps"] = settings.max_episode_steps

        def make_one() -> Robot:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # older versions are asked for by their names
                return cls(gymnasium.make(kind, **kwargs), name)

        return GymnasiumEnv(name, make_one, num_envs=num_envs, seed=seed, split=split)

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        self._env, self.task = env, name
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.horizon = None if env.spec is None else env.spec.max_episode_steps
        self._at_the_end = name.startswith(f"{PREFIX}Fetch")
        self._key = "is_success" if self._at_the_end else "success"
        self._solved = False
        for method in ("compute_reward", "compute_terminated"):
            if hasattr(env.unwrapped, method):
                setattr(self, method, getattr(env.unwrapped, method))

    @property
    def about(self) -> str:  # type: ignore[override]
        return f"{self.task.removeprefix(PREFIX)}, {self.horizon} steps"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.outcome, self._solved = NOTHING, False
        return self._env.reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        solved = bool(info[self._key])
        self._solved = solved or (self._solved and not self._at_the_end)
        over = terminated or truncated
        self.outcome = (SOLVED if self._solved else FAILED) if over else NOTHING
        return observation, float(reward), terminated, truncated, info

    def drawn(self, mode: str) -> Any:
        return self._env.render() if mode == "rgb_array" else None

    def close(self) -> None:
        self._env.close()
