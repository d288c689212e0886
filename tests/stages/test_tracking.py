"""Stages send what they do to trackers, and do the same with them as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import UsageError
from pipelines.stages import collect, evaluate, library, train
from pipelines.stages import run as chain
from tests.stages.recipes import tiny
from tests.tracking.memory import MADE

NAME = "tests.tracking.memory:Memory"
TRACK = {"to": [NAME]}
STAGES = [{"stage": "collect"}, {"stage": "train"}, {"stage": "evaluate", "label": "after"}]


@pytest.fixture(autouse=True)
def _forget() -> None:
    MADE.clear()


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without times."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = ("time", "cpu_seconds", "updates_per_second")
    return [{key: value for key, value in entry.items() if key not in times} for entry in entries]


@pytest.mark.system
def test_training_is_the_same_to_the_bit_and_goes_to_the_tracker(tmp_path: Path) -> None:
    collect.run(tiny(), run=tmp_path / "data")
    for name, more in (("plain", {}), ("tracked", {"track": TRACK})):
        train.run(tiny(**more), run=tmp_path / name, lakes=[(tmp_path / "data/lake", 1.0)])
    assert lines(tmp_path / "plain") == lines(tmp_path / "tracked")
    [tracker] = MADE
    assert [(step, figures["train/loss"]) for step, figures in tracker.lines] == [
        (line["update"], line["loss"]) for line in lines(tmp_path / "tracked")
    ]
    assert tracker.run.config["env"]["name"] == "tmaze"
    assert tracker.ending == "finished"


@pytest.mark.system
def test_a_resume_and_an_evaluation_continue_in_the_same_place(tmp_path: Path) -> None:
    run = tmp_path / "run"
    collect.run(tiny(), run=run)
    lakes = [(run / "lake", 1.0)]
    train.run(tiny(track=TRACK), run=run, lakes=lakes)
    train.run(tiny(track=TRACK, train={"steps": 8}), run=run, lakes=lakes)
    evaluate.run(tiny(track=TRACK), run=run)
    assert [each.run.id for each in MADE] == ["", MADE[0].id, MADE[0].id]
    assert [[step for step, _ in each.lines] for each in MADE] == [[2, 4, 6], [8], [8]]
    assert "evaluate/test/return_mean" in MADE[2].lines[0][1]
    train.run(tiny(track=TRACK), run=run, lakes=lakes, fresh=True)
    assert MADE[3].run.id == ""  # another run


@pytest.mark.system
def test_a_tracker_may_be_added_left_out_or_changed_when_a_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    collect.run(tiny(), run=run)
    lakes = [(run / "lake", 1.0)]
    train.run(tiny(), run=run, lakes=lakes)
    train.run(tiny(track=TRACK, train={"steps": 8}), run=run, lakes=lakes)
    train.run(tiny(train={"steps": 10}), run=run, lakes=lakes)
    assert [step for step, _ in MADE[0].lines] == [2, 4, 6, 8]
    assert len(MADE) == 1


@pytest.mark.system
def test_a_chain_sends_all_its_stages_by_one_tracker(tmp_path: Path) -> None:
    lake = {"name": "meta-frozen-lake", "size": 3, "attempts": 2}
    chain.run(tiny(stages=STAGES, env=lake, track=TRACK), run=tmp_path / "run")
    [tracker] = MADE
    assert {name.partition("/")[0] for _, figures in tracker.lines for name in figures} == {"train", "evaluate"}
    assert ("picture", "adaptation", 6) in tracker.files
    chain.run(tiny(stages=STAGES, env=lake, track=TRACK), run=tmp_path / "run")  # nothing to do
    assert MADE[1].lines == []


def test_an_unknown_tracker_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown tracker 'tensorbord'"):
        chain.run(tiny(stages=STAGES, track={"to": ["tensorbord"]}), run=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.system
def test_a_library_call_does_not_send_to_trackers_that_a_run_names(tmp_path: Path) -> None:
    chain.run(tiny(stages=STAGES, track=TRACK), run=tmp_path / "run")
    assert len(MADE) == 1
    library.evaluate(tmp_path / "run", episodes=3)
    assert len(MADE) == 1
    library.evaluate(tmp_path / "run", episodes=4, settings={"track.to": [NAME]})
    assert len(MADE) == 2
