"""What ranks cost, in CPU seconds of an update, each compared with one process in the same run, in turns.

    python tests/benchmarks/ranks.py [--updates 40] [--ranks 2] [--before TREE]

Weak scaling: an update of each of N ranks with B windows (gloo, this host), relative to one process with B windows.
`--before TREE`: an update of one process of this tree, relative to one of another checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BATCH, LENGTH = 12, 50
SIZES: dict[str, dict[str, Any]] = {
    "1.0 M": {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 256},
    "1.6 M": {"d_model": 128, "num_layers": 3, "num_heads": 8, "d_ff": 512},
}


class Process:
    """A learner in a process of its own, which makes an update whenever it is asked to."""

    def __init__(self, tree: Path, row: dict[str, Any], **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--row", json.dumps(row)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"} | environment,
        )

    def ask(self) -> None:
        assert self.process.stdin is not None
        print("update", file=self.process.stdin, flush=True)

    def seconds(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())


def serve(row: dict[str, Any]) -> None:
    """Make an update for each line of stdin, and print its CPU seconds."""
    import torch

    torch.set_num_threads(1)
    from pipelines.config.model import AgentSettings
    from pipelines.config.settings import TrainSettings
    from pipelines.lake.spaces import Spaces, space_from_json
    from pipelines.training.learner import Learner
    from tests.learning import factories

    if "RANK" in os.environ:
        from pipelines.nets import ranks

        ranks.join(torch.device("cpu"), timeout_seconds=120)
    spaces = Spaces(
        observation={"obs": space_from_json({"kind": "box", "shape": [20]})},
        action=space_from_json({"kind": "discrete", "n": 4}),
    )
    settings = AgentSettings.model_validate({"sequence": {"kind": "transformer"} | row["sequence"]})
    train = TrainSettings(batch_size=row["batch"], threads=1, device="cpu", log_every=10_000)
    learner = Learner(spaces, settings, train, seed=0)
    for number, _ in enumerate(sys.stdin):
        rows, lengths = LENGTH + 1, (LENGTH + 1,) * BATCH
        data = factories.windows(spaces, lengths=lengths, rows=rows, terminated=0.0, seed=number)
        began = time.process_time()
        learner.step(lambda _, data=data: data)
        print(time.process_time() - began, flush=True)


def compared(name: str, one: list[Process], others: list[Process], updates: int) -> None:
    """Print the CPU seconds of one and the mean of the others, and the median of their ratios."""
    pairs = []
    for number in range(updates + 3):
        seconds = {}
        for side in (one, others) if number % 2 else (others, one):
            for each in side:
                each.ask()
            seconds[side is one] = sum(each.seconds() for each in side) / len(side)
        pairs.append((seconds[True], seconds[False]))
    ratios = [b / a for a, b in pairs[3:]]
    before, after = (median(pair[i] for pair in pairs[3:]) for i in range(2))
    spread = stdev(ratios) / len(ratios) ** 0.5
    print(f"{name:50} {1e3 * before:7.1f} ms {1e3 * after:7.1f} ms  x {median(ratios):.3f} +- {spread:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--before", type=Path, help="a checkout to compare one process with")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        serve(json.loads(options.row))
        return
    for name, sequence in SIZES.items():
        row = {"sequence": sequence, "batch": BATCH}
        if options.before is not None:
            sides = [[Process(tree, row)] for tree in (options.before.resolve(), ROOT)]
            title = f"{name}: one process, before and now"
        else:
            with socket.create_server(("localhost", 0)) as server:
                port = server.getsockname()[1]
            place = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            both = row | {"batch": BATCH * options.ranks}
            group = [Process(ROOT, both, **place, RANK=str(r), LOCAL_RANK=str(r)) for r in range(options.ranks)]
            sides, title = [[Process(ROOT, row)], group], f"{name}: alone, and each of {options.ranks} ranks"
        compared(title, *sides, options.updates)
        for each in (*sides[0], *sides[1]):
            each.process.kill()
            each.process.wait()


if __name__ == "__main__":
    main()
