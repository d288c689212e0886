"""Held-out parts of a range: of 30 equal bands every fifth, the third of each five, belongs to test."""

from __future__ import annotations

import numpy as np

BANDS, EVERY, TEST_BAND = 30, 5, 2


def bands_of(split: str) -> np.ndarray:
    """Numbers of the bands of one side."""
    band = np.arange(BANDS)
    return band[(band % EVERY == TEST_BAND) == (split == "test")]


def spread(share: np.ndarray, split: str) -> np.ndarray:
    """`share` in [0, 1) -> [0, 1), uniform over the bands of one side.

    >>> spread(np.array([0.0, 0.5]), "test").round(3).tolist()
    [0.067, 0.567]
    """
    bands = bands_of(split)
    place, inside = np.divmod(np.asarray(share) * len(bands), 1.0)
    return (bands[place.astype(np.int64)] + inside) / BANDS
