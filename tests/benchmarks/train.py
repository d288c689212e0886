"""What an update costs beside the matrix products it cannot do without, all in one run: the ratios count.

    python tests/benchmarks/train.py [--only "discrete L128"] [--updates 5] [--threads 1] [--malloc] [--json]
    python tests/benchmarks/train.py --set agent.sequence.kind=gru --set length=64 --set 'action={"kind":"box"}'

Configuration P: Transformer of width 128 and 2 layers over a 512-512-256 timestep encoder, 20 numbers observed, 4
actions, 7 discounts, 4 critics, 24 windows. Drawing them from a lake is not counted, and told beside it. The last rows
are 6 windows of 64 x 64 images through IMPALA's convolutions, without and with `train.activation_checkpointing`. Each
row runs in a process of its own, which measures the rate of float32 products of the critics' shape between the updates.
Seconds are CPU seconds, medians. The floor is the time that the products alone would take at that rate; the goals,
stated for 150 GFLOP/s, are scaled to it. Memory: peak resident set of the process (VmHWM, Linux) above what it had
after import and one small product.
`--malloc` lets glibc keep freed memory instead of giving it back to the system each time. `--device cuda` measures
another table, on a GPU: see train_cuda.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

GOAL_RATE = 150.0  # GFLOP/s for which the goals are stated
NUMBERS = {"kind": "box", "shape": [20]}
DISCRETE, BOX = {"kind": "discrete", "n": 4}, {"kind": "box", "shape": [4]}
P = {"sequence": {"kind": "transformer", "d_model": 128, "num_layers": 2, "num_heads": 8, "d_ff": 512}}
IMAGES: dict[str, Any] = {
    "observation": {"kind": "box", "shape": [64, 64, 3], "dtype": "uint8"},
    "action": DISCRETE,
    "length": 128,
    "batch": 6,
    "agent": {"timestep": {"image": {"kind": "impala"}}},
}
ROWS: dict[str, dict[str, Any]] = {
    "discrete L128": {"action": DISCRETE, "length": 128, "goal": 0.35, "goal_gb": 0.6},
    "continuous L128": {"action": BOX, "length": 128, "goal": 0.85, "goal_gb": 0.6},
    "multi-task discrete L128": {
        "action": DISCRETE,
        "length": 128,
        "agent": {"kind": "multi-task"},
        "goal": 1.25,
        "goal_gb": 0.6,
    },
    "discrete L512": {"action": DISCRETE, "length": 512, "goal": 1.6, "goal_gb": 1.1},
    "continuous L512": {"action": BOX, "length": 512, "goal": 3.5, "goal_gb": 1.1},
    "images L128": IMAGES,
    "images L128 checkpointing": IMAGES | {"train": {"activation_checkpointing": True}},
}
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def memory(key: str) -> float:
    """GB of this process: "VmHWM" (peak) or "VmRSS" (now)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e9


def windows(spaces: Any, batch: int, length: int) -> Any:
    """Full windows of random numbers."""
    import numpy as np

    from tests.learning import factories

    return factories.windows(
        spaces, lengths=(length + 1,) * batch, rows=length + 1, terminated=0.0, seed=int(np.random.randint(1 << 30))
    )


def drawing(spaces: Any, batch: int, length: int, draws: int = 20) -> float:
    """CPU seconds of drawing a batch from a lake of trajectories twice as long as a window."""
    import numpy as np

    from pipelines.data.mixture import Mixture, Share
    from pipelines.data.strategy import Strategy
    from pipelines.data.view import View
    from pipelines.lake.schema import Schema
    from pipelines.lake.store import Lake
    from tests.lake.factories import fill

    schema = Schema(spaces)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        fill(lake, [2 * length] * 100, schema=schema)
        mixture = Mixture(
            [(View(lake, schema.id), Share())], length=length, seed=0, strategy=Strategy(placement="full")
        )
        mixture.refresh(0)
        seconds = []
        for update in range(draws):
            begun = time.process_time()
            drawn = mixture.sample(batch, update)
            seconds.append(time.process_time() - begun)
        assert np.all(drawn.lengths == length + 1)
    return median(seconds[1:])


