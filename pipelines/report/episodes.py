"""Sample episodes of a lake: frames where observations are pictures, rewards, and the agent's values by step."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pipelines.errors import AmagoError
from pipelines.events import Listener, silent
from pipelines.files.malformed import UNREADABLE
from pipelines.lake import reading
from pipelines.lake.reading import SampledTrajectory
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.report.frames import as_frames, is_image, png
from pipelines.report.markup import Markup, element, facts, folded, joined, table
from pipelines.report.page import Charts, Curve
from pipelines.report.shown import text

Critic = Callable[[Trajectory, Schema], Mapping[str, np.ndarray]]
Draw = Callable[[Lake, str, int], np.ndarray | None]
"""Draws a trajectory of a lake by its uid, in a number of frames at most."""
_FIGURES = ("q", "v", "advantage", "weight", "disagreement", "action_gap", "agreement", "entropy")
_WHOLE = "(tags['unfinished'] is null and not continues)"  # not cut off when a stage ended; of pieces, the last one
_MOST_STEPS = 600  # that a chart shows
_MOST_ROWS = 300  # of a table
_MOST_COMPONENTS = 8
_MOST_FRAMES = 48  # of an episode
_MOST_SIDE = 160  # pixels of a frame
_MOST_BYTES = 400_000  # of an episode's frames
_UNDRAWN: tuple[type[Exception], ...] = (AmagoError, *UNREADABLE)


def section(
    lake: Lake,
    charts: Charts,
    *,
    count: int,
    critic: Critic | None = None,
    draw: Draw | None = None,
    note: str = "",
    listener: Listener = silent,
) -> Markup:
    """Return `count` episodes of the newest policy in the lake, chosen by chance, with the values that `critic` gives
    and the frames that `draw` draws.

    `note`: why there are no values.
    """
    [newest] = lake.sql(f"select max(policy_version) as v from trajectories where {_WHOLE}")
    where = "" if newest["v"] is None else f"{_WHOLE} and policy_version = {int(newest['v'])}"
    found = list(reading.sample(lake, count, where=where, whole=True, listener=listener))
    shown = [_episode(number, each, lake, charts, critic, draw) for number, each in enumerate(found, 1)]
    return joined(element("p", note, class_="warning") if note else None, *shown)


def _episode(
    number: int, found: SampledTrajectory, lake: Lake, charts: Charts, critic: Critic | None, draw: Draw | None
) -> Markup:
    row, schema, columns = found.row, lake.schema(found.schema_id), found.trajectory.columns
    figures = (
        {} if critic is None else {name: _acting(value) for name, value in critic(found.trajectory, schema).items()}
    )
    success = row.get("success")
    known = facts(
        [
            ("task", text(row.get("task"))),
            ("goal", text(row.get("goal_text"))),
            ("return", f"{row['return']:.4g}" if row.get("return") is not None else None),
            ("steps", f"{row['length']:,}"),
            ("success", None if success is None else "yes" if success else "no"),
            ("policy", f"{text(row.get('policy_id'), 100)} at update {row.get('policy_version')}"),
            ("relabelled by", text(row.get("relabel_method"))),
            ("trajectory", row["uid"]),
        ]
    )
    frames = list(_frames(columns, schema)) or _drawn(lake, row, draw)
    drawn = [*_lines(number, columns, figures, charts), *_observations(number, columns, schema, charts)]
    return element(
        "div",
        element("h3", f"Episode {number}: {text(row.get('env'), 80)}"),
        known,
        *frames,
        element("div", *drawn, class_="grid small"),
        folded("Step by step", _steps(columns, figures)),
        class_="episode",
    )


def _acting(values: np.ndarray) -> np.ndarray:
    """Return the figures of the acting discount, the last one."""
    return values[:, -1] if values.ndim == 2 else values


def _lines(
    number: int, columns: Mapping[str, np.ndarray], figures: Mapping[str, np.ndarray], charts: Charts
) -> Iterator[Markup]:
    """Yield the rewards, and the critic's values."""
    rewards = columns["reward"][1:][:_MOST_STEPS]
    steps = list(range(len(rewards)))
    summed = Curve(name="reward", values=rewards.tolist(), x=steps, color=0)
    total = Curve(name="return so far", values=np.cumsum(rewards, dtype=np.float64).tolist(), x=steps, color=1)
    yield charts.lines("Reward", [summed, total], x="step", y="", height=150, of=f"episode {number}")
    groups = {"Value": ("q", "v"), "Advantage": ("advantage",), "Action gap": ("action_gap",), "Entropy": ("entropy",)}
    for title, names in groups.items():
        curves = [
            Curve(name=name, values=figures[name][:_MOST_STEPS].tolist(), x=steps, color=place)
            for place, name in enumerate(names)
            if name in figures and np.isfinite(figures[name]).any()
        ]
        if curves:
            yield charts.lines(title, curves, x="step", y="", height=150, of=f"episode {number}")


