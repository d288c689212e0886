"""Runs the smoke profile of every recipe, each in a process of its own, and prints how fast each went.

    python tests/benchmarks/smoke.py [NAME ...] [--seconds 120]

Recipes whose extra is not installed are left out, and said so. Exits with 1 if a recipe failed or took longer than
`--seconds` (wall clock, the whole process; 0: no limit).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipelines.config.recipes import read_shipped_recipes
from pipelines.stages.recipe import requirement

COLUMNS = ("recipe", "seconds", "CPU s", "env steps/s", "updates/s", "trajectories", "")


def missing_extra(name: str) -> str:
    """The extra that the recipe needs and that is not installed; "" if nothing is missing."""
    extra, installed = requirement(read_shipped_recipes()[name])
    return "" if installed or extra is None else extra


def run_smoke(name: str, folder: Path, *, threads: int = 1) -> dict[str, Any]:
    """What the recipe's smoke profile did: `seconds`, `cpu_seconds`, `status`, and of a run that ended well
    `steps_per_second`, `updates_per_second`, `trajectories`, `episodes` judged.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    arguments = ["run", name, "--profile", "smoke", "--run", str(folder / name), "--output", "json", "-q"]
    done = _amago(arguments, folder, environment)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {"status": "failed"}
    figures: dict[str, Any] = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "status": report["status"],
        "code": done.returncode,
    }
    if done.returncode:
        return figures | {"error": report.get("error", {}).get("message") or done.stderr.strip()[-300:]}
    info = json.loads(_amago(["lake", "info", str(folder / name), "--output", "json"], folder, environment).stdout)
    chosen = ("steps", "updates", "steps_per_second", "updates_per_second", "episodes", "return_mean")
    figures |= {key: report["metrics"].get(key, 0) for key in chosen}  # offline nothing is stepped
    return figures | {"trajectories": info["metrics"]["trajectories"]}


def _amago(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "amago_cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes; none: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest a recipe may take (0: any time)")
    options = parser.parse_args()
    names = options.names or list(read_shipped_recipes())
    unknown = [name for name in names if name not in read_shipped_recipes()]
    if unknown:
        parser.error(f"no recipe '{unknown[0]}'; there are: {', '.join(read_shipped_recipes())}")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if extra := missing_extra(name):
                print(f"| {name} | | | | | | left out: amago[{extra}] is not installed |", flush=True)
                continue
            found = run_smoke(name, Path(folder))
            slow = bool(options.seconds) and found["seconds"] > options.seconds
            bad += bool(found["code"]) or slow
            print(_row(name, found, "too slow" if slow else ""), flush=True)
    return 1 if bad else 0


def _row(name: str, found: dict[str, Any], note: str) -> str:
    times = f"| {name} | {found['seconds']:.0f} | {found['cpu_seconds']:.0f} |"
    if found["code"]:
        return f"{times} | | | failed ({found['code']}): {found['error']} |"
    rates = f" {found['steps_per_second']:,.0f} | {found['updates_per_second']:.1f} | {found['trajectories']:,}"
    return f"{times}{rates} | {note} |"


if __name__ == "__main__":
    sys.exit(main())
