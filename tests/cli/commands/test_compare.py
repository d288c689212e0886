from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.cli.conftest import Amago
from tests.runs.factory import make_run


@pytest.fixture
def runs(amago: Amago) -> None:
    for rate in (1e-3, 1e-4):
        for seed in range(3):
            settings = {"seed": seed, "train": {"learning_rate": rate}}
            scores = {10: 0.0, 40: 100 * rate + seed / 100}
            make_run(Path(f"runs/{rate}-{seed}"), scores=scores, settings=settings)


@pytest.mark.usefixtures("runs")
def test_a_row_for_each_group_in_three_forms(amago: Amago) -> None:
    shown = amago("compare", "runs")
    assert shown.code == 0
    assert "train.learning_rate=0.0001  3" in shown.out
    assert "P(better than the first)" in shown.out
    metrics = amago("compare", "runs/*", "--statistic", "mean", "--output", "json").json["metrics"]
    first, second = metrics["groups"]
    assert (first["score"], second["score"]) == (pytest.approx(0.02), pytest.approx(0.11))
    assert second["scores"] == {"tmaze": pytest.approx([0.10, 0.11, 0.12])}
    assert {"better": second["name"], "than": first["name"]}.items() <= metrics["improvement"][1].items()
    assert metrics["improvement"][1]["probability"] == 1.0
    rows = list(csv.reader(io.StringIO(amago("compare", "runs", "--output", "csv").out)))
    assert len(rows) == 3


@pytest.mark.system
@pytest.mark.usefixtures("runs")
def test_curves_are_written_as_pictures_and_as_points(amago: Amago) -> None:
    for name, start in {"c.png": b"\x89PNG", "c.svg": b"<svg", "c.csv": b"group,steps"}.items():
        assert amago("compare", "runs", "--x", "steps", "--to", name).code == 0
        assert Path(name).read_bytes().startswith(start)
    svg = Path("c.svg").read_text()
    assert "train.learning_rate=0.001" in svg
    rows = list(csv.DictReader(io.StringIO(Path("c.csv").read_text())))
    assert [row["steps"] for row in rows] == ["100.0", "400.0"] * 2
    assert amago("compare", "runs", "--to", "c.gif").code == 2


def test_without_evaluations_there_is_nothing_to_compare(amago: Amago) -> None:
    make_run(Path("runs/a"))
    missing = amago("compare", "runs", "--output", "json")
    assert missing.code == 3
    assert "amago evaluate" in missing.json["error"]["hint"]
    assert amago("compare", "nowhere").code == 3
    assert amago("compare").code == 2


def test_groups_of_different_environments_name_them(amago: Amago) -> None:
    for corridor, size in ((5, "tiny"), (20, "")):
        for seed in range(2):
            settings = {"seed": seed, "env": {"name": "tmaze", "corridor": corridor}, "size": size}
            make_run(Path(f"runs/{corridor}-{seed}"), scores={10: 0.5}, settings=settings)
    shown = amago("compare", "runs")
    assert shown.code == 0
    assert "in different environments, whose scores are of different scales" in shown.out
    rows = list(csv.DictReader(io.StringIO(amago("compare", "runs", "--output", "csv").out)))
    assert {row["environments"] for row in rows} == {"tmaze corridor=5", "tmaze corridor=20"}
    assert "environments" not in amago("compare", "runs/5-*").out
