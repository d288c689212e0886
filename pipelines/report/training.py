"""Training on a page: metrics as small charts with their meanings, speed, and where the time went."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from pipelines.events import duration
from pipelines.files.json import read_object
from pipelines.report.charts import bars
from pipelines.report.markup import Markup, element, facts, join
from pipelines.report.page import Charts, Curve
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


def metric_section(runs: Sequence[ShownRun], charts: Charts) -> Markup | None:
    """Draw a small chart for each metric of training; None if nothing was logged."""
    names = {name for run in runs for name in run.stored.metrics.columns} - _NOT_CHARTS
    bases = [name for name in names if "@" not in name and not (name.startswith("grad_norm_") and "grad_norm" in names)]
    shown = []
    for name in sort_metrics(bases)[:_MOST_METRICS]:
        if len(runs) == 1:
            curves = _variants(runs[0], name, names)
        else:
            curves = [curve for run in runs if (curve := _curve(run, name, run.label, color=run.color)) is not None]
        if curves:
            parts = re.split(r"`([^`]*)`", meaning_of(name))  # every other part was between backticks
            about = join(*(element("code", part) if place % 2 else part for place, part in enumerate(parts)))
            shown.append(charts.lines(text(name, 80), curves, y="", about=about, height=150, keyed=len(runs) == 1))
    return element("div", *shown, class_="grid small") if shown else None


def _variants(run: ShownRun, name: str, names: set[str]) -> list[Curve]:
    """Collect a metric with its variants: at other discounts, or of the parts of the network."""
    variants = {"acting discount" if any(n.startswith(f"{name}@") for n in names) else name: name}
    variants |= {f"discount {n.removeprefix(f'{name}@')}": n for n in sorted(names) if n.startswith(f"{name}@")}
    if name == "grad_norm":
        parts = sorted(n for n in names if n.startswith("grad_norm_"))
        variants = {"whole network": name} | {n.removeprefix("grad_norm_"): n for n in parts}
    curves = [_curve(run, column, label, color=place) for place, (label, column) in enumerate(variants.items())]
    return [curve for curve in curves if curve is not None]


def _curve(run: ShownRun, column: str, label: str, *, color: int) -> Curve | None:
    values = run.column(column)
    if not np.isfinite(values).any() or (column == "skipped_updates" and not np.nan_to_num(values).any()):
        return None
    return Curve(name=text(label, 80), values=values.tolist(), along=run.along, run=run.number, color=color)


def speed_section(runs: Sequence[ShownRun], charts: Charts) -> Markup | None:
    """Show throughput, and where the time went; None if nothing is known."""
    shown = []
    rates = [curve for run in runs if (curve := _curve(run, "updates_per_second", run.label, color=run.color))]
    if rates:
        about = meaning_of("updates_per_second").capitalize() + ", since each training stage began."
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
        spec = bars(value="seconds", height=height, stacked=len(runs) > 1)
        shown.append(charts.rows("Where the time went", spec, rows, columns, "Wall time of the stages."))
    if not shown:
        return None
    figures = facts(_figures(runs[0], spent.get(runs[0].label, {}))) if len(runs) == 1 else None
    return join(element("div", *shown, class_="grid"), figures)


def _figures(run: ShownRun, spent: Mapping[str, float]) -> Iterator[tuple[str, str | None]]:
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


@cache
def meanings() -> tuple[Meaning, ...]:
    """Read what all metrics of training mean, in the order in which a page shows them."""
    text = (resources.files("pipelines.report") / "metrics.toml").read_text(encoding="utf-8")
    return tuple(Meaning(tuple(entry["names"]), entry["meaning"]) for entry in tomllib.loads(text)["metric"])


def meaning_of(metric: str) -> str:
    """Say what a metric means; empty for one that is not listed, such as a metric of the user's own agent."""
    place = _place(metric)
    return meanings()[place].meaning if place is not None else ""


def sort_metrics(metrics: Iterable[str]) -> list[str]:
    """Sort metrics as they are listed; those that are not listed come last, by name."""
    last = len(meanings())
    return sorted(metrics, key=lambda metric: (place if (place := _place(metric)) is not None else last, metric))


def _place(metric: str) -> int | None:
    for place, (names, _) in enumerate(meanings()):
        if any(metric == name or (name.endswith("*") and metric.startswith(name[:-1])) for name in names):
            return place
    return None
