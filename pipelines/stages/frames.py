"""Frames of recorded episodes, drawn by the environments that come with amago."""

from __future__ import annotations

import numpy as np

from pipelines.lake.store import Lake
from pipelines.view.replay import Replays
from pipelines.view.steps import StepReader


def drawn(lake: Lake, uid: str, most: int) -> np.ndarray | None:
    """Return up to `most` evenly spaced frames (n, H, W, 3) of a trajectory; None where it cannot be drawn exactly."""
    steps = StepReader(lake)
    found = steps.find(uid)
    replay = Replays(lake, steps).find(found)
    if replay is None:
        return None
    places = np.unique(np.linspace(0, found.length, min(most, found.length + 1)).round().astype(int))
    return np.stack([replay.picture(place) for place in places.tolist()])
