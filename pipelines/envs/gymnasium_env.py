"""Environments of gymnasium's single-environment interface, stepped one after another in this process.

Episode number k is reset with a seed that is a hash of (seed, split, k). A `TaskEnv` also gives its task, attempts and
success, which gymnasium's interface has no place for.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from pipelines.envs.env import ActorsFailed, EnvFailure, EnvSpec, EpisodeEnv, StepResult, Trial, unknown_task
from pipelines.envs.exploration import random_actions
from pipelines.envs.goals import GoalRule, find_goal_reward
from pipelines.envs.spec import MAX_LENGTH, ActionCodec, ObservationCodec
from pipelines.envs.task_env import NOTHING, TaskEnv, draw, read_success
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError, is_stop
from pipelines.lake.spaces import Box, Spaces
from pipelines.nearest import nearest

_ORDER = 1  # purpose of a random draw
_OURS = Path(__file__).resolve().parents[1]
_WHOLE = "-v shows where it came from"
_TRIAL_SECONDS, _TRIAL_STEPS = 0.25, 300
_ENDED, _ENDED_SECONDS = 3, 1.0  # episodes that show how long they are
_MOST_BYTES = 20 << 20  # of source that is read of one package
_LARGEST_FILE = 1 << 20
_MOST_MODULES = 3  # named in a hint


class GymnasiumEnv(EpisodeEnv):
    """`num_envs` environments made by `factory`, stepped one after another. One that breaks is replaced at its next
    reset.

    A `TaskEnv` gets its `split` before its first reset. `success_key`: key of `info` that says, in an episode's last
    step, whether the task was solved (not for a TaskEnv). `horizon`: used if the environment does not give one.
    `max_length`: room for texts and sequences whose space sets no limit. `action_repeat`: how often each action is
    played, until an attempt ends; rewards add up, and the last observation is shown.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[[], gymnasium.Env],
        *,
        num_envs: int,
        seed: int,
        split: str,
        success_key: str | None = None,
        horizon: int | None = None,
        max_length: int = MAX_LENGTH,
        action_repeat: int = 1,
    ) -> None:
        super().__init__(name, num_envs=num_envs, seed=seed, split=split)
        self._action_repeat = action_repeat
        self._name, self._split, self._success_key, self._factory = name, split, success_key, factory
        self._broken: set[int] = set()
        self._directory = _WorkingDirectory()
        self.envs = [self._make_one()]
        first = self.envs[0]
        self._is_task = isinstance(first, TaskEnv)
        self._named: tuple[str, ...] = ()
        self._kinds: tuple[str, ...] = ()
        space = self._read_space("observation_space")
        self._observations = ObservationCodec(space, name=name, max_length=max_length)
        self._actions = ActionCodec(self._read_space("action_space"), name=name)
        spaces = Spaces(observation=self._observations.spaces, action=self._actions.space)
        goal_reward = find_goal_reward(first.unwrapped, _count_goal_numbers(spaces))
        if isinstance(first, TaskEnv):
            self.spec = EnvSpec(
                name=name,
                spaces=spaces,
                horizon=self._count_decisions(first.horizon, first.num_attempts),
                num_attempts=first.num_attempts,
                has_success=first.has_success,
                about=first.about,
                split=first.splits,
                achievements=first.achievements,
                score=first.score,
                goal_reward=goal_reward,
            )
        else:
            self.spec = EnvSpec(
                name=name,
                spaces=spaces,
                horizon=self._count_decisions(
                    horizon or (first.spec.max_episode_steps if first.spec is not None else None), 1
                ),
                has_success=success_key is not None,
                about=first_sentence(first),
                split="separate seeds",
                goal_reward=goal_reward,
            )
        self.envs += [self._make_one() for _ in range(num_envs - 1)]
        self._seeds = np.zeros(num_envs, dtype=np.int64)
        self._columns = self._observations.empty(num_envs)
        self._goals = [""] * num_envs

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        with self._directory:
            return self._reset(mask)

    def step(self, actions: np.ndarray) -> StepResult:
        with self._directory:
            return self._step(actions)

    def _reset(self, mask: np.ndarray | None) -> dict[str, np.ndarray]:
        indices, episodes = self._advance(mask)
        self._seeds[indices] = self._draw_seeds(episodes)
        columns = {name: column.copy() for name, column in self._columns.items()}
        failures: list[tuple[EnvFailure, BaseException]] = []
        for i, episode in zip(indices.tolist(), episodes.tolist(), strict=True):
            try:
                if i in self._broken:
                    with contextlib.suppress(Exception):  # it is broken, and may fail here as well
                        self.envs[i].close()
                    self.envs[i] = self._make_one()
                    self._broken.discard(i)
                env = self.envs[i]
                if self._named:
                    env.play(self._named[episode % len(self._named)])
                given: dict[str, Any] = {"seed": int(self._seeds[i])}
                if self._kinds:
                    given["options"] = {"kind": self._kinds[episode % len(self._kinds)]}
                observation, _ = _unpack(env.reset(**given), 2, "reset", "an observation and an info")
                self._observations.write(observation, columns, i)
                goal = env.goal_text if isinstance(env, TaskEnv) else None
                self._goals[i] = self._observations.text(observation) if goal is None else goal
            except BaseException as error:
                failures.append(self._record_failure("reset", i, error))
        begun = set(indices.tolist()).difference(*(failure.actors for failure, _ in failures))
        failures += [self._record_failure("reset", i, problem) for i, problem in self._not_finite(columns, begun)]
        self._columns = columns
        if failures:
            raise _join_failures(failures, columns)
        return columns

    def _step(self, actions: np.ndarray) -> StepResult:
        n = self.num_envs
        columns = self._observations.empty(n)
        reward = np.empty(n, dtype=np.float32)
        terminated, truncated, reset, attempt_end, success = np.zeros((5, n), dtype=bool)
        failures: list[tuple[EnvFailure, BaseException]] = []
        for i, action in enumerate(self._actions.decode(actions)):
            try:
                observation, reward[i], terminated[i], truncated[i], info = self._play(self.envs[i], action)
                if not math.isfinite(reward[i]):
                    raise ValueError(f"its reward is {reward[i]}")
                self._observations.write(observation, columns, i)
            except BaseException as error:
                failures.append(self._record_failure("step", i, error))
                for array in (reward, terminated, truncated, *columns.values()):
                    array[i] = 0
                continue
            if self._is_task:
                outcome = self.envs[i].outcome  # type: ignore[attr-defined]
                reset[i], attempt_end[i], success[i] = outcome.reset, outcome.attempt_end, outcome.success
            elif self._success_key is not None and (terminated[i] or truncated[i]):
                success[i] = read_success(info, self._success_key, name=self._name)
        for i, problem in self._not_finite(columns, set(range(n))):
            failures.append(self._record_failure("step", i, problem))
            for array in (reward, terminated, truncated, reset, attempt_end, success, *columns.values()):
                array[i] = 0
        self._columns = columns
        result = StepResult(
            observation=columns,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            reset=reset,
            attempt_end=attempt_end if self._is_task else terminated | truncated,
            success=success,
        )
        if failures:
            raise _join_failures(failures, result)
        return result

    def _not_finite(self, columns: Mapping[str, np.ndarray], actors: set[int]) -> Iterator[tuple[int, ValueError]]:
        """Yield an error for each of `actors` whose observation is not finite, as if it had been raised."""
        for i, message in self._observations.not_finite(columns).items():
            if i in actors:
                try:
                    raise ValueError(message)
                except ValueError as error:
                    yield i, error

    @property
    def steps_one_by_one(self) -> bool:
        return True

    def try_out(self, longest: float = 0.0) -> Trial | None:
        """Times are medians: other load on the machine makes a few steps slow."""
        rng = np.random.default_rng(0)
        steps: list[float] = []
        resets = [0.0]
        try:
            self.reset()
            start = time.perf_counter()
            while (took := time.perf_counter() - start) < _ENDED_SECONDS and (
                (took < _TRIAL_SECONDS and len(steps) < _TRIAL_STEPS)
                or (len(resets) <= _ENDED and len(steps) < longest * len(resets))
            ):
                began = time.perf_counter()
                result = self.step(random_actions(self.spec.spaces.action, self.num_envs, rng))
                steps.append(time.perf_counter() - began)
                over = result.terminated | result.truncated
                if over.any():
                    began = time.perf_counter()
                    self.reset(over)
                    resets.append(time.perf_counter() - began)
        except StageFailed:  # reported when the environment is used
            return None
        number = len(resets) - 1
        seconds = np.median(steps) + np.median(resets[1:] or resets) * number / len(steps)
        length = len(steps) / number if number else None  # the last episode is unfinished, so at most:
        return Trial(seconds=float(seconds), length=min(length, self.spec.horizon or length) if length else None)

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Return a `TaskEnv`'s own names; any other environment is one task."""
        if self._is_task:
            return [self.envs[i].task for i in indices.tolist()]
        return [self._name for _ in indices]

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        """Return a `TaskEnv`'s goal, else the first text of the observation with which the episode began."""
        return [self._goals[i] for i in indices.tolist()]

    def seeds(self, indices: np.ndarray) -> list[int | None]:
        return self._seeds[indices].tolist()

    def achieved(self, indices: np.ndarray) -> np.ndarray:
        if not self.spec.achievements:
            return super().achieved(indices)
        return np.array([self.envs[i].achieved for i in indices.tolist()], dtype=bool)

    def play_only(self, tasks: Sequence[str]) -> None:
        first = self.envs[0]
        if not isinstance(first, TaskEnv):
            if set(tasks) != {self._name}:
                super().play_only(tasks)
            return
        try:
            for name in tasks:
                first.play(name)
        except NotImplementedError:
            super().play_only(tasks)
        except ValueError as error:
            raise unknown_task(name, self._name, why=str(error)) from error
        self._named, self._kinds = tuple(tasks), ()

    def play_evenly(self) -> None:
        first = self.envs[0]
        if isinstance(first, TaskEnv) and first.kinds:
            self._kinds = self.draws.shuffle(first.kinds, _ORDER)

    def render(self, mode: str = "rgb_array", actor: int = 0) -> Any:
        try:
            with self._directory:
                return draw(self.envs[actor], mode)
        except AmagoError:
            raise
        except gymnasium.error.DependencyNotInstalled as error:
            raise InputMissing(f"environment '{self._name}' needs a package to draw itself: {error}") from error
        except Exception as error:
            raise StageFailed(
                f"environment '{self._name}' failed in render: {describe_error(error)}", hint=_WHOLE
            ) from error

    def close(self) -> None:
        for env in self.envs:
            with (
                self._directory,
                contextlib.suppress(Exception),
            ):  # an error here costs nothing
                env.close()

    def _play(self, env: Any, action: Any) -> tuple[Any, Any, bool, bool, Mapping[str, Any]]:
        """Step `env` by `action`, as often as it is repeated or until an attempt ends."""
        earned: Any = None
        for _ in range(self._action_repeat):
            observation, paid, over, cut, info = _unpack(env.step(action), 5, "step", _STEP)
            paid = paid if isinstance(paid, float | int) else _as_reward(paid)
            terminated, truncated = _as_flag(over, "terminated"), _as_flag(cut, "truncated")
            earned = paid if earned is None else earned + paid
            if terminated or truncated or (self._is_task and env.outcome != NOTHING):
                break
        return observation, earned, terminated, truncated, info

    def _count_decisions(self, steps: int | None, attempts: int | None) -> int | None:
        """Count the most actions in `steps`, of which the last of each attempt may be played less often."""
        if steps is None or attempts is None:
            return steps
        return min(steps, -(-steps // self._action_repeat) + attempts - 1)

    def _make_one(self) -> gymnasium.Env:
        try:
            with self._directory:
                env = self._factory()
            if isinstance(env, TaskEnv):
                env.split = self._split
            return env
        except AmagoError:
            raise
        except gymnasium.error.DependencyNotInstalled as error:
            raise InputMissing(f"environment '{self._name}' needs a package: {error}") from error
        except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
            id, hint = self._name.removeprefix("gym:"), str(error)  # gymnasium's own hint, if it knows a similar id
            if "Did you mean" not in hint and ":" not in id:
                hint = explain_unknown_id(id)
            raise UsageError(f"unknown environment '{self._name}'", hint=hint) from error
        except gymnasium.error.Error as error:
            raise UsageError(f"environment '{self._name}' cannot be made: {error}") from error
        except ModuleNotFoundError as error:
            said = f"needs the module '{error.name}'" if error.name else f"cannot be made: {error}"
            raise InputMissing(f"environment '{self._name}' {said}") from error
        except BaseException as error:
            if is_stop(error):
                raise
            raise StageFailed(
                f"environment '{self._name}' cannot be made: {describe_error(error)}", hint=_WHOLE
            ) from error

    def _record_failure(self, where: str, i: int, error: BaseException) -> tuple[EnvFailure, BaseException]:
        """Describe what broke the environment of actor `i`; a user's interrupt is raised again."""
        if is_stop(error):
            raise error
        self._broken.add(i)
        message = (
            f"environment '{self._name}' failed in {where} (actor {self.episodes.offset + i}, "
            f"reset seed {self._seeds[i]}): {describe_error(error)}"
        )
        return EnvFailure(actors=(i,), message=message, trace="".join(traceback.format_exception(error))), error

    def _read_space(self, which: str) -> gymnasium.Space[Any]:
        space = getattr(self.envs[0], which, None)
        if not isinstance(space, gymnasium.Space):
            found = "none" if space is None else type(space).__name__
            raise UsageError(
                f"environment '{self._name}': its {which} is {found}, not a space of gymnasium",
                hint=f"set it in the constructor, e.g. self.{which} = gymnasium.spaces.Discrete(2)",
            )
        return space


def _join_failures(failures: Sequence[tuple[EnvFailure, BaseException]], brought: Any) -> ActorsFailed:
    """Make one error of all failures, in the order of the actors, caused by the first."""
    ordered = sorted(failures, key=lambda failure: failure[0].actors)
    error = ActorsFailed([failure for failure, _ in ordered], brought)
    error.__cause__ = ordered[0][1]
    return error


_STEP = "an observation, a reward, terminated, truncated and an info"


def _unpack(found: Any, count: int, call: str, expected: str) -> Any:
    """Return what `call` returned. ValueError if it is not `count` values: those of gym were others."""
    if not isinstance(found, tuple | list) or len(found) != count:
        given = f"{len(found)} values" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
        raise ValueError(f"its {call} returned {given}, not {expected}")
    return found


def _as_reward(paid: Any) -> float:
    """Convert a reward; arrays of one number are common. ValueError if it is not a number."""
    value = np.asarray(paid)
    if value.size != 1 or value.dtype.kind not in "biuf":
        raise ValueError(f"its reward is {paid!r}, not a number")
    return float(value.item())


def _as_flag(value: Any, name: str) -> bool:
    """Return an environment's flag. ValueError for a value that is neither true nor false."""
    if value is True or value is False:
        return value
    if np.ndim(value) or value not in (0, 1):
        raise ValueError(f"its {name} is {value!r}")
    return bool(value)


def _count_goal_numbers(spaces: Spaces) -> int:
    """Count the numbers of a goal, where what was achieved is shown beside it as another such vector; otherwise 0."""
    achieved = spaces.observation.get(GoalRule.achieved)
    if not isinstance(achieved, Box) or len(achieved.shape) != 1:
        return 0
    return achieved.flat_size if spaces.observation.get(GoalRule.desired) == achieved else 0


def describe_error(error: BaseException) -> str:
    """Return an error's type and text, and its place if that is outside this package."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = _OURS in Path(last.filename).parents
    return f"{type(error).__name__}: {error}" + ("" if ours else f" ({last.filename}, line {last.lineno})")


def first_sentence(env: Any) -> str:
    """Return the first sentence of the class's own docstring, without headings and links."""
    documented = type(env.unwrapped).__dict__.get("__doc__") or ""
    text = re.sub(r"^\s*#.*$", "", documented, flags=re.MULTILINE)
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    first = next((text for text in paragraphs if text[:1].isalnum()), "")
    return re.split(r"(?<=[\w)\]\"'][.!?])\s", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", first))[0]


class _WorkingDirectory:
    """A context for an environment's code: it runs in the working directory that it last set, and the process's own is
    restored at the end. A directory that was removed counts as none.
    """

    def __init__(self) -> None:
        self._process = self._own = ""
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._process = self._find_current()
        if self._own:
            with contextlib.suppress(OSError):
                os.chdir(self._own)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        now = self._find_current()
        if now != self._process and self._process:
            self._own = now
            os.chdir(self._process)

    def _find_current(self) -> str:
        try:
            return os.getcwd()
        except FileNotFoundError:
            return ""


def explain_unknown_id(id: str) -> str:
    """Write a hint for a gymnasium id that is not registered: the module of an installed package that registers it,
    else a package of a similar name, else the form in which a module is named. Packages are searched, not imported.
    """
    packages = []
    for package in metadata.distributions() if id else ():
        with contextlib.suppress(OSError, ValueError, KeyError):
            needs = any(re.match(r"(gymnasium|gym)\b", text, re.IGNORECASE) for text in package.requires or ())
            offers = any(point.group.startswith("gymnasium.envs") for point in package.entry_points)
            if (needs or offers) and package.name.lower() not in ("gymnasium", "gym", "amago"):
                packages.append(package)
    modules = [module for package in packages if (module := _find_registering_module(package, id)) is not None]
    if modules:
        named = " or ".join(f"gym:{module}:{id}" for module in modules[:_MOST_MODULES])
        return f"an installed package registers it: give {named}"
    hint = f"where a package registers it, name the package's module: gym:MODULE:{id}"
    names = {str(package.name).lower(): package for package in packages}
    about = id.partition("/")[0].rpartition("-v")[0] or id
    if (close := nearest(about.lower(), names, cutoff=0.6)) is not None:
        files = names[close].files or ()
        tops = {file.parts[0] for file in files if len(file.parts) > 1 and file.name == "__init__.py"}
        if tops:
            hint += f"; installed is {close}, whose module is {min(tops)}"
    return hint


def _find_registering_module(package: metadata.Distribution, id: str) -> str | None:
    """Find the top module of a package whose source contains `id` in quotes, and "register"."""
    quoted = re.compile(rf"""["']{re.escape(id)}["']""".encode())
    left = _MOST_BYTES
    for file in package.files or ():
        if file.suffix != ".py" or left <= 0:
            continue
        with contextlib.suppress(OSError):
            path = Path(str(file.locate()))
            if (size := path.stat().st_size) > _LARGEST_FILE:
                continue
            content, left = path.read_bytes(), left - size
            if b"register" in content and quoted.search(content):
                return file.parts[0].removesuffix(".py")
    return None
