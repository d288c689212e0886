"""A `gymnasium.vector.VectorEnv` as an environment of several actors.

It must let us reset single actors by `options["reset_mask"]`, as gymnasium's own do: episode k begins with the seed
that an environment of gymnasium's single interface would get. In the mode NEXT_STEP, gymnasium's default, an actor is
reset before the step that would reset it, and all the others wait. With SAME_STEP the environment resets actors by
itself, and only the first episodes are seeded. EnvPool's environments return the actors that were reset alone, and have
the seeds that they were made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from pipelines.envs.constructor import list_parameters
from pipelines.envs.env import EnvSpec, EpisodeEnv, StepResult
from pipelines.envs.gymnasium_env import describe_error, first_sentence
from pipelines.envs.spec import MAX_LENGTH, ActionCodec, ObservationCodec
from pipelines.envs.task_env import read_success
from pipelines.errors import AmagoError, StageFailed, UsageError
from pipelines.lake.spaces import Spaces


class BatchedEnv(EpisodeEnv):
    """The `num_envs` environments of the VectorEnv that `factory` makes of their number. `success_key` as of
    `GymnasiumEnv`."""

    def __init__(
        self,
        name: str,
        factory: Callable[[int], Any],
        *,
        num_envs: int,
        seed: int,
        split: str,
        success_key: str | None = None,
        max_length: int = MAX_LENGTH,
    ) -> None:
        super().__init__(name, num_envs=num_envs, seed=seed, split=split)
        self._name, self._success_key = name, success_key
        self.env = self._make_batch(factory)
        self._observations = ObservationCodec(self.env.single_observation_space, name=name, max_length=max_length)
        self._actions = ActionCodec(self.env.single_action_space, name=name)
        self.spec = EnvSpec(
            name=name,
            spaces=Spaces(observation=self._observations.spaces, action=self._actions.space),
            horizon=self._read_horizon(),
            has_success=success_key is not None,
            about=first_sentence(self.env),
            split="separate seeds",
        )
        self._seeds = np.zeros(num_envs, dtype=np.int64)
        self._columns = self._observations.empty(num_envs)
        self._goals = [""] * num_envs
        self._ended = np.zeros(num_envs, dtype=bool)
        self._begun: Any = None  # what a step showed of the episodes that it began
        self._resets_single = False  # whether that was seen: an environment that ignores the mask resets all

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        mask = np.ones(self.num_envs, dtype=bool) if mask is None else mask
        indices, episodes = self._advance(mask)
        self._seeds[indices] = self._draw_seeds(episodes)
        shown = list(self._begin(mask))
        columns = {name: column.copy() for name, column in self._columns.items()}
        if not (mask.all() or self._resets_itself or self._resets_single):
            self._require_others_unchanged(shown, ~mask)
            self._resets_single = True
        for i, observation in shown:
            if mask[i]:
                self._write(observation, columns, i)
                self._goals[i] = self._observations.text(observation)
        self._ended = self._ended & ~mask
        self._columns = columns
        return columns

    def _begin(self, mask: np.ndarray) -> Iterable[tuple[int, Any]]:
        """Return observations by actor, of which those in `mask` have begun an episode."""
        if self._begun is not None and self._resets_itself and (self._ended | ~mask).all():
            return enumerate(iterate(self._space, self._begun))
        if self._resets_itself and not mask.all():
            raise StageFailed(f"environment '{self._name}' resets actors by itself, at the end of their episodes only")
        options: dict[str, Any] = {} if mask.all() else {"options": {"reset_mask": mask.copy()}}
        if self._is_seeded:
            options["seed"] = self._seeds.tolist()
        shown, info = self._call("reset", lambda: self.env.reset(**options))
        actors = info["env_id"].tolist() if self._is_pool else range(self.num_envs)
        return zip(actors, iterate(self._space, shown), strict=False)

    def _require_others_unchanged(self, shown: Iterable[tuple[int, Any]], others: np.ndarray) -> None:
        """Raise StageFailed if a reset of some actors has changed what the `others` (N,) bool observe."""
        columns = {name: column.copy() for name, column in self._columns.items()}
        for i, observation in shown:
            self._write(observation, columns, i)
        if any((columns[name][others] != before[others]).any() for name, before in self._columns.items()):
            raise StageFailed(
                f"environment '{self._name}' has reset all of its actors, where options['reset_mask'] asked for some",
                hint="let its reset heed the mask, or make it with autoreset_mode=AutoresetMode.SAME_STEP",
            )

    def step(self, actions: np.ndarray) -> StepResult:
        batch = np.stack([np.asarray(action) for action in self._actions.decode(actions)])
        taken = batch.astype(self.env.single_action_space.dtype)
        shown, reward, terminated, truncated, info = self._call("step", lambda: self.env.step(taken))
        terminated, truncated = np.array(terminated, dtype=bool), np.array(truncated, dtype=bool)
        over = terminated | truncated
        if not np.isfinite(reward).all():
            raise StageFailed(f"environment '{self._name}' failed in step: its rewards are {reward}")
        columns = self._observations.empty(self.num_envs)
        finals = self._read_finals(info, over) if self._resets_itself and over.any() else {}
        for i, observation in enumerate(iterate(self._space, shown)):
            self._write(finals.get(i, observation), columns, i)
        self._begun, self._ended, self._columns = shown, over, columns
        return StepResult(
            observation=columns,
            reward=np.array(reward, dtype=np.float32),
            terminated=terminated,
            truncated=truncated,
            reset=np.zeros(self.num_envs, dtype=bool),
            attempt_end=over,
            success=self._read_success(info, over),
        )

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [self._name for _ in indices]

    def seeds(self, indices: np.ndarray) -> list[int | None]:
        own = self._is_seeded and not self._resets_itself
        return self._seeds[indices].tolist() if own else [None] * len(indices)

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        return [self._goals[i] for i in indices.tolist()]

    def render(self, mode: str = "rgb_array", actor: int = 0) -> Any:
        shown = self._call("render", self.env.render) if self.env.render_mode == mode else None
        return None if shown is None else shown[actor]

    def close(self) -> None:
        self.env.close()

    def _make_batch(self, factory: Callable[[int], Any]) -> VectorEnv:
        env = self._call("its constructor", lambda: factory(self.num_envs))
        if not isinstance(env, VectorEnv):
            raise UsageError(f"environment '{self._name}' gives {type(env).__name__}, not a gymnasium.vector.VectorEnv")
        if env.num_envs != self.num_envs:
            raise UsageError(f"environment '{self._name}' gives {env.num_envs} actors, {self.num_envs} were asked for")
        mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))  # gymnasium's default
        self._resets_itself = mode is AutoresetMode.SAME_STEP
        self._is_pool = hasattr(env, "all_env_ids")  # EnvPool
        self._is_seeded = not self._is_pool
        if self._is_pool and getattr(env, "is_async", False):
            raise UsageError(
                f"environment '{self._name}' steps some of its actors at once",
                hint="make it with batch_size equal to num_envs",
            )
        self._space = batch_space(env.single_observation_space, self.num_envs)
        return env

    def _read_horizon(self) -> int | None:
        if self._is_pool:
            return int(getattr(self.env, "config", {}).get("max_episode_steps", 0)) or None
        return self.env.spec.max_episode_steps if self.env.spec is not None else None

    def _call(self, where: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AmagoError:
            raise
        except (Exception, SystemExit) as error:
            message = f"environment '{self._name}' failed in {where}: {describe_error(error)}"
            raise StageFailed(message, hint="-v shows where it came from") from error

    def _write(self, observation: Any, columns: Mapping[str, np.ndarray], i: int) -> None:
        try:
            self._observations.write(observation, columns, i)
            for problem in self._observations.not_finite({name: c[i : i + 1] for name, c in columns.items()}).values():
                raise ValueError(problem)
        except ValueError as error:
            raise StageFailed(f"environment '{self._name}' failed (actor {i}): {error}") from error

    def _read_finals(self, info: Mapping[str, Any], over: np.ndarray) -> dict[int, Any]:
        """Return the last observations of the episodes that ended, by actor."""
        final = info.get("final_obs")
        if final is None:
            raise StageFailed(f"environment '{self._name}' ended an episode without info['final_obs']")
        each = final if isinstance(final, np.ndarray) and final.dtype == object else list(iterate(self._space, final))
        return {i: each[i] for i in np.flatnonzero(over).tolist()}

    def _read_success(self, info: Mapping[str, Any], over: np.ndarray) -> np.ndarray:
        success = np.zeros(self.num_envs, dtype=bool)
        if self._success_key is not None and over.any():
            last = info.get("final_info", {}) if self._resets_itself else info
            for i in np.flatnonzero(over):
                own = {key: values[i] for key, values in last.items() if np.ndim(values)}
                success[i] = read_success(own, self._success_key, name=self._name)
        return success


def is_vector(target: Any) -> bool:
    """Whether a class or factory makes a VectorEnv: a subclass, or a function with a parameter `num_envs`."""
    if isinstance(target, type):
        return issubclass(target, VectorEnv)
    return any(parameter.name == "num_envs" for parameter in list_parameters(target))
