from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pipelines.runs.metrics import read_last_line, read_metrics
from tests.runs.factory import START, make_run, train_line


def test_a_short_log_is_read_whole(tmp_path: Path) -> None:
    columns = read_metrics(make_run(tmp_path / "run", lines=50) / "metrics.jsonl", points=25)
    assert not columns.sampled
    np.testing.assert_array_equal(columns.columns["update"], np.arange(10, 501, 10))
    np.testing.assert_allclose(columns.columns["loss"], 1 / np.arange(10, 501, 10))
    np.testing.assert_allclose(columns.columns["seconds"], np.arange(50))
    assert columns.at("env_steps", 15) == 150


def test_a_long_log_is_sampled_evenly_with_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    names = [f"metric_{number}" for number in range(20)]
    with path.open("w") as file:
        for update in range(1, 5_001):
            if update % 7 == 0:
                file.write(json.dumps({"update": update, "stage": "evaluate", "return_mean": 1.0}) + "\n")
            file.write(json.dumps(train_line(update, names)) + "\n")
    columns = read_metrics(path, points=100)
    updates = columns.columns["update"]
    assert columns.sampled
    assert 90 <= columns.rows <= 101
    assert updates[0] == 1
    assert updates[-1] == 5_000
    assert np.all(np.diff(updates) > 0)
    assert np.diff(updates).max() < 80
    np.testing.assert_allclose(columns.columns["metric_3"], 1 / updates)  # of the same line


def test_lines_that_are_not_metrics_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(train_line(10))
    huge = json.dumps({"update": 3, "stage": "train", "loss": 10**400, "text": "x", "flag": True, "list": [1]})
    lines = ["", "{", "[1]", "5", '{"update": "x", "stage": "train"}', huge, good, '{"update": 20, "stage": "tr']
    path.write_bytes("\n".join(lines).encode() + b"\xff\xfe\n" + b"[" * 50_000)
    columns = read_metrics(path)
    assert list(columns.columns["update"]) == [3, 10]
    assert math.isnan(columns.columns["loss"][0])
    assert {"text", "flag", "list"}.isdisjoint(columns.columns)


@pytest.mark.system
def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b'{"update": 1, "stage": "train", "loss": 1}\n')
        file.truncate(1 << 28)
    assert read_metrics(path).columns["update"][0] == 1


def test_pauses_between_processes_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = [(0, 5.0), (10, 15.0), (10_000, 4.0), (10_006, 10.0)]  # an hour's pause before the third
    lines = [
        {"update": 1 + place, "stage": "train", "time": START + time, "cpu_seconds": cpu}
        for place, (time, cpu) in enumerate(times)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.testing.assert_allclose(read_metrics(path).columns["seconds"], [0, 10, 14, 20])


def test_only_the_wanted_columns_are_kept(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", metrics=("loss", "grad_norm")) / "metrics.jsonl"
    assert read_metrics(path, names=["loss"]).columns.keys() == {"update", "time", "cpu_seconds", "seconds", "loss"}


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\x00" * 1000])
def test_no_lines_are_no_rows(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    columns = read_metrics(path)
    assert columns.rows == 0
    assert columns.at("loss", 3) is None
    assert read_last_line(path) is None
