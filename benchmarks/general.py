"""The benchmark of generality: one setting for every kind of task, compared with what a user would choose.

    python benchmarks/general.py list
    python benchmarks/general.py run --task cartpole --seed 1 --agent amago --seconds 300 --to docs/general.jsonl
    python benchmarks/general.py run --set report --seed 1 --agent ppo --agent dqn --to docs/general.jsonl
    python benchmarks/general.py random                    # measures random play, and writes it into the table
    python benchmarks/general.py book                      # writes the section of docs/results.md and its plot

The tasks are in general_parts/tasks.toml: those of the set "tuning" may guide the choice of defaults, those of the set
"report" only show what came of it. Every agent has the same CPU seconds on one thread, imports included and evaluations
excluded, but for those by which `amago` chooses its best checkpoint. It is scored in the end by the mean return of
whole episodes of the test side, with sampled and with greedy actions. `amago` is run as a user would, by its command
line and without a recipe. The other agents are those of Stable-Baselines3 and sb3-contrib (`pip install -e ".[peers]"`)
with rl-zoo's settings (general_parts/peers.toml).

`run` appends one line of JSON per run and skips runs that are there, so a killed benchmark is resumed by the same
command. A task whose packages are not installed, and an agent that a task does not list, are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.general_parts import book, runs
from benchmarks.general_parts.tasks import (
    AGENTS,
    GAMES,
    RANDOM_EPISODES,
    ROOT,
    TABLE,
    Task,
    load_tasks,
    measure_random,
    write_random,
)
from pipelines.envs.make import requirement
from pipelines.errors import AmagoError

RESULTS = ROOT / "docs" / "general.jsonl"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, evaluate, and append results")
    _add_tasks(run)
    run.add_argument("--seed", type=int, action="append", help="repeatable [default: 1]")
    run.add_argument("--agent", choices=AGENTS, action="append", help="repeatable; none: all")
    run.add_argument("--seconds", type=float, help="CPU seconds of each run [default: 300; of POPGym, by level]")
    run.add_argument("--episodes", type=int, help="of an evaluation [default: as the table says]")
    run.add_argument("--to", type=Path, default=RESULTS, metavar="FILE.jsonl")
    measured = commands.add_parser("random", help="measure random play, and write it into the table")
    _add_tasks(measured)
    measured.add_argument("--episodes", type=int, default=RANDOM_EPISODES)
    measured.add_argument("--again", action="store_true", help="those that are measured already, too")
    commands.add_parser("list", help="the tasks, what they need, and their scores")
    page = commands.add_parser("book", help="write the section of docs/results.md and its plot")
    page.add_argument("--from", dest="source", type=Path, default=RESULTS, metavar="FILE.jsonl")
    page.add_argument("--to", type=Path, default=ROOT / "docs" / "results.md", metavar="FILE.md")
    page.add_argument("--plot", type=Path, default=ROOT / "docs" / "general.svg", metavar="FILE.svg|png")
    return parser.parse_args()


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--task", action="append", metavar="T", help="repeatable")
    chosen.add_argument("--all", action="store_true", help="every task [default]")
    chosen.add_argument("--set", choices=["tuning", "report", "popgym"])


def selected(options: argparse.Namespace) -> list[Task]:
    """List the tasks that the command line names. SystemExit for one that the table does not have."""
    known = load_tasks()
    if unknown := [name for name in options.task or () if name not in known]:
        raise SystemExit(f"no task '{unknown[0]}'; there are: {', '.join(known)}")
    return [
        task
        for name, task in known.items()
        if (not options.task or name in options.task) and (not options.set or task.set == options.set)
    ]


def skip_missing(tasks: list[Task]) -> Iterator[Task]:
    """Yield the tasks whose packages are installed, and name the extras of the others."""
    for task in tasks:
        extra, present = requirement(task.env)
        if present:
            yield task
        else:
            print(f'{task.name}: left out; pip install "amago[{extra}]"', file=sys.stderr)


def jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every run that is asked for, seed by seed."""
    tasks = list(skip_missing(selected(options)))
    for seed in options.seed or [1]:
        for task in tasks:
            for agent in options.agent or AGENTS:
                if agent == "amago" or agent in task.peers:
                    episodes = options.episodes or task.episodes
                    seconds = options.seconds or task.seconds
                    wanted = {"task": task.name, "agent": agent, "seed": seed, "seconds": seconds}
                    yield {**wanted, "episodes": episodes}


def measure(options: argparse.Namespace) -> None:
    for task in skip_missing(selected(options)):
        if options.again or task.random != task.random:
            returns = measure_random(task, options.episodes)
            write_random(task.name, returns.mean(), GAMES if task.set == "popgym" else TABLE)
            error = returns.std() / len(returns) ** 0.5
            print(f"{task.name}: {returns.mean():.4g} +- {error:.2g}, {len(returns)} episodes", flush=True)


def listed() -> str:
    """Tabulate the tasks."""
    rows = [("task", "set", "kind", "environment", "random", "best", "peers", "needs")]
    for task in load_tasks().values():
        extra, present = requirement(task.env)
        needs = "" if extra is None else f"amago[{extra}]" + ("" if present else ", missing")
        scores = f"{task.random:.4g}", f"{task.best:g}"
        rows.append((task.name, task.set, task.kind, task.env, *scores, " ".join(task.peers), needs))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    options = arguments()
    try:
        if options.command == "run":
            return 1 if runs.run_all(list(jobs(options)), options.to) else 0
        if options.command == "random":
            measure(options)
        elif options.command == "list":
            print(listed())
        else:
            print(json.dumps(book.write(options.source, options.to, options.plot)))
    except AmagoError as error:
        raise SystemExit(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
