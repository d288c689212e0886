"""Charts as Vega-Lite specifications: plain dictionaries, drawn as PNG or SVG files here and in a browser by `page`.

vl-convert draws Vega-Lite without a browser or a display; it is imported only when a picture is drawn.

Names of series, tasks and metrics may be anybody's text: they stay data, and never become part of an expression or the
name of a field.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.files.atomic import write_atomically

_SCALE = 2.0
_TITLE_COLUMNS = 80
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
_MARKED = 16  # points of a line that are marked, at most
# 20k, 0 and 0.4 rather than 0k and 400m.
_NUMBERS = {"labelExpr": "abs(datum.value) < 1 ? format(datum.value, '.4~r') : format(datum.value, '~s')"}
# A wheel alone scrolls the page; a drag moves the chart, except that of a finger.
_ZOOM = {
    "type": "interval",
    "translate": "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > window:pointermove!",
    "zoom": "wheel![event.ctrlKey || event.metaKey || event.shiftKey]",
}
_PADDED = {"zero": False, "nice": False, "padding": 5}
# A text without a format is looked up in the wrong place where the nearest point is shown (Vega-Lite 6.4).
_CUT = {"formatType": "truncate", "format": "120"}
_DASHES = {"dotted": [2, 3], "dashed": [7, 4]}


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of charts and pages; those of `lines` have a contrast of 3:1 or more to `paper`."""

    paper: str
    ink: str
    soft: str
    grid: str
    lines: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """Build the Vega-Lite configuration that all charts share."""
        text = {"labelColor": self.ink, "titleColor": self.ink, "labelFontSize": 11.5, "titleFontSize": 12}
        axis = {
            **text,
            "titleFontWeight": "normal",
            "gridColor": self.grid,
            "domainColor": self.soft,
            "titlePadding": 8,
        }
        return {
            "background": None,
            "customFormatTypes": True,
            "font": _FONT,
            "view": {"stroke": None},
            "axis": {**axis, "ticks": False, "labelPadding": 6, "labelOverlap": True, "labelSeparation": 8},
            "axisX": {"grid": False},
            "axisY": {"domain": False},
            "legend": {
                **text,
                "title": None,
                "symbolType": "stroke",
                "symbolStrokeWidth": 2.5,
                "symbolSize": 500,
                "symbolOpacity": 1,
                "labelLimit": 260,
            },
            "title": {"color": self.ink, "fontSize": 15, "anchor": "start", "frame": "bounds", "offset": 12},
            "range": {"category": list(self.lines)},
            "line": {"strokeWidth": 2, "strokeJoin": "round"},
            "rule": {"color": self.soft},
            "bar": {"color": self.lines[0]},
        }


