"""Every trajectory of a view, read as a trainer reads windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipelines.data.gather import Gatherer
from pipelines.data.view import View


def windows_of(view: View) -> Iterator[dict[str, np.ndarray]]:
    """The columns of each trajectory, in the order of the view's table."""
    if not view.num_trajectories:
        return
    lengths = view.table["length"].astype(np.int64)
    gatherer = Gatherer(view, int(lengths.max()) + 1)
    for place, length in enumerate(lengths.tolist()):
        batch = gatherer.gather(np.array([place]), np.array([0]), np.array([length]))
        yield {name: values[0, : length + 1].copy() for name, values in batch.columns.items()}
