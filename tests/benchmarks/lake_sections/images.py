"""Pictures: windows from the blob files of a lake beside npz files of the same trajectories."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lake_sections.common import ATARI, CRAFTER, LENGTH, STEPS, Section, files_below, rates
from lake_sections.sampling import Columns, Data, gather
from pipelines.lake.schema import Schema

BATCH = 16


def npz(data: Data, folder: Path, out: Columns) -> Callable[[], int]:
    files, draws = files_below(folder, ".npz"), data.draws(BATCH)

    def work() -> int:
        chosen, start = next(draws)
        with np.load(files[chosen[0] % len(files)]) as file:
            for name, target in out.items():
                target[0] = file[name][start[0] : start[0] + LENGTH + 1]
        return 1

    return work


def images(folder: Path, count: int) -> Section:
    section = Section()
    for name, schema in (("64x64x3", CRAFTER), ("84x84x4", ATARI)):
        one(folder / name, name, schema, count, section)
    section.notes.append(f"{count} trajectories of {STEPS} steps a kind, batches of {BATCH}, one core")
    return section


def one(folder: Path, name: str, schema: Schema, count: int, section: Section) -> None:
    data = Data(folder, schema, count)
    squeezed = folder / "squeezed"
    squeezed.mkdir()
    for i in range(min(count, 4)):
        with np.load(data.npz / f"{i}.npz") as file:
            np.savez_compressed(squeezed / f"{i}.npz", **dict(file.items()))
    out, core = data.out(1), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(core)})
    try:
        found = rates(
            {
                "lake": gather(data, data.draws(BATCH)),
                "npz": npz(data, data.npz, out),
                "npz compressed": npz(data, squeezed, out),
            },
            turns=5,
            seconds=0.5,
        )
    finally:
        os.sched_setaffinity(0, core)
    per_file = {
        "lake": sum(p.stat().st_size for p in files_below(data.lake.path / "segments")) / count,
        "npz compressed": sum(p.stat().st_size for p in files_below(squeezed)) / min(count, 4),
    }
    raw = schema.step_bytes * (STEPS + 1)
    section.figures |= {f"{name}: {kind}, windows/s": rate for kind, rate in found.items()}
    section.figures |= {f"{name}: lake / {kind}": found["lake"] / found[kind] for kind in ("npz", "npz compressed")}
    section.figures |= {f"{name}: {kind}, times smaller than raw": raw / size for kind, size in per_file.items()}
