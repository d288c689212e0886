"""Small settings documents that the tests of the stages share."""

from __future__ import annotations

from typing import Any

from pipelines.config.load import merge, resolve
from pipelines.config.settings import Settings
from pipelines.errors import Interrupted
from pipelines.events import Event, Listener, Progress
from pipelines.rollout.environment import find_env_model

TINY: dict[str, Any] = {
    "report": False,  # a page costs more than such a run
    "env": {"name": "tmaze", "corridor": 4},
    "agent": {
        "gammas": [0.9],
        "timestep": {"hidden": [8], "output": 8},
        "sequence": {"kind": "transformer", "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16},
        "actor": {"hidden": [8]},
        "critic": {"hidden": [8]},
    },
    "collect": {"actors": 4, "steps": 100},
    "train": {
        "steps": 6,
        "context_length": 5,
        "batch_size": 4,
        "warmup_steps": 2,
        "log_every": 2,
        "checkpoint_every": 3,
        "threads": 1,
    },
    "evaluate": {"episodes": 6, "actors": 3},
}


def tiny(**tables: Any) -> Settings:
    """`TINY` with `tables` merged in."""
    return resolve(merge(TINY, tables), env_model=find_env_model)


def stopping(after: int) -> Listener:
    """A listener that interrupts a stage when it has heard of progress `after` times."""
    heard = 0

    def stop(event: Event) -> None:
        nonlocal heard
        heard += isinstance(event, Progress)
        if isinstance(event, Progress) and heard == after:
            raise Interrupted("stopped")

    return stop
