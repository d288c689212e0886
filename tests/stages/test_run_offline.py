"""run: chains that take data in and train on mixtures of it and of what they collect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing, Interrupted, UsageError
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.stages import run as chain
from tests.stages.recipes import stopping, tiny
from tests.stages.test_ingest import content
from tests.tiers import some

EPISODES, LENGTH = 12, 5
MIXED = [
    {"stage": "ingest", "stop_epoch": 1},
    {"stage": "collect", "start_epoch": 1},
    {"stage": "train", "steps": 2, "stop_epoch": 1, "lakes": ["{run}/offline"]},
    {"stage": "train", "steps": 3, "start_epoch": 1, "lakes": ["{run}/offline:1..0", "{run}/lake:0.25..0.75"]},
]


def trajectories() -> Iterator[dict[str, Any]]:
    """Somebody's T-Mazes: five steps to the right."""
    rng = np.random.default_rng(0)
    for _ in range(EPISODES):
        yield {
            "observations": rng.uniform(-1, 1, (LENGTH + 1, 2)).astype("float32"),
            "actions": np.zeros(LENGTH, int),
            "rewards": rng.standard_normal(LENGTH),
            "terminated": True,
        }


NOTHING: list[dict[str, Any]] = []


def offline(**tables: Any) -> Settings:
    source = {"name": f"{__name__}:trajectories", "lake": "{run}/offline"}
    tables = {"source": source, "stages": MIXED, "epochs": 4, "collect": {"steps": 20}, **tables}
    return tiny(**tables)


def count(lake: Path) -> int:
    ((steps,),) = query(Lake(lake), "select coalesce(sum(length), 0) from trajectories")[1]
    return int(steps)


def drawn_from(run: Path) -> dict[str, list[float]]:
    """The weights that each lake of the newest checkpoint had, by its place."""
    told = {lake["id"]: Path(lake["lake"]).name for lake in RunDirectory(run).load_record()["lakes"]}
    data = checkpoints.load(run / "checkpoints").record["data"]
    return {told[part["id"]]: part["share"] for part in data["lakes"]}


def test_the_weights_of_an_epoch_lie_between_the_ends_of_a_range() -> None:
    mixed = [step.settings.train.lakes for step in chain.plan(offline()) if step.entry.stage == "train"]
    assert mixed == [
        ("{run}/offline:1",),
        ("{run}/offline:1", "{run}/lake:0.25"),
        ("{run}/offline:0.5", "{run}/lake:0.5"),
        ("{run}/offline:0", "{run}/lake:0.75"),
    ]
    by_updates = chain.plan(offline(train={"anneal_steps": 100}))
    assert [s.settings.train.lakes for s in by_updates if s.entry.stage == "train"][2] == tuple(MIXED[3]["lakes"])


@pytest.mark.system
def test_data_is_taken_in_learnt_from_and_joined_by_rollouts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = chain.run(offline(), run=run)
    assert (result.metrics["ingested"], result.metrics["updates"]) == (EPISODES * LENGTH, 11)
    assert count(run / "offline") == EPISODES * LENGTH
    assert count(run / "lake") >= 60
    assert drawn_from(run) == {"offline": [0, 0], "lake": [0.75, 0.75]}
    versions = query(Lake(run / "lake"), "select distinct policy_version from trajectories order by 1")[1]
    assert versions[0] == (2,), "the pretrained policy acts from the first rollout on"


@pytest.mark.system
@pytest.mark.parametrize("stop_after", some([2, 5, 9, 14], 2))
def test_stopped_anywhere_it_does_the_rest_and_takes_nothing_in_twice(tmp_path: Path, stop_after: int) -> None:
    with pytest.raises(Interrupted):
        chain.run(offline(), run=tmp_path / "run", listener=stopping(stop_after))
    result = chain.run(offline(), run=tmp_path / "run")
    assert (result.status, result.metrics["updates"]) == ("done", 11)
    assert count(tmp_path / "run/offline") == EPISODES * LENGTH
    assert json.loads((tmp_path / "run/chain.json").read_text())["passed"] == 8
    assert chain.run(offline(), run=tmp_path / "run").status == "skipped"


@pytest.mark.system
def test_offline_data_stays_as_it_is_when_rollouts_expire(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = offline(stages=MIXED[:1], epochs=1)
    chain.run(one, run=tmp_path / "reference")
    chain.run(offline(lake={"max_steps": 20, "grace_seconds": 0.0}, collect={"seal_seconds": 0.01}, epochs=9), run=run)
    assert count(run / "lake") < 8 * 20
    sealed = [path for path in content(run / "offline") if path.endswith(".arrow")]
    assert sealed
    assert count(run / "offline") == EPISODES * LENGTH


@pytest.mark.system
def test_without_lakes_named_all_that_is_filled_is_drawn_from(tmp_path: Path) -> None:
    stages = [*MIXED[:2], {"stage": "train", "steps": 2}]
    chain.run(offline(stages=stages, epochs=2), run=tmp_path / "two")
    assert drawn_from(tmp_path / "two") == {"offline": [1, 1], "lake": [1, 1]}
    own = {"name": f"{__name__}:trajectories"}
    chain.run(offline(stages=[MIXED[0], {"stage": "train", "steps": 2}], epochs=1, source=own), run=tmp_path / "one")
    assert count(tmp_path / "one/lake") == EPISODES * LENGTH


def test_data_alone_needs_no_environment(tmp_path: Path) -> None:
    source = {"name": f"{__name__}:trajectories", "num_actions": 4}
    settings = offline(stages=[MIXED[0], {"stage": "train", "steps": 2}], epochs=1, source=source)
    settings = settings.model_copy(update={"env": type(settings.env)()})
    assert chain.run(settings, run=tmp_path / "run").metrics["updates"] == 2


def test_lakes_of_others_are_drawn_from_and_not_written(tmp_path: Path) -> None:
    chain.run(offline(stages=MIXED[:1], epochs=1), run=tmp_path / "data")
    before = content(tmp_path / "data/offline")
    lakes = [f"{tmp_path}/data/offline", "{run}/lake"]
    stages = [{"stage": "collect"}, {"stage": "train", "steps": 2, "lakes": lakes}]
    chain.run(offline(stages=stages, epochs=2), run=tmp_path / "run")
    assert drawn_from(tmp_path / "run") == {"offline": [1, 1], "lake": [1, 1]}
    assert content(tmp_path / "data/offline") == before


def test_what_is_missing_is_told_before_anything_is_written(tmp_path: Path) -> None:
    gone = {"name": f"npz:{tmp_path}/nothing", "lake": "{run}/offline"}
    with pytest.raises(InputMissing):
        chain.run(offline(source=gone), run=tmp_path / "run")
    with pytest.raises(InputMissing, match="no trajectories"):
        chain.run(offline(source={"name": f"{__name__}:NOTHING"}), run=tmp_path / "run")
    nothing = [{"stage": "train", "lakes": ["{run}/lake:0..1"]}]
    with pytest.raises(UsageError, match="add up to 0"):
        chain.run(offline(stages=nothing), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.system
def test_a_fresh_start_takes_everything_in_anew(tmp_path: Path) -> None:
    chain.run(offline(), run=tmp_path / "run")
    chain.run(offline(), run=tmp_path / "run", fresh=True)
    assert count(tmp_path / "run/offline") == EPISODES * LENGTH
    assert count(tmp_path / "run/lake") < 100
