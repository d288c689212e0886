"""The benchmark of learning: what recipes reach, from how much data, in how many CPU seconds.

    python tests/benchmarks/learning.py run --task lake-4x4 --seeds 0-4 --jobs 2 --to results.jsonl
    python tests/benchmarks/learning.py run --variants variants.toml --variant wide --set train.batch_size=32
    python tests/benchmarks/learning.py show --from results.jsonl --where "task like 'lake%'"

`run` trains every task (learning_parts/tasks.toml) with every variant and seed, each in a process of its own with one
thread, and appends one line of JSON per run; runs that are there are skipped, so a killed benchmark is resumed by the
same command. A variant is a set of settings by name, from a TOML file of tables or from `--set`; it is laid over the
task's. `--cpu-seconds` ends training after so many; the final evaluations come on top.

The best checkpoint is chosen on training tasks, as in the quickstart. It and the last checkpoint are evaluated on
held-out tasks (`last_...` in the file). CPU seconds are user and system time of the whole process, children and imports
included; evaluations that only draw the learning curve are counted apart and taken out of what is shown.

`show` gives the interquartile mean over seeds with a 95% bootstrap interval, by task and variant, and over tasks, whose
scores are scaled to 0 (random) and 1 (optimum or goal), with seeds drawn within each task.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelines.errors import AmagoError
from tests.benchmarks.learning_parts import schedule, summary, tasks

RESULTS = Path("learning.jsonl")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, and append results")
    run.add_argument("--task", action="append", metavar="T", help="repeatable; none: all but lunarlander")
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
    show = commands.add_parser("show", help="scores by task and variant")
    show.add_argument("--from", dest="source", type=Path, default=RESULTS, metavar="FILE.jsonl")
    show.add_argument("--where", default="true", metavar="SQL", help="over the columns of a result")
    show.add_argument(
        "--metric", default="", metavar="SQL", help="in place of the tasks' own, e.g. list_avg(per_attempt)"
    )
    return parser.parse_args()


def variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Named overrides, as the command line asks for them."""
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
    """Every run that is asked for, seed by seed."""
    known = tasks.load_tasks()
    wanted = options.task or [name for name in known if name != "lunarlander"]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no task '{unknown[0]}'; there are: {', '.join(known)}")
    chosen = variants(options)
    for name in wanted:
        for overrides in chosen.values():
            tasks.settings_of(known[name], overrides, seed=0)  # refuses before anything runs
    limit = options.cpu_seconds
    return [
        {
            "task": name,
            "variant": variant,
            "settings": overrides,
            "seed": seed,
            "cpu_limit": limit,
            **schedule.amago_job(known[name].model_dump(), overrides, seed=seed, points=options.curve, limit=limit),
        }
        for seed in options.seeds
        for name in wanted
        for variant, overrides in chosen.items()
    ]


def main() -> int:
    options = arguments()
    try:
        if options.command == "run":
            return 1 if schedule.run_all(jobs(options), options.to, at_once=options.jobs) else 0
        print(summary.table(options.source, where=options.where, metric=options.metric))
    except AmagoError as error:
        problems = "".join(f"\n  {problem}" for problem in getattr(error, "problems", ()))
        raise SystemExit(f"{error}{problems}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
