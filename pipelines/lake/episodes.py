"""Episodes that are stored in pieces: joining the pieces of an episode, and finding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.lake.schema import TRUNCATED


def join_pieces(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join the step columns of consecutive pieces of an episode.

    Row 0 of a later piece repeats the last row of the one before, where the episode was not truncated.
    """
    joined = {name: np.concatenate([values, *(p[name][1:] for p in pieces[1:])]) for name, values in pieces[0].items()}
    if TRUNCATED in joined:
        ends = np.cumsum([len(piece[TRUNCATED]) - 1 for piece in pieces])[:-1]
        joined[TRUNCATED][ends] = 0
    return joined
