"""A run is sent whole, once, in order; and nothing that happens to a tracker happens to the run."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines import trust
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, Interrupted, UsageError
from pipelines.events import Event, Notice
from pipelines.files.locks import hold_exclusively
from pipelines.tracking import background
from pipelines.tracking.background import MetricsTail, figures, track_run
from pipelines.tracking.base import TrackerName
from pipelines.training.metrics_log import MetricsLog
from tests.tracking.memory import BLOCKED, MADE, Memory

NAME = "tests.tracking.memory:Memory"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(background, "_SECONDS", 0.01)
    MADE.clear()
    BLOCKED.clear()
    yield
    BLOCKED.set()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.update_record(name="run", id="abcd")
    return run


def train(directory: RunDirectory, *updates: int) -> None:
    for update in updates:
        MetricsLog(directory.metrics_path).append("train", update, {"loss": update / 10})


def sent(directory: RunDirectory, name: str = NAME, **more: Any) -> Memory:
    with track_run([name], directory, {"seed": 1}, **more):
        pass
    return MADE[-1]


def test_everything_is_sent_once_and_in_order(directory: RunDirectory) -> None:
    train(directory, 25, 50)
    MetricsLog(directory.metrics_path).append("evaluate", 50, {"return_mean": 0.5})
    (directory.path / "adaptation.png").write_bytes(b"png")
    directory.videos.mkdir()
    (directory.videos / "000050-0a1b2c3d-3.mp4").write_bytes(b"mp4")
    (directory.videos / "notes.txt").write_text("not a video")
    tracker = sent(directory, f"{NAME}:the argument:its rest")
    assert tracker.argument == "the argument:its rest"
    assert tracker.run.config == {"seed": 1}
    assert (tracker.run.name, tracker.run.identity) == ("run", "run-abcd")
    assert [step for step, _ in tracker.lines] == [25, 50, 50]
    assert tracker.lines[1][1]["train/loss"] == 5.0
    assert tracker.lines[2][1]["evaluate/return_mean"] == 0.5
    assert tracker.files == [("picture", "adaptation", 50), ("video", "evaluate/episode_3", 50)]
    assert tracker.ending == "finished"


def test_lines_are_sent_while_the_run_writes_them(directory: RunDirectory) -> None:
    with track_run([NAME], directory, {}):
        train(directory, 25)
        while not (MADE and MADE[0].lines):
            pass
        assert MADE[0].ending is None
        train(directory, 50)
    assert [step for step, _ in MADE[0].lines] == [25, 50]


def test_a_run_that_is_resumed_continues_in_the_same_place(directory: RunDirectory) -> None:
    train(directory, 25, 50, 75)
    first = sent(directory)
    assert first.run.id == ""
    MetricsLog(directory.metrics_path).rewind(50)  # it was killed after update 75, its checkpoint is of update 50
    train(directory, 75, 100)  # the same again, and one more
    MetricsLog(directory.metrics_path).append("evaluate", 100, {"return_mean": 1.0})
    second = sent(directory)
    assert second.run.id == first.id
    assert [step for step, _ in second.lines] == [100, 100]
    third = sent(directory)
    assert third.lines == []


def test_a_rewind_while_it_is_tracked_repeats_nothing(directory: RunDirectory) -> None:
    train(directory, 25, 50, 75)
    MetricsLog(directory.metrics_path).append("evaluate", 50, {"return_mean": 1.0})
    with track_run([NAME], directory, {}):
        while not (MADE and len(MADE[0].lines) == 4):
            pass
        MetricsLog(directory.metrics_path).rewind(25)
        train(directory, 50, 75, 100)
    assert [step for step, _ in MADE[0].lines] == [25, 50, 75, 50, 100]


def test_a_tracker_that_is_added_later_gets_all_of_it(directory: RunDirectory) -> None:
    train(directory, 25, 50)
    sent(directory, f"{NAME}:a")
    train(directory, 75)
    with track_run([f"{NAME}:a", f"{NAME}:b", f"{NAME}:a"], directory, {}):
        pass
    by_name = {each.argument: [step for step, _ in each.lines] for each in MADE[1:]}
    assert by_name == {"a": [75], "b": [25, 50, 75]}


def test_a_picture_that_changed_is_sent_again(directory: RunDirectory) -> None:
    train(directory, 25)
    picture = directory.path / "adaptation.png"
    picture.write_bytes(b"one")
    assert len(sent(directory).files) == 1
    assert sent(directory).files == []
    picture.write_bytes(b"another")
    os.utime(picture, ns=(1, 1))
    assert len(sent(directory).files) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Unmade", "failed, and the run continues without it: nobody answers"),
        ("Refusing", "failed, and the run continues without it: 7"),
        ("Unclosed", "failed, and the run continues without it: it is gone"),
    ],
)
def test_a_tracker_that_fails_is_a_warning(directory: RunDirectory, name: str, words: str) -> None:
    train(directory, 25)
    heard: list[Event] = []
    with track_run([f"tests.tracking.memory:{name}", NAME], directory, {}, heard.append):
        pass
    warnings = [event.text for event in heard if isinstance(event, Notice) and event.level == "warning"]
    assert warnings == [f"tracker 'tests.tracking.memory:{name}' {words}"]
    whole = next(each for each in MADE if type(each) is Memory)
    assert [step for step, _ in whole.lines] == [25]


def test_what_a_tracker_refused_is_sent_next_time(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    train(directory, 25, 50)

    def refuse(self: Memory, figures: object, *, step: int, seconds: float) -> None:
        raise ConnectionError("down")

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "log", refuse)
        sent(directory)
    assert [step for step, _ in sent(directory).lines] == [25, 50]


def test_a_tracker_that_does_not_end_is_left_behind(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_CLOSING_SECONDS", 0.05)
    heard: list[Event] = []
    with track_run(["tests.tracking.memory:Blocked"], directory, {}, heard.append):
        pass
    assert any(isinstance(each, Notice) and "has not taken everything" in each.text for each in heard)


@pytest.mark.parametrize(("error", "ending"), [(Interrupted("stopped"), "interrupted"), (ValueError("no"), "failed")])
def test_a_tracker_learns_how_the_run_ended(directory: RunDirectory, error: Exception, ending: str) -> None:
    with pytest.raises(type(error)), track_run([NAME], directory, {}):
        raise error
    assert MADE[0].ending == ending


def test_one_process_sends_a_run(directory: RunDirectory) -> None:
    train(directory, 25)
    heard: list[Event] = []
    with hold_exclusively(directory.path / ".track.lock", what="it"), track_run([NAME], directory, {}, heard.append):
        pass
    assert not MADE
    [said] = [event.text for event in heard if isinstance(event, Notice)]
    assert said.startswith("left to the process that tracks this run")


def test_nothing_is_sent_to_a_tracker_that_only_a_file_names(directory: RunDirectory) -> None:
    train(directory, 25)
    heard: list[Event] = []
    with trust.only(["evaluate", "runs/foreign"]), track_run(["wandb:theirs", NAME], directory, {}, heard.append):
        pass
    assert not MADE
    assert [event.text.partition(",")[0] for event in heard if isinstance(event, Notice)] == [
        "nothing is sent to 'wandb:theirs'",
        f"nothing is sent to '{NAME}'",
    ]
    with trust.only(["evaluate", "--track", NAME]), track_run([NAME], directory, {}):
        pass
    assert len(MADE) == 1
    with trust.only(["evaluate", "runs/foreign"]):
        trust.trust_everything()
        with track_run([NAME], directory, {}):
            pass
    assert len(MADE) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"trackers": 5}',
        '{"trackers": {"tests.tracking.memory:Memory": {"id": "--a\\u001b[2J", "train": 99}}}',
        '{"trackers": {"tests.tracking.memory:Memory": {"id": 5}}}',
        '{"trackers": {"tests.tracking.memory:Memory": {"others": -5}}}',
    ],
)
def test_a_damaged_record_begins_another_run_in_the_tracker(directory: RunDirectory, content: str) -> None:
    train(directory, 25)
    directory.track_path.write_text(content)
    tracker = sent(directory)
    assert tracker.run.id == ""
    assert [step for step, _ in tracker.lines] == [25]
    assert json.loads(directory.track_path.read_text())["trackers"][NAME]["train"] == 25


def test_lines_that_are_not_whole_or_not_ours_wait_or_are_passed_over(directory: RunDirectory) -> None:
    tail = MetricsTail(directory.metrics_path)
    assert list(tail.new()) == []
    with directory.metrics_path.open("w") as file:
        file.write('{"update": 1, "stage": "train"}\nnonsense\n{"update": "1", "stage": "train"}\n{"update": 2, "st')
        file.flush()
        assert [entry["update"] for _, entry in tail.new()] == [1]
        file.write('age": "evaluate"}\n{"update": 3, "stage": "evaluate"}\n')
        file.flush()
        assert [(place, entry["update"]) for place, entry in tail.new()] == [(0, 2), (1, 3)]


def test_figures_are_the_numbers_of_a_line() -> None:
    line = {
        "stage": "evaluate",
        "update": 5,
        "time": 1.5,
        "episodes": 10,
        "good": True,
        "return_ci95": [1, 3],
        "per_attempt": [{"success_mean": 0.25, "success_ci95": [0.0, 0.5]}, {"success_mean": 1.0}],
        "per_task": {"a": {"episodes": 1}},
        "normalized_by": "d4rl hopper",
        "diverged": float("nan"),
        "three": [1, 2, 3],
    }
    assert figures(line) == {
        "evaluate/episodes": 10.0,
        "evaluate/good": 1.0,
        "evaluate/return_ci95_low": 1.0,
        "evaluate/return_ci95_high": 3.0,
        "evaluate/attempt_1/success_mean": 0.25,
        "evaluate/attempt_1/success_ci95_low": 0.0,
        "evaluate/attempt_1/success_ci95_high": 0.5,
        "evaluate/attempt_2/success_mean": 1.0,
    }


def test_trackers_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrackerName.parse("tensorboard") == ("tensorboard", "")
    assert TrackerName.parse("wandb:team/project") == ("wandb", "team/project")
    assert TrackerName.parse("mine:Tracker") == ("mine:Tracker", "")
    assert TrackerName.parse(NAME).find_factory() is Memory
    with pytest.raises(UsageError, match="unknown tracker 'wandbb'") as unknown:
        TrackerName.parse("wandbb").find_factory()
    assert unknown.value.hint is not None
    assert "wandb" in unknown.value.hint
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputMissing, match="tracker 'trackio' needs trackio") as missing:
        TrackerName.parse("trackio:project").find_factory()
    assert missing.value.hint == 'pip install "amago[trackio]"'
