"""Add a golden lake."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np

from pipelines.lake.folders import list_all
from pipelines.lake.log import lease, protect
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.files import FileTable
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, Ragged, Spaces
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.stages import relabel
from tests.lake.factories import columns, derive, flip_a_bit
from tests.lake.golden import EXPECTED, LAKES, NUMBERS
from tests.stages.recipes import tiny

WORDS = Ragged(max_length=8, dtype="uint8", text=True)
OBSERVATION = {"obs.place": Box(shape=(2,)), "obs.words.length": WORDS.length_space, "obs.words": WORDS}
SCHEMA = Schema(Spaces(observation=OBSERVATION, action=Discrete(n=3)))


def append(lake: Lake, *infos: TrajectoryInfo) -> list[str]:
    with lake.writer(SCHEMA, name="golden") as writer:
        rng = np.random.default_rng(len(list_all(lake.storage)))
        return [writer.append(columns(rng, 3 + number, SCHEMA), info) for number, info in enumerate(infos)]


def main() -> None:
    folder = LAKES / str(NUMBERS[-1] + 1)
    folder.mkdir()
    # The log records where a damaged segment was found: relative, so that no directory of this machine is stored.
    os.chdir(folder)
    lake = Lake.create("lake")
    info = TrajectoryInfo(env="golden", task="t", collector="c")
    merged = append(lake, *(replace(info, history="c/0/t", history_index=index) for index in range(3)))
    merged += append(
        lake, *(TrajectoryInfo(env="golden", task="t", collector="c", episode="e", chunk=i, first_step=4 * i,
                               continues=i == 0) for i in range(2))
    )  # fmt: skip
    derive(lake, {merged[0]: {"reward": np.ones(3, np.float32)}})
    compact(lake, grace_seconds=0.0)
    expire(lake, RetentionLimits(where=f"uid = '{merged[1]}'"))
    gone = append(lake, info)
    expire(lake, RetentionLimits(where=f"uid = '{gone[0]}'"))
    (damaged,) = append(lake, info)
    flip_a_bit(lake, Reader(lake).read(damaged).columns["obs.place"])
    assert verify(lake).corrupt
    (last,) = append(lake, info)
    protect(lake, list_all(lake.storage)[-1:], name="run@1")
    added = {"relabeler": "column:obs.wind:float32[2]=0.5", "where": f"uid = '{last}'"}
    assert relabel.run(tiny(relabel=added), lake=lake.name).metrics["trajectories"] == 1
    inventory = FileTable(lake)
    with lease(lake) as held:
        inventory.refresh()
        inventory.write_manifests(held, forget=True)
    reader = Reader(lake)
    found = {}
    for uid in reader.uids():
        values = reader.read(uid).columns
        found[uid] = {name: np.asarray(array, float).sum() for name, array in values.items()} | {
            "rows": len(values["reward"])
        }
    (folder / EXPECTED).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    for name in ("index.duckdb", "locks", "wal", "tmp"):
        path = folder / "lake" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
