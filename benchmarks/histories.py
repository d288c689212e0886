"""The benchmark of learning from histories: what methods of in-context reinforcement learning make of the same lake.

    python benchmarks/histories.py run --seed 1 --seed 2 --to docs/histories.jsonl
    python benchmarks/histories.py run --method critics --seed 1
    python benchmarks/histories.py book                    # writes the table of docs/histories.md and its plot

The methods are in histories.toml. Each is run by its recipe, as a user would, on one thread, and plays 100 episodes of
30 attempts at cells of the dark room that no history shows, and as many at those of the histories. `online` learns in
the room itself instead, from its own experience. `run` appends one line of JSON per run and skips runs that are there,
so a killed benchmark is resumed by the same command. CPU seconds are those of all: collecting, training, evaluating.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.general_parts.own import list_assignments
from benchmarks.general_parts.runs import ONE_THREAD, append, read
from benchmarks.section import Section
from pipelines.envs.make import make
from pipelines.evaluation.statistics import bootstrap_ci_of_strata
from pipelines.learning import checkpoint as checkpoints
from pipelines.report.charts import Lines, Series
from pipelines.runs.evaluations import read_evaluations
from tests.benchmarks.learning_parts.machine import ROOT, code

RESULTS, METHODS = ROOT / "docs/histories.jsonl", Path(__file__).with_suffix(".toml")
SECTION = Section("histories", "benchmarks/histories.py book")
ATTEMPTS, EPISODES = 30, 100
_SHOWN = (1, 10, 20, 30)  # attempts in the table
_ROOM = {"attempts": 1}


def load_methods() -> dict[str, dict[str, Any]]:
    """Read the table of methods, by name."""
    return tomllib.loads(METHODS.read_text(encoding="utf-8"))


def run(options: argparse.Namespace) -> int:
    """Run what is missing, seed by seed; return how many runs failed."""
    known, failed = {(row["method"], row["seed"]) for row in read(options.to)}, 0
    for seed in options.seed or [1]:
        for name in options.method or load_methods():
            if (name, seed) in known:
                continue
            try:
                row = {"method": name, "seed": seed, **play(name, seed), **code(ROOT)}
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{name}, seed {seed}: FAILED, exit {error.returncode}\n{error.stderr[-2000:]}", flush=True)
                continue
            append(options.to, row)
            shown = ", ".join(f"{row['per_attempt'][attempt - 1]:.2f}" for attempt in _SHOWN)
            print(f"{name}, seed {seed}: {shown} in {row['cpu_seconds']:.0f} CPU s", flush=True)
    return failed


def play(name: str, seed: int) -> dict[str, Any]:
    """Run a method's recipe, and read how its last checkpoint plays held-out cells. CalledProcessError if it fails."""
    method, before = load_methods()[name], resource.getrusage(resource.RUSAGE_CHILDREN)
    changes = [each for key, value in method.get("set", {}).items() for each in list_assignments(key, value)]
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", method["recipe"], "--run", f"{folder}/run", "--seed", str(seed)]
        _call([*words, *(word for each in ["report=false", *changes] for word in ("--set", each))])
        if "attempts" in method:  # the recipe does not play as many
            wanted = ["--attempts", str(method["attempts"]), "--episodes", str(EPISODES), "--checkpoint", "latest"]
            _call(["evaluate", f"{folder}/run", *wanted])
        found = {
            each.standard.split: [round(attempt["return_mean"], 4) for attempt in each.metrics["per_attempt"]]
            for each in read_evaluations(Path(folder) / "run/evaluations")[0]
            if (len(each.metrics["per_attempt"]), each.metrics["episodes"]) == (ATTEMPTS, EPISODES)
        }
        updates = checkpoints.load(Path(folder) / "run/checkpoints").update
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "per_attempt": found["test"],
        "per_attempt_of_learners": found.get("train"),
        "episodes": EPISODES,
        "updates": updates,
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
    }


