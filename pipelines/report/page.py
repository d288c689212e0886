"""Self-contained pages: sections, charts with their data, style and scripts in one HTML file that loads nothing.

A Content-Security-Policy admits two scripts by their hashes and nothing else. If escaping failed somewhere, the text
could still neither run nor load anything.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import AmagoError
from pipelines.files.atomic import write_atomically
from pipelines.files.user_cache import cache_home
from pipelines.report.charts import DARK, LIGHT, Lines, Series
from pipelines.report.markup import Markup, element, encode_json, fold, hash_source, read_asset

_MOST_ROWS = 1_000  # of the table behind a chart
_DIGITS = 5
_LARGEST = 1e300
_SNIPPET = "window.vegaEmbed = vegaEmbed; window.vega = vega;"
AXES = {"updates": "gradient updates", "steps": "environment steps", "seconds": "seconds of training"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a chart.

    A reader chooses the x axis (`AXES`): `along` has the x of each choice. A line without it stands at `x`, and `axis`
    names the one choice for which it is drawn. `run` is the number of its run in the list of runs, where a reader hides
    all lines of a run. `color` is an index of the palette, `joined` that of `charts.Series`.
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
        """Add a chart of lines and return its figure.

        `names` is the heading of the lines in the table of data. `of` is read out with the title, where several charts
        of a page have one title. `keyed`: whether the chart has a legend, whose buttons hide and show lines.
        """
        series = []
        for curve in curves:
            # A script places these lines: those that follow the chosen axis, and references that span the chart.
            is_placed = curve.along or (curve.reference and len(curve.values) == 1)
            series.append(
                Series(
                    name=curve.name,
                    values=curve.values,
                    low=curve.low,
                    high=curve.high,
                    reference=curve.reference,
                    x=None if is_placed else curve.x,
                    joined=curve.joined,
                )
            )
        drawn = Lines(series=series, x_title=x, y_title=y, share=share, whole=whole)
        chart = {
            "spec": drawn.interactive_spec(height=height, tick_count=5 if height < 200 else 7),
            "series": [self._store(curve) for curve in curves],
            "follows": any(curve.along or curve.axis for curve in curves),
            "x": x,
            "y": y,
            "names": names,
        }
        key = None
        if keyed and len(curves) > 1:
            entries = (
                element(
                    "button",
                    element("i", class_=(line.dash_name or None)),
                    line.name,
                    type="button",
                    data_series=number,
                    aria_pressed="true",
                )
                for number, line in enumerate(series)
            )
            label = "Lines of the chart"
            key = element("div", entries, class_="key", id=f"key-{len(self.charts)}", role="group", aria_label=label)
        return self._figure(chart, title, about, key, of)

    def rows(
        self,
        title: str,
        spec: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        columns: Mapping[str, str],
        about: str = "",
    ) -> Markup:
        """Add a chart of `rows` and return its figure; `columns` are the fields of the table of data, with titles."""
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
        behind = fold("Data", element("div", class_="scroll", tabindex=0, role="group", aria_label=f"Data: {label}"))
        behind = Markup(behind.replace("<details", f'<details class="behind" id="table-{number}"', 1))
        caption = element("figcaption", element("h3", title), element("p", about) if about else None)
        return element("figure", caption, key, plot, behind)

    def _store(self, curve: Curve) -> dict[str, Any]:
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
        """Store a column once, rounded to the digits that a chart shows; return its number.

        NaN, infinity, and numbers that would round to it are None, since JSON has none of them.
        """

        def shorten(value: float) -> float | int | None:
            if not abs(value) < _LARGEST:
                return None
            if value == int(value) and abs(value) < 2**53:
                return int(value)
            return float(f"{value:.{_DIGITS}g}")

        array = np.asarray(values, np.float64)
        content = array.tobytes()
        if content not in self._places:
            self._places[content] = len(self.columns)
            self.columns.append(list(map(shorten, array.tolist())))
        return self._places[content]


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of a page: `sections` as (id, title, contents), `axes` to choose from, and `runs` that a reader can hide
    as (name, number, colour)."""

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
        """Render the file's contents."""
        scripts = [read_script(), read_asset("report.js")]
        hashes = " ".join(map(hash_source, scripts))
        policy = (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; media-src data:;"
            " base-uri 'none'; form-action 'none'"
        )
        themes = {"light": LIGHT, "dark": DARK}
        data = {
            "themes": {
                name: {"config": theme.config(), "lines": list(theme.lines), "soft": theme.soft}
                for name, theme in themes.items()
            },
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
            element("style", Markup(read_asset("report.css"))),
        )
        body = element(
            "body",
            element("a", "Skip to the contents", class_="skip", href="#contents"),
            element("header", self.head, class_="top"),
            element("div", element("div", *self._choices()), class_="bar", role="region", aria_label="Choices"),
            element("main", shown, id="contents"),
            element("footer", self.foot),
            element("script", encode_json(data), type="application/json", id="report-data"),
            *(element("script", Markup(script)) for script in scripts),
        )
        return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"

    def _choices(self) -> Iterator[Markup]:
        """Yield links to the sections, and the choices of an x axis and of runs where there is more than one."""
        links = (element("a", title, href=f"#{id}") for id, title, _ in self.sections)
        yield element("nav", links, aria_label="Sections")
        if len(self.axes) > 1:
            axes = (
                element("label", element("input", type="radio", name="axis", value=name, checked=not place), AXES[name])
                for place, name in enumerate(self.axes)
            )
            yield element("fieldset", element("legend", "x axis"), axes)
        if len(self.runs) > 1:
            runs = (
                element(
                    "label",
                    element("input", type="checkbox", name="run", value=number, checked=True),
                    element("i", data_color=color),
                    name,
                )
                for name, number, color in self.runs
            )
            yield element("fieldset", element("legend", "runs"), runs, class_="runs")


@functools.cache
def read_script() -> str:
    """Bundle Vega, Vega-Lite and Vega-Embed: JavaScript that defines `vegaEmbed` and `vega`.

    It contains no end of a <script> element. Bundling takes about five seconds, so the result is kept in this user's
    cache.
    """
    path = cache_home() / f"charting-{metadata.version('vl-convert-python')}.js"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    import vl_convert

    # In a JavaScript string "<\/" and "\x3c" mean the same as what would end a <script> element, or confuse it.
    script = re.sub("</(?=script)", r"<\\/", vl_convert.javascript_bundle(_SNIPPET), flags=re.IGNORECASE)
    script = re.sub("<(?=!--|script)", r"\\x3c", script, flags=re.IGNORECASE)
    with contextlib.suppress(AmagoError):  # a cache that cannot be written costs the next report five seconds
        write_atomically(path, script)
    return script
