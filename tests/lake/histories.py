"""Histories for tests, as collectors would store them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import INFO, SCHEMA, columns
from tests.lake.pieces import split

Written = dict[str, tuple[dict[str, np.ndarray], TrajectoryInfo]]


def fill_histories(
    lake: Lake,
    lengths: Mapping[str, Sequence[int]],
    *,
    schema: Schema = SCHEMA,
    seed: int = 0,
    pieces: int = 0,
    seal_every: int = 3,
    truncated: float = 0.0,
) -> Written:
    """Append the episodes of histories, one of each in turn; `lengths`: their numbers of actions by history ("": no
    history). `pieces`: steps after which an episode is cut (0: never); `truncated`: how many of them end so. Returns
    what was written by uid, in the order of writing."""
    rng, written = np.random.default_rng(seed), Written()
    with lake.writer(schema, seal_seconds=1e9) as writer:
        for index in range(max(map(len, lengths.values()))):
            for name, own in lengths.items():
                if index >= len(own):
                    continue
                values = columns(rng, own[index], schema)
                if rng.random() < truncated:
                    values["terminated"][-1], values["truncated"][-1] = 0, 1
                facts = {"history": name, "history_index": index} if name else {}
                info = dataclasses.replace(INFO, task=f"of {name}", seed=len(written), **facts)
                for part, about in split(values, info, pieces or own[index], episode=f"{name} {index}"):
                    written[writer.append(part, about)] = part, about
                    if len(written) % seal_every == 0:
                        writer.seal()
    return written
