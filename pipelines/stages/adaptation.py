"""Adaptation curves of evaluation reports, success and return by attempt, as tables and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.report.plots import Series, adaptation_curve
from pipelines.stages.result import Table

MOST_COLUMNS = 8  # attempts in a table
_CURVES = ("success", "return")
Reports = Mapping[str, Mapping[str, Any]]


def curves_of(figures: Mapping[str, Any]) -> list[str]:
    """Return which of success and return an evaluation's figures have by attempt."""
    entries = figures["per_attempt"]
    return [kind for kind in _CURVES if entries and f"{kind}_mean" in entries[0]]


def adaptation_tables(reports: Reports, *, of: str = "") -> list[Table]:
    """Return success and return by attempt, as far as all of the named reports have them; `of` ends the titles."""
    return [_table(reports, kind, title=f"{kind} by attempt{of}") for kind in _shared(reports)]


def adaptation_pictures(reports: Reports, directory: Path) -> list[Path]:
    """Draw what `adaptation_tables` lists into `directory`: `adaptation.png`, and `adaptation_return.png`."""
    name = next(iter(reports.values()))["env"]["name"]
    return [
        adaptation_curve(
            directory / ("adaptation.png" if kind == "success" else f"adaptation_{kind}.png"),
            [*(_series(label, report, kind) for label, report in reports.items()), *_references(reports, kind)],
            title=f"Adaptation: {name}",
            metric=kind,
        )
        for kind in _shared(reports)
    ]


def _shared(reports: Reports) -> list[str]:
    return [kind for kind in _CURVES if all(kind in curves_of(report["metrics"]) for report in reports.values())]


def _known(reports: Reports, kind: str) -> dict[str, Sequence[float]]:
    """Random and optimal play by attempt, where they are known exactly: of success only."""
    known = next(iter(reports.values()))["known"]
    return {name: known[name]["success"] for name in ("random", "optimal") if kind == "success" and known[name][kind]}


def _references(reports: Reports, kind: str) -> list[Series]:
    return [Series(name=name, values=values, reference=True) for name, values in _known(reports, kind).items()]


def _series(label: str, report: Mapping[str, Any], kind: str) -> Series:
    entries = report["metrics"]["per_attempt"]
    low, high = zip(*(entry[f"{kind}_ci95"] for entry in entries), strict=True)
    return Series(name=label, values=[entry[f"{kind}_mean"] for entry in entries], low=low, high=high)


def _table(reports: Reports, kind: str, *, title: str) -> Table:
    """Two rows (mean, 95% interval) for each named report, between random and optimal play where those are known. Of
    many attempts, some are shown, the first and the last among them.
    """
    attempts = min(len(report["metrics"]["per_attempt"]) for report in reports.values())
    shown = sorted({round(i * (attempts - 1) / (MOST_COLUMNS - 1)) for i in range(MOST_COLUMNS)})
    known = {name: [name, *(f"{values[i]:.3f}" for i in shown)] for name, values in _known(reports, kind).items()}
    form, interval = (".3f", "{:.2f}-{:.2f}") if kind == "success" else (".4g", "{:.3g} to {:.3g}")
    rows: list[list[Any]] = [known["random"]] if "random" in known else []
    for name, report in reports.items():
        entries = [report["metrics"]["per_attempt"][i] for i in shown]
        rows.append([name, *(format(entry[f"{kind}_mean"], form) for entry in entries)])
        rows.append(["  95% interval", *(interval.format(*entry[f"{kind}_ci95"]) for entry in entries)])
    rows += [known["optimal"]] if "optimal" in known else []
    return Table(title=title, columns=["attempt", *(str(i + 1) for i in shown)], rows=rows)
