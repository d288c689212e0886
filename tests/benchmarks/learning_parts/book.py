"""The table of docs/results.md, between two marks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.section import Section
from pipelines.evaluation.statistics import bootstrap_ci_of_iqm, compute_iqm
from pipelines.runs.evaluations import name_mode
from tests.benchmarks.learning_parts.summary import groups
from tests.benchmarks.learning_parts.tasks import load_tasks

SECTION = Section("results", "tests/benchmarks/learning.py book")
_HEAD = (
    "task",
    "score",
    "95% interval",
    "worst seed",
    "acts",
    "the other way",
    "seeds",
    "env steps",
    "replay ratio",
    "CPU s",
    "code",
)


def write(path: Path, target: Path) -> Path:
    """Replace the table in `target` by what the results in `path` say."""
    SECTION.write(target, section(groups(path, load_tasks()) if path.is_file() else []))
    return target


def section(found: Sequence[Mapping[str, Any]]) -> str:
    """Format the table and the commands that repeat it."""
    if not found:
        return "No results yet."
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    lines += ["| " + " | ".join(_row(group)) + " |" for group in found]
    rates = sorted({rate for group in found for rate in group["gflops"]})
    lines += ["", f"Measured at {rates[0]:g}-{rates[-1]:g} GFLOP/s (float32 products on one thread), by:", "", "```sh"]
    return "\n".join([*lines, *dict.fromkeys(map(command, found)), "```"])


def _row(group: Mapping[str, Any]) -> list[str]:
    scores = np.array(group["scores"])
    low, high = bootstrap_ci_of_iqm([scores])
    name = group["task"] + ("" if group["variant"] == "default" else f", {group['variant']}")
    return [
        name,
        f"{compute_iqm(scores):.3g}",
        f"{low:.3g} to {high:.3g}",
        f"{scores.min():.3g}",
        name_mode(group["greedy"]),
        f"{compute_iqm(np.array(group['other_scores'])):.3g}" if group["other_scores"] else "",
        ranges(group["seeds"]),
        f"{group['env_steps']:,.0f}",
        f"{group['replay_ratio']:.1f}",
        f"{group['cpu_seconds']:.0f}",
        ", ".join(sorted(group["code"])),
    ]


def command(group: Mapping[str, Any]) -> str:
    """Compose the command line that repeats a group of results."""
    words = ["python tests/benchmarks/learning.py run", f"--task {group['task']}", f"--seeds {ranges(group['seeds'])}"]
    if group["variant"] == "reference":
        words.append("--reference DIR --reference-python PYTHON")
    words += [f"--set '{key}={json.dumps(value)}'" for key, value in json.loads(group["settings"]).items()]
    if group["cpu_limit"]:
        words.append(f"--cpu-seconds {group['cpu_limit']:g}")
    return " ".join(words)


def ranges(seeds: Sequence[int]) -> str:
    """Write seeds as `parse_seeds` reads them.

    >>> ranges([0, 1, 2, 7])
    '0-2,7'
    """
    runs: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if runs and runs[-1][-1] == seed - 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
