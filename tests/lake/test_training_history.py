"""Which updates could draw a trajectory: what the checkpoints themselves list."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.lake import lineage
from pipelines.lake.lineage import TrainingHistory
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.stages import collect, train
from tests.stages.recipes import tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `a` trains twice, with more trajectories in between; `b` trains on some of them only."""
    home = tmp_path_factory.mktemp("runs")
    for steps, updates in ((20, 2), (40, 4)):
        collect.run(tiny(collect={"actors": 2, "steps": steps}), run=home / "a")
        settings = tiny(train={"steps": updates, "checkpoint_every": 1})
        train.run(settings, run=home / "a", lakes=[(home / "a" / "lake", 1.0)])
    train.run(tiny(train={"where": "task = 'goal=+1'"}), run=home / "b", lakes=[(home / "a" / "lake", 1.0)])
    return home


def by_run(history: TrainingHistory, uid: str, segment: str) -> dict[str, dict[str, object]]:
    return {Path(str(found["run"])).name: found for found in history.list_updates(uid, segment)}


def expected(run: Path) -> dict[str, int]:
    """The first checkpoint that lists each trajectory."""
    first: dict[str, int] = {}
    newest = max(int(path.name) for path in RunDirectory(run).checkpoints.glob("0*"))
    for update in range(newest, 0, -1):
        for uid in lineage.trajectories(run, str(update)):
            first[uid] = update
    return first


@pytest.mark.system
@pytest.mark.parametrize("rewritten", [False, True])
def test_the_first_update_is_that_of_the_lineage(runs: Path, rewritten: bool) -> None:
    lake = Lake(runs / "a")
    if rewritten:
        compact(lake, grace_seconds=0)
    history = TrainingHistory(lake)
    first_a, first_b = expected(runs / "a"), expected(runs / "b")
    assert set(first_a.values()) >= {1, 3}
    _, rows = catalog.query(lake, "select uid, segment from trajectories")
    assert 0 < len(first_b) < len(rows)
    for uid, segment in rows:
        found = by_run(history, uid, segment)
        assert {name: each["first"] for name, each in found.items()} == {
            name: first[uid] for name, first in (("a", first_a), ("b", first_b)) if uid in first
        }
        assert all(checkpoint >= found["a"]["first"] for checkpoint in found["a"]["checkpoints"])  # type: ignore[attr-defined]


def test_a_damaged_run_beside_the_lake_is_left_out(runs: Path) -> None:
    (runs / "c" / "checkpoints" / "000001").mkdir(parents=True)
    (runs / "c" / "config.toml").write_text("x = [")
    (runs / "c" / "checkpoints" / "000001" / "checkpoint.json").write_text("{")
    lake = Lake(runs / "a")
    _, (first, *_) = catalog.query(lake, "select uid, segment from trajectories order by t_commit")
    assert "a" in by_run(TrainingHistory(lake), *first)
