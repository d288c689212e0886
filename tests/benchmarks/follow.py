"""Time from the end of an episode to the moment from which a trainer that follows the lake draws from it, on one host.

    python tests/benchmarks/follow.py [--seconds 60] [--every 0.05] [--dir DIR]

A process appends an episode every so many seconds through the public writer. The real train stage follows the lake with
a tiny model. Segments per hour are those that the writer made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from lake_sections.common import SMALL
from memory import SETTINGS

from pipelines.config.load import merge, resolve
from pipelines.data.view import View
from pipelines.events import Event
from pipelines.lake.footer import read_footer
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.rollout.environment import find_env_model
from pipelines.stages import train as stage


def write(lake: Lake, every: float) -> None:
    """Append episodes until the parent ends."""
    rng, parent = np.random.default_rng(0), os.getppid()
    with lake.writer(SMALL) as writer:
        while os.getppid() == parent:
            values = SMALL.empty(20)
            values["obs"][...] = rng.standard_normal(values["obs"].shape)
            values["terminated"][-1] = 1
            writer.append(values, TrajectoryInfo(env="bench", t_end=time.time()))
            time.sleep(every)
            writer.poll()


def follow(lake: Lake, run: Path, seconds: float) -> tuple[list[float], list[float]]:
    """Train for so long; return the ages of episodes at the refreshes that took them in, and CPU s of all refreshes."""
    ages: list[float] = []
    looks: list[float] = []
    refresh, end = View.refresh, time.monotonic() + seconds

    def measure(view: View, *arguments: object) -> int:
        before, began = len(view.segments), time.thread_time()
        added = refresh(view, *arguments)  # type: ignore[arg-type]
        looks.append(time.thread_time() - began)
        now = time.time()
        for segment in view.segments[before:]:
            footer = read_footer(lake.storage, segment.file)
            ages.extend((now - footer.trajectories["t_end"].to_numpy())[-len(segment.uids) :] if before else ())
        return added

    def listen(event: Event) -> None:
        if time.monotonic() > end:
            raise KeyboardInterrupt

    View.refresh = measure  # type: ignore[method-assign]
    given = {"train": {"steps": 10**9, "follow": True, "context_length": 16}, "lake": {"compact": False}}
    settings = resolve(merge(SETTINGS, given), env_model=find_env_model)
    with contextlib.suppress(KeyboardInterrupt):
        stage.run(settings, run=run, lakes=[(lake.path, 1.0)], listener=listen)
    return ages, looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=0.05)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(Lake(options.write), options.every)
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        lake = Lake.create(Path(root) / "lake")
        lake.register(SMALL)
        command = [sys.executable, __file__, "--write", str(lake.path), "--every", str(options.every)]
        with subprocess.Popen(command) as writer:
            try:
                ages, looks = follow(lake, Path(root) / "run", options.seconds)
                segments = len(list(lake.path.rglob("*.arrow")))
            finally:
                writer.kill()
    middle, late = np.percentile(ages, [50, 95])
    print(f"an episode every {options.every:g} s: median {middle:.2f} s, p95 {late:.2f} s of {len(ages)} episodes")
    print(f"  {segments * 3600 / options.seconds:,.0f} segments an hour")
    cost = f"{1e3 * np.mean(looks):.2f} ms of CPU each, {sum(looks) / options.seconds:.2%} of the time"
    print(f"  {len(looks)} looks, {cost}")


if __name__ == "__main__":
    main()
