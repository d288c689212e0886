"""The benchmark of methods that learn from histories: its table, its runs, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import histories
from benchmarks.general_parts.runs import read
from pipelines.config.recipes import find


def row(method: str, seed: int, returns: list[float], *, learners: list[float] | None = None) -> dict[str, Any]:
    return {
        "method": method,
        "seed": seed,
        "per_attempt": returns,
        "per_attempt_of_learners": learners,
        "cpu_seconds": 10,
    }


def test_the_table_has_means_over_seeds_and_attempts() -> None:
    rising = [float(attempt) for attempt in range(30)]
    rows = [row("critics", 1, rising, learners=[2.0] * 30), row("critics", 2, [0.0] * 30, learners=[4.0] * 30)]
    table = histories.make_table([*rows, row("online", 1, rising)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][1:5] == [f"attempt {number}" for number in (1, 10, 20, 30)]
    assert cells[0][5:] == ["all attempts", "the learners' cells", "seeds", "CPU s"]
    assert cells[2][0] == "advantage-weighted actor-critic"
    assert cells[2][1:] == ["0.0", "4.5", "9.5", "14.5", "7.2 (0.0 to 14.5)", "3.0", "2", "10"]
    assert cells[3][5:7] == ["14.5", ""]


def test_every_method_is_a_recipe_with_valid_changes() -> None:
    for method in histories.load_methods().values():
        assert find(method["recipe"])
        assert method.keys() <= {"title", "recipe", "set", "attempts"}


def test_runs_that_are_there_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def play(name: str, seed: int) -> dict[str, Any]:
        played.append((name, seed))
        return row(name, seed, [1.0] * 30)

    monkeypatch.setattr(histories, "play", play)
    for seeds in ([1], [1, 2]):
        words = ["x", "run", "--method", "critics", "--to", str(tmp_path / "rows.jsonl")]
        monkeypatch.setattr("sys.argv", [*words, *(word for seed in seeds for word in ("--seed", str(seed)))])
        assert histories.main() == 0
    assert played == [("critics", 1), ("critics", 2)]
    assert [each["seed"] for each in read(tmp_path / "rows.jsonl")] == [1, 2]


@pytest.mark.system
def test_the_optimum_is_that_of_one_who_knows_the_goal() -> None:
    """20 steps, of which the first d - 1 lead to a goal d cells away: 21 - d are paid."""
    assert histories.measure_optimum() == pytest.approx(16.357, abs=1e-3)