def _call(words: Sequence[str]) -> None:
    """Run a command of amago on one thread."""
    command = [sys.executable, "-m", "amago_cli", *words]
    subprocess.run(command, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=True, cwd=ROOT)


def measure_optimum() -> float:
    """Compute the mean return of the environment's expert, who knows the goal, over all held-out cells."""
    room = make("dark-room", num_envs=1, seed=0, params=_ROOM, split="test")
    returns: dict[str, float] = {}
    for _ in range(EPISODES * 4):
        room.reset(np.ones(1, dtype=bool))
        paid, over = 0.0, False
        while not over:
            result = room.step(room.expert())
            paid, over = paid + float(result.reward[0]), bool(result.truncated[0] | result.terminated[0])
        returns[room.tasks(np.zeros(1, dtype=int))[0]] = paid
    return float(np.mean([*returns.values()]))


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the table: each method's mean return in some attempts and in all of them, over seeds, and the range of the
    latter; and that at the cells of the histories."""
    heads = [f"attempt {number}" for number in _SHOWN]
    lines = [f"| method | {' | '.join(heads)} | all attempts | the learners' cells | seeds | CPU s |"]
    lines.append("|---" * (len(heads) + 5) + "|")
    for name, method in load_methods().items():
        mine = [row for row in rows if row["method"] == name]
        if not mine:
            continue
        curves = np.array([row["per_attempt"] for row in mine])
        cells = [f"{curves[:, attempt - 1].mean():.1f}" for attempt in _SHOWN]
        means = sorted(curves.mean(1).tolist())
        cells.append(f"{np.mean(means):.1f}" + (f" ({means[0]:.1f} to {means[-1]:.1f})" if len(means) > 1 else ""))
        known = [np.mean(row["per_attempt_of_learners"]) for row in mine if row["per_attempt_of_learners"]]
        cells.append(f"{np.mean(known):.1f}" if known else "")
        cells += [str(len(mine)), f"{np.mean([row['cpu_seconds'] for row in mine]):,.0f}"]
        lines.append(f"| {method['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw each method's return by attempt, with a 95% interval over seeds where there are several."""
    series = []
    for name, method in load_methods().items():
        curves = np.array([row["per_attempt"] for row in rows if row["method"] == name])
        if len(curves):
            band: dict[str, list[float]] = {}
            if len(curves) > 1:
                bounds = np.array([bootstrap_ci_of_strata([column]) for column in curves.T])
                band = {"low": bounds[:, 0].tolist(), "high": bounds[:, 1].tolist()}
            series.append(Series(name=method["title"], values=curves.mean(0).tolist(), **band))
    chance = make("dark-room", num_envs=1, seed=0, params=_ROOM, split="test").spec.random_return
    series.append(Series(name="optimum", values=[measure_optimum()], reference=True))
    series.append(Series(name="random", values=[chance or 0.0], reference=True))
    return Lines(series=series, x_title="attempt at an unseen cell", y_title="return", whole=True).draw(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train, evaluate, and append results")
    runs.add_argument("--method", choices=list(load_methods()), action="append", help="repeatable; none: all")
    runs.add_argument("--seed", type=int, action="append", help="repeatable [default: 1]")
    runs.add_argument("--to", type=Path, default=RESULTS, metavar="FILE.jsonl")
    book = commands.add_parser("book", help="write the table of docs/histories.md and its plot")
    book.add_argument("--from", dest="source", type=Path, default=RESULTS, metavar="FILE.jsonl")
    book.add_argument("--to", type=Path, default=ROOT / "docs/histories.md", metavar="FILE.md")
    book.add_argument("--plot", type=Path, default=ROOT / "docs/histories.png", metavar="FILE.svg|png")
    options = parser.parse_args()
    if options.command == "run":
        return 1 if run(options) else 0
    rows = read(options.source)
    SECTION.write(options.to, make_table(rows))
    draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
