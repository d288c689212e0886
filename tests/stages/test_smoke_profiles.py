"""Every recipe's smoke profile runs its whole chain in less than two minutes of two cores, where its extra is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.recipes import shipped_recipes
from tests.benchmarks.smoke import missing_extra, run_smoke

pytestmark = [pytest.mark.slow, pytest.mark.smoke]
CPU_SECONDS = 2 * 120


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", shipped_recipes())
def test_a_smoke_profile_runs_the_whole_chain(name: str, tmp_path: Path) -> None:
    if extra := missing_extra(name):
        pytest.skip(f"amago[{extra}] is not installed")
    found = run_smoke(name, tmp_path)
    assert found["code"] == 0, found["error"]
    assert found["status"] == "done"
    assert min(found[what] for what in ("steps", "updates", "episodes", "trajectories", "steps_per_second")) > 0
    assert found["cpu_seconds"] < CPU_SECONDS
