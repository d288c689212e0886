"""Makes the zoo, the policies that come with the package: `python tests/benchmarks/zoo.py [NAME...] [--runs DIR]`.

Each is the best checkpoint of the recipe of its name, proved through ONNX and evaluated on 500 episodes. Its bundle has
the weights, the recording and the report of the proof. Without policy.onnx and its runtimes, which
`amago export zoo:NAME --format onnx` makes again, it is smaller than 2 MB. About 35 minutes of one core, 30 of them for
alchemy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pipelines.config import policy_files
from pipelines.export import parity
from pipelines.files.atomic import write_together
from pipelines.files.checksums import seal
from pipelines.learning import bundle

# Its seed, and whether it acts greedily, since a T-Maze forgives no slip; alchemy is played better by chance.
POLICIES = {"quickstart": (0, True), "tmaze": (0, True), "cartpole": (0, True), "alchemy": (1, False)}
ZOO = Path(__file__).resolve().parents[2] / "pipelines" / "zoo"
EPISODES, MOST_BYTES = 500, 2_000_000
KEPT = (bundle.WEIGHTS, parity.RECORDING, parity.REPORT)


def make(name: str, runs: Path) -> Path:
    """Train `name` in RUNS/NAME, or go on with what is there, and write its bundle into the package."""
    run, exported = runs / name, runs / name / "export"
    seed, greedy = POLICIES[name]
    _amago("run", name, "--run", run, "--set", f"seed={seed}")
    which = "best" if (run / "checkpoints" / "best").exists() else "latest"
    _amago(
        "export",
        run,
        "--format",
        "onnx",
        "--checkpoint",
        which,
        "--set",
        f"export.episodes={EPISODES}",
        "--set",
        f"evaluate.greedy={str(greedy).lower()}",
    )
    to = ZOO / name
    write_together(to, reduced(exported))
    size = sum(path.stat().st_size for path in to.iterdir())
    assert size < MOST_BYTES, f"{to} has {size:,} bytes"
    report = json.loads((to / parity.REPORT).read_text())
    print(name, f"{size:,} bytes", json.dumps({form: score(found) for form, found in report["evaluations"].items()}))
    return to


def reduced(exported: Path) -> dict[str, bytes]:
    """Return the files of a bundle without its forms."""
    record = policy_files.read_record(exported)
    files = {name: content for name, content in bundle.checked_files(exported, record).items() if name in KEPT}
    kept = {key: value for key, value in record.items() if key not in ("checksum", "files")}
    return {**files, policy_files.RECORD: seal(kept | {"forms": []}, files)}


def score(evaluation: dict[str, object]) -> dict[str, object]:
    """Return the mean return and success with their intervals."""
    return {key: value for key, value in evaluation.items() if key.startswith(("return_mean", "return_ci", "success_"))}


def _amago(*arguments: object) -> None:
    command = [sys.executable, "-m", "amago_cli", *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=POLICIES)
    parser.add_argument("--runs", type=Path, help="directory of the runs (default: a temporary one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for each in given.names:
            make(each, given.runs or Path(folder))
