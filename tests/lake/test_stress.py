"""Writers that are killed, a trainer that follows, readers and maintenance on one lake at once.

AMAGO_STRESS_SECONDS=60 makes each run longer; the figures are printed (pytest -s).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from tests.lake.stress import PLAIN, Outcome, Storm, checksum, differs

SECONDS = float(os.environ.get("AMAGO_STRESS_SECONDS", "20"))


def survives(folder: Path, *, seconds: float, writers: int, seed: int) -> Outcome:
    outcome = Storm(folder, writers=writers, seed=seed).rage(seconds)
    print(json.dumps(outcome.figures()))
    assert not outcome.failures
    assert not outcome.wrong
    assert not outcome.told
    assert not outcome.lost
    assert not outcome.doubled
    assert sorted(outcome.left) == sorted(outcome.live)
    assert not outcome.gone & set(outcome.live)
    assert outcome.corrupt == 0
    assert not outcome.foreign
    assert not outcome.leftovers
    assert outcome.index == outcome.rebuilt
    assert [row[0] for row in outcome.index] == sorted(outcome.live)
    lake = Lake(folder / "lake")
    reader = Reader(lake)
    for uid in set(outcome.acknowledged) & set(outcome.live):
        schema = lake.schema(reader.locate(uid)[0].schema_id)
        assert checksum(schema, reader.read(uid).columns) == outcome.acknowledged[uid]
    derived = [uid for uid in outcome.live if uid in outcome.bases]
    assert {outcome.bases[uid] for uid in derived} <= set(outcome.live)
    for uid in derived:
        assert differs(PLAIN, reader.read(uid).columns) is None
    assert min(outcome.kills, outcome.reads, outcome.windows, outcome.commits, outcome.derived) > 0
    return outcome


@pytest.mark.system
def test_a_short_storm_loses_and_doubles_nothing(tmp_path: Path) -> None:
    survives(tmp_path, seconds=2, writers=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    survives(tmp_path, seconds=SECONDS, writers=8, seed=seed)
