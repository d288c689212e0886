from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import Interrupted, Locked, StageFailed, UsageError
from pipelines.events import Event, Notice, Progress
from pipelines.files.locks import hold_exclusively
from pipelines.stages.result import Result
from pipelines.stages.run_processes import EndedRun, PlannedRun, RunProcesses
from pipelines.stages.sweep import make_cells, name_cells
from pipelines.stages.sweep import run as run_sweep
from tests.runs.factory import make_run

# A stand-in for `amago run`: makes a run as the tests' factory does, or fails, as its arguments say.
FAKE = """
import json, sys, time, signal, pathlib
sys.argv[0] = "amago"
from tests.runs.factory import make_run
path, what = pathlib.Path(sys.argv[3]), sys.argv[4]
if what == "fail":
    print(json.dumps({"error": {"message": "no space left", "problems": ["a", "b"]}})); sys.exit(1)
if what == "crash":
    sys.exit("a traceback")
if what == "busy" and not (path.parent / "seen").exists():
    (path.parent / "seen").write_text(""); sys.exit(75)
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: ((path.parent / f"{path.name}.stopped").write_text(""), sys.exit(143)))
    (path.parent / f"{path.name}.waiting").write_text("")
    time.sleep(600)
make_run(path, scores={10: float(what)})
record = json.loads((path / "run.json").read_text())
record["stages"]["run"]["argv"] = sys.argv
(path / "run.json").write_text(json.dumps(record))
"""

SETTINGS = {"env": {"name": "tmaze"}, "train": {"steps": 9, "batch_size": 4, "threads": 1}, "seed": 0}


def run(cells: list[PlannedRun], **fields: Any) -> Result:
    return run_sweep(cells, **{"settings": SETTINGS, "varied": ["train.batch_size", "seed"], **fields})


def command() -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{FAKE}"]


def planned(folder: Path, **what: str) -> list[PlannedRun]:
    return [
        PlannedRun(path=folder / name, arguments=("run", "--run", str(folder / name), each))
        for name, each in what.items()
    ]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pipelines.stages.run_processes._RETRY_SECONDS", 0.01)


def test_a_grid_is_every_combination_with_every_seed() -> None:
    cells = make_cells({"a": [1, 2], "b": ["x"]}, range(5, 7))
    assert cells == [{"a": a, "b": "x", "seed": seed} for a in (1, 2) for seed in (5, 6)]
    assert make_cells({}, [0]) == [{"seed": 0}]
    with pytest.raises(UsageError, match="seed"):
        make_cells({"seed": [1]}, [0])
    with pytest.raises(UsageError, match="twice"):
        make_cells({"a": [1, 1]}, [0])
    with pytest.raises(UsageError, match="limit"):
        make_cells({"a": list(range(10_001))}, [0])


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        ([{"train.steps": 5, "seed": 0}], ["steps-5-seed-0"]),
        ([{"a.kind": "x", "b.kind": "y/../z", "seed": 0}], ["a.kind-x-b.kind-y_.._z-seed-0"]),
        ([{"a": [8, 8], "seed": 0}, {"a": "8_8", "seed": 0}], ["0000-seed-0", "0001-seed-0"]),
        ([{"a": "x" * 500, "seed": 3}], ["0000-seed-3"]),
        ([], []),
    ],
)
def test_names_of_directories_are_short_and_differ(cells: list[dict[str, Any]], names: list[str]) -> None:
    assert name_cells(cells) == names


@pytest.mark.system
def test_a_failure_does_not_stop_the_others_and_repeating_runs_only_what_is_left(tmp_path: Path) -> None:
    heard: list[Event] = []
    cells = planned(tmp_path, a="0.5", b="fail", c="0.7", d="crash", e="busy")
    cells[-1] = PlannedRun(path=tmp_path / "e", arguments=("run", "--run", str(tmp_path / "e"), "0.9"))
    with pytest.raises(StageFailed, match=r"2 of 5 runs failed: 'b': no space left: a; b") as caught:
        run(cells, directory=tmp_path, command=command(), jobs=2, listener=heard.append)
    assert caught.value.result.metrics["done"] == 3
    assert caught.value.result.metrics["failed"] == 2
    assert "a traceback" in (tmp_path / "logs" / "d.log").read_text()
    texts = [event.text for event in heard if isinstance(event, Notice)]
    assert any("a done, return_mean 0.5" in text for text in texts)
    assert max(event.done for event in heard if isinstance(event, Progress)) == 5
    good = [cell for cell in cells if cell.path.name in "ace"]
    before = {path: path.stat().st_mtime_ns for cell in good for path in cell.path.iterdir()}
    repeated = run(good, directory=tmp_path, command=command())
    assert repeated.status == "skipped"
    assert before == {path: path.stat().st_mtime_ns for path in before if path.exists()}
    assert "3" in str(repeated.tables[0].rows[0])  # the comparison: one group of three runs


