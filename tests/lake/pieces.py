"""Episodes cut into pieces for tests, as a collector would store them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import INFO, SCHEMA, columns


def split(
    values: Mapping[str, np.ndarray], info: TrajectoryInfo, steps: int, *, episode: str
) -> list[tuple[dict[str, np.ndarray], TrajectoryInfo]]:
    """Cut a trajectory into pieces of `steps` actions; one that is not longer stays as it is."""
    length, found = len(values["reward"]) - 1, []
    if length <= steps:
        return [(dict(values), info)]
    for chunk, start in enumerate(range(0, length, steps)):
        stop = min(start + steps, length)
        own = {name: column[start : stop + 1].copy() for name, column in values.items()}
        is_last = stop == length
        if not is_last:
            own["truncated"][-1] = 1
        facts = {"episode": episode, "chunk": chunk, "first_step": start, "continues": not is_last}
        unknown = {} if is_last else {"success": None}
        attempts = info.attempts if is_last else ()
        found.append((own, dataclasses.replace(info, **facts, **unknown, attempts=attempts)))
    return found


def fill_twice(
    whole: Lake,
    pieces: Lake,
    lengths: Sequence[int],
    *,
    steps: int,
    schema: Schema = SCHEMA,
    info: TrajectoryInfo = INFO,
    seal_every: int = 2,
) -> tuple[list[str], list[list[str]]]:
    """Store the same episodes in one lake whole, and in another one in pieces of `steps` actions, one piece of each in
    turn. Returns the uids of episodes, and of their pieces."""
    rng = np.random.default_rng(0)
    episodes = [columns(rng, length, schema) for length in lengths]
    for values in episodes:
        if "obs.bits" in values:  # so that readers of datasets take them
            values["obs.bits"] %= 2
    infos = [dataclasses.replace(info, seed=number, task=f"t{number % 3}") for number in range(len(lengths))]
    uids: list[list[str]] = [[] for _ in lengths]
    with whole.writer(schema, seal_seconds=1e9) as writer:
        known = [writer.append(values, each) for values, each in zip(episodes, infos, strict=True)]
    cut = [split(v, each, steps, episode=f"{n:032x}") for n, (v, each) in enumerate(zip(episodes, infos, strict=True))]
    with pieces.writer(schema, seal_seconds=1e9) as writer:
        turn = 0
        for chunk in range(max(map(len, cut))):
            for number, mine in enumerate(cut):
                if chunk < len(mine):
                    uids[number].append(writer.append(*mine[chunk]))
                    turn += 1
                    if turn % seal_every == 0:
                        writer.seal()
    return known, uids
