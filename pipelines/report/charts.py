"""Charts as Vega-Lite specifications: plain dictionaries, drawn as pictures by `plots` and in a browser by `page`.

Names of series, tasks and metrics may be anybody's text: they stay data, and never become part of an expression or the
name of a field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
_MARKED = 16  # points of a line that are marked, at most
# 20k, 0 and 0.4 rather than 0k and 400m.
_NUMBERS = {"labelExpr": "abs(datum.value) < 1 ? format(datum.value, '.4~r') : format(datum.value, '~s')"}
_DOTTED, _DASHED = [2, 3], [7, 4]


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of charts and pages; those of `lines` have a contrast of 3:1 or more to `paper`."""

    paper: str
    ink: str
    soft: str
    grid: str
    lines: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """Return the Vega-Lite configuration of all charts."""
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
            "font": _FONT,
            "view": {"stroke": None},
            "axis": {**axis, "ticks": False, "labelPadding": 6, "labelOverlap": True},
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
    lines=("#0072b2", "#c8501e", "#00805f", "#a8508a", "#8a6a00", "#2f86b8", "#5b5bd6", "#7a7a7a"),
)
DARK = Theme(
    paper="#15181d",
    ink="#e6e8eb",
    soft="#9aa3ad",
    grid="#2d333b",
    lines=("#56b4e9", "#f08c5a", "#3ec79c", "#de9ac4", "#e0b63c", "#8ecdf0", "#a6a6ff", "#b5b5b5"),
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named line with an optional band (`low`, `high`, e.g. a 95% interval) of as many values.

    `x` (default: 1, 2, ...) has as many values, too. A `reference` (random, optimal) is drawn as a quiet dashed line;
    with a single value it spans the picture.
    """

    name: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    reference: bool = False
    x: Sequence[float] | None = None

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


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A chart of lines: `share`: values are shares of 1; `whole`: x are whole numbers, such as attempts."""

    series: Sequence[Series]
    x_title: str
    y_title: str
    share: bool = False
    whole: bool = False
    legend: bool = field(default=True)

    @property
    def own(self) -> list[Series]:
        """Series that are not references."""
        return [each for each in self.series if not each.reference]

    @property
    def references(self) -> list[Series]:
        """Lines to compare with."""
        return [each for each in self.series if each.reference]

    def rows(self) -> list[dict[str, Any]]:
        """Return the data as Vega-Lite reads it: a row for each point of each series."""
        return [row for each in self.series for row in _rows(each, self._span())]

    def _span(self) -> tuple[float, float]:
        places = [place for each in self.series if len(each.values) > 1 or not each.reference for place in each.places]
        return (min(places), max(places)) if places else (0.0, 1.0)

    def spec(self, theme: Theme, *, width: int | str = 520, height: int = 300) -> dict[str, Any]:
        """Return the specification without data, for a table named `rows`."""
        low, high = self._span()
        room = 0.15 if self.whole else 0.0
        x: dict[str, Any] = {"field": "x", "type": "quantitative", "title": self.x_title}
        x["scale"] = {"domain": [low - room, high + room], "nice": False} if high > low else {"zero": False}
        x["axis"] = {"values": ticks(int(low), int(high)), "format": "d"} if self.whole else dict(_NUMBERS, tickCount=7)
        y: dict[str, Any] = {
            "field": "y",
            "type": "quantitative",
            "title": self.y_title,
            "axis": dict(_NUMBERS, tickCount=5),
        }
        if self.share:
            y["scale"], y["axis"] = {"domain": [-0.02, 1.02]}, {"values": [0, 0.25, 0.5, 0.75, 1], "format": ".0%"}
        else:
            y["scale"] = {"zero": False}
        return {"width": width, "height": height, "encoding": {"x": x}, "layer": list(self._layers(theme, y))}

    def _layers(self, theme: Theme, y: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        own, references = [each.name for each in self.own], [each.name for each in self.references]
        colors = [theme.lines[place % len(theme.lines)] for place in range(len(own))] + [theme.soft] * len(references)
        dashes = [[1, 0]] * len(own) + [_DOTTED if name.startswith("random") else _DASHED for name in references]
        names = own + references
        legend: dict[str, Any] | None = {} if self.legend else None
        color = {"field": "series", "scale": {"domain": names, "range": colors}, "legend": legend}
        dash = {"field": "series", "scale": {"domain": names, "range": dashes}, "legend": legend}
        if any(each.low is not None for each in self.series):
            band = {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color}
            yield {
                "transform": [{"filter": "isValid(datum.low)"}],
                "mark": {"type": "area", "opacity": 0.16, "strokeWidth": 0},
                "encoding": band,
            }
        if references:
            yield {
                "transform": [{"filter": "datum.reference"}],
                "mark": {"type": "line", "strokeWidth": 1.5},
                "encoding": {"y": y, "color": color, "strokeDash": dash},
            }
        most = max((len(each.values) for each in self.own), default=0)
        yield {
            "transform": [{"filter": "!datum.reference"}],
            "mark": {"type": "line", "point": {"size": 36, "filled": True} if 0 < most <= _MARKED else False},
            "encoding": {"y": y, "color": color, "strokeDash": dash},
        }


def _rows(series: Series, span: tuple[float, float]) -> Iterator[dict[str, Any]]:
    values, places = list(series.values), list(series.places)
    if series.reference and len(values) == 1:
        values, places = values * 2, list(span)
    for number, (place, value) in enumerate(zip(places, values, strict=True)):
        row = {"series": series.name, "x": float(place), "y": float(value), "reference": series.reference}
        if series.low is not None and series.high is not None:
            row |= {"low": float(series.low[number]), "high": float(series.high[number])}
        yield row


def ticks(first: int, last: int) -> list[int]:
    """Return about ten whole numbers from `first` to `last`.

    >>> ticks(1, 25)
    [1, 4, 7, 10, 13, 16, 19, 22, 25]
    """
    return list(range(first, last + 1, max(1, -(-(last - first + 1) // 10))))


def titled(spec: Mapping[str, Any], title: str, theme: Theme) -> dict[str, Any]:
    """Return a complete specification: with a title, on paper."""
    named = {"title": {"text": title}} if title else {}
    config = theme.config() | {"background": theme.paper, "padding": 14}
    return {"$schema": _SCHEMA, **named, **spec, "config": config}
