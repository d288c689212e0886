"""Steps a second of an exported policy beside the trained one.

`python tests/benchmarks/export.py [WIDTH LAYERS CONTEXT] [FORM...]`: a Transformer (default: width 128, 3 layers, 256
tokens) with random weights acts greedily on random vectors of 16 numbers, with full memories, on one thread: eager as
in evaluations, by ONNX through the bundle's own `policy.py`, by `torch.export`, and compiled by AOTInductor (default:
all of them). Forms take turns; a rate is the best of a few.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from pipelines.config.model import AgentSettings
from pipelines.export import forms
from pipelines.export.step_function import StepFunction
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.learning.bundle import FORMAT, VERSION

ACTORS, TURNS, SECONDS = (1, 24, 256), 3, 0.7
Act = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def main() -> None:
    """Print a row for each number of actors."""
    width, layers, context = [int(text) for text in sys.argv[1:] if text.isdecimal()] or (128, 3, 256)
    wanted = tuple(form for form in forms.FILES if form in sys.argv) or tuple(forms.FILES)
    torch.set_num_threads(1)
    sequence = {"kind": "transformer", "d_model": width, "num_layers": layers, "num_heads": 8, "d_ff": 4 * width}
    settings = AgentSettings.model_validate({"timestep": {"hidden": [128], "output": 64}, "sequence": sequence})
    spaces = Spaces(observation={"obs": Box(shape=(16,))}, action=Discrete(n=4))
    agent = Agent(spaces, settings).eval()
    function = StepFunction(agent, capacity=context)
    files = forms.make_files(function, wanted)
    record = {"format": FORMAT, "version": VERSION, "spaces": spaces.to_json(), **forms.describe_step(function)}
    print(f"{'actors':>6}{'eager':>10}" + "".join(f"{form:>17}" for form in wanted) + "   steps a second (times eager)")
    for actors in ACTORS:
        ways: dict[str, Act] = {"eager": AgentPolicy(agent, num_actors=actors, capacity=context, greedy=True).act}
        for form in wanted:
            step = forms.open_form(form, files[forms.FILES[form]], record, actors)
            ways[form] = forms.ExportedPolicy(step, record, greedy=True, seed=0).act
        ways = {name: walker(act, actors) for name, act in ways.items()}
        for way in ways.values():
            for _ in range(context):  # until memories are full
                way()
        best = dict.fromkeys(ways, 0.0)
        for _ in range(TURNS):
            for name, way in ways.items():
                best[name] = max(best[name], rate(way, actors))
        cells = [f"{best['eager']:>10,.0f}"] + [
            f"{best[n]:>10,.0f} ({best[n] / best['eager']:.2f})" for n in list(ways)[1:]
        ]
        print(f"{actors:>6}" + "".join(cells), flush=True)


def walker(act: Act, actors: int) -> Callable[[], None]:
    """Return a function that acts once, on new numbers."""
    rng = np.random.default_rng(0)
    state = {"action": np.zeros(actors, np.int32), "time": np.zeros(actors, np.int64)}

    def walk() -> None:
        seen = {"obs": rng.standard_normal((actors, 16), np.float32)}
        state["action"] = act(seen, state["action"], np.zeros(actors, np.float32), state["time"])
        state["time"] = state["time"] + 1

    return walk


def rate(way: Callable[[], None], actors: int) -> float:
    """Return environment steps a second of CPU time."""
    began, steps = time.process_time(), 0
    while (spent := time.process_time() - began) < SECONDS:
        way()
        steps += actors
    return steps / spent


if __name__ == "__main__":
    main()
