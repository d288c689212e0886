"""Windows from a lake beside the same windows from simpler stores: warm, cold, and through an overlay."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lake_sections.common import (
    LENGTH,
    PLAIN,
    STEPS,
    Section,
    drop_cache,
    files_below,
    rates,
    resident,
    trajectory,
)
from pipelines.data.gather import Gatherer
from pipelines.data.histories import HistoryContext
from pipelines.data.readahead import PATIENCE
from pipelines.data.strategy import Strategy
from pipelines.data.view import HISTORY, View
from pipelines.lake.arrow import arrow_schema, map_file, to_arrow
from pipelines.lake.overlays import OverlayBatch, OverlayWriter, overlay_uids
from pipelines.lake.reading import Reader
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.data.seeded import SeededSampler

BATCH, BATCHES, ROWS = 256, 64, STEPS + 1
Columns = dict[str, np.ndarray]
Draws = Iterator[tuple[list[int], list[int]]]


class Data:
    """The same trajectories in a lake, in raw files, one a column, and in npz files, one a trajectory."""

    def __init__(self, folder: Path, schema: Schema, count: int) -> None:
        self.folder, self.schema, self.count = folder, schema, count
        self.npz, self.raw = folder / "npz", folder / "raw"
        for path in (self.npz, self.raw):
            path.mkdir(parents=True)
        rng = np.random.default_rng(0)
        files = {c.name: open(self.raw / c.name, "wb") for c in schema.columns}  # noqa: SIM115
        self.lake = Lake.create(folder / "lake")
        with self.lake.writer(schema) as writer:
            for i in range(count):
                columns = trajectory(schema, ROWS, rng)
                writer.append(columns, TrajectoryInfo(env="bench"))
                np.savez(self.npz / f"{i}.npz", **columns)
                for name, file in files.items():
                    columns[name].tofile(file)
        for file in files.values():
            file.close()

    def maps(self, *, scattered: bool = False) -> Columns:
        """The raw files, mapped; `scattered`: without any reading ahead by the system."""
        found = {}
        for column in self.schema.columns:
            memory = map_file(self.raw / column.name, scattered=scattered)
            found[column.name] = np.frombuffer(memory, column.dtype).reshape(-1, *column.shape)
        return found

    def view(self) -> View:
        view = View(self.lake, self.schema.id)
        view.refresh()
        return view

    def out(self, batch: int = BATCH) -> Columns:
        return {c.name: np.zeros((batch, LENGTH + 1, *c.shape), c.dtype) for c in self.schema.columns}

    def draws(self, batch: int = BATCH, seed: int = 1) -> Draws:
        """Batches of (trajectories, first rows): the same ones for every store."""
        rng = np.random.default_rng(seed)
        drawn = [
            (rng.integers(0, self.count, batch).tolist(), rng.integers(0, STEPS - LENGTH, batch).tolist())
            for _ in range(BATCHES)
        ]
        return cycle(drawn)


def slices(maps: Columns, out: Columns, draws: Draws) -> Callable[[], int]:
    """One slice a column and window: what numpy over mapped columns does."""

    def work() -> int:
        chosen, start = next(draws)
        first = [k * ROWS + x for k, x in zip(chosen, start, strict=True)]
        for name, source in maps.items():
            target = out[name]
            for i, x in enumerate(first):
                target[i] = source[x : x + LENGTH + 1]
        return len(chosen)

    return work


def npz(data: Data, out: Columns, draws: Draws) -> Callable[[], int]:
    def work() -> int:
        chosen, start = next(draws)
        for i, (k, x) in enumerate(zip(chosen[:8], start[:8], strict=True)):
            with np.load(data.npz / f"{k}.npz") as file:
                for name, target in out.items():
                    target[i] = file[name][x : x + LENGTH + 1]
        return 8

    return work


def gather(data: Data, draws: Draws) -> Callable[[], int]:
    gatherer = Gatherer(data.view(), LENGTH + 1)

    def work() -> int:
        chosen, start = next(draws)
        return len(gatherer.gather(np.array(chosen), np.array(start), np.array(start) + LENGTH))

    return work


def sample(view: View, strategy: Strategy | None = None, batch: int = BATCH) -> Callable[[], int]:
    """Draw, copy, pad and mask; counts steps of loss."""
    sampler = SeededSampler(view, length=LENGTH, seed=0, strategy=strategy)
    return lambda: int(sampler.sample(batch).mask.sum())


def hdf5(data: Data, out: Columns, draws: Draws) -> Callable[[], int]:
    import h5py

    path = data.folder / "steps.h5"
    with h5py.File(path, "w") as file:
        for name, values in data.maps().items():
            file.create_dataset(name, data=values)  # contiguous: the fastest that HDF5 has for this
    sets = dict(h5py.File(path, "r").items())

    def work() -> int:
        chosen, start = next(draws)
        first = sorted(k * ROWS + x for k, x in zip(chosen, start, strict=True))
        for name, target in out.items():
            source = sets[name]
            for i, x in enumerate(first):
                source.read_direct(target, np.s_[x : x + LENGTH + 1], np.s_[i])
        return len(chosen)

    return work


def parquet(data: Data, out: Columns, draws: Draws, rows: int) -> Callable[[], int]:
    """Row groups of `rows` rows; uncompressed, plain, mapped, one thread, each group read once a batch."""
    path = data.folder / f"steps-{rows}.parquet"
    columns, maps = data.schema.columns, data.maps()
    table = pa.table([to_arrow(c, maps[c.name]) for c in columns], schema=arrow_schema(columns))
    pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False, write_statistics=False)
    file = pq.ParquetFile(path, memory_map=True)

    def work() -> int:
        chosen, start = next(draws)
        first = sorted(k * ROWS + x for k, x in zip(chosen[:64], start[:64], strict=True))
        for i, x in enumerate(first):
            groups = list(range(x // rows, (x + LENGTH) // rows + 1))
            read = file.read_row_groups(groups, use_threads=False).slice(x - groups[0] * rows, LENGTH + 1)
            for column in columns:
                array = read[column.name].combine_chunks()
                flat = array if column.shape == () else array.flatten()
                out[column.name][i] = flat.to_numpy().reshape(LENGTH + 1, *column.shape)
        return 64

    return work


def warm(folder: Path, count: int) -> Section:
    """One core, everything in the page cache."""
    data, section = Data(folder, PLAIN, count), Section()
    out, core = data.out(), os.sched_getaffinity(0)
    works = {
        "memmap": slices(data.maps(), out, data.draws()),
        "lake gather": gather(data, data.draws()),
        "npz": npz(data, out, data.draws()),
        "parquet, 256 rows a group": parquet(data, out, data.draws(), 256),
        "parquet, a trajectory a group": parquet(data, out, data.draws(), ROWS),
    }
    try:
        works["hdf5"] = hdf5(data, out, data.draws())
    except ImportError:
        section.notes.append("no HDF5: h5py is not installed")
    os.sched_setaffinity(0, {min(core)})
    pa.set_cpu_count(1)
    try:
        found = rates(works)
        steps = rates(
            {
                "draw, copy, pad, mask": sample(data.view(), Strategy(placement="full")),
                "the same, windows past the end": sample(data.view()),
            }
        )
    finally:
        os.sched_setaffinity(0, core)
    figures = section.figures
    figures |= {f"{name}, windows/s": rate for name, rate in found.items()}
    figures |= {f"{name}, M steps/s": rate / 1e6 for name, rate in steps.items()}
    figures |= {f"lake gather / {name}": found["lake gather"] / rate for name, rate in found.items()}
    del figures["lake gather / lake gather"]
    section.notes.append(f"{count} trajectories of {STEPS} steps, {PLAIN.step_bytes} B a step, batches of {BATCH}")
    return section


def segments(folder: Path, counts: list[int], trajectories: int = 10_000) -> Section:
    """Windows of 32 steps of the same short trajectories, in segments of ever fewer. One core, warm."""
    section, rng = Section(), np.random.default_rng(0)
    core, length, rows = os.sched_getaffinity(0), 32, 101
    written = [trajectory(PLAIN, rows, rng) for _ in range(50)]
    works = {}
    for count in counts:
        lake = Lake.create(folder / str(count))
        with lake.writer(PLAIN) as writer:
            for i in range(trajectories):
                writer.append(written[i % len(written)], TrajectoryInfo(env="bench"))
                if (i + 1) % (trajectories // count) == 0:
                    writer.seal()
        view = View(lake, PLAIN.id)
        view.refresh()
        gatherer = Gatherer(view, length + 1)

        def work(gatherer: Gatherer = gatherer) -> int:
            start = rng.integers(0, rows - 1 - length, BATCH)
            return len(gatherer.gather(rng.integers(0, trajectories, BATCH), start, start + length))

        works[f"{count:,} segments"] = work
    os.sched_setaffinity(0, {min(core)})
    try:
        for work in works.values():
            for _ in range(2 * PATIENCE + trajectories // BATCH):  # files are opened, and nothing waits for a disk
                work()
        found = rates(works)
    finally:
        os.sched_setaffinity(0, core)
    section.figures |= {f"{name}, windows/s": rate for name, rate in found.items()}
    first, *others = found
    section.figures |= {f"{name} / {first}": found[name] / found[first] for name in others}
    section.notes.append(f"{trajectories:,} trajectories of {rows - 1} steps, batches of {BATCH}")
    return section


def histories(folder: Path, steps: int) -> Section:
    """Windows of 200 steps within trajectories of 1,000, and across the episodes of 50 of learning histories, which are
    as many steps in as many files. One core, warm."""
    section, rng, core, window = Section(), np.random.default_rng(0), os.sched_getaffinity(0), 200
    works = {}
    for name, length in (("within", 1000), ("across", 50)):
        lake = Lake.create(folder / name)
        written = [trajectory(PLAIN, length + 1, rng) for _ in range(50)]
        with lake.writer(PLAIN) as writer:
            for i in range(steps // length):
                history, index = divmod(i, 100)
                info = TrajectoryInfo(env="bench", history=f"{history}", history_index=index)
                writer.append(written[i % len(written)], info)
                if (i + 1) * length % (steps // 10) == 0:
                    writer.seal()
        view = View(lake, PLAIN.id, extra=HISTORY)
        view.refresh()
        context = HistoryContext(stride=5) if name == "across" else None
        sampler = SeededSampler(view, length=window, history=context, seed=0)
        works[name] = lambda sampler=sampler: len(sampler.sample(BATCH))
    os.sched_setaffinity(0, {min(core)})
    try:
        found = rates(works)
    finally:
        os.sched_setaffinity(0, core)
    section.figures |= {f"{name}, windows/s": rate for name, rate in found.items()}
    section.figures["across / within"] = found["across"] / found["within"]
    return section


def cold(folder: Path, count: int, rounds: int = 4) -> Section:
    """One core; the page cache of the files is emptied before every round, and nothing is mapped then."""
    data, section = Data(folder, PLAIN, count), Section()
    stored, raw = files_below(data.lake.path / "segments", ".arrow"), files_below(data.raw)
    out, seen = data.out(), {"lake": [], "fault by fault": [], "the system's reading ahead": []}
    left = 0.0
    view, core = data.view(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(core)})
    try:
        for turn in range(rounds):
            for name in seen:
                drop_cache([*stored, *raw])
                left = max(left, resident([*stored, *raw]))
                draws = data.draws(seed=turn)
                begun = time.perf_counter()
                if name == "lake":
                    gatherer = Gatherer(view, LENGTH + 1)
                    done = 0
                    for _ in range(16):
                        chosen, start = next(draws)
                        done += len(gatherer.gather(np.array(chosen), np.array(start), np.array(start) + LENGTH))
                    del gatherer
                else:
                    maps = data.maps(scattered=name == "fault by fault")
                    work = slices(maps, out, draws)
                    done = sum(work() for _ in range(2))
                    del maps, work
                seen[name].append(done / (time.perf_counter() - begun))
    finally:
        os.sched_setaffinity(0, core)
    best = {name: float(np.median(values)) for name, values in seen.items()}
    section.figures |= {f"{name}, windows/s": rate for name, rate in best.items()}
    section.figures["lake / fault by fault"] = best["lake"] / best["fault by fault"]
    section.figures["lake / the system's reading ahead"] = best["lake"] / best["the system's reading ahead"]
    section.figures["pages left after the drop, %"] = 100 * left
    section.notes.append(f"medians of {rounds} rounds; {mmap.PAGESIZE} B a page; files in {folder}")
    return section


def overlay(folder: Path, count: int) -> Section:
    """New rewards for every trajectory: what they cost on the disk, and while drawing."""
    data, section = Data(folder, PLAIN, count), Section()
    bases, before = data.view(), sum(p.stat().st_size for p in files_below(data.lake.path / "segments"))
    rng = np.random.default_rng(0)
    reader = Reader(data.lake)
    reader.refresh()
    with OverlayWriter(data.lake, PLAIN, ["reward"], name="bench") as writer:
        for segment in reader.list_originals():
            portion = reader.read_portion(segment.number, segment.uids)
            assert portion is not None
            n, reward = len(portion), rng.standard_normal(int(portion.rows.sum())).astype(np.float32)
            batch = OverlayBatch(
                place=np.arange(n), offset=np.zeros(n, np.int64), rows=portion.rows, columns={"reward": reward}
            )
            writer.append(portion.id, portion.table, batch, overlay_uids(portion.uids, "bench", 0), "bench")
    size = sum(p.stat().st_size for p in files_below(data.lake.path / "segments")) - before
    derived = data.view()
    derived.set_weights((derived.table["base"] != derived.table["segment"]).astype(np.float32))
    core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(core)})
    try:
        found = rates({"base": sample(bases), "overlay": sample(derived)}, turns=11)
    finally:
        os.sched_setaffinity(0, core)
    section.figures |= {f"{name}, M steps/s": rate / 1e6 for name, rate in found.items()}
    section.figures["overlay / base"] = found["overlay"] / found["base"]
    section.figures["bytes of the overlay / of its base"] = size / before
    return section