# After Okabe and Ito's palette, for all kinds of colour vision; darker and lighter where the contrast was too low.
LIGHT = Theme(
    paper="#ffffff",
    ink="#1f2328",
    soft="#6b7280",
    grid="#e5e7eb",
    lines=("#0072b2", "#c8501e", "#00805f", "#a8508a", "#8a6a00", "#1f2328", "#5b5bd6", "#7a7a7a"),
)
DARK = Theme(
    paper="#15181d",
    ink="#e6e8eb",
    soft="#9aa3ad",
    grid="#2d333b",
    lines=("#56b4e9", "#f08c5a", "#3ec79c", "#de9ac4", "#e0b63c", "#e6e8eb", "#a6a6ff", "#b5b5b5"),
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named line of `values`, with an optional band from `low` to `high`, such as a 95% interval.

    `x` (default: 1, 2, ...), `low` and `high` have one number per value. A `reference`, such as random or optimal play,
    is a quiet dashed line; with a single value it spans the picture. Values that are not `joined` are points with bars,
    since a line between two distant evaluations would claim to know what happened between them.
    """

    name: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    reference: bool = False
    x: Sequence[float] | None = None
    joined: bool = True

    def __post_init__(self) -> None:
        count = len(self.values)
        others = {"low and high": (self.low, self.high), "x": (self.x,)}
        for what, columns in others.items():
            given = [column for column in columns if column is not None]
            if (given and len(given) != len(columns)) or any(len(column) != count for column in given):
                raise ValueError(f"series '{self.name}': {what} need {count} values each")

    @property
    def places(self) -> Sequence[float]:
        """The x of every value."""
        return self.x if self.x is not None else range(1, len(self.values) + 1)

    @property
    def dash_name(self) -> str:
        """How the line is drawn: `dotted` for random play, `dashed` for other references, empty for a plain line."""
        return ("dotted" if self.name.startswith("random") else "dashed") if self.reference else ""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A chart of lines. `share`: values are shares of 1. `whole`: x are whole numbers, such as attempts."""

    series: Sequence[Series]
    x_title: str
    y_title: str
    share: bool = False
    whole: bool = False

    @property
    def own(self) -> list[Series]:
        """Series that are not references."""
        return [each for each in self.series if not each.reference]

    @property
    def references(self) -> list[Series]:
        """Lines to compare with."""
        return [each for each in self.series if each.reference]

    def rows(self) -> list[dict[str, Any]]:
        """List the data as Vega-Lite reads it: a row for each point of each series."""
        rows = []
        for series in self.series:
            values, places = list(series.values), list(series.places)
            if series.reference and len(values) == 1:
                values, places = values * 2, list(self._span())
            for number, (place, value) in enumerate(zip(places, values, strict=True)):
                row: dict[str, Any] = {"series": series.name, "x": float(place), "y": float(value)}
                row |= {"reference": series.reference, "joined": series.joined}
                if series.low is not None and series.high is not None:
                    row |= {"low": float(series.low[number]), "high": float(series.high[number])}
                rows.append(row)
        return rows

    def _span(self) -> tuple[float, float]:
        places = [place for each in self.series if len(each.values) > 1 or not each.reference for place in each.places]
        return (min(places), max(places)) if places else (0.0, 1.0)

    def spec(self, theme: Theme, *, width: int | str = 520, height: int = 300) -> dict[str, Any]:
        """Build the specification of a picture, without its data."""
        low, high = self._span()
        room = 0.15 if self.whole else 0.0
        x = self._x(int(low), int(high))
        x["scale"] = {"domain": [low - room, high + room], "nice": False} if high > low else {"zero": False}
        own, references = [each.name for each in self.own], [each.name for each in self.references]
        colors = [theme.lines[place % len(theme.lines)] for place in range(len(own))] + [theme.soft] * len(references)
        color = {"field": "series", "type": "nominal", "scale": {"domain": own + references, "range": colors}}
        layers = list(self._layers(color, self._y({"zero": False}), {}))
        return {"width": width, "height": height, "encoding": {"x": x}, "layer": layers}

    def interactive_spec(self, *, height: int = 260, tick_count: int = 7) -> dict[str, Any]:
        """Build the specification for a page: with hover and zoom, and without a legend.

        A script of the page adds data and colours.
        """
        low, high = self._span()
        x = self._x(int(low), int(high)) if self.whole else self._x(0, 0, tick_count)
        x["scale"] = {"domain": [low - 0.15, high + 0.15]} if self.whole and high > low else _PADDED
        hover = {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout"}
        is_near = {"condition": {"param": "hover", "value": 1, "empty": False}, "value": 0}
        number = ".1%" if self.share else ".5~g"
        tooltip: list[dict[str, Any]] = [
            {"field": "series", "type": "nominal", "title": "line", **_CUT},
            {"field": "x", "title": self.x_title, "type": "quantitative", "format": ",~r"},
            {"field": "y", "title": self.y_title or "value", "type": "quantitative", "format": number},
        ]
        if any(each.low is not None for each in self.series):
            bounds = (("low", "95% from"), ("high", "95% to"))
            tooltip += [{"field": f, "title": t, "type": "quantitative", "format": number} for f, t in bounds]
        color = {"field": "series", "type": "nominal"}
        y = self._y(_PADDED)
        layers = list(self._layers(color, y, None))
        for layer in layers:
            layer["mark"] |= {"clip": True}
        layers[-1]["params"] = [{"name": "zoom", "select": _ZOOM, "bind": "scales"}]
        layers.append(
            {
                "params": [{"name": "hover", "select": hover}],
                "mark": {"type": "point", "filled": True, "size": 70, "clip": True},
                "encoding": {
                    "y": y,
                    "color": {**color, "legend": None},
                    "opacity": is_near,
                    "tooltip": tooltip,
                },
            }
        )
        return {"width": "container", "height": height, "encoding": {"x": x}, "layer": layers}

    def _x(self, low: int, high: int, tick_count: int = 7) -> dict[str, Any]:
        axis: dict[str, Any] = dict(_NUMBERS, tickCount=tick_count)
        if self.whole:  # about ten whole numbers, the first one included
            step = max(1, -(-(high - low + 1) // 10))
            axis = {"values": list(range(low, high + 1, step)), "format": "d"}
        return {"field": "x", "type": "quantitative", "title": self.x_title, "axis": axis}

    def _y(self, scale: Mapping[str, Any]) -> dict[str, Any]:
        y = {"field": "y", "type": "quantitative", "title": self.y_title or None}
        if self.share:
            axis = {"values": [0, 0.25, 0.5, 0.75, 1], "format": ".0%"}
            return {**y, "scale": {"domain": [-0.02, 1.02]}, "axis": axis}
        return {**y, "scale": dict(scale), "axis": dict(_NUMBERS, tickCount=5)}

    def _layers(
        self, color: Mapping[str, Any], y: Mapping[str, Any], legend: Mapping[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """Yield bands, references and the series' own lines."""
        own, references = [each.name for each in self.own], [each.name for each in self.references]
        dashes = [[1, 0]] * len(own) + [_DASHES[each.dash_name] for each in self.references]
        dash = {
            "field": "series",
            "type": "nominal",
            "scale": {"domain": own + references, "range": dashes},
            "legend": legend,
        }
        color = {**color, "legend": legend}
        if any(each.low is not None and each.joined for each in self.series):
            yield {
                "transform": [{"filter": "isValid(datum.low) && datum.joined"}],
                "mark": {"type": "area", "opacity": 0.16, "strokeWidth": 0},
                "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color},
            }
        if references:
            yield {
                "transform": [{"filter": "datum.reference"}],
                "mark": {"type": "line", "strokeWidth": 1.5},
                "encoding": {"y": y, "color": color, "strokeDash": dash},
            }
        if any(not each.joined for each in self.own):
            yield {
                "transform": [{"filter": "isValid(datum.low) && !datum.joined"}],
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color},
            }
            yield {
                "transform": [{"filter": "!datum.joined"}],
                "mark": {"type": "point", "size": 60, "filled": True},
                "encoding": {"y": y, "color": color},
            }
        most = max((len(each.values) for each in self.own), default=0)
        yield {
            "transform": [{"filter": "!datum.reference && datum.joined"}],
            "mark": {"type": "line", "point": {"size": 36, "filled": True} if 0 < most <= _MARKED else False},
            "encoding": {"y": y, "color": color, "strokeDash": dash},
        }

    def draw(self, path: Path, *, title: str = "") -> Path:
        """Draw the chart as PNG, or as SVG where the name ends so."""
        spec = {"data": {"values": self.rows()}, **self.spec(LIGHT)}
        return draw(path, add_title(spec, title, LIGHT))


def is_a_curve(places: Sequence[float]) -> bool:
    """Decide whether evaluations at these x may be joined by a line: three or more, and none far from the others.

    A line from the evaluation before training to those after it would look like learning at a constant rate.

    >>> is_a_curve([0, 3900, 4000]), is_a_curve([100, 200, 300])
    (False, True)
    """
    ordered = sorted(set(places))
    gaps = [after - before for before, after in itertools.pairwise(ordered)]
    return len(gaps) > 1 and max(gaps) <= sum(gaps) / 2


def specify_bars(*, value: str, height: int = 180, stacked: bool = False) -> dict[str, Any]:
    """Specify horizontal bars for rows with `name` and `value`; `stacked` ones also have `part`."""
    x = {"field": "value", "type": "quantitative", "title": value, "axis": dict(_NUMBERS, tickCount=6)}
    y = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170, "domain": False}}
    shown = {"field": "value", "type": "quantitative", "title": value, "format": ",.4~r"}
    tooltip = [{"field": "name", "title": "name"}, *([{"field": "part"}] if stacked else []), shown]
    return {"width": "container", "height": height, "mark": "bar", "encoding": {"x": x, "y": y, "tooltip": tooltip}}


def specify_histogram(*, value: str, height: int = 180) -> dict[str, Any]:
    """Specify a histogram for rows with `low`, `high` and `count`."""
    x = {"field": "low", "type": "quantitative", "bin": {"binned": True}, "title": value, "axis": dict(_NUMBERS)}
    x["scale"] = {"zero": False, "nice": False}
    y = {"field": "count", "type": "quantitative", "title": "trajectories", "axis": dict(_NUMBERS, tickCount=4)}
    tooltip = [
        {"field": "low", "title": "from", "type": "quantitative", "format": ",.4~r"},
        {"field": "high", "title": "to", "type": "quantitative", "format": ",.4~r"},
        {"field": "count", "title": "trajectories", "type": "quantitative", "format": ","},
    ]
    encoding = {"x": x, "x2": {"field": "high"}, "y": y, "tooltip": tooltip}
    return {"width": "container", "height": height, "mark": "bar", "encoding": encoding}


def add_title(spec: Mapping[str, Any], title: str, theme: Theme) -> dict[str, Any]:
    """Complete a specification with its schema, a title if there is one, and the theme's colours and paper."""
    named = {"title": {"text": title}} if title else {}
    config = theme.config() | {"background": theme.paper, "padding": 14}
    return {"$schema": _SCHEMA, **named, **spec, "config": config}


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
