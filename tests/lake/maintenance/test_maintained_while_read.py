"""A process that compacts, expires and sweeps at once, under one that draws all the time."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from pipelines.data.view import View
from pipelines.lake.store import Lake
from tests.data.seeded import SeededSampler
from tests.lake.factories import SCHEMA, columns, fill, segment_files

MAINTAIN = """
import sys
from pipelines.lake.maintenance.compaction import CompactionRules, compact
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.store import Lake
from tests.lake.factories import SCHEMA, fill
lake = Lake(sys.argv[1])
for number in range(int(sys.argv[2])):
    fill(lake, [30] * 20, seed=number, seal_every=2)
    expire(lake, RetentionLimits(max_trajectories=300 if number % 3 else 250), grace_seconds=0.01)
    compact(lake, CompactionRules(small_bytes=1 << 20, target_bytes=1 << 20, settle_seconds=0.0), grace_seconds=0.01)
"""


@pytest.mark.system
def test_a_reader_draws_the_right_bytes_while_everything_moves_and_dies(lake: Lake) -> None:
    fill(lake, [30] * 300, seed=99, seal_every=3)
    view = View(lake, SCHEMA.id)
    view.refresh()
    sampler = SeededSampler(view, length=8, seed=0)
    assert len(segment_files(lake)) == 100
    known = expected(12)
    moves, drawn, files = 0, 0, set()
    with subprocess.Popen([sys.executable, "-c", MAINTAIN, str(lake.path), "12"]) as process:
        looked = time.monotonic()
        while process.poll() is None:
            batch = sampler.sample(16)
            for i, length in enumerate(batch.lengths.tolist()):
                window = batch.columns["obs.state"][i, :length]
                assert window.tobytes() in known
                assert not batch.columns["obs.state"][i, length:].any()
            drawn += 1
            if time.monotonic() - looked > 0.2:
                view.refresh()
                looked = time.monotonic()
            files |= {segment.file for segment in view.live.segments}
            moves = view.moves
        assert process.returncode == 0
    view.refresh(), view.refresh()
    fresh = View(lake, SCHEMA.id)
    fresh.refresh()
    assert set(view.uids().tolist()) == set(fresh.uids().tolist())
    assert view.num_trajectories == 290
    assert moves >= 3
    assert len(files) > 105
    assert drawn > 20


def expected(seeds: int) -> bytes:
    """The observations of all trajectories that are ever written, one after another."""
    pieces = []
    for seed, count in [*((seed, 20) for seed in range(seeds)), (99, 300)]:
        rng = np.random.default_rng(seed)
        pieces += [columns(rng, 30)["obs.state"].tobytes() for _ in range(count)]
    return b"".join(pieces)
