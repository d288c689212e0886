from __future__ import annotations

from pathlib import Path

from pipelines.training.metrics_log import MetricsLog


def test_a_rewind_drops_later_updates_and_what_cannot_be_read(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    for update in (2, 4, 6):
        log.append("train", update, {"loss": 1.0})
    log.append("evaluate", 6, {"return_mean": 2.0})
    with log.path.open("ab") as file:
        file.write(b'{"update": "x", "stage": "train"}\n{"update": null, "stage": "train"}\n{"stage": "train"}\n')
        file.write(b'\xff\xfe\n[1]\n{"update": 8, "sta')
    log.rewind(4)
    assert [(entry["stage"], entry["update"]) for entry in log.read()] == [("train", 2), ("train", 4), ("evaluate", 6)]
    assert len(log.path.read_text().splitlines()) == 3


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.rewind(3)
    assert log.read() == []
