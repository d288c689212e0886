"""The windows that `amago train` draws, for a training loop of your own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from pipelines.config.settings import TrainSettings
from pipelines.data.mixture import Share
from pipelines.errors import UsageError
from pipelines.events import silent
from pipelines.lake.store import Lake
from pipelines.training.data import make_mixture

# Not those of prioritised replay, whose errors only `train` knows.
_SETTINGS = {"weighting", "placement", "half_life", "burn_in", "context", "relabel", "verify"}
_SETTINGS |= {"history_order", "history_stride", "history_horizon"}


class WindowDataset(IterableDataset[dict[str, Tensor]]):
    """Batches of windows of `length` steps, drawn from one lake or several for ever; `refresh` batches apart, it looks
    for what collectors have added.

    `settings` are those of `[train]` about drawing (docs/settings.md): `weighting`, `placement`, `half_life`,
    `burn_in`, `context` and `history_*`, `relabel`, `verify`. Batch number k depends on `seed`, k and the lakes alone:
    with N workers of a DataLoader, which draw every N-th batch each, the batches are those of one process, unless the
    lakes change. InputMissing where a lake is missing or has nothing to draw from, UsageError for wrong SQL, another
    setting or a wrong value.

    A batch is a dictionary of tensors: every column of the lake (B, length + 1, ...), `mask` (B, length), true where a
    step counts, `start` (B,), the time of a window's first row in its episode, and `lengths` (B,), its valid rows. Row
    t + 1 holds the action that was taken at row t, its reward, and what was observed then. Steps that only warm up a
    memory do not count. Of a `history`, `cut_off` (B, length) are the steps after which an episode was truncated.

    >>> windows = iter(WindowDataset("runs/maze", length=8, batch_size=4, where="length > 2"))
    >>> batch = next(windows)
    >>> tuple(batch["action"].shape), tuple(batch["mask"].shape)
    ((4, 9), (4, 8))
    """

    def __init__(
        self,
        *places: Path | str,
        length: int,
        batch_size: int,
        where: str = "",
        weight: str = "",
        seed: int = 0,
        refresh: int = 1000,
        **settings: Any,
    ) -> None:
        if not places:
            raise UsageError("WindowDataset has no lake to draw from", hint='name one: WindowDataset("runs/x", ...)')
        if others := sorted(settings.keys() - _SETTINGS):
            taken = ", ".join(sorted(_SETTINGS))
            raise UsageError(f"WindowDataset does not take '{others[0]}'", hint=f"of [train] it takes: {taken}")
        self._places, self._batch_size, self._seed, self._refresh = places, batch_size, seed, refresh
        chosen = {"context_length": length, "batch_size": batch_size, "where": where, "weight": weight}
        if seed < 0:
            raise UsageError(f"WindowDataset: seed is {seed}", hint="it must be 0 or more")
        try:
            self._train = TrainSettings.model_validate(chosen | settings)
        except ValidationError as error:
            first = error.errors()[0]
            name = {"context_length": "length"}.get(str(first["loc"][0]), str(first["loc"][0])) if first["loc"] else ""
            raise UsageError(f"WindowDataset: {name or 'its settings'}: {first['msg']}") from error
        for place in places:
            Lake(place)  # refused here, not in a worker

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Draw from the first batch on, from what the lakes hold now."""
        lakes = [Lake(place) for place in self._places]
        shares = [(lake, Share()) for lake in lakes]
        mixture = make_mixture(shares, lakes[0].only_schema(), self._train, seed=self._seed, listener=silent)
        worker = get_worker_info()
        number, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for drawn in range(1 << 62):
            if drawn % max(self._refresh // step, 1) == 0:
                mixture.refresh(number)
                mixture.shares(number)  # refuses lakes that are empty
            batch = mixture.sample(self._batch_size, number)
            mask = batch.mask
            if batch.warm_up is not None:
                mask &= np.arange(mask.shape[1]) >= batch.warm_up[:, None]
            found = {**batch.columns, "mask": mask, "start": batch.start, "lengths": batch.lengths}
            if batch.cut_off is not None:
                found["cut_off"] = batch.cut_off
            yield {name: torch.from_numpy(values) for name, values in found.items()}
            number += step
