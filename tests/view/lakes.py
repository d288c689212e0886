"""Lakes for the tests of the viewer."""

from __future__ import annotations

import numpy as np

from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Ragged, Spaces
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo

PLAY = Schema(
    Spaces(
        observation={
            "obs.image": Box(shape=(12, 16, 3), dtype="uint8"),
            "obs.grid": Box(shape=(4, 5), dtype="int64"),
            "obs.many": Box(shape=(9,)),
            "obs.mission.length": Discrete(n=81),
            "obs.mission": Ragged(max_length=80, dtype="uint32", text=True),
        },
        action=Discrete(n=5),
    )
)


def episode(length: int, *, missions: dict[int, str] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Step columns of `PLAY`; `missions`: the texts by the step at which they begin."""
    rng = np.random.default_rng(seed)
    values = PLAY.empty(length + 1)
    values["obs.image"][:] = rng.integers(0, 255, values["obs.image"].shape)
    values["obs.grid"][:] = rng.integers(0, 8, values["obs.grid"].shape)
    values["obs.many"][:] = rng.standard_normal(values["obs.many"].shape)
    values["action"][1:] = rng.integers(0, 5, length)
    values["reward"][1:] = rng.standard_normal(length)
    values["terminated"][-1] = 1
    text = ""
    for step in range(length + 1):
        text = (missions or {0: "go"}).get(step, text)
        codes = np.array([ord(letter) for letter in text], np.uint32)
        values["obs.mission"][step, : len(codes)] = codes
        values["obs.mission.length"][step] = len(codes)
    return values


def put(lake: Lake, values: dict[str, np.ndarray], info: TrajectoryInfo | None = None, schema: Schema = PLAY) -> str:
    """Append one trajectory; returns its uid."""
    with lake.writer(schema, seal_seconds=1e9) as writer:
        return writer.append(values, info or TrajectoryInfo(env="play"))
