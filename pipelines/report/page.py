"""A self-contained page: sections, charts with their data, style and scripts in one HTML file that asks nobody for
anything.

A Content-Security-Policy admits our two scripts by their hashes and nothing else, so that a text which escaped escaping
could still neither run nor load anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.files.atomic import write_atomically
from pipelines.report.bundle import charting_script
from pipelines.report.charts import DARK, LIGHT, Lines, Series, Theme, is_random
from pipelines.report.markup import Markup, asset, element, folded, script_data, source_hash

_MOST_ROWS = 1_000  # of the table behind a chart
_DIGITS = 5
_LARGEST = 1e300
AXES = {"updates": "gradient updates", "steps": "environment steps", "seconds": "seconds of training"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a chart. `along`: its x by axis (keys of `AXES`), where a chart follows the reader's choice; else `x`.

    `axis`: the only choice for which it is shown, at `x`. `run`: the number of its run in the list of runs, by which a
    reader hides all its lines. `color`: its place in the palette. `joined`: as of `charts.Series`.
    """

    name: str
    values: Sequence[float]
    along: Mapping[str, Sequence[float] | np.ndarray] = field(default_factory=dict)
    x: Sequence[float] | None = None
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    reference: bool = False
    axis: str = ""
    run: int | None = None
    color: int = 0
    joined: bool = True


