"""Episodes on a page: samples of a lake with frames, rewards and the agent's values, and videos of evaluations."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from pipelines.errors import AmagoError
from pipelines.events import Listener, silent
from pipelines.files.malformed import UNREADABLE, read_limited
from pipelines.lake import reading
from pipelines.lake.reading import SampledTrajectory
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectory
from pipelines.report.frames import as_frames, encode_png, is_image
from pipelines.report.markup import Markup, element, facts, fold, join, table
from pipelines.report.page import Charts, Curve
from pipelines.report.shown import ShownRun, text

Critic = Callable[[Trajectory, Schema], Mapping[str, np.ndarray]]
Draw = Callable[[Lake, str, int], np.ndarray | None]
"""Draws a trajectory of a lake by its uid, in a number of frames at most."""
_FIGURES = ("q", "v", "advantage", "weight", "disagreement", "action_gap", "agreement", "entropy")
_MARKS = {"reset": "r", "terminated": "T", "truncated": "t"}
_WHOLE = "(tags['unfinished'] is null and not continues)"  # not cut off when a stage ended; of pieces, the last one
_MOST_STEPS = 600  # that a chart shows
_MOST_ROWS = 300  # of a table
_MOST_COMPONENTS = 8
_MOST_FRAMES = 48  # of an episode
_MOST_SIDE = 160  # pixels of a frame
_MOST_BYTES = 400_000  # of an episode's frames
_MOST_VIDEOS = 4
_MOST_VIDEO_BYTES = 4 << 20  # of one video
_MOST_NAMES = 10_000
_UNDRAWN: tuple[type[Exception], ...] = (AmagoError, *UNREADABLE)


def show_samples(
    lake: Lake,
    charts: Charts,
    *,
    count: int,
    critic: Critic | None = None,
    draw: Draw | None = None,
    note: str = "",
    listener: Listener = silent,
) -> Markup:
    """Show `count` random episodes of the newest policy in the lake.

    `critic` gives the agent's values and `draw` the frames; `note` says why there are no values.
    """
    [newest] = lake.sql(f"select max(policy_version) as v from trajectories where {_WHOLE}", listener=listener)
    where = "" if newest["v"] is None else f"{_WHOLE} and policy_version = {int(newest['v'])}"
    found = list(reading.sample(lake, count, where=where, whole=True, listener=listener))
    shown = [_Episode(number, each, lake, charts, critic, draw).show() for number, each in enumerate(found, 1)]
    return join(element("p", note, class_="warning") if note else None, *shown)


class _Episode:
    """A sampled trajectory as a part of the page. `figures` are the critic's, by name; of the discounts, they are of
    the last one, which is that of the policy that acts."""

    def __init__(
        self,
        number: int,
        found: SampledTrajectory,
        lake: Lake,
        charts: Charts,
        critic: Critic | None,
        draw: Draw | None,
    ) -> None:
        self.number, self.lake, self.charts, self.draw = number, lake, charts, draw
        self.row, self.schema, self.columns = found.row, lake.schema(found.schema_id), found.trajectory.columns
        figures = {} if critic is None else critic(found.trajectory, self.schema)
        self.figures = {name: values[:, -1] if values.ndim == 2 else values for name, values in figures.items()}

    def show(self) -> Markup:
        row = self.row
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
        return element(
            "div",
            element("h3", f"Episode {self.number}: {text(row.get('env'), 80)}"),
            known,
            *self._show_frames(),
            element("div", *self._draw_charts(), class_="grid small"),
            fold("Step by step", self._tabulate_steps()),
            class_="episode",
        )

    def _draw_charts(self) -> Iterator[Markup]:
        """Yield charts of the rewards, the critic's values, numeric actions, and observations of few numbers."""
        columns, figures, charts, of = self.columns, self.figures, self.charts, f"episode {self.number}"
        rewards = columns["reward"][1:][:_MOST_STEPS]
        steps = list(range(len(rewards)))
        summed = Curve(name="reward", values=rewards.tolist(), x=steps, color=0)
        total = Curve(name="return so far", values=np.cumsum(rewards, dtype=np.float64).tolist(), x=steps, color=1)
        yield charts.lines("Reward", [summed, total], x="step", y="", height=150, of=of)
        groups = {
            "Value": ("q", "v"),
            "Advantage": ("advantage",),
            "Action gap": ("action_gap",),
            "Entropy": ("entropy",),
        }
        for title, names in groups.items():
            curves = [
                Curve(name=name, values=figures[name][:_MOST_STEPS].tolist(), x=steps, color=place)
                for place, name in enumerate(names)
                if name in figures and np.isfinite(figures[name]).any()
            ]
            if curves:
                yield charts.lines(title, curves, x="step", y="", height=150, of=of)
        for column in self.schema.columns:
            if column.role not in ("observation", "action") or column.name not in columns:
                continue
            if is_image(column.dtype, column.shape):
                continue
            values = columns[column.name]
            # No action led to row 0: action t stands in row t + 1.
            values = (values[1:] if column.role == "action" else values)[: _MOST_STEPS + 1]
            if values.dtype.kind not in "biuf":
                continue
            flat = values.reshape(len(values), -1).astype(np.float64)
            if not 0 < flat.shape[1] <= _MOST_COMPONENTS:
                continue
            name = text(column.name, 60)
            curves = []
            for place, part in enumerate(flat.T):
                label = name if flat.shape[1] == 1 else f"{name}[{place}]"
                curves.append(Curve(name=label, values=part.tolist(), x=range(len(part)), color=place))
            yield charts.lines(name, curves, x="step", y="", height=150, of=of)

    def _show_frames(self) -> list[Markup]:
        """Show the observations that are pictures or, without any, what the environment draws, if it can draw this."""
        shown, columns, row = [], self.columns, self.row
        for column in self.schema.columns:
            if column.role == "observation" and column.name in columns and is_image(column.dtype, column.shape):
                frames = as_frames(columns[column.name])
                places = np.unique(np.linspace(0, len(frames) - 1, min(_MOST_FRAMES, len(frames))).round().astype(int))
                shown.append(self._show_strip(frames[places], text(column.name, 60), of=len(frames)))
        if shown or self.draw is None:
            return shown
        try:
            drawn = self.draw(self.lake, row["uid"], _MOST_FRAMES)
        except _UNDRAWN:
            return []
        name = f"drawn by {text(row.get('env'), 60)}"
        return [] if drawn is None else [self._show_strip(drawn, name, of=row["length"] + 1)]

    @staticmethod
    def _show_strip(frames: np.ndarray, name: str, *, of: int) -> Markup:
        """Embed frames (T, H, W, C), chosen from `of` frames, as pictures in rows.

        Large frames lose pixels, and a large strip loses frames, so that a page stays small.
        """
        every = max(1, -(-max(frames.shape[1:3]) // _MOST_SIDE))
        pictures = [encode_png(np.ascontiguousarray(frame[::every, ::every])) for frame in frames]
        size = sum(map(len, pictures))
        kept = pictures[:: -(-size // _MOST_BYTES)]
        caption = f"{len(kept)} of {of:,} frames, in order: {name}"
        shown = (
            element("img", src=f"data:image/png;base64,{base64.b64encode(each).decode()}", alt="") for each in kept
        )
        strip = element("div", shown, class_="frames", role="img", aria_label=caption)
        return element("figure", strip, element("figcaption", element("p", caption)))

    def _tabulate_steps(self) -> Markup:
        columns, figures = self.columns, self.figures
        names = [name for name in _FIGURES if name in figures]
        marks = {name: mark for name, mark in _MARKS.items() if name in columns}
        length = len(columns["reward"]) - 1
        rows = []
        for step in range(min(length, _MOST_ROWS)):
            parts = np.asarray(columns["action"][step + 1]).reshape(-1).tolist()[:_MOST_COMPONENTS]
            action = parts[0] if len(parts) == 1 else " ".join(f"{part:.3g}" for part in parts)
            flags = "".join(mark for name, mark in marks.items() if np.any(columns[name][step + 1]))
            values = (float(figures[name][step]) for name in names)
            rows.append([step, action, float(columns["reward"][step + 1]), flags, *values])
        cut = f", the first {_MOST_ROWS} of {length:,}" if length > _MOST_ROWS else ""
        caption = f"Steps{cut}. r: the task begins again, T: termination, t: truncation"
        return table(["step", "action", "reward", "ends", *names], rows, caption=caption)


def show_videos(run: ShownRun) -> Markup | None:
    """Embed the videos of the newest evaluation that has some; None if there are none of a reasonable size."""
    folder = run.stored.path / "videos"
    if not folder.is_dir():
        return None
    names = sorted((path.name for path in folder.iterdir()), reverse=True)[:_MOST_NAMES]
    stems = [name.rpartition("-")[0] for name in names if name.endswith((".mp4", ".gif"))]
    chosen = sorted(name for name in names if stems and name.rpartition("-")[0] == stems[0])
    shown = [video for name in chosen if (video := _embed_video(folder / name)) is not None][:_MOST_VIDEOS]
    if not shown:
        return None
    about = f"Episodes of evaluation {text(stems[0], 60)}, with attempt, reward, return and the agent's value."
    return join(element("p", about), element("div", *shown, class_="grid small"))


def _embed_video(path: Path) -> Markup | None:
    """Embed a video file; None for one that is large, or whose content is not what its name says."""
    try:
        content = read_limited(path, _MOST_VIDEO_BYTES)
    except OSError:
        return None
    kind = None
    if path.suffix == ".mp4" and content[4:8] == b"ftyp":
        kind = "video/mp4"
    elif path.suffix == ".gif" and content[:6] in (b"GIF87a", b"GIF89a"):
        kind = "image/gif"
    if kind is None:
        return None
    source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    caption = element("figcaption", text(path.stem, 80))
    label = f"Video of an episode: {text(path.stem, 80)}"
    if path.suffix == ".gif":
        return element("figure", caption, element("img", src=source, alt=label, class_="video"))
    player = element(
        "video",
        src=source,
        controls=True,
        muted=True,
        playsinline=True,
        preload="metadata",
        class_="video",
        aria_label=label,
    )
    return element("figure", caption, player)
