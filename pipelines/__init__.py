"""The engine of amago: silent, typed and importable; it reports through events and returns results.

The names in `__all__` are its public API. Each is imported on first use, so that `from pipelines import Lake` does not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.config.settings import Settings
    from pipelines.export.policy_bundle import load_policy
    from pipelines.lake.store import Lake
    from pipelines.stages.library import collect, evaluate, train
    from pipelines.stages.recipe import run
    from pipelines.training.dataset import WindowDataset

__all__ = ["Lake", "Settings", "WindowDataset", "collect", "evaluate", "load_policy", "run", "train"]

_PLACES = {
    "Lake": "pipelines.lake.store",
    "Settings": "pipelines.config.settings",
    "WindowDataset": "pipelines.training.dataset",
    "collect": "pipelines.stages.library",
    "evaluate": "pipelines.stages.library",
    "load_policy": "pipelines.export.policy_bundle",
    "run": "pipelines.stages.recipe",
    "train": "pipelines.stages.library",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'pipelines' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
