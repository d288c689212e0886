"""Every recipe's smoke profile runs its whole chain in less than two minutes of two cores, where its extra is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.recipes import read_shipped_recipes
from tests.benchmarks.smoke import missing_extra, run_smoke
from tests.formats.d4rl_data import flat, write

pytestmark = [pytest.mark.slow, pytest.mark.smoke]
CPU_SECONDS = 2 * 120


def d4rl_file(cache: Path, source: str) -> None:
    """Something like Hopper's data, in the place of what would be fetched."""
    data = flat([200] * 30, size=11, actions=3)
    (cache / "datasets").mkdir(parents=True)
    write(cache / "datasets" / f"{source.removeprefix('d4rl:')}.hdf5", data)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", read_shipped_recipes())
def test_a_smoke_profile_runs_the_whole_chain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if extra := missing_extra(name):
        pytest.skip(f"amago[{extra}] is not installed")
    if "source" in read_shipped_recipes()[name]:
        d4rl_file(tmp_path / "cache", read_shipped_recipes()[name]["source"]["name"])
        monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))
    found = run_smoke(name, tmp_path)
    assert found["code"] == 0, found["error"]
    assert found["status"] == "done"
    wanted = ["updates", "episodes", "trajectories"]
    recipe = read_shipped_recipes()[name]
    plays = "source" not in recipe or "steps" in recipe  # where its stages are chosen
    if any(entry["stage"] == "collect" for entry in recipe["stages"]) if "stages" in recipe else plays:
        wanted += ["steps", "steps_per_second"]
    assert min(found[what] for what in wanted) > 0
    assert found["cpu_seconds"] < CPU_SECONDS
