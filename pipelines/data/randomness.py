"""Random streams of an update.

Every draw of an update (windows, action samples, ensemble members, dropout, image shifts) comes from a stream that is a
function of (seed, update, micro-batch, purpose). No stream has state to save: a resumed run draws the same numbers, and
so does a run whose micro-batches are divided differently among processes.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What the numbers of a stream are for."""

    WINDOWS = 0
    ACTIONS = 1  # action samples and ensemble members
    DROPOUT = 2  # dropout and image shifts
    STEPS = 3  # steps that are left out, where a batch has one of few shapes


def _sequence(seed: int, update: int, micro_batch: int, purpose: Purpose) -> np.random.SeedSequence:
    return np.random.SeedSequence((seed, update, micro_batch, purpose))


def stream(seed: int, update: int, micro_batch: int, purpose: Purpose) -> np.random.Generator:
    """Make the generator of a stream; `micro_batch` counts from 0 within the update."""
    return np.random.default_rng(_sequence(seed, update, micro_batch, purpose))


def key(seed: int, update: int, micro_batch: int, purpose: Purpose) -> int:
    """Return a 63-bit seed for a generator of another library."""
    return int(_sequence(seed, update, micro_batch, purpose).generate_state(1, np.uint64)[0] >> np.uint64(1))
