"""One run of amago by its command line, as a user would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.general_parts.tasks import Task, load_tasks
from pipelines.runs.evaluations import read_evaluations
from pipelines.training.metrics_log import MetricsLog

_AMAGO = [sys.executable, "-m", "amago_cli"]
_WAYS = {"sampled": "--sample", "greedy": "--greedy"}
_POLL_SECONDS = 0.1


def amago_command(task: Task, *, seconds: float, seed: int, run: Path) -> list[str]:
    """Compose the command that trains on a task without a recipe. Its plan fills `seconds` of an idle machine; if it
    takes more CPU seconds, `train` interrupts it."""
    parameters = [each for key, value in task.params.items() for each in list_assignments(f"env.{key}", value)]
    given = [*parameters, "train.threads=1", "report=false"]
    words = [*_AMAGO, "run", "--env", task.env, "--minutes", str(seconds / 60), "--run", str(run), "--seed", str(seed)]
    return [*words, *(word for each in given for word in ("--set", each))]


def list_assignments(setting: str, value: Any) -> Iterator[str]:
    """Yield the assignments of a setting for `--set`; a table is one of each of its keys, an empty one replaces what is
    there."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from list_assignments(f"{setting}.{key}", each)
    else:
        yield f"{setting}={json.dumps(value)}"


def play(job: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Train for the job's CPU seconds, all processes included, and evaluate both ways the checkpoint that the run has
    marked as its best by evaluations on training tasks, the last one if it has marked none."""
    task, run = load_tasks()[job["task"]], folder / "general"
    command = amago_command(task, seconds=job["seconds"], seed=job["seed"], run=run)
    spent = train(command, seconds=job["seconds"], environment=environment)
    lines = [line for line in MetricsLog(run / "metrics.jsonl").read() if line.get("stage") == "train"]
    last = lines[-1] if lines else {}
    checkpoint = "best" if (run / "checkpoints" / "best").exists() else "latest"
    scores = {way: _evaluate(run, checkpoint, flag, job["episodes"], environment) for way, flag in _WAYS.items()}
    settings = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    return {
        "settings": {name: value for name, value in settings.items() if name != "seed"},
        "env_steps": int(last.get("env_steps", 0)),
        "updates": int(last.get("update", 0)),
        "train_cpu_seconds": round(spent, 2),
        "checkpoint": checkpoint,
        "curve": curve(run, lines),
        **scores,
    }


def train(command: list[str], *, seconds: float, environment: Mapping[str, str]) -> float:
    """Run a command until it ends, or interrupt it after `seconds` CPU seconds of all its processes, and return those
    that it took. CalledProcessError if it fails."""
    taken = 0.0
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=dict(environment), text=True, **pipes) as child:
        try:
            while child.poll() is None:
                taken = max(taken, tree_cpu_seconds(child.pid))
                if taken >= seconds:
                    child.send_signal(signal.SIGINT)
                    break
                time.sleep(_POLL_SECONDS)
            _, errors = child.communicate()
        except BaseException:
            child.kill()
            raise
    if child.returncode not in (0, 130):
        raise subprocess.CalledProcessError(child.returncode, command, stderr=errors)
    return taken


def tree_cpu_seconds(pid: int) -> float:
    """Sum the CPU seconds of a process and its descendants, those that have ended included; 0 if it is gone. /proc is
    read, since `resource` knows a child's seconds only after its end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, ValueError):
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(tree_cpu_seconds(int(child)) for child in children)


def curve(run: Path, lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Read the learning curve: the evaluations of the run, by update, with the CPU seconds and the environment steps of
    the training line at that update."""
    at = {line["update"]: line for line in lines}
    found: dict[int, dict[str, float]] = defaultdict(dict)
    evaluations, _ = read_evaluations(run / "evaluations")
    for each in evaluations:
        way, line = "greedy" if each.standard.greedy else "sampled", at.get(each.update, {})
        found[each.update] |= {name: round(line[name], 2) for name in ("cpu_seconds", "env_steps") if name in line}
        found[each.update][way] = round(each.metrics["return_mean"], 4)
    return [found[update] for update in sorted(found)]


def _evaluate(run: Path, checkpoint: str, flag: str, episodes: int, environment: Mapping[str, str]) -> float:
    """Return the mean return of whole episodes of the test side, as `amago evaluate` reports it."""
    words = ["--checkpoint", checkpoint, "--episodes", str(episodes), "--output", "json"]
    command = [*_AMAGO, "evaluate", str(run), flag, *words]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True)
    return round(float(json.loads(done.stdout)["metrics"]["return_mean"]), 4)
