"""The benchmark of learning: which runs are done, how settings come about, and what is computed from results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.recipes import read_shipped_recipes
from pipelines.errors import Interrupted, UsageError
from pipelines.evaluation.statistics import compute_iqm
from pipelines.events import Event, Progress
from tests.benchmarks import learning_reference
from tests.benchmarks.learning_parts import book, draw, one, results, schedule, summary, tasks

TASKS = tasks.load_tasks()
LAKE = TASKS["lake-4x4"]
RESULTS = Path(__file__).parents[2] / "docs/results.jsonl"
COUNTS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
    "twenty-one",
    "twenty-two",
    "twenty-three",
    "twenty-four",
    "twenty-five",
    "twenty-six",
    "twenty-seven",
    "twenty-eight",
    "twenty-nine",
    "thirty",
    "thirty-one",
    "thirty-two",
    "thirty-three",
    "thirty-four",
    "thirty-five",
    "thirty-six",
)
SMALL = {"epochs": 2, "train.steps": 3, "train.batch_size": 4, "collect.actors": 8, "collect.steps": 640}


def row(**changes: Any) -> dict[str, Any]:
    """A result as a run writes it."""
    base = {"task": "lake-4x4", "variant": "default", "settings": {}, "seed": 0, "cpu_limit": 0.0, "updates": 10}
    figures = {"env_steps": 100, "replay_ratio": 2.0, "cpu_seconds": 9.0, "curve_cpu_seconds": 1.0, "gflops": 100.0}
    return base | figures | {"return_mean": 1.0, "per_attempt": [0.0, 0.5], "version": "1", "commit": "abc"} | changes


def point(update: int, score: float) -> dict[str, Any]:
    """A point of a learning curve."""
    x = {"update": update, "cpu_seconds": 10.0 * update, "env_steps": update}
    return x | {"return_mean": score, "per_attempt": [score]}


def test_seeds_are_lists_and_ranges() -> None:
    assert tasks.parse_seeds("100-102,5,101") == [100, 101, 102, 5]
    assert book.ranges(tasks.parse_seeds("0-2,7")) == "0-2,7"
    for wrong in ("", "3-1", "x"):
        with pytest.raises(ValueError, match=r"no seeds|invalid literal"):
            tasks.parse_seeds(wrong)


def test_variants_may_be_written_as_tables_or_with_dots(tmp_path: Path) -> None:
    file = tmp_path / "variants.toml"
    file.write_text('[a]\nagent.n_step = 5\n[b]\n"agent.n_step" = 5\n[c.agent]\nn_step = 5\n')
    assert tasks.load_variants(file) == {name: {"agent.n_step": 5} for name in "abc"}


def test_overrides_lie_over_the_task_and_a_new_kind_drops_the_settings_of_the_old_one() -> None:
    wanted = {"agent.sequence.hidden": 32, "agent.sequence.kind": "gru", "epochs": 3}
    settings = tasks.settings_of(LAKE, wanted, seed=7)
    assert (settings.agent.sequence.kind, settings.epochs, settings.seed) == ("gru", 3, 7)
    assert (settings.train.threads, settings.collect.workers) == (1, 0)
    with pytest.raises(UsageError):
        tasks.settings_of(LAKE, {"agent.nonsense": 1}, seed=0)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_chooses_its_best_checkpoint_on_training_tasks(name: str) -> None:
    settings = tasks.settings_of(TASKS[name], {}, seed=0)
    evaluations = [entry.overrides for entry in settings.stages if entry.stage == "evaluate"]
    choosing, curve = evaluations
    assert choosing["mark_best"] is True
    assert choosing["split"] == "train"
    assert curve["seed"] == tasks.CURVE_SEED
    assert "mark_best" not in curve


def test_the_reference_plays_tasks_of_the_table() -> None:
    assert learning_reference.TASKS.keys() <= TASKS.keys()


@pytest.mark.system
def test_a_run_is_trained_evaluated_and_drawn(tmp_path: Path) -> None:
    overrides = SMALL | {"evaluate.episodes": 4, "agent.critic.hidden": [8], "agent.actor.hidden": [8]}
    settings = tasks.settings_of(LAKE, overrides, seed=0, points=2)
    found = one.play(settings, tmp_path / "run")
    assert (found["status"], found["updates"], found["env_steps"]) == ("done", 6, 1280)
    assert found["replay_ratio"] == pytest.approx(6 * 4 * 50 / 1280, rel=0.5)
    assert [each["update"] for each in found["curve"]] == [3, 6]
    assert found["curve"][0]["cpu_seconds"] < found["curve"][1]["cpu_seconds"]
    assert len(found["per_attempt"]) == len(found["last_per_attempt"]) == 5
    assert found["episodes"] == 4
    assert found["greedy"] is False
    assert found["other_episodes"] == 4
    files = (tmp_path / "run/evaluations").glob("*.json")
    played = [json.loads(path.read_text()) for path in files]
    final = {(each["update"], each["settings"]["greedy"]) for each in played if each["settings"]["actors"] == 4}
    assert {(found["best_update"], False), (found["best_update"], True)} <= final


@pytest.mark.system
def test_a_run_that_is_stopped_is_evaluated_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Progress) and (event.unit, event.done) == ("updates", 5):
            raise Interrupted("stopped")

    monkeypatch.setattr(one, "stopping_after", lambda _: stop)
    settings = tasks.settings_of(LAKE, SMALL | {"epochs": 20, "evaluate.episodes": 4}, seed=0, points=0)
    found = one.play(settings, tmp_path / "run")
    assert (found["status"], found["updates"], found["best_update"]) == ("limit", 5, 5)


def test_cpu_seconds_stop_a_run_only_where_there_is_a_limit() -> None:
    event = Progress(stage="train", done=1, total=2, unit="updates")
    one.stopping_after(0.0)(event)
    with pytest.raises(Interrupted):
        one.stopping_after(1e-6)(event)


def test_runs_that_are_there_are_not_done_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    jobs = [row(seed=seed) for seed in range(3)]
    results.append(file, row(seed=1))
    assert [job["seed"] for job in schedule.missing(jobs, file)] == [0, 2]
    others = [row(seed=1, settings={"epochs": 2}), row(seed=1, cpu_limit=60.0), row(seed=1, variant="wide")]
    assert schedule.missing(others, file) == others


def test_a_line_that_a_kill_cut_short_costs_that_run_only(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results.append(file, row(seed=0))
    with file.open("a") as open_file:
        open_file.write('{"task": "lake-4x4", "seed"')
    assert len(schedule.missing([row(seed=0), row(seed=1)], file)) == 1
    results.append(file, row(seed=1))
    assert [each["seed"] for each in results.read(file)] == [0, 1]
    assert summary.groups(file, TASKS)[0]["seeds"] == [0, 1]


@pytest.mark.system
def test_jobs_run_in_processes_and_failures_leave_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = "import sys, json; print(json.dumps({**json.load(sys.stdin), 'cpu': sum(range(10**6))}))"
    said = {"per_attempt": [], "return_mean": 1.0, "updates": 1, "env_steps": 2}
    jobs = [
        row(seed=0) | {"_command": [sys.executable, "-c", good], "_input": said},
        row(seed=1) | {"_command": [sys.executable, "-c", "raise SystemExit('broken')"], "_input": {}},
    ]
    file = tmp_path / "results.jsonl"
    assert schedule.run_all(jobs, file, at_once=2) == 1
    written = results.read(file)
    assert [each["seed"] for each in written] == [0]
    assert 0 < written[0]["cpu_seconds"] <= written[0]["wall_seconds"] + 0.1
    assert "broken" in capsys.readouterr().out


def test_scores_are_of_the_last_attempt_or_the_return(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results.append(file, row(seed=0, per_attempt=[0.0, 0.25]))
    results.append(file, row(seed=1, per_attempt=[0.0, 0.75]))
    results.append(file, row(task="pendulum", return_mean=-150.0, per_attempt=[]))
    found = {group["task"]: group["scores"] for group in summary.groups(file, TASKS)}
    assert found == {"lake-4x4": [0.25, 0.75], "pendulum": [-150.0]}
    assert summary.groups(file, TASKS, where="seed = 1", metric="list_avg(per_attempt)")[0]["scores"] == [0.375]
    text = summary.table(file)
    assert "0.500" in text
    assert "lake-4x4 pendulum" in text


def test_a_curve_is_against_cpu_seconds_without_its_own_evaluations() -> None:
    metrics = {"return_mean": 1.0, "per_attempt": []}
    trained = [{"update": 3, "cpu_seconds": 10.0, "env_steps": 30}, {"update": 6, "cpu_seconds": 25.0, "env_steps": 60}]
    reports = [
        {"update": update, "cpu_seconds": 4.0, "settings": {"seed": seed, "episodes": 100}, "metrics": metrics}
        for update in (6, 3)
        for seed in (tasks.CURVE_SEED, 77)
    ]
    found = one.curve(trained, reports)
    assert [(each["update"], each["cpu_seconds"], each["env_steps"]) for each in found] == [
        (3, 10.0, 30),
        (6, 21.0, 60),
    ]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_curves_of_seeds_become_a_band_where_all_have_one(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "results.jsonl"
    results.append(file, row(seed=0, curve=[point(1, 0.0), point(3, 1.0)]))
    results.append(file, row(seed=1, curve=[point(2, 0.0), point(4, 1.0)]))
    ((_, seeds),) = draw.curves(file)["lake-4x4"].items()
    series = draw.band(seeds, 1, "seeds")
    assert (series.places[0], series.places[-1]) == (2.0, 3.0)
    assert series.values[0] == pytest.approx(0.25)  # (.5 + 0) / 2
    assert series.values[-1] == pytest.approx(0.75)
    assert draw.learning_curves(file, tmp_path / f"curves.{ending}").stat().st_size > 5_000


def test_the_book_has_a_row_a_seed_set_and_the_command_that_repeats_it(tmp_path: Path) -> None:
    file, page = tmp_path / "results.jsonl", tmp_path / "results.md"
    page.write_text(f"before\n{book.SECTION.begin}\nold\n{book.SECTION.end}\nafter\n")
    for seed in (100, 101):
        results.append(file, row(seed=seed, settings={"epochs": 3}, variant="short"))
    for _ in range(2):
        text = book.write(file, page).read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
    assert "| lake-4x4, short | 0.5 | 0.5 to 0.5 | 0.5 | greedy |  | 100-101 | 100 | 2.0 | 8 | 1 (abc) |" in text
    assert "learning.py run --task lake-4x4 --seeds 100-101 --set 'epochs=3'" in text


def test_results_of_the_repository_can_be_read() -> None:
    for line in RESULTS.read_text().splitlines():
        assert {"task", "seed", "commit", "curve"} <= json.loads(line).keys()


def test_what_a_recipe_expects_is_what_the_book_says() -> None:
    """Figures of our own are those of the recipe's row of most seeds, to the digit; others are bounds or name who
    reports them."""
    rows = {
        TASKS[row["task"]].recipe: row
        for row in sorted(summary.groups(RESULTS, TASKS), key=lambda row: len(row["seeds"]))
        if row["variant"] == "default" and not row["cpu_limit"] and not TASKS[row["task"]].set
    }
    assert len(rows) >= 6
    for name, recipe in read_shipped_recipes().items():
        expected = recipe.get("expected", "at most")
        if name in rows:
            require_quoted(expected, rows[name])
        else:
            assert re.search(r"at most|random|\((AMAGO|[A-Z]\w+ et al\. 20\d\d)", expected), name


def require_quoted(expected: str, row: dict[str, Any]) -> None:
    figures, seeds, cost = re.match(r"(.*?) \(([\w-]+) seeds\)(?:, in (\d+) CPU seconds)?", expected).groups()  # type: ignore[union-attr]
    by_attempt = np.mean([each for each in row["attempts"] if each] or [[]], axis=0)
    known = [compute_iqm(np.array(row["scores"])), *row["scores"], *by_attempt, row["env_steps"] / 1e6]
    for text in re.findall(r"-?\d*\.?\d+", figures):
        digits = len(text.partition(".")[2])
        assert any(round(value, digits) == float(text) for value in known), (expected, text)
    assert seeds == COUNTS[len(row["seeds"])], expected
    assert cost is None or int(cost) == round(row["cpu_seconds"]), expected
