"""Ranks of a chain: rank 0 carries out its stages, and the others take part in those that train.

They are started once, with the command. Between two train stages they wait for orders, with model and data open.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.data.mixture import Share
from pipelines.errors import StageFailed
from pipelines.events import Listener
from pipelines.lake.spaces import Spaces
from pipelines.lake.store import Lake
from pipelines.nets import ranks
from pipelines.stages.result import Result
from pipelines.training.trainer import Trainer


@dataclass(frozen=True)
class TrainOrder:
    """A train stage for all ranks: train from `update` to `target` on lakes with their shares."""

    settings: Settings
    spaces: Spaces
    lakes: tuple[tuple[Path | str, Share], ...]
    update: int
    target: int

    @classmethod
    def of(cls, trainer: Trainer, lakes: tuple[tuple[Path | str, Share], ...], target: int) -> TrainOrder:
        """Describe what rank 0's trainer is about to do."""
        return cls(trainer.settings, trainer.learner.spaces, lakes, trainer.learner.update, target)


def take_part(run: Path, listener: Listener) -> Result:
    """Train whenever rank 0 does, until it has carried out the chain."""
    trainer, opened, started = None, dict[Path | str, Lake](), time.monotonic()
    for order in ranks.receive_orders():
        with ranks.raise_together():
            if trainer is None:
                trainer = Trainer(order.settings, RunDirectory(run), order.spaces)
            if trainer.learner.update != order.update:
                raise StageFailed(
                    f"it has checkpoint {trainer.learner.update} of '{run}', but rank 0 has {order.update}",
                    hint="all ranks need the same directory of the run",
                )
            lakes = []
            for place, share in order.lakes:
                opened[place] = opened.get(place) or Lake(place)
                lakes.append((opened[place], share))
        assert trainer is not None
        trainer.train(trainer.draw_from(lakes, listener), order.target, listener)
    ranks.leave()
    return Result(command="run", status="done", run=run, seconds=time.monotonic() - started)
