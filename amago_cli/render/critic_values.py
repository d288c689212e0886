"""Critic values of a trajectory: lines in its drawing, a table of its steps, and all figures for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amago_cli.render.table import cell, plain, render

if TYPE_CHECKING:
    import numpy as np

SHOWN = ("q", "v", "advantage", "weight", "disagreement")
_MOST_STEPS = 20


def acting(figures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Select the acting discount (T,) from the displayed figures (T, discounts)."""
    return {name: figures[name][:, -1] for name in SHOWN}


def steps_table(columns: Mapping[str, np.ndarray], figures: Mapping[str, np.ndarray]) -> str:
    """Tabulate the steps; of a long trajectory only those with the largest absolute advantage."""
    import numpy as np

    shown = acting(figures)
    steps = np.arange(len(shown["q"]))
    title = "step by step"
    if len(steps) > _MOST_STEPS:
        title = f"the {_MOST_STEPS} of {len(steps):,} steps with the largest absolute advantage"
        steps = np.sort(np.argsort(-np.abs(shown["advantage"]), kind="stable")[:_MOST_STEPS])
    rows = [
        [step, _action(columns["action"][step + 1]), float(columns["reward"][step + 1])]
        + [float(shown[name][step]) for name in SHOWN]
        for step in steps.tolist()
    ]
    lines = render(["step", "action", "reward", *SHOWN], rows, show=cell, title=title)
    return "\n".join(f"  {line}" for line in lines)


def as_fields(columns: Mapping[str, np.ndarray], figures: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return lists over steps: actions, rewards, and for each figure a list over discounts, of which the last one
    acts."""
    taken = {name: plain(columns[name][1:]) for name in ("action", "reward")}
    return taken | {name: plain(values) for name, values in figures.items()}


def _action(value: np.ndarray) -> str:
    parts: Sequence[Any] = value.reshape(-1).tolist()
    return " ".join(f"{part:.3g}" if isinstance(part, float) else str(part) for part in parts)
