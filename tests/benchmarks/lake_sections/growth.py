"""What a refresh and the SQL index cost as a lake grows."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from memory import private

from lake_sections.common import HOURS, SMALL, TINY, Section, add_segment, timed
from pipelines.data.view import View
from pipelines.lake.folders import FULL
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.report.charts import Lines, Series
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
_IMPORTS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pipelines.lake.maintenance import compaction, retention
from pipelines.lake.sql import catalog, selection
from pipelines.lake.store import Lake
lake = Lake(sys.argv[1])
"""


def write(lake: Lake, count: int, *, sealed: bool) -> None:
    """Append trajectories of 1 to 18 steps by the public writer, in segments of 64 MiB; `sealed`: of a thousand."""
    rng = np.random.default_rng(0)
    with lake.writer(SMALL, seal_seconds=1e9) as writer:
        for number in range(count // 1000):
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
            if sealed:
                writer.seal()


def run_child(text: str, lake: Path) -> dict[str, float]:
    """Run a command on a lake in a process of its own; its figures, and those that it printed as JSON."""
    begun = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", _IMPORTS + text, str(lake)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"failed: {text}")
    lines = printed.splitlines()
    figures = {"s": time.perf_counter() - begun, "CPU s": usage.ru_utime + usage.ru_stime}
    return figures | {"peak MiB": usage.ru_maxrss / 1024} | (json.loads(lines[-1]) if lines else {})


def maintenance(folder: Path, sizes: list[int]) -> Section:
    """Expiry, merging, and the index after them: CPU seconds and the peak of memory of each command, its helper process
    included. A public writer builds the lake, of trajectories of 1 to 18 steps, 1,000 in a segment.
    """
    section = Section()
    for size in sizes:
        write(Lake.create(folder / str(size)), size, sealed=True)
        for name, text in _MAINTENANCE.items():
            for unit, value in run_child(text, folder / str(size)).items():
                section.figures[f"{size:,}: {name}, {unit}"] = value
    for few, many in itertools.pairwise(sizes):
        for name in list(_MAINTENANCE)[1:]:
            less, more = (
                max(section.figures[f"{size:,}: {name}, CPU s"] - section.figures[f"{size:,}: open, CPU s"], 0.01)
                for size in (few, many)
            )
            section.figures[f"{name}, exponent from {few:,}"] = math.log(more / less) / math.log(many / few)
    section.notes.append("memory includes mapped files; exponents are those of the time beyond opening the lake")
    return section


# What people do with a lake of millions, in this order. Each has a process of its own.
_MILLIONS = {
    "imports": "from pipelines import WindowDataset",
    "write": "from lake_sections.growth import write; write(lake, COUNT, sealed=False)",
    "first batch, without manifests": "from lake_sections.growth import draw; draw(lake)",
    "build the index": "catalog.refresh(lake)",
    "select(where)": "selection.select(lake, \"task like '%1%' and length > 5\")",
    "select(weight)": "selection.select(lake, weight='1.0 / count(*) over (partition by task)')",
    "expire 10% by SQL": "retention.expire(lake, retention.RetentionLimits(where='seed % 10 = 0'))",
    "index after it": "catalog.refresh(lake)",
    "first batch": "from lake_sections.growth import draw; draw(lake)",
    "first batch, weighted": "from lake_sections.growth import draw; draw(lake, weight='1.0 + length')",
    "follow": "from lake_sections.growth import follow; follow(lake)",
    "merge": "compaction.compact(lake)",
    "first batch, merged": "from lake_sections.growth import draw; draw(lake)",
}


def draw(lake: Lake, weight: str = "") -> None:
    """Draw windows of 32 steps as a trainer does; prints what its first batch and those after it took."""
    from pipelines import WindowDataset

    windows = iter(WindowDataset(lake.path, length=32, batch_size=64, weight=weight))
    begun = time.process_time()
    next(windows)
    first = time.process_time() - begun
    begun = time.process_time()
    for _ in range(200):
        next(windows)
    later, sizes = time.process_time() - begun, private(str(lake.path))
    print(json.dumps({"first, CPU s": first, "later, ms": later / 0.2, "private MB": sizes[0], "mapped MB": sizes[1]}))


def follow(lake: Lake, rounds: int = 9) -> None:
    """Take in 100 new trajectories; prints what that takes in the thread of a trainer, with a predicate and without."""
    from pipelines.config.settings import TrainSettings
    from pipelines.data.mixture import Share
    from pipelines.events import silent
    from pipelines.training.data import make_mixture

    figures = {}
    for name, where in {"100 new, ms": "", "100 new with a predicate, ms": "length > 5"}.items():
        train = TrainSettings(context_length=32, batch_size=64, where=where)
        mixture = make_mixture([(lake, Share())], SMALL, train, seed=0, listener=silent)
        mixture.refresh(0)
        seconds = []
        for turn in range(rounds):
            with lake.writer(SMALL) as writer:
                for _ in range(100):
                    writer.append(SMALL.empty(10), TrajectoryInfo(env="bench", seed=1))
            begun = time.thread_time()
            mixture.refresh(1 + turn)
            seconds.append(time.thread_time() - begun)
        figures[name] = 1e3 * statistics.median(seconds)
    print(json.dumps(figures))


def millions(folder: Path, sizes: list[int], to: Path | None) -> Section:
    """Lakes of millions of trajectories of 1 to 18 steps, written, selected from, drawn from, followed and expired. The
    figures of each are appended to the file `to`."""
    section = Section()
    for size in sizes:
        lake = Lake.create(folder / str(size))
        figures: dict[str, float] = {}
        for name, text in _MILLIONS.items():
            for unit, value in run_child(text.replace("COUNT", str(size)), lake.path).items():
                figures[f"{name}, {unit}"] = value
            print(size, name, figures, file=sys.stderr, flush=True)
        stored = sum(path.stat().st_size for path in lake.path.rglob("*") if path.is_file())
        figures["GB, with those that were replaced"] = stored / 1e9
        shutil.rmtree(lake.path)
        section.figures |= {f"{size:,}: {name}": value for name, value in figures.items()}
        if to is not None:
            with to.open("a") as file:
                file.write(json.dumps({"trajectories": size, "figures": figures}) + "\n")
    return section


# Of these the picture has a line, as many as it has colours. The first batch does not include the start of its process.
_DRAWN = {
    **{name: f"{name}, CPU s" for name in ("write", "build the index", "expire 10% by SQL", "select(weight)", "merge")},
    "first batch": "first batch, first, CPU s",
}


def draw_growth(rows: Path, picture: Path) -> None:
    """Draw what each command takes for a trajectory, over the number of them from a million on, where the start of a
    process no longer counts for much. A line that does not rise is a cost in proportion."""
    found = [row for row in map(json.loads, rows.read_text().splitlines()) if row["trajectories"] >= 1_000_000]
    found.sort(key=lambda row: row["trajectories"])
    counts = [row["trajectories"] for row in found]
    series = [
        Series(
            name=name,
            values=[1e6 * row["figures"][key] / row["trajectories"] for row in found],
            x=[math.log10(count) for count in counts],
        )
        for name, key in _DRAWN.items()
    ]
    Lines(series=series, x_title="trajectories, power of ten", y_title="CPU microseconds a trajectory").draw(picture)


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
