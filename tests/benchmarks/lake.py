"""How fast the lake is beside simpler stores, all in one run: the ratios count, not the rates.

    python tests/benchmarks/lake.py [--trajectories 400] [--rounds 40] [--json]

Random windows of 128 steps, 101 bytes a step, one core, page cache warm: a loop of slices over raw memory-mapped
columns, the lake (gather alone, then draw, gather, padding and mask), one npz file a trajectory. Images: 64 x 64 x 3
bytes a step. Writing: appends a second with their log, and sealed bytes a second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipelines.data.sampler import WindowSampler
from pipelines.data.strategy import Strategy
from pipelines.data.view import View
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, MultiBinary, Spaces
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo

LENGTH, STEPS = 128, 1000
PLAIN = Schema(
    Spaces(observation={"obs.state": Box(shape=(17,)), "obs.bits": MultiBinary(n=2)}, action=Box(shape=(6,)))
)
assert PLAIN.step_bytes == 101
IMAGES = Schema(Spaces(observation={"obs": Box(shape=(64, 64, 3), dtype="uint8")}, action=Box(shape=(6,))))


def filled(schema: Schema, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    columns = schema.empty(rows)
    for values in columns.values():
        if values.dtype == np.float32:
            values[...] = rng.standard_normal(values.shape)
        elif values.ndim == 4:  # a picture that changes little, as pictures do
            values[...] = np.repeat(np.repeat(rng.integers(0, 255, (rows, 8, 8, 3)), 8, 1), 8, 2)
    return columns


def rate(work: Callable[[], int], rounds: int) -> float:
    """Windows a second: the best of three, after one round to warm."""
    work()
    best = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        count = sum(work() for _ in range(rounds))
        best = max(best, count / (time.perf_counter() - begun))
    return best


def compare(schema: Schema, directory: Path, trajectories: int, rounds: int, batch: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    lake = Lake.create(directory / "lake")
    rows, parts, files = STEPS + 1, [], []
    (directory / "npz").mkdir()
    appending = sealing = 0.0
    writer = lake.writer(schema, seal_bytes=1 << 40, seal_seconds=1e9)
    for i in range(trajectories):
        columns = filled(schema, rows, rng)
        begun = time.perf_counter()
        writer.append(columns, TrajectoryInfo())
        appending += time.perf_counter() - begun
        parts.append(columns)
        files.append(directory / "npz" / f"{i}.npz")
        np.savez(files[-1], **columns)
        if writer._unsealed_bytes > 64 << 20 or i == trajectories - 1:
            begun = time.perf_counter()
            writer.seal()
            sealing += time.perf_counter() - begun
    raw = {}
    for column in schema.columns:
        path = directory / f"{column.name}.raw"
        np.concatenate([p[column.name] for p in parts]).tofile(path)
        raw[column.name] = np.asarray(np.memmap(path, column.dtype, "r")).reshape(-1, *column.shape)
    size = sum(values.nbytes for values in parts[0].values())
    del parts
    view = View(lake, schema.id)
    view.refresh()
    sampler = WindowSampler(view, length=LENGTH, seed=0, strategy=Strategy(placement="full"))
    out = {c.name: np.zeros((batch, LENGTH + 1, *c.shape), c.dtype) for c in schema.columns}

    def memmap() -> int:
        starts = (rng.integers(0, trajectories, batch) * rows + rng.integers(0, STEPS - LENGTH, batch)).tolist()
        for name, source in raw.items():
            target = out[name]
            for i, x in enumerate(starts):
                target[i] = source[x : x + LENGTH + 1]
        return batch

    def gather() -> int:
        sampler._gatherer.gather(rng.integers(0, trajectories, batch), rng.integers(0, STEPS - LENGTH, batch))
        return batch

    def sample() -> int:
        drawn = sampler.sample(batch)
        assert drawn.mask.shape == (batch, LENGTH)
        return batch

    def npz() -> int:
        for i, k in enumerate(rng.integers(0, trajectories, batch).tolist()):
            x = int(rng.integers(0, STEPS - LENGTH))
            with np.load(files[k]) as file:
                for name, target in out.items():
                    target[i] = file[name][x : x + LENGTH + 1]
        return batch

    figures = {
        "memmap windows/s": rate(memmap, rounds),
        "lake gather windows/s": rate(gather, rounds),
        "lake sample windows/s": rate(sample, rounds),
        "npz windows/s": rate(npz, max(1, rounds // 20)),
        "append us": appending / trajectories * 1e6,
        "write MB/s": trajectories * size / 1e6 / (appending + sealing),
    }
    figures["lake / memmap"] = figures["lake gather windows/s"] / figures["memmap windows/s"]
    figures["lake / npz"] = figures["lake gather windows/s"] / figures["npz windows/s"]
    figures["sample steps/s"] = figures["lake sample windows/s"] * LENGTH
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "plain").mkdir()
        (root / "images").mkdir()
        results = {
            "101 B/step": compare(PLAIN, root / "plain", options.trajectories, options.rounds, 256),
            "64x64x3 image": compare(IMAGES, root / "images", max(10, options.trajectories // 50), 2, 16),
        }
    if options.json:
        print(json.dumps(results))
        return
    for name, figures in results.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:24}{value:14,.2f}")


if __name__ == "__main__":
    main()
