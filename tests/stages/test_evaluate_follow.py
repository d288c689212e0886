"""evaluate --follow: every new checkpoint is scored, until the training ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.config.policy_files import list_checkpoints
from pipelines.errors import RequirementNotMet
from pipelines.events import Event, Notice, Progress
from pipelines.files.locks import LockHolder
from pipelines.runs.evaluations import read_evaluations
from pipelines.stages import evaluate, train
from tests.stages.recipes import tiny


class Training:
    """A listener that trains to the next of some updates whenever the evaluation waits; `stage` holds the run's lock
    meanwhile."""

    def __init__(self, run: Path, updates: list[int], monkeypatch: pytest.MonkeyPatch, *, stage: str = "train") -> None:
        self.run, self.updates, self.stage = run, updates, stage
        self.heard: list[str] = []
        monkeypatch.setattr(evaluate, "find_running", lambda path: (stage, LockHolder(pid=1, host="here", since="now")))
        monkeypatch.setattr("pipelines.events.POLL_SECONDS", 0.0)
        self.end = lambda: monkeypatch.setattr(evaluate, "find_running", lambda path: None)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.heard.append(event.text)
        if not isinstance(event, Progress) or event.stage != "wait":
            return
        if self.updates:
            train.run(tiny(train={"steps": self.updates.pop(0)}), run=self.run, lakes=[(self.run / "lake", 1.0)])
        else:
            self.end()


@pytest.mark.system
def test_each_checkpoint_is_evaluated_once(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_checkpoints(trained / "checkpoints")[-1]
    training = Training(trained, [before + 3, before + 6], monkeypatch)
    result = evaluate.follow(tiny(), path=trained, listener=training)
    found, _ = read_evaluations(trained / "evaluations")
    assert {each.update for each in found} == {before, before + 3, before + 6}
    assert result.metrics["update"] == before + 6
    scored = [re.match(r"checkpoint (\d+): return", text) for text in training.heard]
    assert [int(each[1]) for each in scored if each] == [before, before + 3, before + 6]


@pytest.mark.system
def test_a_requirement_is_for_the_last_checkpoint(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_checkpoints(trained / "checkpoints")[-1]
    training = Training(trained, [before + 3], monkeypatch)
    with pytest.raises(RequirementNotMet):
        evaluate.follow(tiny(evaluate={"require": "return_mean > 5"}), path=trained, listener=training)
    assert any(text.startswith(f"checkpoint {before + 3}:") for text in training.heard)


def test_a_collector_in_the_run_does_not_keep_it_waiting(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(trained, [], monkeypatch, stage="collect")
    monkeypatch.setattr(training, "end", lambda: pytest.fail("it waited for the end of the collector"))
    evaluate.follow(tiny(), path=trained, listener=training)


@pytest.mark.full
def test_it_ends_with_a_training_in_another_process(trained: Path) -> None:
    before = list_checkpoints(trained / "checkpoints")[-1]
    amago, run = [sys.executable, "-m", "amago_cli"], str(trained)
    wanted = ["--steps", str(before + 200), "--set", "train.checkpoint_every=40"]
    command = [*amago, "train", "--from-lake", f"{run}/lake", "--run", run, *wanted]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        done = subprocess.run(
            [*amago, "evaluate", run, "--follow", "--episodes", "4", "--output", "json"],
            capture_output=True, text=True, check=True, timeout=900,
        )  # fmt: skip
        _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    last = json.loads(done.stdout)["metrics"]["update"]
    assert last in list_checkpoints(trained / "checkpoints")
