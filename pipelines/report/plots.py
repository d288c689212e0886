"""Pictures of results as PNG files: how success grows within an episode, how a metric grows with training.

matplotlib is imported only when a picture is drawn, by its object interface: no global state, no display.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.files.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by readers of every kind of colour vision, and in grey.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_INK, _SOFT, _GRID = "#222222", "#6B6B6B", "#E3E3E3"
_SIZE_INCHES = (7.2, 4.0)
_DPI = 160


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named line with an optional band (`low`, `high`, e.g. a 95% interval) of as many values.

    A `reference` (random, optimal) is drawn as a quiet dashed line; with a single value it spans the picture.
    """

    name: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    reference: bool = False

    def __post_init__(self) -> None:
        bands = [band for band in (self.low, self.high) if band is not None]
        if len(bands) == 1 or any(len(band) != len(self.values) for band in bands):
            raise ValueError(f"series '{self.name}': low and high need {len(self.values)} values each")


def adaptation_curve(
    path: Path, series: Sequence[Series], *, title: str = "", metric: str = "success", unit: str = "attempt"
) -> Path:
    """Draw `metric` by attempt (1, 2, ...) into the PNG `path`; an agent that adapts rises from left to right."""
    attempts = max(len(each.values) for each in series)

    def arrange(axes: Axes) -> None:
        axes.set_xlim(0.85, attempts + 0.15)
        axes.set_xticks(_ticks(attempts))
        if metric == "success":
            _share_axis(axes)

    return _draw(
        path,
        series,
        lambda each: range(1, len(each.values) + 1),
        arrange,
        title,
        f"{unit} in the episode",
        metric,
    )


def learning_curve(
    path: Path,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    title: str = "",
    metric: str = "return",
    unit: str = "gradient updates",
) -> Path:
    """Draw `metric` against `x` (updates or environment steps) into the PNG `path`."""

    def arrange(axes: Axes) -> None:
        from matplotlib.ticker import EngFormatter

        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if len(x) > 1:
            axes.set_xlim(min(x), max(x))
        if metric == "success":
            _share_axis(axes)

    return _draw(path, series, lambda each: x[: len(each.values)], arrange, title, unit, metric)


def _draw(
    path: Path,
    series: Sequence[Series],
    places: Callable[[Series], Sequence[float] | range],
    arrange: Callable[[Axes], None],
    title: str,
    x_label: str,
    y_label: str,
) -> Path:
    figure, axes = _canvas(title, x_label, y_label)
    own = [each for each in series if not each.reference]
    for each in series:
        if each.reference:
            _reference(axes, each, places(each))
    for place, each in enumerate(own):
        draw_series(axes, each, list(places(each)), place)
    arrange(axes)
    _legend(axes)
    return save(figure, path)


def draw_series(axes: Axes, series: Series, x: Sequence[float], place: int) -> None:
    """Draw a line and its band; `place` is its number among the lines of the picture."""
    color = _COLORS[place % len(_COLORS)]
    if series.low is not None and series.high is not None:
        axes.fill_between(x, series.low, series.high, color=color, alpha=0.16, linewidth=0)
    marker = _MARKERS[place % len(_MARKERS)] if len(x) <= 16 else ""
    axes.plot(x, series.values, color=color, marker=marker, markersize=5, linewidth=2, label=series.name)


def _canvas(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    style_axes(axes, x_label, y_label)
    if title:
        # The figure's title, not the axes': it may be as wide as the picture.
        text = textwrap.fill(title, 72)
        figure.suptitle(text, x=0.012, ha="left", color=_INK, fontsize=12, fontweight="bold")
    return figure, axes


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Label the axes, in the style of all pictures."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
    axes.tick_params(colors=_SOFT, labelcolor=_INK, length=0, labelsize=9.5)
    axes.set_xlabel(x_label, color=_INK, fontsize=10.5, labelpad=6)
    axes.set_ylabel(y_label, color=_INK, fontsize=10.5, labelpad=6)


def _reference(axes: Axes, each: Series, places: Sequence[float] | range) -> None:
    dashes = (0, (1, 1.6)) if each.name.startswith("random") else (0, (5, 2.5))
    style: dict[str, Any] = {"color": _SOFT, "linewidth": 1.3, "linestyle": dashes, "label": each.name}
    if len(each.values) == 1:
        axes.axhline(each.values[0], **style)
    else:
        axes.plot(list(places), each.values, **style)


def _legend(axes: Axes) -> None:
    # Beside the data rather than on it: a curve may go anywhere.
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=9.5,
        labelcolor=_INK,
        handlelength=2.2,
        labelspacing=0.7,
    )


def _share_axis(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _ticks(count: int) -> list[int]:
    step = max(1, -(-count // 10))
    return list(range(1, count + 1, step))


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, or as SVG where the name ends so."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if path.suffix == ".svg" else "png")
    write_atomically(path, buffer.getvalue())
    return path
