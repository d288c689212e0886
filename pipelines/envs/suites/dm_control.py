"""`dmc:DOMAIN-TASK`: DeepMind's control suite, and the manipulation tasks that show features, by shimmy."""

from __future__ import annotations

import ctypes.util
import importlib
import os
import re
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.suites.suite import read_release, refuse_from
from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean

PREFIX = "dmc:"
_SUITE_STEPS = 1000
_ID = re.compile(r"dm_control/(\w+-\w+|\w+_features)-v0")


class _DmControlSettings(SettingsModel):
    """Parameters of `dmc:DOMAIN-TASK`."""

    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes here as well."""
    action_repeat: int | None = Field(None, ge=1)
    """Play each action this often in a row, and add up the rewards; unset: once."""


def list_names() -> list[str]:
    """List every DOMAIN-TASK that the installed dm_control brings.

    It can render without a display only if that is chosen before it is imported: it takes GLFW if nobody chooses, which
    aborts the process where there is no display, at the first reset of tasks that upload a terrain, whether or not
    anybody wants pictures.
    """
    if sys.platform == "linux" and not any(os.environ.get(n) for n in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")):
        os.environ["MUJOCO_GL"] = "egl" if ctypes.util.find_library("EGL") else "disabled"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no display, and none is needed
        import shimmy

    gymnasium.register_envs(shimmy)
    return [found[1] for found in map(_ID.fullmatch, gymnasium.registry) if found and found[1] != "compatibility-env"]


class _WithIn1d:
    """numpy with `in1d`, which numpy 2.4 took away and dm_control before 1.0.38 asks for in its quadrupeds."""

    in1d = staticmethod(np.isin)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class DmControl(GymnasiumEnv):
    """N actors in one task, each in an environment of shimmy."""

    Settings = _DmControlSettings

    def __init__(self, name: str, settings: _DmControlSettings, *, num_envs: int, seed: int, split: str) -> None:
        if read_release("dm-control") < (2, 0):
            refuse_from("mujoco", (4, 0), name=name, why="dm_control reads fields that it no longer has")
        task, known, limit = name.removeprefix(PREFIX), list_names(), settings.max_episode_steps
        if task not in known:
            hint = did_you_mean(task, known, prefix=PREFIX, cutoff=0.75, otherwise=f"known: {', '.join(known)}")
            raise UsageError(f"unknown environment '{name}'", hint=hint)
        if task.startswith("quadruped-") and not hasattr(np, "in1d"):
            importlib.import_module("dm_control.suite.quadruped").np = _WithIn1d()  # type: ignore[attr-defined]

        def make_one() -> gymnasium.Env:
            id, checks = f"dm_control/{task}-v0", {"disable_env_checker": True}
            return gymnasium.make(id, render_mode="rgb_array", max_episode_steps=limit, **checks)

        horizon = min(limit or _SUITE_STEPS, _SUITE_STEPS) if "-" in task else limit
        super().__init__(
            name,
            make_one,
            num_envs=num_envs,
            seed=seed,
            split=split,
            horizon=horizon,
            action_repeat=settings.action_repeat or 1,
        )
