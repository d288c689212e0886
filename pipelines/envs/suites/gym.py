"""`gym:ID` and `module:attr`: environments of gymnasium's single-environment interface.

`gym:` IDs are made by `gymnasium.make`, with every key that is not a setting below passed on; `module:attr` is called
with those keys and must return a `gymnasium.Env`, perhaps a `TaskEnv` (a class or a factory). A VectorEnv, or a factory
with a parameter `num_envs`, makes all actors at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import gymnasium
from pydantic import ConfigDict, Field

from pipelines import trust
from pipelines.config.base import SettingsModel
from pipelines.envs.constructor import Parameter, list_parameters, refuse_wrong_parameters
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv, first_sentence
from pipelines.envs.spec import MAX_LENGTH
from pipelines.envs.suites.pettingzoo import is_pettingzoo, seat
from pipelines.envs.task_env import Attempts, TaskEnv
from pipelines.envs.vector_env import BatchedEnv, is_vector
from pipelines.errors import InputMissing, UsageError
from pipelines.registry import Registry

PREFIX = "gym:"
_MODES = ("rgb_array", "ansi")
OWN = Registry("environment", {})
# gymnasium's own environments that need more than gymnasium: package of the class, our extra, module it brings.
_EXTRAS = (("gymnasium.envs.box2d.", "box2d", "Box2D"), ("gymnasium.envs.mujoco.", "mujoco", "mujoco"))


class _GymnasiumSettings(SettingsModel):
    """Parameters of `gym:ID` and `module:attr`; any other key goes to the environment's constructor."""

    model_config = ConfigDict(frozen=True, extra="allow")

    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes (or attempts) here instead of where the registration says."""
    attempts: int | None = Field(None, ge=1)
    """Attempts at one task in one episode, each reset with the same seed, with `obs.attempt` in the observation; unset:
    1. A constructor with a parameter `attempts` gets the number instead.
    """
    success_key: str | None = None
    """Key of `info` that says, in an episode's last step, whether the task was solved."""
    action_repeat: int | None = Field(None, ge=1)
    """Play each action this often in a row, and add up the rewards; unset: once. A constructor with a parameter
    `action_repeat` gets the number instead.
    """
    seat: str | None = None
    """Agent of a PettingZoo environment that is played; unset: drawn for every episode."""
    max_length: int = Field(MAX_LENGTH, ge=1)
    """Room for the numbers of a Sequence, or the characters of a text whose space sets no limit; more is an error."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Gymnasium:
    """Makes `gym:ID` and `module:attr`: a `GymnasiumEnv`, a `BatchedEnv`, or a class of our own interface."""

    Settings = _GymnasiumSettings

    @classmethod
    def make(
        cls,
        name: str,
        settings: _GymnasiumSettings,
        *,
        num_envs: int,
        seed: int,
        split: str,
        label: str | None = None,
        drawn: bool = False,
    ) -> Env:
        """Make the actors. `label` is the environment's name, if not `name`; `drawn`: with a `render_mode`, if they
        take one.
        """
        cls.require_trust(name, settings.kwargs)
        make = cls._make_registered if name.startswith(PREFIX) else cls._make_own
        return make(name, label or name, settings, drawn, num_envs=num_envs, seed=seed, split=split)

    @classmethod
    def _make_registered(cls, name: str, label: str, settings: _GymnasiumSettings, drawn: bool, **which: Any) -> Env:
        if settings.seat is not None:
            raise UsageError(f"env.seat: environment '{label}' has a single seat", hint="leave it out")
        extra, installed = cls.find_requirement(name)
        if not installed:
            raise InputMissing(f"environment '{name}' needs the extra '{extra}'", hint=f'pip install "amago[{extra}]"')
        kwargs: dict[str, Any] = {"disable_env_checker": True} | settings.kwargs  # the codecs check every step
        if settings.max_episode_steps is not None:
            kwargs["max_episode_steps"] = settings.max_episode_steps
        id = name.removeprefix(PREFIX)

        def make_one() -> gymnasium.Env:
            if drawn and "render_mode" not in kwargs:
                os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a display
                for mode in _MODES:
                    with contextlib.suppress(TypeError, AssertionError), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # about a mode that it does not have
                        env = gymnasium.make(id, render_mode=mode, **kwargs)
                        if mode in env.metadata.get("render_modes", ()):
                            return env
                        env.close()
            return gymnasium.make(id, **kwargs)

        return _make_batch(label, make_one, settings, **which)

    @classmethod
    def _make_own(cls, name: str, label: str, settings: _GymnasiumSettings, drawn: bool, **which: Any) -> Env:
        target, kwargs = OWN.get(name), settings.kwargs
        known = {parameter.name for parameter in list_parameters(target)}
        if drawn and "render_mode" in known:
            modes = getattr(target, "metadata", {}).get("render_modes", ())
            kwargs = {"render_mode": next((mode for mode in _MODES if mode in modes), None), **kwargs}
        for key in ("attempts", "action_repeat"):
            given = getattr(settings, key)
            if given is not None and (_is_our_env(target) or key in known):
                kwargs, settings = {**kwargs, key: given}, settings.model_copy(update={key: None})
        refuse_wrong_parameters(label, target, kwargs, without=_list_given(target))
        if _is_our_env(target):
            env: Env = target(**which, **kwargs)
            if label != name:
                env.spec = replace(env.spec, name=label)
            return env
        if is_vector(target):
            for key in ("attempts", "max_episode_steps", "action_repeat"):
                if getattr(settings, key) is not None:
                    hint = "give it to its constructor"
                    raise UsageError(f"env.{key}: a VectorEnv steps and ends its episodes by itself", hint=hint)
            return BatchedEnv(
                label,
                lambda num_envs: target(num_envs=num_envs, **kwargs),
                success_key=settings.success_key,
                max_length=settings.max_length,
                **which,
            )

        if "pettingzoo" in sys.modules and not (isinstance(target, type) and issubclass(target, gymnasium.Env)):
            first = target(**kwargs)  # only what a factory returns shows its interface
            if is_pettingzoo(first):
                if settings.action_repeat is not None:
                    raise UsageError("env.action_repeat: a game is played move by move", hint="leave it out")
                return seat(label, lambda: target(**kwargs), settings, **which)
        if settings.seat is not None:
            raise UsageError(f"env.seat: environment '{label}' has a single seat", hint="leave it out")

        def make_one() -> gymnasium.Env:
            env = target(**kwargs)
            if not isinstance(env, gymnasium.Env):
                raise UsageError(f"environment '{name}' gives {type(env).__name__}, not a gymnasium.Env")
            if settings.max_episode_steps is not None:
                env = gymnasium.wrappers.TimeLimit(env, settings.max_episode_steps)
            return env

        return _make_batch(label, make_one, settings, **which)

    @staticmethod
    def list_parameters(name: str) -> list[Parameter]:
        """List the parameters that `module:attr` takes besides those of `Settings`. Imports it."""
        if name.startswith(PREFIX):
            return []
        OWN.require_trust(name)
        target = OWN.get(name)
        return list_parameters(target, without=_list_given(target))

    @staticmethod
    def find_requirement(name: str) -> tuple[str | None, bool]:
        """Find the extra that `gym:ID` needs (None: none known), and whether it is installed."""
        registered = gymnasium.registry.get(name.removeprefix(PREFIX))
        made_by = registered.entry_point if registered is not None else None
        for package, extra, module in _EXTRAS:
            if isinstance(made_by, str) and made_by.startswith(package):
                return extra, find_spec(module) is not None
        return None, True

    @staticmethod
    def require_trust(name: str, params: Mapping[str, Any]) -> None:
        """Raise InputMissing if making `name` would import a module whose name the user did not type: `module:attr`,
        `gym:MODULE:ID`, or a parameter of that form, which gymnasium's wrappers of other libraries import."""
        if not name.startswith(PREFIX):
            OWN.require_trust(name)
            return
        for text in (name, *(value for value in params.values() if isinstance(value, str))):
            if ":" in text.removeprefix(PREFIX):
                trust.require("environment", text)


def _is_our_env(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, Env)


def _list_given(target: Any) -> tuple[str, ...]:
    """List the parameters of a constructor that we give ourselves."""
    return ("num_envs", "seed", "split") if _is_our_env(target) else ("num_envs",) if is_vector(target) else ()


def _make_batch(
    name: str, make_one: Callable[[], gymnasium.Env], settings: _GymnasiumSettings, **which: Any
) -> GymnasiumEnv:
    attempts = settings.attempts or 1

    def make_several() -> gymnasium.Env:
        env = make_one()
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
        make_one if attempts == 1 else make_several,
        success_key=settings.success_key,
        horizon=settings.max_episode_steps,
        max_length=settings.max_length,
        action_repeat=settings.action_repeat or 1,
        **which,
    )