def _observations(number: int, columns: Mapping[str, np.ndarray], schema: Schema, charts: Charts) -> Iterator[Markup]:
    """Yield the action where it is a number, and small numeric observations."""
    for column in schema.columns:
        if (
            column.role not in ("observation", "action")
            or is_image(column.dtype, column.shape)
            or column.name not in columns
        ):
            continue
        values = columns[column.name]
        values = (values[1:] if column.role == "action" else values)[: _MOST_STEPS + 1]
        if values.dtype.kind not in "biuf":
            continue
        flat = values.reshape(len(values), -1).astype(np.float64)
        if not 0 < flat.shape[1] <= _MOST_COMPONENTS:
            continue
        name = text(column.name, 60)
        curves = [
            Curve(
                name=name if flat.shape[1] == 1 else f"{name}[{place}]",
                values=part.tolist(),
                x=range(len(part)),
                color=place,
            )
            for place, part in enumerate(flat.T)
        ]
        yield charts.lines(name, curves, x="step", y="", height=150, of=f"episode {number}")


def _frames(columns: Mapping[str, np.ndarray], schema: Schema) -> Iterator[Markup]:
    """Yield strips of observations that are pictures."""
    for column in schema.columns:
        if column.role == "observation" and column.name in columns and is_image(column.dtype, column.shape):
            frames = as_frames(columns[column.name])
            places = np.unique(np.linspace(0, len(frames) - 1, min(_MOST_FRAMES, len(frames))).round().astype(int))
            yield _strip(frames[places], text(column.name, 60), of=len(frames))


def _drawn(lake: Lake, row: Mapping[str, Any], draw: Draw | None) -> list[Markup]:
    """Return a strip of what the environment draws; nothing where it cannot draw this episode."""
    if draw is None:
        return []
    try:
        frames = draw(lake, row["uid"], _MOST_FRAMES)
    except _UNDRAWN:
        return []
    return [] if frames is None else [_strip(frames, f"drawn by {text(row.get('env'), 60)}", of=row["length"] + 1)]


def _strip(frames: np.ndarray, name: str, *, of: int) -> Markup:
    """Return frames (T, H, W, C) as pictures in rows; `of`: number of frames from which they were chosen."""
    every = max(1, -(-max(frames.shape[1:3]) // _MOST_SIDE))
    pictures = [png(np.ascontiguousarray(frame[::every, ::every])) for frame in frames]
    size = sum(map(len, pictures))
    kept = pictures[:: -(-size // _MOST_BYTES)]
    caption = f"{len(kept)} of {of:,} frames, in order: {name}"
    shown = (element("img", src=f"data:image/png;base64,{base64.b64encode(each).decode()}", alt="") for each in kept)
    strip = element("div", shown, class_="frames", role="img", aria_label=caption)
    return element("figure", strip, element("figcaption", element("p", caption)))


def _steps(columns: Mapping[str, np.ndarray], figures: Mapping[str, np.ndarray]) -> Markup:
    names = [name for name in _FIGURES if name in figures]
    length = len(columns["reward"]) - 1
    rows = [
        [
            step,
            _plain(columns["action"][step + 1]),
            float(columns["reward"][step + 1]),
            _flags(columns, step + 1),
            *(float(figures[name][step]) for name in names),
        ]
        for step in range(min(length, _MOST_ROWS))
    ]
    cut = f", the first {_MOST_ROWS} of {length:,}" if length > _MOST_ROWS else ""
    caption = f"Steps{cut}. r: the task begins again, T: termination, t: truncation"
    return table(["step", "action", "reward", "ends", *names], rows, caption=caption)


def _flags(columns: Mapping[str, np.ndarray], row: int) -> str:
    marks = {"reset": "r", "terminated": "T", "truncated": "t"}
    return "".join(mark for name, mark in marks.items() if name in columns and np.any(columns[name][row]))


def _plain(value: np.ndarray) -> Any:
    parts = np.asarray(value).reshape(-1).tolist()[:_MOST_COMPONENTS]
    return parts[0] if len(parts) == 1 else " ".join(f"{part:.3g}" for part in parts)
