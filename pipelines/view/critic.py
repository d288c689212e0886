"""Figures of a trained agent for the steps of a window: q, v, advantage, weight, entropy and more."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipelines.errors import UsageError
from pipelines.lake.schema import Schema
from pipelines.lake.trajectory import Trajectory, TrajectoryInfo
from pipelines.view.lanes import StepWindow, numbers
from pipelines.view.steps import StepReader, StoredTrajectory

MOST_STEPS = 4096
_MOST_BYTES = 256 << 20
_KEPT = 16  # windows
SHOWN = ("q", "v", "advantage", "weight", "entropy", "disagreement", "action_gap", "agreement")


class Evaluator(Protocol):
    """Interface of `pipelines.evaluation.values.Values`, which imports torch."""

    run: Path
    update: int
    window: int
    discounts: tuple[float, ...]

    def __call__(self, trajectory: Trajectory, schema: Schema, *, offset: int = 0) -> Mapping[str, np.ndarray]: ...


class CriticLanes:
    """Figures of a run's agent for windows of at most `MOST_STEPS` steps, with a cache of recent windows."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: OrderedDict[tuple[str, int, int], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()  # one evaluation at a time

    @property
    def about(self) -> dict[str, Any]:
        """The run, its update, and the acting discount."""
        agent = self._evaluator
        return {"run": str(agent.run), "update": agent.update, "discount": float(agent.discounts[-1])}

    def lanes(self, reader: StepReader, found: StoredTrajectory, start: int, stop: int) -> dict[str, Any]:
        """Compute the figures `SHOWN` of each step of a window, for the acting discount.

        UsageError for a window of more steps, or of more bytes, than are evaluated at once.
        """
        window = StepWindow.of(found.length, start, stop, 1)
        start, stop = window.start, min(window.stop, found.length)
        if stop - start > MOST_STEPS:
            raise UsageError(f"values are computed for up to {MOST_STEPS:,} steps at once", hint="zoom in")
        key = (found.uid, start, stop)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._evaluate(reader, found, start, stop)
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            return self._known[key]

    def _evaluate(self, reader: StepReader, found: StoredTrajectory, start: int, stop: int) -> dict[str, Any]:
        if stop <= start:
            return {"start": start, "t": [], "lanes": {name: [] for name in SHOWN}}
        begin = max(0, start - self._evaluator.window)  # the context that the first step has in training
        if (stop + 1 - begin) * found.schema.step_bytes > _MOST_BYTES:
            raise UsageError("the steps of this window are too large to evaluate at once", hint="zoom in")
        columns = {c.name: reader.rows(found.uid, c.name, begin, stop + 1) for c in found.schema.columns}
        part = Trajectory(columns=columns, info=TrajectoryInfo(), uid=found.uid)
        figures = self._evaluator(part, found.schema, offset=begin)
        return {
            "start": start,
            "t": list(range(start, stop)),
            "lanes": {name: numbers(figures[name][start - begin : stop - begin, -1]) for name in SHOWN},
        }
