"""Tuning with runs that only pretend to train: their score follows from their settings."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import IntegrityError, Interrupted, StageFailed, UsageError
from pipelines.events import Event, Notice, Progress
from pipelines.stages.run_processes import PlannedRun
from pipelines.stages.search_space import Dimension
from pipelines.stages.tune import Search, run

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.system

# Scores are highest at a rate of 1e-3. A poor run has poor evaluations from the start and takes long.
FAKE = """
import json, math, os, shutil, sys, time, signal, pathlib
sys.argv[0] = "amago"
from tests.runs.factory import make_run, write_evaluation
path, rate, seed, mode = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
path.parent.mkdir(parents=True, exist_ok=True)
with open(path.parent / f"{path.name}.started", "a") as file: file.write("x")
if mode == "fail":
    print(json.dumps({"error": {"message": "cannot learn"}})); sys.exit(1)
score = 1 - abs(math.log10(rate) + 3) + seed / 1000
if not path.exists():  # at once, since it may be killed at any moment
    new = path.with_name(path.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    make_run(new, scores={10: score / 2}, status=None)
    os.rename(new, path)
poor = mode == "slow" and score < 0.5
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if poor:
    time.sleep(600)
write_evaluation(path, 20, score)
record = json.loads((path / "run.json").read_text())
record["stages"]["run"] |= {"status": "done", "argv": sys.argv}
(path / "run.json.new").write_text(json.dumps(record))
os.replace(path / "run.json.new", path / "run.json")
"""
SPACE = [Dimension(key="train.learning_rate", low=1e-5, high=1e-1, log=True), Dimension(key="x", choices=([1], [1, 2]))]

SETTINGS = {"seed": 5, "about": "a text", "env": {"name": "tmaze"}, "train": {"steps": 9, "learning_rate": 1e-3}}


def search(folder: Path, mode: str = "quick", **fields: Any) -> Search:
    def plan(values: Any, path: Path) -> PlannedRun:
        arguments = (str(path), str(values["train.learning_rate"]), str(values["seed"]), mode)
        assert values["x"] in ([1], [1, 2])
        return PlannedRun(path=path, arguments=arguments)

    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{FAKE}"]
    given = Search(
        directory=folder,
        space=SPACE,
        settings=SETTINGS,
        plan=plan,
        command=command,
        trials=4,
        jobs=2,
        confirm=2,
        seed=5,
    )
    return replace(given, **fields)


def started(folder: Path) -> list[int]:
    """Return how often each trial was started, in order."""
    return [len(path.read_text()) for path in sorted(folder.glob("trial-*.started"))]


def test_the_best_trial_is_confirmed_on_fresh_seeds(tmp_path: Path) -> None:
    result = run(search(tmp_path, trials=6))
    best = result.metrics["best"]
    assert (result.metrics["trials"], result.metrics["complete"], result.metrics["fail"]) == (6, 6, 0)
    assert started(tmp_path) == [1] * 6
    rate = best["settings"]["train.learning_rate"]
    assert best["return_mean"] == pytest.approx(1 - abs(math.log10(rate) + 3) + 0.005)
    scores = [1 - abs(math.log10(rate) + 3) + seed / 1000 for seed in (6, 7)]
    assert sorted(result.metrics["confirmed"]["scores"]) == pytest.approx(scores)
    study = optuna.load_study(
        study_name="tune",
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))),
    )
    assert study.best_trial.number == best["trial"]
    assert len({trial.params["train.learning_rate"] for trial in study.trials}) == 6


def test_repeating_does_nothing_and_more_trials_are_added(tmp_path: Path) -> None:
    first = run(search(tmp_path))
    again = run(search(tmp_path))
    assert again.metrics == first.metrics
    more = run(search(tmp_path, trials=6))
    assert more.metrics["trials"] == 6
    assert started(tmp_path) == [1] * 6
    rates = {json.dumps(row) for row in more.tables[0].rows}
    assert len(rates) == 6


def test_poor_trials_are_pruned_by_their_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.stages.tune._LOOK_SECONDS", 0.0)
    monkeypatch.setattr(
        "optuna.pruners.MedianPruner", lambda **_: optuna.pruners.ThresholdPruner(lower=0.25)
    )  # from the first evaluation on
    texts: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Notice):
            texts.append(event.text)

    result = run(search(tmp_path, mode="slow", trials=8), listener=hear)
    assert result.metrics["pruned"] > 0
    assert result.metrics["complete"] + result.metrics["pruned"] == 8
    assert any("pruned at update 10" in text for text in texts)


def test_a_search_killed_at_any_moment_goes_on_and_repeats_no_trial(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from pathlib import Path; from tests.stages.test_tune import search, run; run(search(Path(sys.argv[1])))"
    )
    for expected in (1, 2, 3):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
        while len(started(tmp_path)) < expected and process.poll() is None:
            time.sleep(0.005)
        with_children = os.getpgid(process.pid)
        os.killpg(with_children, signal.SIGKILL)
        process.wait()
    with (tmp_path / "study.log").open("ab") as file:
        file.write(b'{"op_code": 6, "torn')
    result = run(search(tmp_path))
    assert result.metrics["trials"] == 4
    assert result.metrics["complete"] == 4
    assert len(list(tmp_path.glob("trial-????"))) == 4


def test_an_interrupted_trial_is_resumed_and_not_asked_again(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Progress) and started(tmp_path):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        run(search(tmp_path, jobs=1), listener=stop)
    result = run(search(tmp_path, jobs=1))
    assert result.metrics["complete"] == result.metrics["trials"] == 4


def test_failing_trials_are_recorded_and_all_of_them_failing_ends_the_search(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="cannot learn"):
        run(search(tmp_path, mode="fail", trials=50))
    assert len(started(tmp_path)) <= 4


def test_another_space_metric_or_experiment_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(search(tmp_path, trials=1, confirm=0))
    wider = replace(SPACE[0], high=1.0)
    other: dict[str, dict[str, Any]] = {
        "metric: 'return_mean' -> 'success_mean'": {"metric": "success_mean"},
        "space.x.key: 'x' -> (unset)": {"space": SPACE[:1]},
        "space.train.learning_rate.high: 0.1 -> 1.0": {"space": [wider, SPACE[1]]},
        "train.steps: 9 -> 10": {"settings": SETTINGS | {"train": {"steps": 10, "learning_rate": 1e-3}}},
        "env.name: 'tmaze' -> 'bandit'": {"settings": SETTINGS | {"env": {"name": "bandit"}}},
        "seed: 5 -> 6": {"settings": SETTINGS | {"seed": 6}},
    }
    for difference, fields in other.items():
        with pytest.raises(UsageError) as refused:
            run(search(tmp_path, trials=2, **fields))
        assert difference in refused.value.problems
    assert started(tmp_path) == [1]


def test_settings_that_change_no_score_may_change_in_a_search(tmp_path: Path) -> None:
    run(search(tmp_path, trials=1, confirm=0))
    settings = SETTINGS | {"about": "another", "train": {"steps": 9, "learning_rate": 5.0, "threads": 3}}
    assert run(search(tmp_path, trials=2, settings=settings)).metrics["trials"] == 2


@pytest.mark.parametrize("damage", ["removed", "altered", "emptied"])
def test_a_search_whose_record_of_settings_is_damaged_is_refused(tmp_path: Path, damage: str) -> None:
    run(search(tmp_path, trials=1, confirm=0))
    record = tmp_path / "settings.json"
    if damage == "removed":
        record.unlink()
    else:
        record.write_text(record.read_text().replace("tmaze", "bandit") if damage == "altered" else "")
    with pytest.raises(IntegrityError, match=r"settings\.json"):
        run(search(tmp_path, trials=2))


def test_a_search_killed_before_its_first_trial_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("optuna.samplers.TPESampler", kill)  # made after the journal's first line is written
        with pytest.raises(Killed):
            run(search(tmp_path))
    assert (tmp_path / "study.log").exists()
    assert run(search(tmp_path, trials=1, confirm=0)).metrics["complete"] == 1


def damage(name: str, log: Path) -> None:
    """Damage a journal in a way of that name."""
    good = log.read_bytes()
    lines = good.splitlines(keepends=True)
    score = good.rindex(b'"values":[') + len(b'"values":[')
    contents = {
        "emptied": b"",
        "cut in half": good[: len(good) // 2],
        "a line less": b"".join(lines[:-1]),
        "without its first line": b"".join(lines[1:]),
        "a score altered": good[:score] + b"9" + good[score + 1 :],
        "a byte flipped": good[:40] + b"\xff" + good[41:],
        "foreign JSON": b'{"a": 1}\n',
        "a list": b"[]\n",
        "binary": bytes(range(256)) + b"\n",
        "a huge line": b"x" * 5_000_000 + b"\n",
    }
    log.unlink()
    if name in contents:
        log.write_bytes(contents[name])
    elif name == "a directory":
        log.mkdir()
    elif name == "a pipe":
        os.mkfifo(log)
    else:
        assert name == "a foreign line after it"
        log.write_bytes(good + b'{"op_code": []}\n')


DAMAGES = (
    "emptied",
    "cut in half",
    "a line less",
    "without its first line",
    "a score altered",
    "a byte flipped",
    "foreign JSON",
    "a list",
    "binary",
    "a huge line",
    "a directory",
    "a pipe",
    "a foreign line after it",
)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_journal_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    run(search(tmp_path, trials=2, confirm=0))
    damage(name, tmp_path / "study.log")
    with pytest.raises(IntegrityError, match=r"study\.log' is damaged: .*--run") as refused:
        run(search(tmp_path, trials=3, confirm=0))
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)
    assert started(tmp_path) == [1, 1]
