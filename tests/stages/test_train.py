"""train: exact resume, atomic checkpoints, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.errors import InputMissing, Interrupted, UsageError
from pipelines.events import Event, Progress
from pipelines.stages import collect, evaluate, train
from pipelines.training import checkpoint as checkpoints
from pipelines.training.metrics_log import MetricsLog
from tests.stages.recipes import tiny


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    collect.run(tiny(), lake=tmp_path / "lake")
    return tmp_path / "lake"


def weights(run: Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return dict(checkpoints.load(run / "checkpoints", which).weights)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=0, msg=name)


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
    assert torch.equal(a["generator"], b["generator"])
    assert torch.equal(a["torch"], b["torch"])
    for index, state in a["optimizer"]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, b["optimizer"]["state"][index][name], rtol=0, atol=0)


def test_an_interruption_saves_and_the_same_command_goes_on(tmp_path: Path, lake: Path) -> None:
    def stop_at_two(event: Event) -> None:
        if isinstance(event, Progress) and event.done == 2:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)], listener=stop_at_two)
    assert checkpoints.numbers(tmp_path / "run/checkpoints") == [2]
    result = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert result.metrics["updates"] == 6
    assert result.metrics["updates_done"] == 4
    train.run(tiny(), run=tmp_path / "whole", lakes=[(lake, 1.0)])
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_finished_training_is_skipped(tmp_path: Path, lake: Path) -> None:
    train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)]).status == "skipped"


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


def test_a_lake_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    from pipelines.lake.store import Lake

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


@pytest.mark.parametrize("wrong", [{"device": "nonsense"}, {"batch_size": 5, "accumulate": 2}])
def test_nothing_is_made_or_lost_for_a_training_that_cannot_start(tmp_path: Path, lake: Path, wrong: dict) -> None:
    with pytest.raises(UsageError):
        train.run(tiny(train=wrong), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert not (tmp_path / "run").exists()
    train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    with pytest.raises(UsageError):
        train.run(tiny(train=wrong), run=tmp_path / "run", lakes=[(lake, 1.0)], fresh=True)
    assert train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)]).status == "skipped"


def test_a_fresh_start_forgets_the_evaluations_of_what_it_replaces(tmp_path: Path, lake: Path) -> None:
    for fresh in (False, True):
        train.run(tiny(seed=int(fresh)), run=tmp_path / "run", lakes=[(lake, 1.0)], fresh=fresh)
        assert evaluate.run(tiny(seed=int(fresh)), run=tmp_path / "run").status == "done"


def test_what_is_skipped_tells_its_loss(tmp_path: Path, lake: Path) -> None:
    done = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    skipped = train.run(tiny(), run=tmp_path / "run", lakes=[(lake, 1.0)])
    assert skipped.metrics["loss"] == done.metrics["loss"]
