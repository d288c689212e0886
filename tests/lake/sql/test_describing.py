from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from pipelines.lake import collectors
from pipelines.lake.log import protect
from pipelines.lake.sql.describing import describe
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, INFO, SCHEMA, columns, fill, remove, segment_files


def test_figures_are_those_of_what_was_written(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7, 8, 9], seal_every=2)
    found = describe(lake)
    lengths = [len(values["reward"]) - 1 for values in written.values()]
    stored = sum(path.stat().st_size for path in segment_files(lake))
    assert (found["trajectories"], found["steps"], found["segments"]) == (5, sum(lengths), 3)
    assert found["bytes"] == stored
    assert found["bytes_per_step"] == pytest.approx(stored / (sum(lengths) + 5))
    tasks = {row["task"]: row for row in found["tasks"]}
    for number in range(3):
        own = lengths[number::3]
        row = tasks[f"t{number}"]
        assert (row["trajectories"], row["length_min"], row["length_max"]) == (len(own), min(own), max(own))
        assert row["length_mean"] == np.mean(own)
        returns = [float(values["reward"][1:].sum(dtype=np.float64)) for values in list(written.values())[number::3]]
        assert row["return_mean"] == pytest.approx(np.mean(returns))
    assert found["task_count"] == 3


def test_collectors_say_how_long_ago_they_last_wrote(lake: Lake) -> None:
    began = time.time()
    with lake.writer(SCHEMA) as writer:
        writer.append(columns(np.random.default_rng(0), 4), INFO)
    collectors.register(
        lake, "c0", run={"path": "runs/x", "absolute": "/runs/x", "id": "x"}, env={"name": "maze"}, seed=1,
        process={"host": "gpu03", "pid": 12, "started": 1.0},
    )  # fmt: skip
    (row,) = describe(lake)["collectors"]
    assert (row["collector"], row["steps"], row["run"], row["host"], row["pid"]) == ("c0", 4, "runs/x", "gpu03", 12)
    assert 0 <= row["seconds_since_commit"] <= time.time() - began + 1


def test_what_died_is_counted(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7, 8], seal_every=2)
    one, two = ("/".join(path.parts[-2:]).removesuffix(".arrow") for path in segment_files(lake))
    remove(lake, time=1.0, reason="x", segments=(one,))
    remove(lake, time=1.0, reason="x", trajectories={two: (list(written)[2],)})
    found = describe(lake)
    assert (found["trajectories"], found["segments"], found["log_entries"]) == (1, 1, 2)
    assert (found["expired_trajectories"], found["superseded_or_expired_segments"]) == (1, 1)


def test_wide_columns_are_told_by_what_they_take_on_the_disk(lake: Lake) -> None:
    fill(lake, [50], schema=IMAGES)
    rows = {row["column"]: row for row in describe(lake)["columns"]}
    total = sum(path.stat().st_size for path in segment_files(lake))
    assert rows["reward"]["stored_bytes"] == rows["reward"]["bytes"] == 4
    plain = sum(row["bytes"] for name, row in rows.items() if name != "obs")
    assert rows["obs"]["bytes"] == 1200
    assert rows["obs"]["stored_bytes"] == pytest.approx(total / 51 - plain)


def test_segments_are_counted_by_size_and_protection_is_told(lake: Lake) -> None:
    fill(lake, [5, 6], seal_every=1)
    protect(lake)
    found = describe(lake)
    assert Counter({row["size"]: row["segments"] for row in found["segment_sizes"]})["below 1 MiB"] == 2
    assert found["protected"]
    assert [row["name"] for row in found["protections"]] == ["lake"]


def test_an_empty_lake_has_a_description(lake: Lake) -> None:
    found = describe(lake)
    assert (found["trajectories"], found["bytes_per_step"], found["tasks"]) == (0, None, [])
