"""Training on a page: metrics as small charts with their meanings, speed, and where the time went."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from pipelines.events import duration
from pipelines.files.json import read_object
from pipelines.report.charts import specify_bars
from pipelines.report.markup import Markup, element, facts, join
from pipelines.report.page import Charts
from pipelines.report.shown import ShownRun, text
from pipelines.runs.evaluations import to_number

_NOT_CHARTS = frozenset({"update", "time", "cpu_seconds", "seconds", "steps_seen", "env_steps", "updates_per_second"})
_MOST_METRICS = 80
_TIMES = {
    "collect.env": "collecting: environments",
    "collect.policy": "collecting: policy",
    "collect.other": "collecting: recording",
    "ingest": "importing",
    "relabel": "relabelling",
    "train.update": "training: updates",
    "train.data": "training: waiting for data",
    "evaluate": "evaluation",
    "export": "export",
}


def show_metrics(runs: Sequence[ShownRun], charts: Charts) -> Markup | None:
    """Draw a small chart for each metric of training; None if nothing was logged."""
    names = {name for run in runs for name in run.stored.metrics.columns} - _NOT_CHARTS
    bases = [name for name in names if "@" not in name and not (name.startswith("grad_norm_") and "grad_norm" in names)]
    shown = []
    for name in Meaning.sort(bases)[:_MOST_METRICS]:
        if len(runs) == 1:
            curves = runs[0].make_variants(name, names)
        else:
            curves = [curve for run in runs if (curve := run.make_curve(name, run.label, color=run.color)) is not None]
        if curves:
            parts = re.split(r"`([^`]*)`", Meaning.find(name))  # every other part was between backticks
            about = join(*(element("code", part) if place % 2 else part for place, part in enumerate(parts)))
            shown.append(charts.lines(text(name, 80), curves, y="", about=about, height=150, keyed=len(runs) == 1))
    return element("div", *shown, class_="grid small") if shown else None


def show_speed(runs: Sequence[ShownRun], charts: Charts) -> Markup | None:
    """Show throughput, and where the time went; None if nothing is known."""
    shown = []
    rates = [curve for run in runs if (curve := run.make_curve("updates_per_second", run.label, color=run.color))]
    if rates:
        about = Meaning.find("updates_per_second").capitalize() + ", since each training stage began."
        shown.append(
            charts.lines("Updates per second", rates, y="updates per second", about=about, height=200, keyed=False)
        )
    spent = {}
    for run in runs:
        recorded = (read_object(run.stored.path / "chain.json") or {}).get("seconds")
        if isinstance(recorded, Mapping):
            known = {key: to_number(recorded.get(key)) or 0.0 for key in _TIMES}
            if took := {key: value for key, value in known.items() if value > 0}:
                spent[run.label] = took
    if spent:
        rows = [
            {"name": label, "part": _TIMES[key], "value": value}
            for label, took in spent.items()
            for key, value in took.items()
        ]
        columns = {"name": "run", "part": "part", "value": "seconds"}
        if len(runs) == 1:  # a bar for each part instead of each run
            rows = [{"name": row["part"], "value": row["value"]} for row in rows]
            columns = {"name": "part", "value": "seconds"}
        height = max(90, 34 * (len(rows) if len(runs) == 1 else len(spent)))
        spec = specify_bars(value="seconds", height=height, stacked=len(runs) > 1)
        shown.append(charts.rows("Where the time went", spec, rows, columns, "Wall time of the stages."))
    if not shown:
        return None
    figures = facts(_list_figures(runs[0], spent.get(runs[0].label, {}))) if len(runs) == 1 else None
    return join(element("div", *shown, class_="grid"), figures)


def _list_figures(run: ShownRun, spent: Mapping[str, float]) -> Iterator[tuple[str, str | None]]:
    last: Mapping[str, Any] = run.stored.last_training
    collecting = sum(value for key, value in spent.items() if key.startswith("collect."))
    updating = sum(value for key, value in spent.items() if key.startswith("train."))
    steps, updates, seen = run.stored.env_steps, run.stored.updates, to_number(last.get("steps_seen"))
    yield "environment steps per second of collecting", f"{steps / collecting:,.0f}" if steps and collecting else None
    yield "updates per second of training", f"{updates / updating:,.1f}" if updates and updating else None
    yield "steps trained on per second", f"{seen / updating:,.0f}" if seen and updating else None
    yield "replay ratio", f"{ratio:.3g}" if (ratio := to_number(last.get("replay_ratio"))) else None
    yield "CPU time of the last process", duration(cpu) if (cpu := to_number(last.get("cpu_seconds"))) else None


class Meaning(NamedTuple):
    """Names of metrics and what they mean, with code in backticks. `auxiliary_loss_*` has any ending."""

    names: tuple[str, ...]
    meaning: str

    @staticmethod
    @cache
    def read_all() -> tuple[Meaning, ...]:
        """Read what all metrics of training mean, in the order in which a page shows them."""
        text = (resources.files("pipelines.report") / "metrics.toml").read_text(encoding="utf-8")
        return tuple(Meaning(tuple(entry["names"]), entry["meaning"]) for entry in tomllib.loads(text)["metric"])

    @classmethod
    def find(cls, metric: str) -> str:
        """Say what a metric means; empty for one that is not listed, such as a metric of the user's own agent."""
        place = cls._place(metric)
        return cls.read_all()[place].meaning if place is not None else ""

    @classmethod
    def sort(cls, metrics: Iterable[str]) -> list[str]:
        """Sort metrics as they are listed; those that are not listed come last, by name."""
        last = len(cls.read_all())
        return sorted(
            metrics, key=lambda metric: (place if (place := cls._place(metric)) is not None else last, metric)
        )

    @classmethod
    def _place(cls, metric: str) -> int | None:
        for place, (names, _) in enumerate(cls.read_all()):
            if any(metric == name or (name.endswith("*") and metric.startswith(name[:-1])) for name in names):
                return place
        return None
