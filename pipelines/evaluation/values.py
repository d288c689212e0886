"""Critic and policy outputs of a trained agent for the steps of recorded trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from pipelines.config.model import AgentSettings
from pipelines.data.batch import Batch
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.schema import Schema
from pipelines.lake.store import describe_difference
from pipelines.lake.trajectory import Trajectory
from pipelines.learning.batch import TensorBatch
from pipelines.learning.checkpoint import load_agent
from pipelines.learning.diagnostics import inspect
from pipelines.rollout.policies import load_trained

FIGURES = (
    "q", "v", "advantage", "weight", "disagreement", "action_gap", "agreement", "target", "log_prob", "entropy",
)  # fmt: skip
_STEPS = 4096  # evaluated at once: bounds memory for long trajectories


class Values:
    """The critic's and policy's output for the steps of a trajectory, by a run's checkpoint.

    `discounts`: the last one acts. The network sees the same context as in training: windows of `window` steps. The
    windows of a longer trajectory overlap by half, and each step is evaluated in the window that has the most steps
    before it: all of them in the first window, at least half a window afterwards.
    """

    def __init__(self, name: str, *, seed: int = 0, own: AgentSettings | None = None) -> None:
        """`name`: RUN or RUN@CHECKPOINT (latest, best, or an update number); `own` as for `load_agent`. InputMissing
        where there is none, UsageError for an agent without critics, and for a bundle, which acts alone."""
        found = load_trained(name)
        checkpoint = found.checkpoint
        if found.run is None:
            raise UsageError(f"{checkpoint.label} has no values: it only acts", hint="name the run it was made from")
        self._agent, self._seed = load_agent(checkpoint, own=own), seed
        if self._agent.target_heads is None:
            raise UsageError(
                f"run '{found.run}' has no values: a {self._agent.settings.kind} agent has no critics",
                hint="name the run of an agent that has",
            )
        self.run: Path = found.run
        self.update, self.window = checkpoint.update, int(checkpoint.record["context_length"])
        self.discounts: tuple[float, ...] = self._agent.gammas

    def __call__(self, trajectory: Trajectory, schema: Schema, *, offset: int = 0) -> dict[str, np.ndarray]:
        """Compute each of `FIGURES`: (T, discounts) float32, in reward units; NaN where the agent does not have it
        (`action_gap` and `agreement` need critics with a value for each action). InputMissing if the trajectory's
        spaces differ from those of the agent. `offset`: the step at which the given part of a longer trajectory
        begins."""
        ours = self._agent.spaces
        if schema.spaces != ours:
            differs = "; ".join(describe_difference(ours, schema.spaces, ("trained on", "in the lake")))
            raise InputMissing(
                f"run '{self.run}' cannot evaluate {trajectory.uid}: it was trained for other spaces: {differs}"
            )
        steps = trajectory.length
        out = {name: np.full((steps, len(self.discounts)), np.nan, np.float32) for name in FIGURES}
        for batch, kept in self._windows(trajectory.columns, steps, offset):
            found = inspect(self._agent, TensorBatch.from_numpy(batch, ours), seed=self._seed)
            for place, (start, first) in enumerate(zip((batch.start - offset).tolist(), kept, strict=True)):
                stop = min(start + self.window, steps)
                for name in out.keys() & found.keys():
                    out[name][first:stop] = found[name][place, first - start : stop - start]
        return out

    def _windows(self, columns: Mapping[str, np.ndarray], steps: int, offset: int) -> Iterator[tuple[Batch, list[int]]]:
        """Yield batches of windows, with the first step to evaluate in each."""
        half = max(self.window // 2, 1)
        starts = [0, *range(half, steps - self.window + half, half)] if steps > self.window else [0]
        firsts = [0, *(start + self.window - half for start in starts[1:])]
        count = max(_STEPS // self.window, 1)
        for at in range(0, len(starts), count):
            start = np.array(starts[at : at + count])
            lengths = np.minimum(steps - start, self.window) + 1
            rows = int(lengths.max())
            cut = {}
            for name, column in columns.items():
                cut[name] = np.zeros((len(start), rows, *column.shape[1:]), column.dtype)
                for place, (begin, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
                    cut[name][place, :length] = column[begin : begin + length]
            yield Batch(columns=cut, lengths=lengths, start=start + offset), firsts[at : at + count]
