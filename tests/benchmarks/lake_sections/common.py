"""What the sections share: spaces, data that compresses as real data does, rates, and an empty page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
from frames import stacked, tiles

from pipelines.lake import footer, segment
from pipelines.lake.folders import segment_key
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Box, Discrete, MultiBinary, Spaces
from pipelines.lake.store import Lake

LENGTH, STEPS = 128, 1000
PLAIN = Schema(
    Spaces(observation={"obs.state": Box(shape=(17,)), "obs.bits": MultiBinary(n=2)}, action=Box(shape=(6,)))
)
assert PLAIN.step_bytes == 101
CRAFTER = Schema(Spaces(observation={"obs": Box(shape=(64, 64, 3), dtype="uint8")}, action=Discrete(n=17)))
ATARI = Schema(Spaces(observation={"obs": Box(shape=(84, 84, 4), dtype="uint8")}, action=Discrete(n=18)))
TINY = Schema(Spaces(observation={"obs": Box(shape=(), dtype="uint8")}, action=Discrete(n=2)))
SMALL = Schema(Spaces(observation={"obs": Box(shape=(4,))}, action=Discrete(n=2)))
HOURS = [f"2026{month:02d}{day:02d}{hour:02d}" for month in (1, 2) for day in range(1, 29) for hour in range(24)]
Figures = dict[str, Any]


@dataclass
class Section:
    """Figures of a section, and what a reader must know to judge them."""

    figures: Figures = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def trajectory(schema: Schema, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Step columns of one trajectory."""
    columns = schema.empty(rows)
    for name, values in columns.items():
        if values.ndim == 4:
            values[...] = (tiles if values.shape[-1] == 3 else stacked)(rng, rows)
        elif values.dtype == np.float32:
            values[...] = rng.standard_normal(values.shape)
        elif name == "action":
            values[...] = rng.integers(0, 17, values.shape)
    return columns


def rates(works: Mapping[str, Callable[[], int]], *, turns: int = 7, seconds: float = 0.25) -> dict[str, float]:
    """Items a second of each: the best of several turns, which they take one after the other (a neighbour's load then
    meets all of them).
    """
    best = dict.fromkeys(works, 0.0)
    for work in works.values():
        work()
    for _ in range(turns):
        for name, work in works.items():
            begun, count = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                count += work()
            best[name] = max(best[name], count / (time.perf_counter() - begun))
    return best


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def files_below(folder: Path, ending: str = "") -> list[Path]:
    return sorted(path for path in folder.rglob(f"*{ending}") if path.is_file())


def drop_cache(paths: Iterable[Path]) -> None:
    """Write the files out and let the system forget their pages. Pages that somebody has mapped stay."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident(paths: Iterable[Path]) -> float:
    """Share of the files' pages in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    inside = total = 0
    for path in paths:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            view = np.frombuffer(memory, np.uint8)
            pages = -(-len(view) // mmap.PAGESIZE)
            vector = (ctypes.c_ubyte * pages)()
            if libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), vector):
                raise OSError(ctypes.get_errno(), "mincore")
            inside += int(np.sum(np.frombuffer(vector, np.uint8) & 1))
            total += pages
            del view
    return inside / max(total, 1)


def footer_table(count: int, length: int, number: int, rng: np.random.Generator) -> pa.Table:
    """The rows of `count` trajectories of `length` actions, as the footer of segment `number` holds them."""
    row = {field.name: None for field in footer.TRAJECTORIES} | {"collector": "bench", "source": "rollout"}
    columns = {
        **{name: pa.array([value] * count, footer.TRAJECTORIES.field(name).type) for name, value in row.items()},
        "uid": pa.array([rng.bytes(16) for _ in range(count)], pa.binary(16)),
        "row0": pa.array(np.arange(count) * (length + 1)),
        "length": pa.array(np.full(count, length)),
        "env": pa.array(["bench"] * count),
        "task": pa.array([f"task {i}" for i in rng.integers(0, 50, count).tolist()]),
        "policy_id": pa.array(["run"] * count),
        "policy_version": pa.array(np.full(count, number)),
        "seed": pa.array(rng.integers(0, 1 << 40, count)),
        "return": pa.array(rng.standard_normal(count)),
        "success": pa.array(rng.random(count) < 0.3),
        "t_start": pa.array(np.full(count, 1e9 + number)),
        "t_end": pa.array(np.full(count, 1e9 + number + 1)),
        "crc": pa.array(rng.integers(0, 1 << 32, count, dtype=np.uint32)),
    }
    return pa.table([columns[field.name] for field in footer.TRAJECTORIES], schema=footer.TRAJECTORIES)


def add_segment(lake: Lake, schema: Schema, count: int, *, hour: str, number: int, rng: np.random.Generator) -> str:
    """A segment of `count` trajectories of one action each, as a writer would leave it; its id."""
    table, values = footer_table(count, 1, number, rng), schema.empty(2 * count)
    writer = f"bench.0.{UUID(bytes=rng.bytes(16)).hex[:8]}"
    header = {
        "format": footer.FORMAT,
        "kind": "steps",
        "schema": schema.id,
        "writer": writer,
        "sequence": number,
        "t_commit": 1e9 + number,
        "rows": 2 * count,
        "columns": {name: segment.checksum(array) for name, array in values.items()},
    }
    tmp = lake.path / "tmp"
    staged = segment.stage_files(tmp, "bench", schema.columns, values, lambda: footer.encode(header, table))
    id = f"{hour}/{number:016x}-{writer}-{number:08d}"
    lake.storage.publish(staged.main, segment_key(id))
    return id


def shown(value: Any) -> str:
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 100 else f"{value:,.0f}"


def table(title: str, figures: Mapping[str, Any], notes: Sequence[str]) -> str:
    width = max([24, *(len(key) for key in figures)])
    lines = [title, *(f"  {key:{width}} {shown(value):>14}" for key, value in figures.items())]
    return "\n".join([*lines, *(f"  ({note})" for note in notes)])
