"""An update on a GPU: what precision, compilation, flash-attn and packing make of it, and the share of the GPU's rate.

    python tests/benchmarks/train.py --device cuda [--only bf16] [--updates 10] [--batch 64] [--length 1024] [--json]

Transformer of width 256 and 6 layers, 64 windows of 1024 steps. Seconds are wall-clock, medians of whole updates, with
batches drawn before. MFU is the FLOP that an update cannot do without (see pipelines/training/flops.py; attention
counts full squares), a second, over the rate of bf16 products of 8192 x 8192 matrices in the same run; or over
`--peak`, in TFLOP/s, as a data sheet has it. The last two rows have windows of all lengths: their FLOP are those of the
real steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from pipelines.config.model import AgentSettings
from pipelines.config.settings import TrainSettings
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning.agent import Agent
from pipelines.nets.attention import AttentionWindow, find_obstacle
from pipelines.training.flops import count_update_flop
from pipelines.training.learner import Learner
from tests.benchmarks.clock import Clock
from tests.learning import factories

SPACES = Spaces(observation={"obs": Box(shape=(20,))}, action=Discrete(n=4))
MODEL: dict[str, Any] = {"kind": "transformer", "d_model": 256, "num_layers": 6, "num_heads": 8, "d_ff": 1024}
EAGER = {"cuda_graphs": False}
BF16, FAST = {"precision": "bf16"}, {"precision": "bf16", "compile": True}
ROWS: dict[str, dict[str, Any]] = {  # of each the attention backend, the switches, and whether lengths differ
    "float32 eager": {"attention": "sdpa", "train": EAGER | {"precision": "float32"}},
    "tf32 eager": {"attention": "sdpa", "train": EAGER | {"precision": "tf32"}},
    "bf16 eager": {"attention": "sdpa", "train": EAGER | BF16},
    "bf16 compiled": {"attention": "sdpa", "train": EAGER | FAST},
    "float32 graphs": {"attention": "sdpa", "train": {"precision": "float32"}},
    "bf16 graphs": {"attention": "sdpa", "train": BF16},
    "bf16 compiled graphs": {"attention": "sdpa", "train": FAST},
    "bf16 compiled flash": {"attention": "flash", "train": FAST},
    "bf16 compiled checkpointing": {"attention": "auto", "train": FAST | {"activation_checkpointing": True}},
    "bf16 compiled uneven padded": {"attention": "auto", "train": FAST, "uneven": True},
    "bf16 compiled uneven packed": {"attention": "auto", "train": FAST | {"packing": True}, "uneven": True},
}


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds when all work given to the device is done."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def product_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """FLOP a second of products of square matrices."""
    now, x = clock_of(device), torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(8):
        begun = now()
        torch.mm(x, x)
        seconds.append(now() - begun)
    return 2 * size**3 / median(seconds[2:])


def measure(
    row: dict[str, Any], *, device: torch.device, peak: float, batch: int, length: int, updates: int,
    model: dict[str, Any] = MODEL,
) -> dict[str, Any]:  # fmt: skip
    """One row's figures."""
    settings = AgentSettings.model_validate({"sequence": model | {"attention": row["attention"]}})
    train = TrainSettings(
        batch_size=batch, context_length=length, device=str(device), threads=0, **row.get("train", {})
    )
    now, rng = clock_of(device), np.random.default_rng(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    learner = Learner(SPACES, settings, train, seed=0)
    lengths = rng.integers(2, length + 2, batch) if row.get("uneven") else np.full(batch, length + 1)
    lengths[0] = length + 1
    data = factories.windows(SPACES, lengths=tuple(lengths.tolist()), rows=length + 1, terminated=0.0)
    seconds = []
    for _ in range(3 + updates):  # the first compile
        begun = now()
        learner.step(lambda _: data)
        seconds.append(now() - begun)
    cost, steps = median(seconds[3:]), int((lengths - 1).sum())
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    clock = Clock(now)
    clock.watch(learner)
    learner.step(lambda _: data)
    products = count_update_flop(Agent(SPACES, settings), 1, length) * steps / length
    return {
        "seconds": cost, "first seconds": seconds[0], "updates/s": 1 / cost, "timesteps/s": steps / cost,
        "TFLOP": products / 1e12, "TFLOP/s": products / cost / 1e12, "MFU": products / cost / peak, "peak GB": memory,
        "notices": learner.notices, "computes with": learner.describe(), "parts": clock.seconds,
    }  # fmt: skip


def run(options: Any) -> None:
    """All rows, one after the other."""
    device = torch.device(options.device)
    measured = product_rate(device, torch.bfloat16)
    peak = options.peak * 1e12 if options.peak else measured
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "bf16 TFLOP/s": measured / 1e12}
    if not options.json:
        print(f"{found['device']}: bf16 products at {measured / 1e12:.0f} TFLOP/s; MFU of {peak / 1e12:.0f}")
    for name, row in ROWS.items():
        if options.only is not None and options.only not in name:
            continue
        missing = (
            find_obstacle("flash", device, torch.bfloat16, AttentionWindow()) if row["attention"] == "flash" else None
        )
        if missing is None:
            torch.compiler.reset()
            torch.cuda.empty_cache()
            found[name] = measure(
                row, device=device, peak=peak, batch=options.batch, length=options.length, updates=options.updates
            )
        else:
            found[name] = {"left out": missing}
        if not options.json:
            show(name, found[name], found.get("float32 eager"))
    if options.json:
        print(json.dumps(found))


def show(name: str, figures: dict[str, Any], first: dict[str, Any] | None) -> None:
    if "left out" in figures:
        print(f"{name:28} left out: flash {figures['left out']}")
        return
    times = f"  {figures['timesteps/s'] / first['timesteps/s']:.2f} x float32 eager" if first else ""
    print(
        f"{name:28} {figures['seconds'] * 1e3:8.1f} ms  {figures['timesteps/s']:,.0f} timesteps/s  "
        f"{figures['TFLOP/s']:.0f} TFLOP/s  MFU {figures['MFU']:.1%}  {figures['peak GB']:.1f} GB  "
        f"{figures['computes with']['attention']}{times}  (first update {figures['first seconds']:.0f} s)"
    )
    for notice in figures["notices"]:
        print(f"    {notice}")
    for part, seconds in sorted(figures["parts"].items(), key=lambda item: -item[1]):
        print(f"    {part:36}{seconds * 1e3:8.1f} ms", flush=True)
