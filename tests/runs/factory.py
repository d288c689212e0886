"""Run directories as a chain leaves them, made without training."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from pipelines.config.settings import Settings

START = 1_795_397_021.0


def make_run(
    path: Path,
    *,
    scores: Mapping[int, float] | None = None,
    settings: Mapping[str, Any] | None = None,
    status: str | None = "done",
    error: str = "",
    recipe: Mapping[str, Any] | None = None,
    lines: int = 4,
    metrics: Sequence[str] = ("loss",),
    series: str = "9318ba67",
) -> Path:
    """Write a run with an evaluation for each update of `scores` and `lines` lines of training, 10 updates apart."""
    document = Settings.model_validate(dict(settings or {})).model_dump(mode="json", exclude_none=True)
    (path / "evaluations").mkdir(parents=True)
    (path / "config.toml").write_text(tomli_w.dumps(document))
    entry: dict[str, Any] = {"argv": ["amago", "run", "maze"], "time": "2026-11-23T01:23:41+0000", "pid": 4}
    if status is not None:
        entry |= {"status": status, "ended": "2026-11-23T01:33:41+0000"} | ({"error": error} if error else {})
    record = {"name": path.name, "id": "0a1b2c3d", "hardware": {"host": "gpu03"}, "stages": {"run": entry}}
    if recipe is not None:
        record["recipe"] = dict(recipe)
    (path / "run.json").write_text(json.dumps(record, indent=1))
    with (path / "metrics.jsonl").open("w") as file:
        for number in range(1, lines + 1):
            file.write(json.dumps(train_line(10 * number, metrics)) + "\n")
    for update, score in (scores or {}).items():
        write_evaluation(path, update, score, series=series)
    return path


def train_line(update: int, metrics: Sequence[str] = ("loss",)) -> dict[str, Any]:
    """Return a line of metrics.jsonl: one second and 100 environment steps for 10 updates."""
    return {
        "update": update,
        "stage": "train",
        "time": START + update / 10,
        "cpu_seconds": update / 20,
        **dict.fromkeys(metrics, 1.0 / update),
        "env_steps": 10 * update,
    }


def write_evaluation(run: Path, update: int, score: float, *, series: str = "9318ba67", **fields: Any) -> Path:
    """Write an evaluation in the run's environment (tmaze without one); its interval is 0.1 to each side of the
    score."""
    env = tomllib.loads((run / "config.toml").read_text()).get("env") or {}
    figures = {
        "episodes": 50,
        "return_mean": score,
        "return_ci95": [score - 0.1, score + 0.1],
        "per_attempt": [{"attempt": 1, "success_mean": 0.25, "success_ci95": [0.0, 0.5]}],
    }
    report = {
        "update": update,
        "env": env if env.get("name") else {"name": "tmaze"},
        "settings": {"split": "test", "label": ""},
        "metrics": figures,
        "known": {"optimal": {"return": 1.0, "success": [0.5]}},
        "time": START + update / 10,
    }
    path = run / "evaluations" / f"{update:06d}-{series}.json"
    path.write_text(json.dumps(report | fields, indent=1))
    return path
