"""Labels in windows: each belongs to the observation of its row, also where two episodes of a history meet."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.config.settings import Settings
from pipelines.data.histories import HistoryContext
from pipelines.data.sampler import WindowSampler
from pipelines.data.strategy import Strategy
from pipelines.data.view import HISTORY, View
from pipelines.lake.footer import hex_uids
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.stages import collect
from tests.rollout.test_labels import leads_to_goal


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    place = tmp_path_factory.mktemp("labels") / "lake"
    room = {"name": "dark-room", "size": 5, "attempts": 1, "attempt_steps": 6}
    wanted = {"steps": 600, "tasks": ["goal=0,1", "goal=4,2"], "copies": 2, "label": "expert", "chunk_steps": 4}
    collect.run(Settings.model_validate({"env": room, "collect": wanted}), lake=place)
    return Lake(place)


@pytest.mark.parametrize("order", ["time", "shuffle", None])
@pytest.mark.parametrize("packed", [False, True])
def test_labels_belong_to_the_observations_of_their_rows(lake: Lake, order: str | None, packed: bool) -> None:
    if packed:
        compact(lake, grace_seconds=0.0)
    history = None if order is None else HistoryContext(order=order)
    view = View(lake, lake.only_schema().id, extra=(*Strategy().extra, *(HISTORY if history else ())))
    view.refresh()
    batch = WindowSampler(view, length=15, history=history).sample(200, np.random.default_rng(0))
    tasks = dict(query(lake, "select uid, task from trajectories")[1])
    uids, joins = hex_uids(view.uids()), 0
    assert batch.trajectory is not None
    for window, rows in enumerate(batch.lengths.tolist()):
        task = tasks[uids[batch.trajectory[window]]]
        joins += int(batch.columns["reset"][window, 1 : rows - 1].sum())
        for row in range(rows - 1):
            label = int(batch.columns["label"][window, row])
            assert leads_to_goal(batch.columns["obs"][window, row], label, task)
    assert (joins > 200) == (history is not None)
