"""train: exact resume, atomic checkpoints, what is refused."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from pipelines.config.policy_files import list_checkpoints
from pipelines.data.view import View
from pipelines.errors import InputMissing, Interrupted, UsageError
from pipelines.events import Event, Notice, Progress
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import trajectories
from pipelines.lake.spaces import Spaces
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.lake.writer import is_followed
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.batch import TensorBatch
from pipelines.stages import collect, evaluate, train
from pipelines.stages.train import Source
from pipelines.training.metrics_log import MetricsLog
from tests.stages.recipes import tiny
from tests.tiers import some


@pytest.fixture
def lake(collected: Path) -> Path:
    return collected


def weights(run: Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return dict(checkpoints.load(run / "checkpoints", which).weights)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=0, msg=name)


@pytest.mark.system
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path: Path, lake: Path) -> None:
    settings = tiny(agent={"sequence": {"dropout": 0.2}})
    train.run(settings, run=tmp_path / "whole", lakes=[(lake, 1.0)])
    train.run(settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 3})}),
              run=tmp_path / "parts", lakes=[(lake, 1.0)])  # fmt: skip
    torch.manual_seed(1234)  # what another process would start with
    train.run(settings, run=tmp_path / "parts", lakes=[(lake, 1.0)])
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    whole, parts = (checkpoints.load(tmp_path / run / "checkpoints") for run in ("whole", "parts"))
    for name in ("steps_seen", "update", "data"):
        assert whole.record[name] == parts.record[name]
    a, b = whole.training_state(), parts.training_state()
    for index, state in a["optimizer"]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, b["optimizer"]["state"][index][name], rtol=0, atol=0)


@pytest.mark.system
def test_an_interruption_saves_and_the_same_command_goes_on(tmp_path: Path, lake: Path) -> None:
    def stop_at_two(event: Event) -> None:
        if isinstance(event, Progress) and event.done == 2:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)], listener=stop_at_two)
    assert list_checkpoints(tmp_path / "run/checkpoints") == [2]
    result = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert result.metrics["updates"] == 6
    assert result.metrics["updates_done"] == 4
    train.run(tiny(), run=tmp_path / "whole", lakes=[(lake, 1.0)])
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_finished_training_is_skipped(tmp_path: Path, lake: Path) -> None:
    train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)]).status == "skipped"


@pytest.mark.system
def test_more_steps_extend_a_run_and_other_settings_are_refused(tmp_path: Path, lake: Path) -> None:
    train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    more = train.run(tiny(train={"steps": 8}), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert more.metrics["updates_done"] == 2
    with pytest.raises(UsageError) as refused:
        train.run(tiny(train={"learning_rate": 0.5}), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert refused.value.problems == ("train.learning_rate: 0.0001 -> 0.5",)
    fresh = train.run(tiny(train={"learning_rate": 0.5}), run=tmp_path / "run", lakes=[(lake, 1.0)], fresh=True)
    assert fresh.metrics["updates_done"] == 6


def test_metrics_have_one_line_a_logged_update_after_a_resume(tmp_path: Path, lake: Path) -> None:
    train.run(tiny(train={"steps": 5}), run=tmp_path / "run", lakes=[(lake, 1.0)])
    newest = tmp_path / "run/checkpoints/000005"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()  # as if killed between the checkpoint at 3 and the end
    train.run(tiny(train={"steps": 6}), run=tmp_path / "run", lakes=[(lake, 1.0)])
    lines = MetricsLog(tmp_path / "run/metrics.jsonl").read()
    assert [line["update"] for line in lines] == [2, 4, 6]


@pytest.mark.system
@pytest.mark.parametrize("stopped", some(["a signal", "a target", "a kill"], 0))
def test_metrics_after_a_resume_are_those_of_an_uninterrupted_run(tmp_path: Path, lake: Path, stopped: str) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.done == 3:
            raise Interrupted("stopped") if stopped == "a signal" else KeyboardInterrupt

    whole = {"train": {"steps": 6, "log_every": 2, "checkpoint_every": 3}}
    train.run(tiny(**whole), run=tmp_path / "whole", lakes=[(lake, 1.0)])
    if stopped == "a target":
        train.run(tiny(train=whole["train"] | {"steps": 3}), run=tmp_path / "parts", lakes=[(lake, 1.0)])
    else:
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            train.run(tiny(**whole), run=tmp_path / "parts", lakes=[(lake, 1.0)], listener=stop)
    train.run(tiny(**whole), run=tmp_path / "parts", lakes=[(lake, 1.0)])
    lines = {name: MetricsLog(tmp_path / name / "metrics.jsonl").read() for name in ("whole", "parts")}
    timing = ("time", "cpu_seconds", "updates_per_second")
    plain = {
        name: {line["update"]: {k: v for k, v in line.items() if k not in timing} for line in found}
        for name, found in lines.items()
    }
    assert plain["whole"].keys() == {2, 4, 6}
    assert {update: plain["parts"][update] for update in (2, 4, 6)} == plain["whole"]


def test_the_replay_ratio_is_steps_trained_on_by_steps_collected(tmp_path: Path, lake: Path) -> None:
    result = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    collected = sum(row[0] for row in query(Lake(lake), "select length from trajectories")[1])
    assert result.metrics["env_steps"] == collected > 0
    assert result.metrics["replay_ratio"] == result.metrics["steps_seen"] / collected
    lines = MetricsLog(tmp_path / "run/metrics.jsonl").read()
    assert lines[-1]["replay_ratio"] == result.metrics["replay_ratio"] > lines[0]["replay_ratio"] > 0
    assert 0 < lines[0]["cpu_seconds"] <= lines[-1]["cpu_seconds"]


def test_a_lake_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no lake"):
        train.run(tiny(), run=tmp_path / "run", lakes=[(tmp_path / "nowhere", 1.0)])
    Lake.create(tmp_path / "empty")
    with pytest.raises(InputMissing, match="empty"):
        train.run(tiny(), run=tmp_path / "run", lakes=[(tmp_path / "empty", 1.0)])


def test_a_lake_of_other_spaces_is_refused_by_a_trained_run(tmp_path: Path, lake: Path) -> None:
    train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    collect.run(tiny(env={"name": "dark-key-door"}), lake=tmp_path / "other")
    with pytest.raises(InputMissing, match="other spaces"):
        train.run(tiny(), run=tmp_path / "run", lakes=[(tmp_path / "other", 1.0)])


@pytest.mark.parametrize("wrong", [{"device": "nonsense"}, {"batch_size": 5, "grad_accumulation": 2}])
def test_nothing_is_made_or_lost_for_a_training_that_cannot_start(tmp_path: Path, lake: Path, wrong: dict) -> None:
    with pytest.raises(UsageError):
        train.run(tiny(train=wrong), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert not (tmp_path / "run").exists()
    train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    with pytest.raises(UsageError):
        train.run(tiny(train=wrong), run=tmp_path / "run", lakes=[(lake, 1.0)], fresh=True)
    assert train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)]).status == "skipped"


def test_trajectories_beyond_the_learned_positions_are_refused_at_the_start(tmp_path: Path, lake: Path) -> None:
    longest = query(Lake(lake), "select max(length) from trajectories")[1][0][0]
    for rows, refused in ((longest, True), (longest + 1, False)):
        settings = tiny(agent={"sequence": {"position": "learned", "max_time": rows}})
        with pytest.raises(UsageError, match="max_time") if refused else nullcontext():
            train.run(settings, run=tmp_path / f"run-{rows}", lakes=[(lake, 1.0)])
        assert (tmp_path / f"run-{rows}" / "checkpoints").exists() is not refused


@pytest.mark.system
def test_a_fresh_start_forgets_the_evaluations_of_what_it_replaces(tmp_path: Path, lake: Path) -> None:
    for fresh in (False, True):
        train.run(tiny(seed=int(fresh)), run=tmp_path / "run", lakes=[(lake, 1.0)], fresh=fresh)
        assert evaluate.run(tiny(seed=int(fresh)), run=tmp_path / "run").status == "done"


def test_a_skipped_update_reports_its_loss(tmp_path: Path, lake: Path) -> None:
    done = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    skipped = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert skipped.metrics["loss"] == done.metrics["loss"]


def same_training(a: Path, b: Path) -> None:
    assert_same(weights(a), weights(b))
    one, two = (checkpoints.load(run / "checkpoints") for run in (a, b))
    assert one.record["data"] == two.record["data"]
    left, right = one.training_state()["data"], two.training_state()["data"]
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.system
@pytest.mark.parametrize("prefetch", some([0, 1, 3], 1))
def test_batches_read_ahead_change_nothing(tmp_path: Path, lake: Path, prefetch: int) -> None:
    two_parts = {"grad_accumulation": 2, "prefetch": prefetch}
    train.run(tiny(train={"grad_accumulation": 2, "prefetch": 0}), run=tmp_path / "plain", lakes=[(lake, 1.0)])
    train.run(tiny(train={**two_parts, "steps": 3}), run=tmp_path / "ahead", lakes=[(lake, 1.0)])
    train.run(tiny(train=two_parts), run=tmp_path / "ahead", lakes=[(lake, 1.0)])
    same_training(tmp_path / "plain", tmp_path / "ahead")


EVERYTHING = {
    "weighting": "task",
    "half_life": 200.0,
    "per_alpha": 0.6,
    "per_beta": 0.5,
    "anneal_steps": 4,
    "checkpoint_every": 2,
}


@pytest.mark.system
def test_a_resumed_mixture_with_priorities_equals_an_uninterrupted_one(tmp_path: Path, lake: Path) -> None:
    collect.run(tiny(seed=5), lake=tmp_path / "other")
    lakes = [(lake, 0.8, 0.2), (tmp_path / "other", 0.2)]
    train.run(tiny(train=EVERYTHING), run=tmp_path / "whole", lakes=lakes)
    train.run(tiny(train={**EVERYTHING, "steps": 3}), run=tmp_path / "parts", lakes=lakes)
    train.run(tiny(train=EVERYTHING), run=tmp_path / "parts", lakes=lakes)
    same_training(tmp_path / "whole", tmp_path / "parts")
    known = checkpoints.load(tmp_path / "whole/checkpoints").training_state()["data"]
    measured = [bool(values.any()) for name, values in known.items() if name.endswith("/measured")]
    assert measured == [True, True]


def test_a_checkpoint_says_what_was_drawn_from(tmp_path: Path, lake: Path) -> None:
    collect.run(tiny(seed=5), lake=tmp_path / "other")
    settings = tiny(train={"anneal_steps": 4, "where": "length > 0", "weight": "length"})
    train.run(settings, run=tmp_path / "run", lakes=[(lake, 0.8, 0.2), (tmp_path / "other", 0.5)])
    first, second = checkpoints.load(tmp_path / "run/checkpoints").record["data"]["lakes"]
    assert (first["id"], first["name"]) == (Lake(lake).id, Lake(lake).name)
    assert (first["share"], second["share"]) == ([0.8, 0.2], [0.5, 0.5])
    assert (first["where"], first["weight"]) == ("length > 0", "length")
    assert first["history"] == [[1, len(first["segments"])]]
    assert [len(part["segments"]) > 0 for part in (first, second)] == [True, True]


@pytest.mark.system
def test_other_lakes_or_weights_are_another_configuration(tmp_path: Path, lake: Path) -> None:
    collect.run(tiny(seed=5), lake=tmp_path / "other")
    pair = [(lake, 0.5), (tmp_path / "other", 0.5)]
    train.run(tiny(), run=tmp_path / "run", lakes=pair)
    for lakes in ([(lake, 1.0)], [(lake, 0.5), (tmp_path / "other", 0.7)], [(lake, 0.5)]):
        with pytest.raises(UsageError, match="other lakes"):
            train.run(tiny(), run=tmp_path / "run", lakes=lakes)
    assert train.run(tiny(), run=tmp_path / "run", lakes=pair[::-1]).status == "skipped"
    alone = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)], fresh=True)
    assert alone.metrics["updates_done"] == 6
    assert train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)]).status == "skipped"


def test_lakes_of_different_spaces_are_not_mixed(tmp_path: Path, lake: Path) -> None:
    collect.run(tiny(env={"name": "dark-key-door"}), lake=tmp_path / "other")
    with pytest.raises(InputMissing, match=r"hold steps of different spaces: .* in '.*lake', .* in '.*other'"):
        train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0), (tmp_path / "other", 1.0)])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", [{"where": "lenght > 3"}, {"weight": "length > 'x'"}, {"weight": "0.0 - length"}])
def test_an_expression_that_is_wrong_is_said_before_anything_starts(tmp_path: Path, lake: Path, wrong: dict) -> None:
    with pytest.raises(UsageError):
        train.run(tiny(train=wrong), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert not (tmp_path / "run").exists()


def test_a_selection_of_nothing_is_said(tmp_path: Path, lake: Path) -> None:
    with pytest.raises(InputMissing, match="no trajectories to draw from"):
        train.run(tiny(train={"where": "length > 1000000"}), run=tmp_path / "run", lakes=[(lake, 1.0)])


@pytest.mark.system
def test_a_follower_waits_for_a_lake_and_takes_in_what_comes(tmp_path: Path) -> None:
    """The lake is begun while the trainer waits for it, and filled twice more while it trains."""
    told: list[Event] = []
    counts: list[int] = []

    def listen(event: Event) -> None:
        told.append(event)
        if isinstance(event, Progress) and event.stage == "wait" and len(counts) == 0:
            counts.append(1)
            collect.run(tiny(), lake=tmp_path / "lake")
        if isinstance(event, Progress) and event.stage == "train" and event.done in (2, 4) and event.done > len(counts):
            counts.extend([1] * 2)
            collect.run(tiny(seed=event.done), lake=tmp_path / "lake")

    settings = tiny(train={"follow": True, "refresh_seconds": 1e-6})
    done = train.run(settings, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)], listener=listen)
    assert done.metrics["updates"] == 6
    assert any(isinstance(event, Notice) and event.text.startswith("waiting for lake") for event in told)
    data = checkpoints.load(tmp_path / "run/checkpoints").record["data"]["lakes"][0]
    assert [update for update, _ in data["history"]] == [1, 3, 5]  # seen after an update, drawn from by the next
    assert data["history"][-1][1] == len(data["segments"]) == len(list(Lake(tmp_path / "lake").path.rglob("*.arrow")))


def test_a_follower_that_waits_can_be_interrupted(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Progress):
            raise Interrupted("stopped")

    settings = tiny(train={"follow": True})
    with pytest.raises(Interrupted):
        train.run(settings, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)], listener=stop)
    assert not (tmp_path / "run").exists()


@pytest.mark.system
def test_following_an_unchanged_lake_changes_nothing(tmp_path: Path, lake: Path) -> None:
    train.run(tiny(), run=tmp_path / "plain", lakes=[(lake, 1.0)])
    assert not is_followed(Lake(lake).storage)
    settings = tiny(train={"follow": True, "refresh_seconds": 1e-6})
    train.run(settings, run=tmp_path / "follows", lakes=[(lake, 1.0)])
    assert is_followed(Lake(lake).storage)  # its writers seal sooner
    same_training(tmp_path / "plain", tmp_path / "follows")


@pytest.mark.system
def test_a_follower_that_selects_what_is_new_trains_as_one_that_selects_everything(
    tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments come and expire after fixed updates."""
    for seed in (1, 2):
        collect.run(tiny(seed=seed), lake=lake)
    segments = sorted(lake.glob("segments/*/*.arrow"))
    asked: dict[str, list[int]] = {"new": [], "all": []}
    select_all = View._select

    def grow(there: Path, event: Event) -> None:
        if isinstance(event, Progress) and event.stage == "train" and event.done in (2, 4):
            segment = segments[-event.done // 2]
            shutil.copy(segment, there / segment.relative_to(lake))
        if isinstance(event, Progress) and event.stage == "train" and event.done == 3:
            expire(Lake(there), RetentionLimits(where="uid < '4'"))

    settings = tiny(train={"follow": True, "refresh_seconds": 1e-6, "where": "length > 4", "weight": "length"})
    for run in ("new", "all"):
        there = tmp_path / run / "lake"
        shutil.copytree(lake, there, ignore=shutil.ignore_patterns("index.duckdb*"))
        for segment in segments[-2:]:
            (there / segment.relative_to(lake)).unlink()
        with monkeypatch.context() as patched:
            patched.setattr(View, "_select", lambda view, own=asked[run]: (own.append(1), select_all(view)))
            if run == "all":
                patched.setattr(View, "_update_selection", lambda view: view._select() if view._unselected else None)
            train.run(settings, run=tmp_path / run / "run", lakes=[(there, 1.0)], listener=partial(grow, there))
    assert_same(weights(tmp_path / "new/run"), weights(tmp_path / "all/run"))
    found = [checkpoints.load(tmp_path / run / "run/checkpoints").record["data"]["lakes"][0] for run in asked]
    for name in ("segments", "trajectories", "history"):
        assert found[0][name] == found[1][name]
    assert (len(asked["new"]), len(asked["all"])) == (1, 4)


def test_windows_are_drawn_from_the_selected_by_their_weights(tmp_path: Path, lake: Path) -> None:
    """Against the same selection made by hand."""
    from pipelines.data.mixture import Share
    from pipelines.lake.sql.catalog import query
    from pipelines.lake.store import Lake
    from pipelines.training.data import make_mixture

    opened = Lake(lake)
    settings = tiny(train={"where": "uid < '8' and length > 4", "weight": "length / count(*) over ()"}).train
    mixture = make_mixture([(opened, Share())], opened.only_schema(), settings, seed=0, listener=lambda event: None)
    mixture.refresh(0)
    view = mixture.parts[0].view
    weights = dict(zip((uid.ljust(16, b"\0").hex() for uid in view.uids()), view.table["weight"].tolist(), strict=True))
    _, rows = query(opened, "select uid, length, length > 4 and uid < '8' from trajectories")
    chosen = sum(bool(kept) for *_, kept in rows)
    assert 0 < chosen < len(rows)
    assert weights == pytest.approx(
        {str(uid).replace("-", ""): length / chosen * bool(kept) for uid, length, kept in rows}
    )


class EverySecondIsNaN(torch.nn.Module):
    """A loss of a user's own that breaks every second update."""

    def __init__(self, spaces: Spaces, state_size: int) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, states: torch.Tensor, batch: TensorBatch, mask: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return states[:, 1:, 0] * (0.0 if self.calls % 2 else torch.nan)


def test_the_log_counts_skipped_updates_and_means_are_of_the_others(tmp_path: Path, lake: Path) -> None:
    settings = tiny(agent={"auxiliary_losses": [{"kind": "tests.stages.test_train:EverySecondIsNaN"}]})
    result = train.run(settings, run=tmp_path / "run", lakes=[(lake, 1.0)])
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert [line["skipped_updates"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    assert result.metrics["skipped_updates"] == 3


def test_a_log_line_of_skipped_updates_alone_has_no_loss(tmp_path: Path, lake: Path) -> None:
    settings = tiny(
        agent={"auxiliary_losses": [{"kind": "tests.stages.test_train:EverySecondIsNaN"}]}, train={"log_every": 1}
    )
    train.run(settings, run=tmp_path / "run", lakes=[(lake, 1.0)])
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert ["loss" in line for line in lines] == [True, False] * 3


def test_the_summary_gives_the_mean_return_of_the_finished_episodes(tmp_path: Path) -> None:
    collect.run(tiny(collect={"steps": 108}), run=tmp_path / "a")
    stored = list(trajectories(Lake(tmp_path / "a")))
    returns = [float(each.columns["reward"].sum()) for each in stored if not each.info.tags]
    assert 0 < len(returns) < len(stored)
    lakes = [Source(tmp_path / "a")]
    metrics = train.run(tiny(train={"steps": 1}), run=tmp_path / "b", lakes=lakes).metrics
    assert metrics["data_episodes"] == len(returns)
    assert metrics["data_return_mean"] == pytest.approx(sum(returns) / len(returns))
    best = max(returns)
    chosen = tiny(train={"steps": 1, "where": f"return >= {best - 1e-6}"})
    metrics = train.run(chosen, run=tmp_path / "c", lakes=lakes).metrics
    assert metrics["data_return_mean"] == pytest.approx(best)
    assert metrics["data_episodes"] < len(returns) or set(returns) == {best}
