"""Meta-World's goals: fifty vectors for each environment class and seed, drawn as the library draws them, kept on disk.

The library makes a benchmark by resetting every one of its classes fifty times, which takes up to a minute and is the
same each time. Here a class's goals are drawn when its first task is played, and found again in

    $AMAGO_CACHE (else $XDG_CACHE_HOME/amago, else ~/.cache/amago) / metaworld-VERSION / NAME-SEED.npz

The vectors of (class, seed) are those of `metaworld.ML1(name, seed).train_tasks`, to the bit. A file that cannot be
read or does not hold what it should is written anew; where none can be written the goals are drawn each time.
"""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from pipelines.errors import StageFailed
from pipelines.files.atomic import write_atomically
from pipelines.files.user_cache import cache_home

NUM_GOALS = 50
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def goal_vectors(name: str, seed: int, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Goal vectors (50, d) float64 of class `name`: from the cache, else by `draw` (d,), called fifty times."""
    path = cache_home() / f"metaworld-{metadata.version('metaworld')}" / f"{name}-{seed}.npz"
    found = _read(path)
    if found is None:
        with global_numpy_seed(seed):
            found = np.stack([draw() for _ in range(NUM_GOALS)])
        if not _sound(found):
            raise StageFailed(f"Meta-World's class '{name}' does not draw {NUM_GOALS} different goals with seed {seed}")
        _keep(path, found)
    return found


@contextlib.contextmanager
def global_numpy_seed(seed: int) -> Iterator[None]:
    """numpy's global generator, which Meta-World draws from, at `seed`; afterwards as it was."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def _read(path: Path) -> np.ndarray | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            goals = stored["goals"]
    except _UNREADABLE:
        return None
    return goals if _sound(goals) else None


def _keep(path: Path, goals: np.ndarray) -> None:
    with contextlib.suppress(StageFailed):  # a read-only home costs time, nothing else
        write_atomically(path, lambda file: np.savez(file, goals=goals))


def _sound(goals: np.ndarray) -> bool:
    shaped = goals.ndim == 2 and goals.shape[0] == NUM_GOALS and goals.dtype == np.float64
    return bool(shaped and np.isfinite(goals).all() and len(np.unique(goals, axis=0)) == NUM_GOALS)
