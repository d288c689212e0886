"""The benchmark of learning: what recipes reach, from how much data, in how many CPU seconds.

    python tests/benchmarks/learning.py run --task lake-4x4 --seeds 0-4 --jobs 2 --to results.jsonl
    python tests/benchmarks/learning.py run --variants variants.toml --variant wide --set train.batch_size=32
    python tests/benchmarks/learning.py show --from results.jsonl --where "task like 'lake%'"
    python tests/benchmarks/learning.py draw --from results.jsonl --to curves.png

`run` trains every task (learning_parts/tasks.toml) with every variant and seed, each in a process of its own with one
thread, and appends one line of JSON per run; runs that are there are skipped, so a killed benchmark is resumed by the
same command. A variant is a set of settings by name, from a TOML file of tables or from `--set`; it is laid over the
task's. `--cpu-seconds` ends training after so many; the final evaluations come on top.

The best checkpoint is chosen on training tasks, as in the quickstart. It and the last checkpoint (`last_...` in the
file) are evaluated on held-out tasks, acting as the recipe says: discrete actions are sampled by default, and `greedy`
is recorded. The best one plays the same episodes the other way, too (`other_...`); `show` and `book` have both scores.
CPU seconds are user and system time of the whole process, children and imports included; evaluations that only draw the
learning curve are counted apart and taken out of what is shown.

`show` gives the interquartile mean over seeds with a 95% bootstrap interval, by task and variant, and over tasks, whose
scores are scaled to 0 (random) and 1 (optimum or goal), with seeds drawn within each task. `draw` draws learning curves
with the same intervals. `book` writes the table of docs/results.md from docs/results.jsonl.

`run --reference DIR --reference-python PYTHON` plays lakes, T-Maze and the dark room with a checkout of AMAGO 3.3, for
as many CPU seconds (--cpu-seconds, or the task's): see learning_reference.py. `pip install torch gin-config einops
accelerate gym gymnasium==0.29.1 wandb termcolor matplotlib` makes its Python.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import duckdb

from pipelines.errors import AmagoError
from tests.benchmarks import learning_reference
from tests.benchmarks.learning_parts import book, draw, schedule, summary, tasks
from tests.benchmarks.learning_parts.machine import ROOT

RESULTS = Path("learning.jsonl")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, and append results")
    run.add_argument("--task", action="append", metavar="T", help="repeatable; none: all")
    run.add_argument("--variant", action="append", metavar="NAME", help="repeatable; with --variants: a table in it")
    run.add_argument(
        "--variants", type=Path, metavar="FILE", help="TOML tables of settings; all of them if none is named"
    )
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="on top of every variant")
    run.add_argument("--seeds", type=tasks.parse_seeds, default=[0], help="e.g. 0-4 or 0,3 [default: 0]")
    run.add_argument("--jobs", type=int, default=1, help="runs at once")
    run.add_argument("--to", type=Path, default=RESULTS, metavar="FILE.jsonl")
    run.add_argument("--cpu-seconds", type=float, default=0.0, metavar="LIMIT", help="0: as the recipe ends")
    run.add_argument("--curve", type=int, default=tasks.CURVE_POINTS, metavar="POINTS", help="0: no learning curve")
    run.add_argument("--reference", type=Path, metavar="DIR", help="run a checkout of AMAGO 3.3 instead of this one")
    run.add_argument("--reference-python", type=Path, metavar="PYTHON", help="a Python that has what DIR needs")
    show = commands.add_parser("show", help="scores by task and variant")
    picture = commands.add_parser("draw", help="learning curves by task, against CPU seconds and environment steps")
    for reader in (show, picture):
        reader.add_argument("--from", dest="source", type=Path, default=RESULTS, metavar="FILE.jsonl")
        reader.add_argument("--where", default="true", metavar="SQL", help="over the columns of a result")
    picture.add_argument("--to", type=Path, required=True, metavar="FILE.png|svg")
    page = commands.add_parser("book", help="write the table of docs/results.md")
    page.add_argument("--from", dest="source", type=Path, default=ROOT / "docs/results.jsonl", metavar="FILE.jsonl")
    page.add_argument("--to", type=Path, default=ROOT / "docs/results.md", metavar="FILE.md")
    show.add_argument(
        "--metric", default="", metavar="SQL", help="in place of the tasks' own, e.g. list_avg(per_attempt)"
    )
    options = parser.parse_args()
    if options.command == "run" and bool(options.reference) != bool(options.reference_python):
        parser.error("--reference DIR and --reference-python PYTHON belong together")
    return options


def variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Collect the named overrides that the command line asks for."""
    extra = tasks.parse_overrides(options.set)
    if options.variants is None:
        if len(options.variant or []) > 1:
            raise SystemExit("several variants need --variants FILE")
        return {(options.variant or [tasks.describe(extra)])[0]: extra}
    known = tasks.load_variants(options.variants) | {tasks.DEFAULT: {}}
    wanted = options.variant or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no variant '{unknown[0]}'; there are: {', '.join(known)}")
    return {name: {**known[name], **extra} for name in wanted}


def jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """List every run that is asked for, seed by seed."""
    known = tasks.load_tasks()
    playable = list(learning_reference.TASKS) if options.reference else list(known)
    wanted = options.task or playable
    if unknown := [name for name in wanted if name not in playable]:
        raise SystemExit(f"no task '{unknown[0]}'; there are: {', '.join(playable)}")
    chosen = {"reference": {}} if options.reference else variants(options)
    found = []
    for seed, name, (variant, overrides) in product(options.seeds, wanted, chosen.items()):
        job = {"task": name, "variant": variant, "settings": overrides, "seed": seed, "cpu_limit": options.cpu_seconds}
        if options.reference:
            job["cpu_limit"] = job["cpu_limit"] or known[name].cpu_seconds
            place = {"root": options.reference, "python": options.reference_python}
            found.append(schedule.reference_job(job, points=options.curve, **place))
        else:
            tasks.settings_of(known[name], overrides, seed=seed)  # refuses before anything runs
            found.append(schedule.own_job(known[name].model_dump(), job, points=options.curve))
    return found


def main() -> int:
    options = arguments()
    try:
        if options.command == "run":
            root = options.reference or ROOT
            return 1 if schedule.run_all(jobs(options), options.to, at_once=options.jobs, root=root) else 0
        if options.command == "show":
            print(summary.table(options.source, where=options.where, metric=options.metric))
        elif options.command == "draw":
            print(draw.learning_curves(options.source, options.to, where=options.where))
        else:
            print(book.write(options.source, options.to))
    except duckdb.Error as error:
        raise SystemExit(f"this SQL cannot be answered: {error}") from error
    except AmagoError as error:
        problems = "".join(f"\n  {problem}" for problem in getattr(error, "problems", ()))
        raise SystemExit(f"{error}{problems}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
