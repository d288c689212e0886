"""relabel, when something is wrong: an error leaves the lake as it was, an interruption keeps what was derived."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pipelines.errors import Interrupted, UsageError
from pipelines.events import Event, Progress
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.reading import trajectories
from pipelines.lake.store import Lake
from pipelines.stages import collect, relabel
from tests.stages.recipes import tiny

MAZE = {"name": "mazerunner", "size": 9, "goals": 2, "max_episode_steps": 20}
SOME = {"relabeler": ["instruction:all", "return:0.9"], "copies": 2}


@pytest.fixture(scope="module")
def _lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = tmp_path_factory.mktemp("relabelled") / "lake"
    for seed in range(3):  # a segment each
        collect.run(tiny(seed=seed, env=MAZE, collect={"steps": 120}), lake=lake)
    return lake


@pytest.fixture
def lake(_lake: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_lake, tmp_path / "lake", symlinks=True))


def files(lake: Path) -> list[str]:
    """All but the index, which questions may build."""
    found = (path.relative_to(lake).as_posix() for path in lake.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith("index"))


def versions(lake: Path) -> dict[str, tuple[str, ...]]:
    found = trajectories(Lake(lake), "base_uid is not null")
    return {each.uid: (each.columns["reward"].tobytes(), str(dict(each.info.tags))) for each in found}


@pytest.mark.system
def test_a_function_that_fails_late_leaves_the_lake_as_it_was(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, before, called = ModuleType("mine"), files(lake), []

    def pay(columns: dict[str, np.ndarray]) -> np.ndarray:
        called.append(1)
        return columns["reward"] * (np.nan if len(called) == 15 else 1.0)

    mine.pay = pay  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    with pytest.raises(UsageError, match="'mine:pay' is NULL or NaN"):
        relabel.run(tiny(env=MAZE, relabel={"relabeler": "reward:mine:pay"}), lake=lake)
    assert len(called) >= 15
    assert files(lake) == before


@pytest.mark.system
def test_an_interruption_keeps_what_was_derived_and_the_rest_follows(lake: Path, tmp_path: Path) -> None:
    settings = tiny(env=MAZE, relabel=SOME)

    def stop(event: Event) -> None:
        if isinstance(event, Progress):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        relabel.run(settings, lake=lake, listener=stop)
    some = versions(lake)
    assert len(some) > 3
    result = relabel.run(settings, lake=lake)
    assert result.metrics["trajectories"] > 0
    whole = versions(lake)
    assert len(whole) == len(some) + result.metrics["trajectories"]
    assert some.items() <= whole.items()
    assert all("return@0.9" in tags for _, tags in whole.values())
    assert relabel.run(settings, lake=lake).metrics["trajectories"] == 0
    report = verify(Lake(lake))
    assert report.corrupt == ()
    assert not [name for name in files(lake) if name.startswith(("tmp/", "wal/"))]


@pytest.mark.system
def test_other_seeds_and_relabelers_add_other_versions(lake: Path) -> None:
    for seed in (0, 1):
        relabel.run(tiny(seed=seed, env=MAZE, relabel={"relabeler": "instruction:all"}), lake=lake)
    relabel.run(tiny(env=MAZE, relabel={"relabeler": "hindsight", "strategy": "random"}), lake=lake)
    found = list(trajectories(Lake(lake), "base_uid is not null"))
    assert len({each.uid for each in found}) == len(found)
    assert {each.info.source for each in found} == {"relabel"}
    assert all(each.info.success for each in found if each.columns["reward"].sum() == 2)
