"""What benchmarks of updates measure, on a small network."""

from __future__ import annotations

import pytest
import torch

from pipelines.config.model import AgentSettings
from pipelines.learning.agent import Agent
from pipelines.training.flops import count_update_flop
from tests.benchmarks import train_cuda
from tests.benchmarks.clock import Clock

MODEL = {"kind": "transformer", "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}


def test_a_clock_takes_inner_parts_out_of_outer_ones() -> None:
    ticks = iter([0.0, 1.0, 5.0, 7.0])
    clock = Clock(lambda: next(ticks))
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.seconds == {"outer": 3.0, "inner": 4.0}


@pytest.mark.system
@pytest.mark.parametrize("uneven", [False, True])
def test_figures_of_a_row_fit_together(uneven: bool) -> None:
    row = {"attention": "sdpa", "train": {"precision": "bf16", "packing": uneven}, "uneven": uneven}
    cpu = torch.device("cpu")
    figures = train_cuda.measure(row, device=cpu, peak=1e12, batch=3, length=8, updates=1, model=MODEL)
    assert figures["MFU"] == pytest.approx(figures["TFLOP"] / figures["seconds"])
    steps = round(figures["timesteps/s"] * figures["seconds"])
    agent = Agent(train_cuda.SPACES, AgentSettings.model_validate({"sequence": MODEL}))
    assert figures["TFLOP"] == pytest.approx(count_update_flop(agent, 1, 8) * steps / 8 / 1e12)
    assert (steps < 24) == uneven
    assert {"targets", "optimiser", "encoder forward"} <= figures["parts"].keys()
    assert figures["computes with"]["attention"] == "sdpa"
