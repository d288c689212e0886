"""Conversion of XLand-MiniGrid's published rulesets (bz2-compressed pickles) into the npz files that `xland` reads.

A pickle can run code, so nothing here is called by an environment: users convert a benchmark that they downloaded,
once. The reader rebuilds arrays of numpy and JAX and refuses every other object, without importing or calling it.
"""

from __future__ import annotations

import bz2
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.envs.suites.xland_rulesets import Rulesets, checked, save
from pipelines.errors import InputMissing, IntegrityError

_UNREADABLE = (OSError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, MemoryError)


def convert(published: Path | str, target: Path | str) -> int:
    """Write the rulesets of the file `published` to the npz file `target`; returns their number.

    InputMissing where there is no such file, IntegrityError where it holds anything but rulesets.
    """
    rulesets = read(Path(published))
    save(Path(target), rulesets)
    return len(rulesets)


def read(path: Path) -> Rulesets:
    """Read a published benchmark, such as `medium_1m_v3`. Errors as for `convert`."""
    try:
        with bz2.open(path) as file:
            content = _ArraysOnly(file).load()
        arrays = [np.asarray(content[name]) for name in ("goals", "rules", "init_tiles")]
    except FileNotFoundError as error:
        raise InputMissing(f"rulesets file '{path}' does not exist") from error
    except (pickle.UnpicklingError, *_UNREADABLE) as error:
        raise IntegrityError(f"'{path}' is not a published benchmark of XLand-MiniGrid: {error}") from error
    return checked(Rulesets(*arrays), path)


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that knows arrays alone."""

    def find_class(self, module: str, name: str) -> Any:
        package = module.replace("numpy.core.", "numpy._core.")
        found = _KNOWN.get((package, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not an array")
        return found


def _encoded(text: str, encoding: str) -> bytes:
    """Bytes, as pickles of protocol 2 spell them."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has text in the encoding '{encoding}'")
    return text.encode(encoding)


def _jax_array(rebuild: Callable[..., np.ndarray], arguments: tuple[Any, ...], state: Any, _: Any) -> np.ndarray:
    """The numpy array inside a pickled array of JAX."""
    array = rebuild(*arguments)
    array.__setstate__(state)
    return array


_PLAIN = np.zeros(1)
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy._core.multiarray", "_reconstruct"): _PLAIN.__reduce__()[0],
    ("numpy._core.numeric", "_frombuffer"): _PLAIN.__reduce_ex__(5)[0],
    ("_codecs", "encode"): _encoded,
    ("jax._src.array", "_reconstruct_array"): _jax_array,
}
