"""How fast data is taken in: a gzip file like D4RL's hopper sets, by the stage of `amago collect --from`.

    python tests/benchmarks/ingest.py [--steps 1000000] [--episode 500] [--json] [--dir DIR]

Each in a process of its own. Rates are by the clock and by the CPU time of the process, imports left out of both;
memory is its highest resident set. `check` reads and checks everything before the first trajectory is stored; `once`
leaves that out.
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

import h5py
import numpy as np


def make(path: Path, steps: int, episode: int) -> None:
    """11 observations, 3 actions, next observations, terminals and timeouts in turn, gzip."""
    rng, packed = np.random.default_rng(0), {"compression": "gzip"}
    states = np.cumsum(rng.standard_normal((steps + 1, 11), dtype=np.float32), axis=0) * np.float32(1e-2)
    ends = np.arange(steps) % episode == episode - 1
    odd = np.arange(steps) // episode % 2 == 1
    with h5py.File(path, "w") as file:
        file.create_dataset("observations", data=states[:-1], **packed)
        file.create_dataset("next_observations", data=states[1:], **packed)
        file.create_dataset("actions", data=np.tanh(rng.standard_normal((steps, 3), dtype=np.float32)), **packed)
        file.create_dataset("rewards", data=rng.standard_normal(steps, dtype=np.float32), **packed)
        file.create_dataset("terminals", data=ends & odd, **packed)
        file.create_dataset("timeouts", data=ends & ~odd, **packed)


def take(path: Path, lake: Path, *, check: bool) -> dict[str, float]:
    """One call of the stage in this process, which only does that."""
    from pipelines.config.settings import Settings
    from pipelines.stages import ingest

    document = {"source": {"name": f"d4rl:{path}", "check": check}}
    begun, cpu = time.perf_counter(), time.process_time()
    done = ingest.run(Settings.model_validate(document), lake=lake)
    seconds, spent = time.perf_counter() - begun, time.process_time() - cpu
    return {
        "million steps/s by the clock": done.metrics["steps"] / seconds / 1e6,
        "million steps/s of CPU time": done.metrics["steps"] / spent / 1e6,
        "MB of memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--episode", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--take", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        path, lake, check = options.take
        print(json.dumps(take(Path(path), Path(lake), check=check == "check")))
        return
    found = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        path = Path(root) / "hopper_made-v2.hdf5"
        make(path, options.steps, options.episode)
        megabytes = path.stat().st_size / 1e6
        for how in ("check", "once"):
            command = [sys.executable, __file__, "--take", str(path), str(Path(root) / how), how]
            found[how] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], **found}, indent=1))
        return
    print(
        f"{options.steps:,} steps, {megabytes:.0f} MB of gzip; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for how, figures in found.items():
        print(f"  {how:6}", "  ".join(f"{name} {value:,.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
