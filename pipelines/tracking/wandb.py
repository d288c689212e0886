"""Weights & Biases: `wandb:PROJECT`, or `wandb:ENTITY/PROJECT`.

WANDB_MODE=offline writes to RUN/wandb, for `wandb sync`. It never asks for a login: without an API key, tracking fails.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from pipelines.tracking.base import Ending, TrackedRun

_STEP = "update"


class WandbTracker:
    """One run of W&B, resumed by its id."""

    def __init__(self, argument: str, run: TrackedRun) -> None:
        mode: Any = os.environ.get("WANDB_MODE") or None
        if mode in (None, "online") and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key: `wandb login`, or WANDB_MODE=offline")
        entity, _, project = argument.rpartition("/")
        self.id = run.id or secrets.token_hex(4)
        self._run = wandb.init(
            entity=entity or None,
            project=project or "amago",
            name=run.name,
            id=self.id,
            resume="allow",
            reinit="create_new",
            dir=str(run.directory),
            config=dict(run.config),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        offline = f"offline, send it by `wandb sync {Path(self._run.dir).parent}`"
        self.place = offline if self._run.offline else str(self._run.url)

    def log(self, figures: Mapping[str, float], *, step: int, seconds: float) -> None:
        self._run.log({**figures, _STEP: step})

    def picture(self, name: str, path: Path, *, step: int) -> None:
        self._run.log({name: wandb.Image(str(path)), _STEP: step})

    def video(self, name: str, path: Path, *, step: int) -> None:
        self._run.log({name: wandb.Video(str(path), format=path.suffix[1:]), _STEP: step})

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=0 if ending == "finished" else 1)
