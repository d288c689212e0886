"""Time to list many runs and to read their metrics: `python tests/benchmarks/runs.py [RUNS] [LINES]`.

Makes RUNS run directories (default 1,000) as chains leave them, each with LINES lines of metrics (default 400), ten
evaluations, three checkpoints and a lake, in a temporary directory, and prints seconds and peak memory.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.runs.factory import START, make_run, write_evaluation

NAMES = [f"{name}{gamma}" for name in ("q", "v", "target", "td_error") for gamma in ("", "@0.9", "@0.97", "@0.99")]
NAMES += ["loss", "actor_loss", "critic_loss", "entropy", "log_prob", "grad_norm", "updates_per_second", "steps_seen"]
NAMES += [f"popart_{what}@{gamma}" for what in ("mu", "sigma") for gamma in (0.9, 0.97, 0.99)]
NAMES += [f"grad_norm_{part}" for part in ("timestep", "sequence", "actor", "critic", "auxiliary")]


def make(folder: Path, runs: int, lines: int) -> None:
    """Write the runs."""
    rng = random.Random(0)
    for number in range(runs):
        rate = 10 ** rng.uniform(-5, -3)
        settings = {"seed": number % 5, "env": {"name": "tmaze"}, "train": {"learning_rate": rate}}
        recipe = {"name": "tmaze-20", "profile": "", "changed": {"train.learning_rate": [1e-4, rate]}}
        status = rng.choice(["done", "done", "done", "failed", None])
        path = make_run(folder / f"run-{number:05d}", settings=settings, recipe=recipe, status=status, lines=0)
        record = json.loads((path / "run.json").read_text()) | {"seed": number % 5, "env": "tmaze"}
        (path / "run.json").write_text(json.dumps(record, indent=1))
        write_metrics(path / "metrics.jsonl", lines, rng)
        tasks = {f"task-{task}": {"episodes": 1, "return_mean": 0.5} for task in range(50)}
        for place in range(1, 11):
            score = rng.random()
            figures = {"return_mean": score, "return_ci95": [score - 0.1, score + 0.1], "per_task": tasks}
            write_evaluation(path, place * lines, score, metrics=figures)
        for name in ("000100", "000200", "000300"):
            (path / "checkpoints" / name).mkdir(parents=True)
            for file in ("checkpoint.json", "weights.safetensors", "training.pt", "average.safetensors"):
                (path / "checkpoints" / name / file).write_bytes(b"0" * 5_000)
        for place in range(4):
            (path / "lake" / "segments" / f"20261123{place:02d}").mkdir(parents=True)
            for segment in range(10):
                (path / "lake" / "segments" / f"20261123{place:02d}" / f"{segment}.arrow").write_bytes(b"0" * 1_000)


def write_metrics(path: Path, lines: int, rng: random.Random) -> None:
    """Write a log with as many metrics as an agent with three discounts has."""
    with path.open("w") as file:
        for number in range(1, lines + 1):
            line = {"update": 25 * number, "stage": "train", "time": START + number, "cpu_seconds": number / 2}
            line |= {name: rng.gauss(0, 1) for name in NAMES} | {"env_steps": 100 * number}
            file.write(json.dumps(line) + "\n")


def timed(title: str, code: str, folder: Path) -> None:
    """Run `code` in a process of its own and print its seconds, those of the CPU, and peak memory."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{title:<42}{seconds:6.2f} s  {cpu:6.2f} CPU s   peak of all so far {after.ru_maxrss >> 10} MB")


def main() -> None:
    """Make the runs and time what reads them."""
    given = [int(text) for text in sys.argv[1:]]
    runs, lines = (*given, *(1_000, 400)[len(given) :])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs"
        os.environ["AMAGO_CACHE"] = str(Path(temporary) / "cache")
        make(folder, runs, lines)
        listing = "import sys; from amago_cli.app import main; main(['runs', sys.argv[1], '--output', '{}'])"
        timed(f"amago runs, {runs} runs, first time", listing.format("text"), folder)
        timed(f"amago runs, {runs} runs, again", listing.format("text"), folder)
        timed(f"amago runs, {runs} runs, again, as JSON", listing.format("json"), folder)
        metrics = (
            "import sys; from pipelines.runs.find import find_runs; from pipelines.runs.stored import read_run\n"
            "for path in find_runs([sys.argv[1]])[:20]: run = read_run(path); run.metrics, run.evaluations"
        )
        timed(f"metrics of 20 runs of {lines} lines", metrics, folder)


if __name__ == "__main__":
    main()
