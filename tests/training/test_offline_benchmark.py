"""The benchmark of learning from a dataset: its table, and what it reads of a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.section import Section
from tests.benchmarks import offline

RULED = "| task | steps | recorded: mean, best tenth | amago: best, last | d3rlpy |\n|---|---|---|---|---|"


def make_row(task: str, learner: str, seed: int, score: float, last: float) -> dict:
    about = {"task": task, "learner": learner, "seed": seed, "steps": 1000, "data_mean": 10.0, "data_high": 40.0}
    return about | {"return_mean": score, "return_last": last}


def test_the_table_has_a_line_for_each_task_that_was_run() -> None:
    rows = [
        make_row("hopper", "iql", 1, 20.0, 20.0),
        make_row("hopper", "amago", 2, 51.0, 50.0),
        make_row("hopper", "amago", 1, 61.25, 60.0),
        make_row("lunarlander", "amago", 1, 5.0, 4.0),
    ]
    lines = "\n".join(offline.tabulate(rows))
    assert lines.startswith(RULED)
    assert "| hopper | 1,000 | 10, 40 | 51 (50), 61.25 (60) | IQL 20 |" in lines
    assert "| lunarlander (tuning) | 1,000 | 10, 40 | 5 (4) |  |" in lines
    assert "walker2d" not in lines


def test_the_page_is_what_its_rows_say(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    shutil.copy(offline.PAGE, page)
    rows = [json.loads(line) for line in offline.RESULTS.read_text().splitlines()]
    offline.SECTION.write(page, "\n".join(offline.tabulate(rows)))
    assert page.read_text() == offline.PAGE.read_text()
    assert all(row["task"] in offline.TASKS for row in rows)


def test_what_is_in_a_file_is_counted_by_episode(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        file["rewards"] = np.array([1.0, 2, 3, 4, 5])
        file["terminals"] = np.array([0, 1, 0, 0, 0], bool)
        file["timeouts"] = np.array([0, 0, 0, 1, 0], bool)  # the last episode has no end
    assert offline.measure(tmp_path / "data.hdf5") == {"steps": 5, "data_mean": 5.0, "data_high": 7.0}


def test_a_page_without_marks_is_not_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    with pytest.raises(ValueError, match="unpack"):
        Section("offline", "a command").write(page, "text")
    assert page.read_text() == "nothing here\n"
