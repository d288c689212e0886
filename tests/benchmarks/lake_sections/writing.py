"""Writing: long trajectories into segments, and small commits by one process and by eight."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lake_sections.common import PLAIN, STEPS, Section, trajectory
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo

SHORT = 32  # steps of the trajectories that are committed one by one


def durable(path: Path, write: Callable[[Any], object]) -> None:
    """As a segment gets its name: written, synced, renamed, the folder synced."""
    staged = path.with_suffix(".tmp")
    with open(staged, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def committing(kind: str, folder: Path, number: int, until: float, done: Any) -> None:
    """Commit small trajectories, one at a time, until that moment."""
    columns, count = trajectory(PLAIN, SHORT + 1, np.random.default_rng(number)), 0
    if kind == "lake":
        writer = Lake(folder).writer(PLAIN, name=f"w{number}")
    if kind == "hdf5":
        import h5py

        file = h5py.File(folder / f"{number}.h5", "w")
        sets = _growing(file, columns)
    while time.time() < until:
        if kind == "lake":
            writer.append(columns, TrajectoryInfo())
            writer.seal()
        elif kind == "npz":
            durable(folder / f"{number}-{count}.npz", lambda file: np.savez(file, **columns))
        elif kind == "hdf5":
            _grow(sets, columns)
            file.flush()
            os.fsync(file.id.get_vfd_handle())
        else:
            durable(folder / secrets.token_hex(8), lambda file: file.write(bytes(4096)))
        count += 1
    done.put(count)


def _growing(file: Any, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        name: file.create_dataset(
            name, shape=(0, *values.shape[1:]), maxshape=(None, *values.shape[1:]), dtype=values.dtype, chunks=True
        )
        for name, values in columns.items()
    }


def _grow(sets: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
    for name, values in columns.items():
        sets[name].resize(len(sets[name]) + len(values), axis=0)
        sets[name][-len(values) :] = values


def commits(kind: str, folder: Path, processes: int, seconds: float) -> float:
    """Commits a second of so many processes together."""
    folder.mkdir()
    if kind == "lake":
        Lake.create(folder)
    context = multiprocessing.get_context("fork")
    done, until = context.Queue(), time.time() + seconds + 0.3
    workers = [
        context.Process(target=committing, args=(kind, folder, number, until, done)) for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    total = sum(done.get() for _ in workers)
    for worker in workers:
        worker.join()
    return total / (seconds + 0.3)


def writing(folder: Path, count: int, seconds: float = 3.0) -> Section:
    section, rng = Section(), np.random.default_rng(0)
    kinds = ["lake", "npz", "bare fsync and rename"]
    try:
        import h5py
    except ImportError:
        section.notes.append("no HDF5: h5py is not installed")
    else:
        kinds.append("hdf5")
    data = [trajectory(PLAIN, STEPS + 1, rng) for _ in range(50)]
    size = PLAIN.step_bytes * (STEPS + 1)
    lake, spent = Lake.create(folder / "long"), []
    writer = lake.writer(PLAIN)
    begun = time.perf_counter()
    for i in range(count):
        at = time.perf_counter()
        writer.append(data[i % 50], TrajectoryInfo())
        spent.append(time.perf_counter() - at)
    writer.close()
    section.figures["lake, MB/s, synced"] = count * size / 1e6 / (time.perf_counter() - begun)
    section.figures["lake, us an append of 101 kB, median"] = float(np.median(spent)) * 1e6
    short = trajectory(PLAIN, SHORT + 1, rng)
    writer, spent = lake.writer(PLAIN), []
    for _ in range(2000):
        at = time.perf_counter()
        writer.append(short, TrajectoryInfo())
        spent.append(time.perf_counter() - at)
    writer.close()
    section.figures[f"lake, us an append of {SHORT} steps, median"] = float(np.median(spent)) * 1e6
    (folder / "files").mkdir()
    begun = time.perf_counter()
    for i in range(count // 4):
        columns = data[i % 50]
        durable(folder / "files" / f"{i}.npz", lambda file, columns=columns: np.savez(file, **columns))
    section.figures["npz, MB/s, synced"] = count // 4 * size / 1e6 / (time.perf_counter() - begun)
    if "hdf5" in kinds:
        begun = time.perf_counter()
        with h5py.File(folder / "long.h5", "w") as file:
            sets = _growing(file, data[0])
            for i in range(count):
                _grow(sets, data[i % 50])
            file.flush()
            os.fsync(file.id.get_vfd_handle())
        section.figures["hdf5, MB/s, synced once"] = count * size / 1e6 / (time.perf_counter() - begun)
    for kind in kinds:
        for processes in (1, 8):
            name = f"{kind}, commits/s, {processes} process{'es' if processes > 1 else ''}"
            section.figures[name] = commits(kind, folder / f"{kind}-{processes}", processes, seconds)
    section.notes.append(f"a commit: a trajectory of {SHORT} steps that readers see and a power cut spares")
    section.notes.append("HDF5: a file for each process, since one file takes one writer")
    return section
