"""`gym:ID` and `module:attr`: environments of gymnasium's single-environment interface.

`gym:` IDs are made by `gymnasium.make`, with every key that is not a setting below passed on; `module:attr` is called
with those keys and must return a `gymnasium.Env`, perhaps a `TaskEnv` (a class or a factory).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import gymnasium
from pydantic import ConfigDict, Field

from pipelines import trust
from pipelines.config.base import SettingsModel
from pipelines.envs.attempts import Attempts
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv, first_sentence
from pipelines.envs.spec import MAX_LENGTH
from pipelines.envs.task_env import TaskEnv
from pipelines.errors import InputMissing, UsageError
from pipelines.registry import Registry

PREFIX = "gym:"
OWN = Registry("environment", {})
# gymnasium's own environments that need more than gymnasium: package of the class, our extra, module it brings.
_EXTRAS = (("gymnasium.envs.box2d.", "box2d", "Box2D"), ("gymnasium.envs.mujoco.", "mujoco", "mujoco"))


class GymnasiumSettings(SettingsModel):
    """Parameters of `gym:ID` and `module:attr`; any other key goes to the environment's constructor."""

    model_config = ConfigDict(frozen=True, extra="allow")

    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes (or attempts) here instead of where the registration says."""
    attempts: int | None = Field(None, ge=1)
    """Attempts at one task in one episode, each reset with the same seed, with `obs.attempt` in the observation; unset:
    1. A constructor with a parameter `attempts` gets the number instead.
    """
    success_key: str | None = None
    """Key of `info` that tells, in an episode's last step, whether the task was solved."""

    max_length: int = Field(MAX_LENGTH, ge=1)
    """Room for the numbers of a Sequence, or the characters of a text whose space sets no limit; more is an error."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def settings_model(name: str) -> type[SettingsModel]:
    return GymnasiumSettings


def make(name: str, settings: GymnasiumSettings, *, num_envs: int, seed: int, split: str) -> Env:
    """`gym:ID`, or `module:attr`; an attr that is a subclass of our own `Env` is made as a batch."""
    require_trust(name, settings.kwargs)
    if name.startswith(PREFIX):
        extra, installed = requirement(name)
        if not installed:
            raise InputMissing(f"environment '{name}' needs the extra '{extra}'", hint=f'pip install "amago[{extra}]"')
        limit = settings.max_episode_steps
        kwargs: dict[str, Any] = {"disable_env_checker": True} | settings.kwargs  # the codecs check every step
        if limit is not None:
            kwargs["max_episode_steps"] = limit

        def registered() -> gymnasium.Env:
            return gymnasium.make(name.removeprefix(PREFIX), **kwargs)

        return _batch(name, registered, settings, num_envs=num_envs, seed=seed, split=split)
    target = OWN.get(name)
    kwargs = settings.kwargs
    if settings.attempts is not None and (_is_batch(target) or "attempts" in _parameters(target)):
        kwargs, settings = {**kwargs, "attempts": settings.attempts}, settings.model_copy(update={"attempts": None})
    if _is_batch(target):
        return target(num_envs=num_envs, seed=seed, split=split, **kwargs)

    def own() -> gymnasium.Env:
        env = target(**kwargs)
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"environment '{name}' gives {type(env).__name__}, not a gymnasium.Env")
        if settings.max_episode_steps is not None:
            env = gymnasium.wrappers.TimeLimit(env, settings.max_episode_steps)
        return env

    return _batch(name, own, settings, num_envs=num_envs, seed=seed, split=split)


def requirement(name: str) -> tuple[str | None, bool]:
    """The extra that `gym:ID` needs (None: none known), and whether it is there."""
    registered = gymnasium.registry.get(name.removeprefix(PREFIX))
    made_by = registered.entry_point if registered is not None else None
    for package, extra, module in _EXTRAS:
        if isinstance(made_by, str) and made_by.startswith(package):
            return extra, find_spec(module) is not None
    return None, True


def require_trust(name: str, params: Mapping[str, Any]) -> None:
    """InputMissing if making `name` would import a module whose name the user did not type: `module:attr`,
    `gym:MODULE:ID`, or a parameter of that form, which gymnasium's wrappers of other libraries import."""
    if not name.startswith(PREFIX):
        OWN.require_trust(name)
        return
    for text in (name, *(value for value in params.values() if isinstance(value, str))):
        if ":" in text.removeprefix(PREFIX):
            trust.require("environment", text)


def _is_batch(target: Any) -> bool:
    """Whether `target` is a class of our own interface, all actors at once."""
    return isinstance(target, type) and issubclass(target, Env)


def _parameters(target: Any) -> frozenset[str]:
    """Names of the parameters that a class or factory takes."""
    try:
        return frozenset(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # of some that are written in C
        return frozenset()


def _batch(
    name: str,
    factory: Callable[[], gymnasium.Env],
    settings: GymnasiumSettings,
    *,
    num_envs: int,
    seed: int,
    split: str,
) -> Env:
    attempts = settings.attempts or 1

    def several() -> gymnasium.Env:
        env = factory()
        if isinstance(env, TaskEnv) and env.num_attempts != 1:
            raise UsageError(
                f"environment '{name}' has {env.num_attempts or 'its own number of'} attempts of its own",
                hint="leave env.attempts out",
            )
        return Attempts(
            env,
            attempts,
            show=True,
            label=name,
            success_key=settings.success_key,
            limit=settings.max_episode_steps,
            about=first_sentence(env),
        )

    return GymnasiumEnv(
        name,
        factory if attempts == 1 else several,
        num_envs=num_envs,
        seed=seed,
        split=split,
        success_key=settings.success_key,
        horizon=settings.max_episode_steps,
        max_length=settings.max_length,
    )
