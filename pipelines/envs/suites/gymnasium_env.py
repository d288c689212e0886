"""`gym:ID` and `module:attr`: environments of gymnasium's single-environment interface, stepped in this
process.

Episode number k is reset with a seed that is a hash of (seed, split, k); training seeds are even and test
seeds odd, so the two sides never meet. `gym:` IDs are made by `gymnasium.make`, with every key that is not a
setting below passed on; `module:attr` is called with those keys and must return a `gymnasium.Env` (a class or
a factory).
"""

from __future__ import annotations

import contextlib
import importlib
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import gymnasium
import numpy as np
from pydantic import ConfigDict, Field

from pipelines.config.base import SettingsModel
from pipelines.envs.draws import Draws
from pipelines.envs.env import Env, EnvSpec, StepResult
from pipelines.envs.spec import MAX_LENGTH, ActionCodec, ObservationCodec
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import Spaces

PREFIX = "gym:"
RESET = 0
_OURS = Path(__file__).resolve().parents[1]
_WHOLE = "-v shows where it came from"


class GymnasiumSettings(SettingsModel):
    """Parameters of `gym:ID` and `module:attr`; any other key goes to the environment's constructor."""

    model_config = ConfigDict(frozen=True, extra="allow")

    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes here instead of where the registration says."""
    success_key: str | None = None
    """Key of `info` that tells, in an episode's last step, whether the task was solved."""

    max_length: int = Field(MAX_LENGTH, ge=1)
    """Room for the numbers of a Sequence, or the characters of a text whose space sets no limit; more is an error."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class GymnasiumEnv(Env):
    """`num_envs` environments made by `factory`, stepped one after another."""

    def __init__(
        self,
        name: str,
        factory: Callable[[], gymnasium.Env],
        settings: GymnasiumSettings,
        *,
        num_envs: int,
        seed: int,
        split: str,
    ) -> None:
        super().__init__(num_envs=num_envs)
        self._success_key = settings.success_key
        self._test = split == "test"
        self._draws = Draws(seed, split, name)
        self._name = name
        self.envs = [self._guarded(factory, "be made")]
        first = self.envs[0]
        self._observations = ObservationCodec(first.observation_space, name=name, max_length=settings.max_length)
        self._actions = ActionCodec(first.action_space, name=name)
        self.spec = EnvSpec(
            name=name,
            spaces=Spaces(observation=self._observations.spaces, action=self._actions.space),
            horizon=_horizon(first, settings),
            has_success=settings.success_key is not None,
            about=_first_sentence(first),
            split="separate seeds",
        )
        self.envs += [self._guarded(factory, "be made") for _ in range(num_envs - 1)]
        self._seeds = np.zeros(num_envs, dtype=np.int64)
        self._columns = self._observations.empty(num_envs)
        self._goals = [""] * num_envs

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        drawn = self._draws.integers(self.episodes.advance(indices), RESET, 2**30)
        self._seeds[indices] = 2 * drawn + self._test
        columns = {name: column.copy() for name, column in self._columns.items()}
        for i in indices.tolist():
            try:
                observation, _ = self.envs[i].reset(seed=int(self._seeds[i]))
                self._observations.write(observation, columns, i)
                self._goals[i] = self._observations.text(observation)
            except (Exception, SystemExit) as error:
                self._fail("reset", i, error)
        self._columns = columns
        return columns

    def step(self, actions: np.ndarray) -> StepResult:
        n = self.num_envs
        columns = self._observations.empty(n)
        reward = np.empty(n, dtype=np.float32)
        terminated, truncated, success = np.zeros((3, n), dtype=bool)
        for i, action in enumerate(self._actions.decode(actions)):
            try:
                observation, reward[i], terminated[i], truncated[i], info = self.envs[i].step(action)
                self._observations.write(observation, columns, i)
            except (Exception, SystemExit) as error:
                self._fail("step", i, error)
            if self._success_key is not None and (terminated[i] or truncated[i]):
                success[i] = self._succeeded(info)
        self._columns = columns
        return StepResult(
            observation=columns,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            reset=np.zeros(n, dtype=bool),
            attempt_end=terminated | truncated,
            success=success,
        )

    def tasks(self, indices: np.ndarray) -> list[str]:
        """One environment is one task."""
        return [self._name for _ in indices]

    def goal_texts(self, indices: np.ndarray) -> list[str]:
        """The first text of the observation with which the episode began."""
        return [self._goals[i] for i in indices.tolist()]

    def play_only(self, tasks: Sequence[str]) -> None:
        if set(tasks) != {self._name}:
            super().play_only(tasks)

    def close(self) -> None:
        for env in self.envs:
            with contextlib.suppress(Exception):  # what was collected counts, however an environment ends
                env.close()

    def _succeeded(self, info: dict[str, Any]) -> bool:
        if self._success_key not in info:
            raise UsageError(
                f"environment '{self._name}': info has no key '{self._success_key}' at an episode's end",
                hint=f"keys there: {', '.join(map(str, info)) or 'none'}; see env.success_key",
            )
        return bool(info[self._success_key])

    def _guarded(self, factory: Callable[[], gymnasium.Env], what: str) -> gymnasium.Env:
        try:
            return factory()
        except AmagoError:
            raise
        except gymnasium.error.DependencyNotInstalled as error:
            raise InputMissing(f"environment '{self._name}' needs a package: {error}") from error
        except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
            raise UsageError(f"unknown environment '{self._name}'", hint=str(error)) from error
        except gymnasium.error.Error as error:
            raise UsageError(f"environment '{self._name}' cannot {what}: {error}") from error
        except ModuleNotFoundError as error:
            raise InputMissing(f"environment '{self._name}' needs the module '{error.name}'") from error
        except (Exception, SystemExit) as error:
            raise StageFailed(f"environment '{self._name}' cannot {what}: {_told(error)}", hint=_WHOLE) from error

    def _fail(self, where: str, actor: int, error: BaseException) -> NoReturn:
        raise StageFailed(
            f"environment '{self._name}' failed in {where} (actor {actor}, reset seed {self._seeds[actor]}): "
            f"{_told(error)}",
            hint=_WHOLE,
        ) from error


def settings_model(name: str) -> type[SettingsModel]:
    return GymnasiumSettings


def make(name: str, settings: GymnasiumSettings, *, num_envs: int, seed: int, split: str) -> Env:
    """`gym:ID`, or `module:attr`; an attr that is a subclass of our own `Env` is made as a batch."""
    if name.startswith(PREFIX):
        limit = settings.max_episode_steps
        kwargs: dict[str, Any] = {"disable_env_checker": True} | settings.kwargs  # the codecs check every step
        if limit is not None:
            kwargs["max_episode_steps"] = limit

        def registered() -> gymnasium.Env:
            return gymnasium.make(name.removeprefix(PREFIX), **kwargs)

        return GymnasiumEnv(name, registered, settings, num_envs=num_envs, seed=seed, split=split)
    target = load_attribute(name)
    if isinstance(target, type) and issubclass(target, Env):
        return target(num_envs=num_envs, seed=seed, split=split, **settings.kwargs)  # type: ignore[call-arg]

    def own() -> gymnasium.Env:
        env = target(**settings.kwargs)
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"environment '{name}' gives {type(env).__name__}, not a gymnasium.Env")
        if settings.max_episode_steps is not None:
            env = gymnasium.wrappers.TimeLimit(env, settings.max_episode_steps)
        return env

    return GymnasiumEnv(name, own, settings, num_envs=num_envs, seed=seed, split=split)


def load_attribute(name: str) -> Any:
    """The object `module:attr` names. InputMissing where there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputMissing(
            f"environment '{name}': no module '{error.name}'", hint="is its directory on PYTHONPATH?"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise InputMissing(f"environment '{name}': module '{module_name}' has no '{attribute}'") from error


def _told(error: BaseException) -> str:
    """What was raised, and where, unless that is here."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = _OURS in Path(last.filename).parents
    return f"{type(error).__name__}: {error}" + ("" if ours else f" ({last.filename}, line {last.lineno})")


def _horizon(env: gymnasium.Env, settings: GymnasiumSettings) -> int | None:
    if settings.max_episode_steps is not None:
        return settings.max_episode_steps
    return env.spec.max_episode_steps if env.spec is not None else None


def _first_sentence(env: gymnasium.Env) -> str:
    """Of the class's own docstring: headings are left out, links become their text."""
    documented = type(env.unwrapped).__dict__.get("__doc__") or ""
    text = re.sub(r"^\s*#.*$", "", documented, flags=re.MULTILINE)
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    first = next((text for text in paragraphs if text[:1].isalnum()), "")
    return re.split(r"(?<=[\w)\]\"'][.!?])\s", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", first))[0]