@pytest.mark.system
def test_a_run_that_another_process_is_still_ending_is_tried_again(tmp_path: Path) -> None:
    (cell,) = planned(tmp_path, a="busy")
    with RunProcesses(command(), jobs=1, logs=tmp_path / "logs") as processes:
        processes.start(cell)
        ended: list[EndedRun] = []
        while not ended:
            ended = processes.take_ended()
    assert (tmp_path / "seen").exists()
    assert ended[0].code != 75  # "busy" is no score, so the second try fails


@pytest.mark.system
def test_an_interruption_stops_the_processes_at_their_safe_points(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if all((tmp_path / f"{name}.waiting").exists() for name in "ab"):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        run(planned(tmp_path, a="wait", b="wait"), directory=tmp_path, command=command(), jobs=2, listener=stop)
    assert all((tmp_path / f"{name}.stopped").exists() for name in "ab")


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    with hold_exclusively(tmp_path / ".sweep.lock", what="x"), pytest.raises(Locked):
        run([], directory=tmp_path, command=command())


def finished(path: Path) -> Path:
    """A run that `amago run x` has finished."""
    make_run(path)
    record = json.loads((path / "run.json").read_text())
    record["stages"]["run"]["argv"] = ["amago", "run", "x", "--output", "json"]
    (path / "run.json").write_text(json.dumps(record))
    return path


def test_progress_counts_the_runs_that_were_done_before(tmp_path: Path) -> None:
    heard: list[Event] = []
    cells = [PlannedRun(path=finished(tmp_path / name), arguments=("run", "x")) for name in "ab"]
    cells.append(PlannedRun(path=tmp_path / "c", arguments=("run", "x")))
    with pytest.raises(StageFailed):
        run(cells, directory=tmp_path, command=["false"], listener=heard.append)
    assert [event.text[:3] for event in heard if isinstance(event, Notice)] == ["2 o", "3/3"]
    assert heard[-1] == Progress(stage="sweep", done=3, total=3, unit="runs")


def test_a_run_is_done_if_the_same_command_finished_it(tmp_path: Path) -> None:
    path = finished(tmp_path / "a")
    assert PlannedRun(path=path, arguments=("run", "x")).is_done
    assert not PlannedRun(path=path, arguments=("run", "y")).is_done
    assert not PlannedRun(path=tmp_path / "b", arguments=("run", "x")).is_done


def test_runs_of_another_experiment_are_refused_with_the_difference(tmp_path: Path) -> None:
    cells = [PlannedRun(path=finished(tmp_path / "a"), arguments=("run", "x"))]
    run(cells, directory=tmp_path, command=command())
    others: list[dict[str, Any]] = [
        {"env": {"name": "bandit"}},
        {"train": {"steps": 9, "batch_size": 4, "learning_rate": 0.5}},
    ]
    differences = ["env.name: 'tmaze' -> 'bandit'", "train.learning_rate: (unset) -> 0.5"]
    for other, difference in zip(others, differences, strict=True):
        with pytest.raises(UsageError) as refused:
            run(cells, directory=tmp_path, command=command(), settings=SETTINGS | other)
        assert difference in refused.value.problems


def test_a_sweep_may_vary_another_key_and_train_for_longer(tmp_path: Path) -> None:
    cells = [PlannedRun(path=finished(tmp_path / "a"), arguments=("run", "x"))]
    run(cells, directory=tmp_path, command=command())
    longer = SETTINGS | {"train": {"steps": 99, "batch_size": 8, "threads": 4, "learning_rate": 1.0}}
    done = {"directory": tmp_path, "command": command(), "varied": ["train.learning_rate", "seed"]}
    assert run(cells, settings=longer, **done).status == "skipped"
    assert run(cells, settings=SETTINGS, **done).status == "skipped", "what was varied once is never compared again"
