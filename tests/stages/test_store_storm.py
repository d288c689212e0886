"""Collectors that are killed and trainers that follow, on an object store that fails a third of all requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.store_storm import storm
from tests.conftest import start_server


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_storm_loses_and_doubles_nothing(tmp_path: Path) -> None:
    start_server().stop()  # skips where there is none
    found = storm(tmp_path / "storm", minutes=2.5, collectors=3, trainers=1)
    assert found["kills"] == 2
    assert (found["lost"], found["doubled"], found["corrupt"], found["logs_left"]) == (0, 0, [], 0)
    assert found["trajectories"] >= found["acknowledged"] > 0
    assert found["steps"] == found["steps_reported"]
    assert set(found["trainer_exits"]) == {0}
    fates = found["fates"]
    assert sum(fates.values()) - fates["served"] > 0.25 * sum(fates.values())
    segments, looks = found["segments_seen"]["trainer-0"], found["looks"]["trainer-0"]
    assert 0 < found["served"]["trainer"]["GET segments"] <= 3 * segments
    assert looks > 0
