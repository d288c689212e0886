"""A view whose storage fails now and then: what it knows stays true, and in the end it misses nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.data.gather import Gatherer
from pipelines.data.view import TASK, View
from pipelines.errors import StageFailed, StorageError
from pipelines.lake.footer import hex_uids
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from tests.lake.factories import SCHEMA, fill
from tests.tiers import some


class Failing(LocalStorage):
    """Refuses a share of what it is asked."""

    def __init__(self, root: Path, rng: np.random.Generator) -> None:
        super().__init__(root)
        self.rng, self.share = rng, 0.0

    def __getattribute__(self, name: str) -> Any:
        asked = ("names", "folders", "listings", "tail", "read", "exists")
        if name in asked and self.rng.random() < self.share:
            raise StorageError("no connection")
        return super().__getattribute__(name)


@pytest.mark.parametrize("seed", some(range(6), 0, 1))
def test_windows_are_right_between_failures_and_nothing_is_missed(tmp_path: Path, seed: int) -> None:
    lake, rng = Lake.create(tmp_path / "lake"), np.random.default_rng(seed)
    written = fill(lake, [3, 5])
    storage = Failing(tmp_path / "lake", rng)
    watched = Lake(tmp_path / "lake")
    watched.storage = storage
    view = View(watched, SCHEMA.id, extra=(TASK,))
    for step in range(8):
        written |= fill(lake, [3, 5, 4], seed=step)
        if step in (3, 6):
            compact(lake, grace_seconds=1000.0)
        for _ in range(3):
            storage.share = 0.2
            with contextlib.suppress(StorageError, StageFailed):
                view.refresh()
            storage.share = 0.0
            check(view, written)
    view.refresh()
    view.refresh()
    assert sorted(hex_uids(view.uids())) == sorted(written)
    check(view, written)


def check(view: View, written: dict[str, dict[str, np.ndarray]]) -> None:
    """Every trajectory of the view is read as it was written."""
    if not view.num_trajectories:
        return
    uids, chosen = hex_uids(view.uids()), np.arange(view.num_trajectories)
    batch = Gatherer(view, 6).gather(chosen, np.zeros_like(chosen), view.table["length"].astype(np.int64))
    for place, number in enumerate(batch.trajectory.tolist()):
        length = int(batch.lengths[place])
        for name, values in written[uids[number]].items():
            np.testing.assert_array_equal(batch.columns[name][place, :length], values, err_msg=name)
