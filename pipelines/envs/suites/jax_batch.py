"""What the JAX suites share: functions over all actors at once, compiled for one shape each.

A reset of some actors computes a reset of all and keeps those of a mask, so that no mask brings a shape of its own, and
nothing is compiled twice.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any  # nested containers of arrays, as JAX passes them through
LAST_SEED = 2**31 - 1


@jax.jit
def keys(seeds: jax.Array) -> jax.Array:
    """(N,) seeds below 2^32 -> (N, 2) keys of JAX's random numbers."""
    return jax.vmap(jax.random.PRNGKey)(seeds)


@jax.jit
def folded(keys_N: jax.Array, counter: jax.Array) -> jax.Array:
    """(N, 2) keys and (N,) counters -> (N, 2) other keys, one for each counter."""
    return jax.vmap(jax.random.fold_in)(keys_N, counter)


@jax.jit
def merged(mask: jax.Array, new: Tree, old: Tree) -> Tree:
    """`new` for the actors in `mask` (N,), `old` for the others; leaves keep the type that they have in `old`."""

    def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *(1,) * (b.ndim - 1)), a.astype(b.dtype), b)

    return jax.tree.map(chosen, new, old)


def as_numpy(array: jax.Array, dtype: str) -> np.ndarray:
    """A copy of our own, of `dtype`."""
    return np.array(array, dtype=dtype)