def measure(row: dict[str, Any], updates: int, threads: int, dtype: str) -> dict[str, Any]:
    """One row's figures; runs in a process of its own."""
    import torch

    torch.set_num_threads(threads)
    from pipelines.config.model import AgentSettings
    from pipelines.config.settings import TrainSettings
    from pipelines.lake.spaces import Spaces, space_from_json
    from pipelines.training.flops import count_update_flop
    from pipelines.training.learner import Learner
    from tests.benchmarks.clock import Clock

    x, w = torch.randn(1792, 256), torch.randn(256, 256)

    def rate() -> float:
        begun, count = time.process_time(), 0
        while time.process_time() - begun < 0.15:
            torch.mm(x, w)
            count += 1
        return count * 2 * 1792 * 256 * 256 / (time.process_time() - begun) / 1e9

    rate()
    baseline = memory("VmRSS")
    observation = space_from_json(row.get("observation", NUMBERS))
    spaces = Spaces(observation={"obs": observation}, action=space_from_json(row["action"]))
    settings = AgentSettings.model_validate(P | row.get("agent", {}))
    batch = int(row.get("batch", 24))
    precision = {"float32": "float32", "bfloat16": "bf16"}[dtype]
    switches = row.get("train", {})
    train = TrainSettings(batch_size=batch, threads=threads, device="cpu", precision=precision, **switches)
    learner = Learner(spaces, settings, train, seed=0)
    agent, clock = learner.agent, Clock()
    clock.watch(learner)
    seconds, rates, parts = [], [], []
    for _ in range(updates + 1):
        data = windows(spaces, batch, int(row["length"]))
        clock.seconds = {}
        rates.append(rate())
        begun = time.process_time()
        learner.step(lambda _, data=data: data)
        seconds.append(time.process_time() - begun)
        parts.append(dict(clock.seconds))
    products, speed, cost = count_update_flop(agent, batch, int(row["length"])), median(rates[1:]), median(seconds[1:])
    figures = {
        "seconds": cost,
        "GFLOP/s": speed,
        "floor": products / speed / 1e9,
        "x floor": cost / (products / speed / 1e9),
        "GFLOP": products / 1e9,
        "peak GB": memory("VmHWM") - baseline,
        "process GB": memory("VmHWM"),
        "updates/s": 1 / cost,
        "timesteps/s": batch * int(row["length"]) / cost,
        "parts": {name: median(p.get(name, 0.0) for p in parts[1:]) for name in parts[-1]},
    }
    if "observation" not in row:  # images: see lake.py
        figures["parts"]["data (not counted)"] = drawing(spaces, batch, int(row["length"]))
    if "goal" in row:
        figures |= {"goal": row["goal"] * GOAL_RATE / speed, "goal GB": row["goal_gb"]}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="rows whose name contains TEXT")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a row of your own")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--batch", type=int, default=64, help="windows, on CUDA")
    parser.add_argument("--length", type=int, default=1024, help="steps of a window, on CUDA")
    parser.add_argument("--peak", type=float, help="TFLOP/s of which MFU is a share, on CUDA (default: measured)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--malloc", action="store_true", help="glibc keeps freed memory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        figures = measure(json.loads(options.row), options.updates, options.threads, options.dtype)
        print(json.dumps(figures))
        return
    if options.device != "cpu":
        cuda(options)
        return
    rows = {name: row for name, row in ROWS.items() if options.only is None or options.only in name}
    if options.set:
        rows = {" ".join(options.set): own_row(options.set)}
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(options.threads)}
    environment |= KEPT if options.malloc else {}
    results = {}
    for name, row in rows.items():
        command = [sys.executable, __file__, "--row", json.dumps(row), "--updates", str(options.updates)]
        command += ["--threads", str(options.threads), "--dtype", options.dtype]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        results[name] = json.loads(done.stdout)
        if not options.json:
            show(name, results[name])
    if options.json:
        print(json.dumps(results))


def cuda(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"--device {options.device}: torch finds no CUDA device here; see amago doctor")
    from tests.benchmarks import train_cuda

    train_cuda.run(options)


def own_row(settings: list[str]) -> dict[str, Any]:
    """`agent.a.b=value`, `train.a=value`, `observation=...`, `action=...`, `length=...`, `batch=...` on top of the
    first row."""
    row: dict[str, Any] = {"action": DISCRETE, "length": 128, "agent": {}}
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *path, last = key.split(".")
        table = row
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return row


def show(name: str, figures: dict[str, Any]) -> None:
    f = figures
    goal = f"  goal {f['goal']:.2f} s, {f['goal GB']:.1f} GB" if "goal" in f else ""
    print(
        f"{name:26} {f['seconds']:7.3f} s  {f['x floor']:5.2f} x floor ({f['GFLOP']:.1f} GFLOP at "
        f"{f['GFLOP/s']:.0f}/s)  {f['peak GB']:.2f} GB{goal}  {f['timesteps/s']:,.0f} timesteps/s"
    )
    for part, seconds in sorted(f["parts"].items(), key=lambda item: -item[1]):
        print(f"    {part:28}{seconds:8.3f} s {seconds / f['seconds']:6.1%}", flush=True)


if __name__ == "__main__":
    main()