@dataclass
class Charts:
    """The charts of a page and their data: columns of numbers, each stored once."""

    columns: list[list[float | None]] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    _places: dict[bytes, int] = field(default_factory=dict)

    def lines(
        self,
        title: str,
        curves: Sequence[Curve],
        *,
        y: str,
        x: str = "",
        about: str | Markup = "",
        share: bool = False,
        whole: bool = False,
        height: int = 260,
        names: str = "line",
        of: str = "",
        keyed: bool = True,
    ) -> Markup:
        """Return a chart of lines; `names` says what the lines are, for its table; `of`: what the chart belongs to, for
        those who cannot see it. `keyed`: whether it has a legend of its own.
        """
        follows = any(curve.along or curve.axis for curve in curves)
        drawn = Lines(series=[_series(curve) for curve in curves], x_title=x, y_title=y, share=share, whole=whole)
        chart = {
            "spec": drawn.interactive_spec(height=height, tick_count=5 if height < 200 else 7),
            "series": [self._stored(curve) for curve in curves],
            "follows": follows,
            "x": x,
            "y": y,
            "names": names,
        }
        key = _key(len(self.charts), curves) if keyed and len(curves) > 1 else None
        return self._figure(chart, title, about, key, of)

    def rows(
        self,
        title: str,
        spec: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        columns: Mapping[str, str],
        about: str = "",
    ) -> Markup:
        """Return a chart of rows; `columns` are those of its table, with their titles."""
        table = [[name, heading] for name, heading in columns.items()]
        return self._figure({"spec": dict(spec), "rows": list(rows), "table": table}, title, about, None, "")

    def _figure(self, chart: dict[str, Any], title: str, about: str | Markup, key: Markup | None, of: str) -> Markup:
        number, label = len(self.charts), f"{title}, {of}" if of else title
        self.charts.append(chart)
        plot = element(
            "div",
            class_="plot",
            data_chart=number,
            style=f"min-height:{chart['spec']['height'] + 45}px",
            tabindex=0,
            role="img",
            aria_label=f"Chart: {label}. Its data is in the table below.",
        )
        behind = folded("Data", element("div", class_="scroll", tabindex=0, role="group", aria_label=f"Data: {label}"))
        behind = Markup(behind.replace("<details", f'<details class="behind" id="table-{number}"', 1))
        caption = element("figcaption", element("h3", title), element("p", about) if about else None)
        return element("figure", caption, key, plot, behind)

    def _stored(self, curve: Curve) -> dict[str, Any]:
        values, x, low, high = curve.values, curve.x, curve.low, curve.high
        if curve.reference and len(values) == 1 and x is not None:
            values, x = [values[0]] * 2, [min(x), max(x)]
        found: dict[str, Any] = {"name": curve.name, "y": self._column(values), "run": curve.run, "color": curve.color}
        if curve.along:
            found["along"] = {name: self._column(places) for name, places in curve.along.items()}
        else:
            found["x"] = self._column(x if x is not None else range(1, len(values) + 1))
        if low is not None and high is not None:
            found |= {"low": self._column(low), "high": self._column(high)}
        found |= {"reference": curve.reference, "joined": curve.joined}
        return found | ({"axis": curve.axis} if curve.axis else {})

    def _column(self, values: Sequence[float] | np.ndarray) -> int:
        array = np.asarray(values, np.float64)
        content = array.tobytes()
        if content not in self._places:
            self._places[content] = len(self.columns)
            self.columns.append([_short(value) for value in array.tolist()])
        return self._places[content]


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of a page. `sections`: (id, title, contents); `runs`: runs that a reader can hide, each with its
    name, number and colour."""

    title: str
    head: Markup
    sections: Sequence[tuple[str, str, Markup]]
    charts: Charts
    axes: Sequence[str] = ()
    runs: Sequence[tuple[str, int, int]] = ()
    foot: str = ""

    def write(self, to: Path) -> Path:
        """Write the page to the file `to`; return it."""
        write_atomically(to, self.html())
        return to

    def html(self) -> str:
        """Return the file's contents."""
        scripts = [charting_script(), asset("report.js")]
        hashes = " ".join(map(source_hash, scripts))
        policy = (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; media-src data:;"
            " base-uri 'none'; form-action 'none'"
        )
        data = {
            "themes": {"light": _theme(LIGHT), "dark": _theme(DARK)},
            "axes": [{"name": name, "title": AXES[name]} for name in self.axes],
            "columns": self.charts.columns,
            "charts": self.charts.charts,
            "mostRows": _MOST_ROWS,
        }
        shown = (
            element("section", element("h2", title), contents, id=id, aria_label=title)
            for id, title, contents in self.sections
        )
        head = element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="referrer", content="no-referrer"),
            element("title", self.title),
            element("style", Markup(asset("report.css"))),
        )
        body = element(
            "body",
            element("a", "Skip to the contents", class_="skip", href="#contents"),
            element("header", self.head, class_="top"),
            element(
                "div",
                element("div", self._navigation(), self._axis(), self._runs()),
                class_="bar",
                role="region",
                aria_label="Choices",
            ),
            element("main", shown, id="contents"),
            element("footer", self.foot),
            element("script", script_data(data), type="application/json", id="report-data"),
            *(element("script", Markup(script)) for script in scripts),
        )
        return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"

    def _navigation(self) -> Markup:
        return element(
            "nav", (element("a", title, href=f"#{id}") for id, title, _ in self.sections), aria_label="Sections"
        )

    def _axis(self) -> Markup | None:
        if len(self.axes) < 2:
            return None
        choices = (
            element("label", element("input", type="radio", name="axis", value=name, checked=not place), AXES[name])
            for place, name in enumerate(self.axes)
        )
        return element("fieldset", element("legend", "x axis"), choices)

    def _runs(self) -> Markup | None:
        if len(self.runs) < 2:
            return None
        choices = (
            element(
                "label",
                element("input", type="checkbox", name="run", value=number, checked=True),
                element("i", data_color=color),
                name,
            )
            for name, number, color in self.runs
        )
        return element("fieldset", element("legend", "runs"), choices, class_="runs")


def _series(curve: Curve) -> Series:
    """Return what a specification needs to know of a curve."""
    x = None if curve.along or (curve.reference and len(curve.values) == 1) else curve.x
    return Series(
        name=curve.name,
        values=curve.values,
        low=curve.low,
        high=curve.high,
        reference=curve.reference,
        x=x,
        joined=curve.joined,
    )


def _key(chart: int, curves: Sequence[Curve]) -> Markup:
    """Return a legend whose entries hide and show their lines."""
    entries = (
        element(
            "button",
            element("i", class_=("dotted" if is_random(curve.name) else "dashed") if curve.reference else None),
            curve.name,
            type="button",
            data_series=number,
            aria_pressed="true",
        )
        for number, curve in enumerate(curves)
    )
    return element("div", entries, class_="key", id=f"key-{chart}", role="group", aria_label="Lines of the chart")


def _short(value: float) -> float | int | None:
    """Return a number as short as its use allows; None for what JSON does not have, or what rounds to infinity."""
    if not abs(value) < _LARGEST:
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def _theme(theme: Theme) -> dict[str, Any]:
    return {"config": theme.config(), "lines": list(theme.lines), "soft": theme.soft}
