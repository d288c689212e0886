"""Scores over seeds, by task and variant, and over tasks by variant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.evaluation.statistics import bootstrap_ci_of_iqm, compute_iqm
from pipelines.runs.evaluations import name_mode
from tests.benchmarks.learning_parts.results import connect
from tests.benchmarks.learning_parts.tasks import Task, load_tasks

_QUERY = """
SELECT task, variant, cpu_limit, settings::VARCHAR AS settings, greedy, list(score ORDER BY seed) AS scores,
    list(other_score ORDER BY seed) FILTER (other_score IS NOT NULL) AS other_scores,
    list(seed ORDER BY seed) AS seeds, list(per_attempt) AS attempts, avg(updates) AS updates,
    list(DISTINCT gflops) AS gflops, list(DISTINCT version || ' (' || "commit" || ')') AS code,
    avg(env_steps) AS env_steps, avg(replay_ratio) AS replay_ratio,
    avg(cpu_seconds - coalesce(curve_cpu_seconds, 0)) AS cpu_seconds
FROM results WHERE ({where}) AND score IS NOT NULL GROUP BY ALL ORDER BY task, variant, cpu_limit, settings, greedy
"""
_HEAD = ("task", "variant", "seeds", "acts", "score", "95%", "worst", "other way", "by attempt", "updates", "steps")
_HEAD += ("replay", "CPU s")


def groups(path: Path, tasks: Mapping[str, Task], *, where: str = "true", metric: str = "") -> list[dict[str, Any]]:
    """Group the results that differ in nothing but the seed, one row each."""
    with connect(path, tasks, metric=metric) as con:
        found = con.execute(_QUERY.format(where=where))
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def table(path: Path, *, where: str = "true", metric: str = "") -> str:
    """Format scores as text."""
    tasks = load_tasks()
    found = groups(path, tasks, where=where, metric=metric)
    rows: list[Sequence[str]] = [_HEAD, *(_row(group) for group in found)]
    text = _aligned(rows)
    return text if metric else f"{text}\n\n{_aligned(_over_tasks(found, tasks))}"


def _row(group: Mapping[str, Any]) -> list[str]:
    scores = np.array(group["scores"])
    low, high = bootstrap_ci_of_iqm([scores])
    attempts = [values for values in group["attempts"] if values]
    limit = f" ({group['cpu_limit']:g} s)" if group["cpu_limit"] else ""
    return [
        group["task"],
        group["variant"] + limit,
        ",".join(map(str, group["seeds"])),
        name_mode(group["greedy"]),
        f"{compute_iqm(scores):.3f}",
        f"{low:.2f}-{high:.2f}" if low >= 0 else f"{low:.2f}..{high:.2f}",
        f"{scores.min():.3f}",
        f"{compute_iqm(np.array(group['other_scores'])):.3f}" if group["other_scores"] else "",
        " ".join(f"{value:.2f}" for value in np.mean(attempts, axis=0)) if attempts else "",
        f"{group['updates']:.0f}",
        f"{group['env_steps']:.0f}",
        f"{group['replay_ratio']:.1f}",
        f"{group['cpu_seconds']:.0f}",
    ]


def _over_tasks(found: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task]) -> list[Sequence[str]]:
    """List variants, best first: the interquartile mean over all runs, scores scaled by each task's range."""
    scaled: dict[str, list[np.ndarray]] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    for group in found:
        zero, one = tasks[group["task"]].range
        scaled[group["variant"]].append((np.array(group["scores"]) - zero) / (one - zero))
        names[group["variant"]].append(group["task"])
    rows: list[Sequence[str]] = [("variant", "scaled score", "95%", "runs", "tasks")]
    for variant, strata in sorted(scaled.items(), key=lambda item: -compute_iqm(np.concatenate(item[1]))):
        low, high = bootstrap_ci_of_iqm(strata)
        values = np.concatenate(strata)
        listed = " ".join(names[variant])
        rows.append((variant, f"{compute_iqm(values):.3f}", f"{low:.2f}-{high:.2f}", str(len(values)), listed))
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
