"""run: the plan, the whole chain, and going on after it stopped anywhere."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from pipelines.config.load import resolve
from pipelines.config.policy_files import list_checkpoints
from pipelines.config.recipes import find
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing, IntegrityError, Interrupted, UsageError
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.report import run_report
from pipelines.rollout.environment import find_env_model
from pipelines.stages import evaluate
from pipelines.stages import run as chain
from tests.stages.recipes import stopping, tiny
from tests.tiers import some

STAGES = [
    {"stage": "collect", "steps": 120},
    {"stage": "evaluate", "stop_epoch": 1, "label": "before training"},
    {"stage": "train", "steps": 2},
    {"stage": "evaluate", "start_epoch": -1, "label": "after training", "mark_best": True},
    {"stage": "export", "start_epoch": -1},
]


def lake_env() -> dict:
    return {"name": "meta-frozen-lake", "size": 3, "attempts": 2}


def one_epoch() -> Settings:
    return tiny(env=lake_env(), epochs=1, stages=STAGES)


@pytest.fixture(scope="module")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    chain.run(one_epoch(), run=run)
    return run


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """The run of a chain of `one_epoch()`, free to be changed."""
    return Path(shutil.copytree(_finished, tmp_path / "run", symlinks=True))


@pytest.mark.system
def test_chains_report_steps_of_unfinished_episodes_and_whether_critics_can_tell_actions_apart(tmp_path: Path) -> None:
    walk = {"name": "tests.envs.breaking:Walk", "length": 40}
    settings = tiny(env=walk, epochs=2, stages=[{"stage": "collect", "steps": 160}, {"stage": "train", "steps": 2}])
    metrics = chain.run(settings, run=tmp_path / "run").metrics
    first, *_, last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for epoch, line in ((1, first), (2, last)):
        collected = 160 * epoch
        assert 0 < line["in_flight_share"] < 1
        assert line["in_flight_share"] == pytest.approx(1 - line["env_steps"] / collected)
    assert metrics["in_flight_share"] == last["in_flight_share"]
    assert last["gap_to_spread"] == pytest.approx(last["action_gap"] / last["action_spread"])
    assert {name: last[name] for name in ("agreement", "gap_to_spread")}.items() <= metrics.items()


def test_the_plan_follows_every_start_and_stop() -> None:
    settings = tiny(
        epochs=5,
        stages=[
            {"stage": "collect", "steps": 10},
            {"stage": "train", "steps": 3, "start_epoch": 1, "every": 2},
            {"stage": "evaluate", "start_epoch": -1},
            {"stage": "relabel", "stop_epoch": 1},
        ],
    )
    plan = [(step.epoch, step.entry.stage, step.target) for step in chain.plan(settings)]
    assert plan == [
        (0, "collect", 10),
        (0, "relabel", 0),
        (1, "collect", 20),
        (1, "train", 3),
        (2, "collect", 30),
        (3, "collect", 40),
        (3, "train", 6),
        (4, "collect", 50),
        (4, "evaluate", 0),
        (4, "evaluate", 0),
    ]


@pytest.mark.system
def test_episodes_beyond_the_learned_positions_are_refused_before_anything_is_collected(tmp_path: Path) -> None:
    settings = tiny(agent={"sequence": {"position": "learned", "max_time": 5}}, stages=STAGES)  # its horizon is 5
    with pytest.raises(UsageError, match=r"time index 5 .* agent.sequence.max_time to 6 or more"):
        chain.run(settings, run=tmp_path / "run")
    stored = Lake.find(tmp_path / "run/lake")
    assert stored is None or query(stored, "select count(*) from trajectories")[1] == [(0,)]
    settings = tiny(agent={"sequence": {"position": "learned", "max_time": 6}}, stages=STAGES)
    chain.run(settings, run=tmp_path / "run", fresh=True)
    with pytest.raises(UsageError, match="max_time"):
        evaluate.run(tiny(env={"corridor": 9}), run=tmp_path / "run")


@pytest.mark.system
def test_a_chain_learns_is_judged_and_is_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = chain.run(tiny(env=lake_env(), epochs=3, stages=STAGES), run=run)
    assert result.metrics["updates"] == 6
    assert query(Lake(run / "lake"), "select sum(length) from trajectories")[1] == [(360,)]
    versions = query(Lake(run / "lake"), "select distinct policy_version from trajectories order by 1")[1]
    assert versions[-1] == (4,)
    assert (run / "export/policy.json").is_file()
    assert (run / "adaptation.png").read_bytes().startswith(b"\x89PNG")
    table = result.tables[-2]
    assert [row[0] for row in table.rows] == [
        "random",
        "before training",
        "  95% interval",
        "after training",
        "  95% interval",
    ]
    assert checkpoints.load(run / "checkpoints", "best").update == 6


@pytest.mark.system
def test_a_chain_writes_a_page_and_records_where_its_time_went(tmp_path: Path) -> None:
    began, run = time.monotonic(), tmp_path / "run"
    settings = tiny(env=lake_env(), epochs=2, stages=STAGES, report=True)
    result = chain.run(settings, run=run)
    page = (run / "report.html").read_text()
    assert result.outputs[-1] == run / "report.html"
    assert "finished" in page
    assert "Where the time went" in page
    assert "cannot be shown" not in page
    seconds = json.loads((run / "chain.json").read_text())["seconds"]
    assert seconds.keys() == {
        *("collect.env", "collect.policy", "collect.other", "train.data", "train.update", "evaluate", "export")
    }
    assert all(value >= 0 for value in seconds.values())
    assert 0 < sum(seconds.values()) < time.monotonic() - began
    (run / "report.html").unlink()
    again = chain.run(settings, run=run)
    assert again.status == "skipped"
    assert (run / "report.html").exists()


@pytest.mark.system
def test_a_chain_writes_no_page_where_none_is_wanted(finished: Path) -> None:
    assert not one_epoch().report
    assert not (finished / "report.html").exists()


@pytest.mark.system
def test_the_page_of_a_stopped_chain_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "_FIRST_SECONDS", 0.0)
    settings = tiny(env=lake_env(), epochs=3, stages=STAGES, report=True)
    with pytest.raises(Interrupted):
        chain.run(settings, run=tmp_path / "run", listener=stopping(6))
    assert "interrupted" in (tmp_path / "run/report.html").read_text()
    assert chain.run(settings, run=tmp_path / "run").status == "done"
    assert "finished" in (tmp_path / "run/report.html").read_text()


@pytest.mark.system
def test_a_finished_chain_is_skipped(finished: Path) -> None:
    again = chain.run(one_epoch(), run=finished)
    assert again.status == "skipped"
    assert again.tables


@pytest.mark.system
@pytest.mark.parametrize("stop_after", some([1, 3, 6, 9], 1))
def test_a_chain_stopped_anywhere_goes_on(tmp_path: Path, stop_after: int) -> None:
    settings = tiny(env=lake_env(), epochs=3, stages=STAGES)
    with pytest.raises(Interrupted):
        chain.run(settings, run=tmp_path / "run", listener=stopping(stop_after))
    result = chain.run(settings, run=tmp_path / "run")
    assert result.status == "done"
    assert list_checkpoints(tmp_path / "run/checkpoints")[-1] == 6
    assert query(Lake(tmp_path / "run/lake"), "select sum(length) from trajectories")[1][0][0] >= 360
    assert json.loads((tmp_path / "run/chain.json").read_text())["passed"] == 10


def test_a_resolved_configuration_runs_again(finished: Path) -> None:
    _, document = find(str(finished / "config.toml"))
    assert resolve(document, env_model=find_env_model) == one_epoch()


def test_a_recipe_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no stages"):
        chain.run(tiny(), run=tmp_path / "run")


@pytest.mark.system
def test_a_damaged_ledger_is_refused_and_a_fresh_start_helps(finished: Path) -> None:
    (finished / "chain.json").write_text('{"passed": "x"}')
    with pytest.raises(IntegrityError, match=r"chain.json"):
        chain.run(one_epoch(), run=finished)
    assert chain.run(one_epoch(), run=finished, fresh=True).status == "done"
    assert checkpoints.load(finished / "checkpoints", "best").update == 2


def test_nothing_is_made_or_lost_for_an_environment_that_cannot_be_made(tmp_path: Path) -> None:
    wrong = tiny(env={"name": "gym:Nothing-v7", "corridor": 1}, stages=STAGES)
    with pytest.raises(UsageError):
        chain.run(wrong, run=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_a_finished_chain_survives_a_fresh_start_that_cannot_be_made(finished: Path) -> None:
    with pytest.raises(UsageError):
        chain.run(tiny(env={"name": "gym:Nothing-v7", "corridor": 1}, stages=STAGES), run=finished, fresh=True)
    assert chain.run(one_epoch(), run=finished).status == "skipped"


LONG = {"name": "gym:Pendulum-v1", "max_episode_steps": 100}


@pytest.mark.system
@pytest.mark.parametrize("collectors", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_first_epoch_of_long_episodes_has_something_to_train_on(tmp_path: Path, collectors: int) -> None:
    """No episode ends in any epoch: 4 actors play 15 steps each, an episode takes 100."""
    stages = [{"stage": "collect", "steps": 60}, {"stage": "train", "steps": 2}]
    acting = {"collectors": collectors, "actors": 4 // collectors}
    settings = tiny(env=LONG, epochs=3, stages=stages, collect=acting)
    chain.run(settings, run=tmp_path / "run")
    lake = Lake(tmp_path / "run")
    rows = query(lake, "select first_step, length, continues from trajectories order by all")[1]
    # A quarter of the steps or more would be missing at the end of epochs 1 to 3.
    assert rows == sorted([(0, 15, True), (15, 15, True), (30, 15, True)] * 4)
    assert query(lake, "select count(*), sum(complete::int) from episodes")[1] == [(4, 0)]
    chain.run(settings.model_copy(update={"epochs": 4}), run=tmp_path / "run")
    assert query(lake, "select sum(length) from trajectories")[1] == [(240,)]


def test_whole_episodes_only_is_a_choice(tmp_path: Path) -> None:
    stages = [{"stage": "collect", "steps": 60}, {"stage": "train", "steps": 2}]
    settings = tiny(env=LONG, epochs=3, stages=stages, collect={"chunk_steps": 0})
    with pytest.raises(InputMissing, match="no trajectories to draw from"):
        chain.run(settings, run=tmp_path / "run")


@pytest.mark.system
def test_running_pieces_of_a_context_are_cut_where_episodes_are_cut_anyway(tmp_path: Path) -> None:
    stages = [{"stage": "collect", "steps": 60}, {"stage": "train", "steps": 2}]
    settings = tiny(env=LONG, epochs=2, stages=stages, collect={"chunk_steps": 10})
    chain.run(settings, run=tmp_path / "run")
    lengths = query(Lake(tmp_path / "run"), "select chunk, length, continues from trajectories order by first_step")[1]
    assert lengths[::4] == [(0, 10, True), (1, 5, True), (2, 10, True), (3, 5, True)]
