"""Relabelling whole segments: trajectories a second, and the bytes of what is stored."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from lake_sections.common import Section
from pipelines.config.load import resolve
from pipelines.lake.schema import Schema
from pipelines.lake.segment import stored_bytes
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories, TrajectoryInfo
from pipelines.relabelers.paths import Paths
from pipelines.rollout.environment import find_env_model
from pipelines.stages import relabel

STEPS, COPIES = 500, 20
# 101 B a step: 90 of observations, 4 of action and reward each, 3 of flags; the goals are among the observations.
GOAL = Schema(
    Spaces(
        observation={
            "obs.observation": Box(shape=(74,), dtype="uint8"),
            "obs.achieved_goal": Box(shape=(2,)),
            "obs.desired_goal": Box(shape=(2,)),
        },
        action=Discrete(n=5),
    )
)
SEQUENCE = Schema(
    Spaces(
        observation={
            "obs.observation": Box(shape=(58,), dtype="uint8"),
            "obs.achieved": Box(shape=(1, 2)),
            "obs.goals": Box(shape=(3, 2)),
        },
        action=Discrete(n=5),
    )
)


class Sparse:
    """Pays 1 where a trajectory is at its middle, and ends there: rewards and ends are 5 B a step."""

    reads = changes = ("reward", "terminated")

    def relabel(self, paths: Paths) -> Paths:
        middle = paths.first + paths.rows // 2
        reward, over = np.zeros(len(paths.time), np.float32), np.zeros(len(paths.time), np.uint8)
        reward[middle] = 1.0
        over[paths.last] = 1
        return paths.with_columns({"reward": reward, "terminated": over})


def sparse(argument: str, context: object) -> Sparse:
    return Sparse()


def relabelling(folder: Path, count: int) -> Section:
    """`COPIES` versions each of `count` trajectories."""
    what = f"{COPIES} versions of {count} trajectories of {STEPS} steps"
    section = Section(notes=[f"{what}; all that the stage does, from opening the lake on"])
    rows = (
        ("5 B a step", GOAL, "goal-frozen-lake", "lake_sections.relabelling:sparse"),
        ("scale", GOAL, "goal-frozen-lake", "scale:0.5"),
        ("SQL reward", GOAL, "goal-frozen-lake", "reward:reward + (action = 2)::int"),
        ("hindsight final", GOAL, "goal-frozen-lake", "hindsight:final"),
        ("hindsight future", GOAL, "goal-frozen-lake", "hindsight:future"),
        ("instruction some", SEQUENCE, "mazerunner", "instruction:some"),
    )
    for name, schema, env, relabeler in rows:
        lake = _filled(folder / name.replace(" ", "-"), schema, env, count)
        settings = resolve({"relabel": {"relabeler": relabeler, "copies": COPIES}}, env_model=find_env_model)
        begun = time.perf_counter()
        relabel.run(settings, lake=lake.path)
        seconds = time.perf_counter() - begun
        files = list((lake.path / "segments").rglob("*.ovl.arrow"))
        base = sum(
            stored_bytes(lake.storage, f"{path.parent.name}/{path.name.removesuffix('.arrow')}")
            for path in (lake.path / "segments").rglob("*.arrow")
            if path not in files
        )
        section.figures[f"{name}, trajectories/s"] = COPIES * count / seconds
        section.figures[f"{name}, bytes / of the base"] = sum(path.stat().st_size for path in files) / base / COPIES
    return section


def _filled(place: Path, schema: Schema, env: str, count: int) -> Lake:
    lake, rng = Lake.create(place), np.random.default_rng(0)
    rows = STEPS + 1
    with lake.writer(schema, seal_seconds=1e9) as writer:
        for start in range(0, count, 500):
            some = min(500, count - start)
            columns = schema.empty(some * rows)
            columns["action"][:] = rng.integers(0, 5, some * rows)
            place_ = rng.integers(0, 12, (some * rows, 2)).astype(np.float32)
            if schema is GOAL:
                columns["obs.achieved_goal"][:] = place_
                columns["obs.desired_goal"][:] = 99.0
            else:
                columns["obs.achieved"][:, 0] = place_
                columns["obs.goals"][:] = 99.0
            columns["truncated"][rows - 1 :: rows] = 1
            writer.append_many(Trajectories(columns, [rows] * some, [TrajectoryInfo(env=env)] * some))
    return lake
