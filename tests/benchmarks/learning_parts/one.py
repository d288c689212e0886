"""One run of the benchmark, in a process of its own: `python -m tests.benchmarks.learning_parts.one < JOB > RESULT`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings, StageSettings
from pipelines.errors import Interrupted
from pipelines.events import Event, Listener, Progress
from pipelines.files.json import read_object
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.rollout.collector import count_stored_steps
from pipelines.stages import evaluate
from pipelines.stages import run as chain
from pipelines.training.metrics_log import MetricsLog
from tests.benchmarks.learning_parts.tasks import CURVE_EPISODES, CURVE_SEED, Task, settings_of

SCORES = ("return_mean", "return_std", "success_mean", "episodes")


def play(settings: Settings, directory: Path, *, cpu_seconds: float = 0.0) -> dict[str, Any]:
    """Train until the recipe's end, or for so many CPU seconds, and evaluate the best and the last checkpoint, as the
    recipe acts; the best one also the other way, greedily or sampled, on the same episodes."""
    status = "done"
    try:
        chain.run(settings, run=directory, listener=stopping_after(cpu_seconds))
    except Interrupted:
        status = "limit"
        _evaluate(settings, directory, next(entry for entry in settings.stages if entry.overrides.get("mark_best")))
    run = RunDirectory(directory)
    greedy = settings.evaluate.acts_greedily(by_default=checkpoints.load(run.checkpoints).greedy)
    final = {"split": "test", "actors": min(settings.evaluate.episodes, 250)}
    best, other, last = (
        _evaluate(settings, directory, StageSettings(stage="evaluate", checkpoint=which, greedy=way, **final))
        for which, way in (("best", greedy), ("best", not greedy), ("latest", greedy))
    )
    trained = [line for line in MetricsLog(run.metrics_path).read() if line["stage"] == "train"]
    reports = [report for path in run.evaluations.glob("*.json") if (report := read_object(path))]
    newest, env_steps = checkpoints.load(run.checkpoints), count_stored_steps(Lake(run.lake), run.identity)
    return {
        "status": status,
        "updates": newest.update,
        "env_steps": env_steps,
        "replay_ratio": round(newest.record["steps_seen"] / env_steps, 2),
        "greedy": greedy,
        **scores(best),
        **{f"other_{name}": value for name, value in scores(other).items()},
        **{f"last_{name}": value for name, value in scores(last).items()},
        "best_update": best["update"],
        "curve": curve(trained, reports),
        "curve_cpu_seconds": round(sum(r["cpu_seconds"] for r in reports if r["settings"]["seed"] == CURVE_SEED), 2),
    }


def stopping_after(cpu_seconds: float) -> Listener:
    """Make a listener that interrupts after so many CPU seconds (0: never), or when the parent process has died."""
    parent = os.getppid()

    def listen(event: Event) -> None:
        if os.getppid() != parent:
            sys.exit("the process that started this run is gone")
        if isinstance(event, Progress) and cpu_seconds and time.process_time() >= cpu_seconds:
            raise Interrupted("the CPU seconds of this run are used up")

    return listen


def _evaluate(settings: Settings, directory: Path, entry: StageSettings) -> Mapping[str, Any]:
    return evaluate.run(settings.for_stage(entry), run=directory).metrics


def scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the figures of an evaluation that a result keeps."""
    found = {name: round(metrics[name], 4) for name in SCORES if name in metrics}
    return found | {
        "per_attempt": [round(entry["success_mean"], 4) for entry in metrics["per_attempt"] if "success_mean" in entry]
    }


def curve(trained: list[dict[str, Any]], reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build the learning curve against environment steps and CPU seconds, those of its own evaluations left out."""
    lines = {line["update"]: line for line in trained}
    points, spent = [], 0.0
    for report in sorted(reports, key=lambda report: report["update"]):
        wanted = report["settings"]
        if (wanted["seed"], wanted["episodes"]) == (CURVE_SEED, CURVE_EPISODES):  # others check the other way to act
            line = lines[report["update"]]
            x = {"cpu_seconds": round(line["cpu_seconds"] - spent, 2), "env_steps": line["env_steps"]}
            points.append({"update": report["update"], **x, **scores(report["metrics"])})
            spent += report["cpu_seconds"]
    return points


def main() -> None:
    job = json.load(sys.stdin)
    task = Task.model_validate(job["task"])
    settings = settings_of(task, job["settings"], seed=job["seed"], points=job["points"])
    with tempfile.TemporaryDirectory() as folder:
        json.dump(play(settings, Path(folder) / "run", cpu_seconds=job["cpu_limit"]), sys.stdout)


if __name__ == "__main__":
    main()
