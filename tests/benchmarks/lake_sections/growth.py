"""What a refresh and the SQL index cost as a lake grows."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from lake_sections.common import HOURS, SMALL, TINY, Section, add_segment, timed
from pipelines.data.view import View
from pipelines.lake.folders import FULL
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.view.viewer import LakeViewer

QUERIES = {
    "count": "select count(*) from trajectories",
    "group by task": "select task, count(*), avg(return) from trajectories group by task",
    "best successes": "select uid, return from trajectories where success order by return desc limit 10",
    "one uid": "select * from trajectories where uid = (select max(uid) from trajectories)",
}


def folder_of(number: int) -> str:
    """Where a segment lies that writers made, 500 an hour."""
    hour, further = HOURS[number // 500], number % 500 // FULL
    return f"{hour}_{further:04d}" if further else hour


def grown(folder: Path, count: int, a_segment: int, rng: np.random.Generator) -> Lake:
    """A lake of `count` tiny trajectories."""
    lake = Lake.create(folder)
    lake.register(TINY)
    for number in range(count // a_segment):
        add_segment(lake, TINY, a_segment, hour=folder_of(number), number=number, rng=rng)
    return lake


def refresh(folder: Path, sizes: list[int], rounds: int = 9) -> Section:
    """Taking in 100 new trajectories; existing ones lie in segments of 100, from a million on in segments of 10,000."""
    section, rng = Section(), np.random.default_rng(0)
    for size in sizes:
        a_segment = 100 if size < 1_000_000 else 10_000
        lake = grown(folder / str(size), size, a_segment, rng)
        hour = folder_of(size // a_segment - 1)
        view = View(lake, TINY.id)
        first = timed(view.refresh)
        catalog.refresh(lake)
        follow, index = [], []
        for turn in range(rounds):
            add_segment(lake, TINY, 100, hour=hour, number=10_000_000 + turn, rng=rng)
            follow.append(timed(view.refresh))
            index.append(timed(lambda lake=lake: catalog.refresh(lake)))
        assert view.num_trajectories == size + 100 * rounds
        section.figures[f"{size:,}: follower from nothing, ms"] = 1e3 * first
        section.figures[f"{size:,}: follower, 100 new, ms"] = 1e3 * statistics.median(follow)
        section.figures[f"{size:,}: index, 100 new, ms"] = 1e3 * statistics.median(index)
    least, *others = sizes
    for size in others:
        for what in ("follower", "index"):
            base = section.figures[f"{least:,}: {what}, 100 new, ms"]
            section.figures[f"{what}, {size:,} / {least:,}"] = section.figures[f"{size:,}: {what}, 100 new, ms"] / base
    section.notes.append(f"medians of {rounds}; nothing new: see the listing alone")
    return section


def index(folder: Path, sizes: list[int]) -> Section:
    """Building the index from the footers, and asking it; segments of 10,000 trajectories."""
    section, rng = Section(), np.random.default_rng(0)
    for size in sizes:
        lake = grown(folder / str(size), size, 10_000, rng)
        section.figures[f"{size:,}: build, s"] = timed(lambda lake=lake: catalog.refresh(lake))
        section.figures[f"{size:,}: index, MB"] = (lake.path / "index.duckdb").stat().st_size / 1e6
        for name, text in QUERIES.items():
            seconds = []
            for _ in range(3):
                begun = time.perf_counter()
                catalog.query(lake, text)
                seconds.append(time.perf_counter() - begun)
            section.figures[f"{size:,}: {name}, ms"] = 1e3 * min(seconds)
    section.notes.append("a query includes looking for what is new")
    return section


# Commands on a lake, each in a process of its own, one after the other.
_MAINTENANCE = {
    "open": "",
    "build the index": "catalog.refresh(lake)",
    "expire 10% by SQL": "retention.expire(lake, retention.RetentionLimits(where='seed % 10 = 0'))",
    "index after it": "catalog.refresh(lake)",
    "index, nothing new": "catalog.refresh(lake)",
    "compact": "compaction.compact(lake)",
    "index after merging": "catalog.refresh(lake)",
    "expire 10% by SQL, merged": "retention.expire(lake, retention.RetentionLimits(where='seed % 10 = 1'))",
    "index after it, merged": "catalog.refresh(lake)",
    "rebuild the index": "catalog.rebuild(lake)",
}
_IMPORTS = """
import sys
from pipelines.lake.maintenance import compaction, retention
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
lake = Lake(sys.argv[1])
"""


def maintenance(folder: Path, sizes: list[int]) -> Section:
    """Expiry, merging, and the index after them: CPU seconds and the peak of memory of each command, its helper process
    included. A public writer builds the lake, of trajectories of 1 to 18 steps, 1,000 in a segment.
    """
    section = Section()
    for size in sizes:
        lake, rng = Lake.create(folder / str(size)), np.random.default_rng(0)
        with lake.writer(SMALL, seal_seconds=1e9) as writer:
            for number in range(size // 1000):
                rows = rng.integers(2, 20, 1000)
                values, ends = SMALL.empty(int(rows.sum())), np.cumsum(rows)
                values["obs"][...] = rng.standard_normal(values["obs"].shape)
                values["terminated"][ends - 1] = 1
                seeds, tasks = rng.integers(0, 1 << 40, 1000).tolist(), rng.integers(0, 50, 1000).tolist()
                infos = [
                    TrajectoryInfo(env="bench", task=f"task {task}", policy_version=number, collector="c", seed=seed)
                    for seed, task in zip(seeds, tasks, strict=True)
                ]
                writer.append_many(Trajectories(values, rows.tolist(), infos))
                writer.seal()
        for name, text in _MAINTENANCE.items():
            child = subprocess.Popen([sys.executable, "-c", _IMPORTS + text, str(lake.path)])
            _, status, usage = os.wait4(child.pid, 0)
            if status:
                raise RuntimeError(f"{name} failed")
            section.figures[f"{size:,}: {name}, CPU s"] = usage.ru_utime + usage.ru_stime
            section.figures[f"{size:,}: {name}, peak MiB"] = usage.ru_maxrss / 1024
    for few, many in itertools.pairwise(sizes):
        for name in list(_MAINTENANCE)[1:]:
            less, more = (
                max(section.figures[f"{size:,}: {name}, CPU s"] - section.figures[f"{size:,}: open, CPU s"], 0.01)
                for size in (few, many)
            )
            section.figures[f"{name}, exponent from {few:,}"] = math.log(more / less) / math.log(many / few)
    section.notes.append("memory includes mapped files; exponents are those of the time beyond opening the lake")
    return section


def pages(folder: Path, count: int, rounds: int = 5) -> Section:
    """What the page of `amago view` asks of a large lake."""
    section = Section()
    lake = grown(folder, count, 10_000, np.random.default_rng(0))
    catalog.refresh(lake)
    viewer = LakeViewer(lake)
    first = viewer.page(where="", order="t_commit", descending=True)
    middle = viewer.page(where="", order="return", descending=False)["rows"][50][0]
    found = "return > 0.5 and task like '%1%'"
    asked = {
        "first page": lambda: viewer.page(where="", order="t_commit", descending=True),
        "a page within, by return": lambda: viewer.page(where="", order="return", descending=False, after=middle),
        "filter": lambda: viewer.page(where=found, order="t_commit", descending=True),
        "count of a filter": lambda: viewer.count(found),
        "curve": lambda: viewer.curve("", "t_commit", 60),
        "what is new": viewer.state,
        "one trajectory": lambda: viewer.trajectory(first["rows"][0][0]),
    }
    for name, ask in asked.items():
        section.figures[f"{count:,}: {name}, ms"] = 1e3 * statistics.median(timed(ask) for _ in range(rounds))
    section.notes.append(f"medians of {rounds}, without HTTP")
    return section
