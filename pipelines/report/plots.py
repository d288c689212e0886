"""Pictures of results as PNG or SVG files: how success grows within an episode, how a metric grows with training.

vl-convert draws Vega-Lite without a browser or a display; it is imported only when a picture is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.files.atomic import write_atomically
from pipelines.report.charts import LIGHT, Lines, Series, add_title

_SCALE = 2.0
_TITLE_COLUMNS = 80


def adaptation_curve(
    path: Path, series: Sequence[Series], *, title: str = "", metric: str = "success", unit: str = "attempt"
) -> Path:
    """Draw `metric` by attempt (1, 2, ...) at `path`; an agent that adapts rises from left to right."""
    share = metric == "success"
    chart = Lines(series=series, x_title=f"{unit} in the episode", y_title=metric, share=share, whole=True)
    return save(path, chart, title=title)


def learning_curve(
    path: Path, series: Sequence[Series], *, title: str = "", metric: str = "return", unit: str = "gradient updates"
) -> Path:
    """Draw `metric` at `path` against the x of its series (updates or environment steps)."""
    return save(path, Lines(series=series, x_title=unit, y_title=metric, share=metric == "success"), title=title)


def save(path: Path, chart: Lines, *, title: str = "") -> Path:
    """Draw a chart as PNG, or as SVG where the name ends so."""
    spec = {"data": {"values": chart.rows()}, **chart.spec(LIGHT)}
    return draw(path, add_title(spec, title, LIGHT))


def draw(path: Path, spec: Mapping[str, Any]) -> Path:
    """Draw a Vega-Lite specification with its data as PNG, or as SVG where the name ends so."""
    import vl_convert

    if (title := spec.get("title")) is not None:
        spec = {**spec, "title": {**title, "text": textwrap.wrap(title["text"], _TITLE_COLUMNS)}}
    if path.suffix == ".svg":
        content = vl_convert.vegalite_to_svg(dict(spec), allowed_base_urls=[]).encode()
    else:
        content = vl_convert.vegalite_to_png(dict(spec), scale=_SCALE, allowed_base_urls=[])
    write_atomically(path, content)
    return path
