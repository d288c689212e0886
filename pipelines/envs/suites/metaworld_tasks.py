"""Meta-World's goals, and objects of its classes that are set to them.

The library makes a benchmark by resetting every one of its classes fifty times, which takes up to a minute and is the
same each time. Here a class's goals are drawn when its first task is played, and found again in

    $AMAGO_CACHE (else $XDG_CACHE_HOME/amago, else ~/.cache/amago) / metaworld-VERSION / NAME-SEED.npz

The vectors of (class, seed) are those of `metaworld.ML1(name, seed).train_tasks`, to the bit. A file that cannot be
read, or has other content, is rewritten; where none can be written the goals are drawn each time.

As the library makes them, objects take 20 MB each, mostly textures and meshes that nothing collides with. MuJoCo's
compiler can leave those out, having taken their masses into account, and 4 MB remain; the simulation is the same to the
bit (a test plays both). Making one takes 0.1 s, so some are kept when their class is not being played.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from importlib import metadata

import mujoco
import numpy as np
from metaworld import Task
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.sawyer_xyz_env import SawyerXYZEnv

from pipelines.errors import StageFailed
from pipelines.files.atomic import write_atomically
from pipelines.files.user_cache import cache_home

NUM_GOALS = 50
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def load_goals(name: str, seed: int, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Load the goal vectors (50, d) float64 of class `name` from the cache; else call `draw` (d,) fifty times.

    Meta-World draws from numpy's global generator: it is set to `seed` meanwhile, and afterwards as it was.
    """
    path = cache_home() / f"metaworld-{metadata.version('metaworld')}" / f"{name}-{seed}.npz"
    with contextlib.suppress(*_UNREADABLE), np.load(path, allow_pickle=False) as stored:
        goals = stored["goals"]
        if _is_sound(goals):
            return goals
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        goals = np.stack([draw() for _ in range(NUM_GOALS)])
    finally:
        np.random.set_state(state)
    if not _is_sound(goals):
        raise StageFailed(f"Meta-World's class '{name}' does not draw {NUM_GOALS} different goals with seed {seed}")
    with contextlib.suppress(StageFailed):  # a read-only home costs time, nothing else
        write_atomically(path, lambda file: np.savez(file, goals=goals))
    return goals


def _is_sound(goals: np.ndarray) -> bool:
    shaped = goals.ndim == 2 and goals.shape[0] == NUM_GOALS and goals.dtype == np.float64
    return bool(shaped and np.isfinite(goals).all() and len(np.unique(goals, axis=0)) == NUM_GOALS)


# A collision class that no geom belongs to: a geom that could collide with it is not left out, and never collides.
_NOBODY = 1 << 20


class Shelf:
    """Objects that no episode uses, at most `spare` of them."""

    def __init__(self, spare: int = 16) -> None:
        self._spare = spare
        self._idle: OrderedDict[int, tuple[str, SawyerXYZEnv]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, name: str) -> SawyerXYZEnv:
        """Take an object of class `name`, perhaps a new one. Give it back after use."""
        key = next((key for key, (owner, _) in self._idle.items() if owner == name), None)
        return self._idle.pop(key)[1] if key is not None else _make_class(name)()

    def give(self, name: str, env: SawyerXYZEnv) -> None:
        """Keep `env` for the next user of its class; the object that has been idle longest is closed if there are too
        many.
        """
        self._idle[id(env)] = name, env
        while len(self._idle) > self._spare:
            self._idle.popitem(last=False)[1][1].close()


_SHELF = Shelf()  # one in each process, whatever is played there


class ClassPool:
    """Objects of `shelf` set to tasks: goals drawn with `goal_seed`, and shown or not."""

    def __init__(self, *, goal_seed: int, hide_goal: bool, shelf: Shelf = _SHELF) -> None:
        self._goal_seed, self._hide_goal, self._shelf = goal_seed, hide_goal, shelf
        self._goals: dict[str, np.ndarray] = {}

    def take(self, name: str, goal: int) -> SawyerXYZEnv:
        """Take an object of class `name`, set to its goal number `goal`. Give it back after use."""
        env = self._shelf.take(name)
        if name not in self._goals:
            self._goals[name] = load_goals(name, self._goal_seed, lambda: _draw_goal(env))
        task = {
            "rand_vec": self._goals[name][goal],
            "env_cls": ALL_V3_ENVIRONMENTS[name],
            "partially_observable": self._hide_goal,
        }
        env.set_task(Task(env_name=name, data=pickle.dumps(task)))
        assert env.sawyer_observation_space is not None  # forgotten by set_task, which fails if it is still forgotten
        return env

    def give(self, name: str, env: SawyerXYZEnv) -> None:
        self._shelf.give(name, env)


def _draw_goal(env: SawyerXYZEnv) -> np.ndarray:
    """Draw the goal of a reset with a new random vector, as the library's benchmarks draw theirs."""
    env._freeze_rand_vec, env._set_task_called = False, True
    env._set_task_inner()
    env.reset()
    assert env._last_rand_vec is not None
    return np.array(env._last_rand_vec, dtype=np.float64)


@functools.cache
def _make_class(name: str) -> type[SawyerXYZEnv]:
    """Make the class `name` with a model that leaves out whatever is only seen."""
    return type(name, (_Pictureless, ALL_V3_ENVIRONMENTS[name]), {})


class _Pictureless:
    fullpath: str

    def _initialize_simulation(self) -> tuple[mujoco.MjModel, mujoco.MjData]:
        spec = mujoco.MjSpec.from_file(self.fullpath)
        spec.compiler.discardvisual = True
        for geom in spec.geoms:
            if geom.name and not geom.contype and not geom.conaffinity:  # the class may ask where it is
                geom.conaffinity = _NOBODY
        model = spec.compile()
        del spec
        if sys.platform == "linux":  # the C library would keep the 30 MB that compiling a model took
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
            if trim is not None:
                trim(0)
        return model, mujoco.MjData(model)
