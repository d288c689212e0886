from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Amago
from tests.report.test_markup import Elements
from tests.report.test_run_report import data_of
from tests.runs.factory import make_run


def test_a_report_is_written_beside_the_run(amago: Amago, small: Path) -> None:
    done = amago("report", small, "--episodes", 2)
    assert done.code == 0, done.err
    assert "small/report.html" in done.out
    page = (small / "report.html").read_text()
    headings = Elements(page).text
    for title in (
        "Metrics of training",
        "Episode 2",
        "Lake",
        "Settings",
        "Lineage",
        "Hardware and versions",
        "Repeat it",
    ):
        assert title in headings
    assert "cannot be shown" not in headings
    names = {line["name"] for chart in data_of(page)["charts"] for line in chart.get("series", ())}
    assert {"q", "v", "advantage", "reward"} <= names  # the agent's values


def test_json_names_the_file(amago: Amago, small: Path) -> None:
    found = amago("report", small, "--to", "r.html", "--episodes", 0, "--output", "json").json
    assert found["outputs"] == ["r.html"]
    assert found["metrics"] == {"runs": 1, "bytes": Path("r.html").stat().st_size}


def test_several_runs_by_a_pattern(amago: Amago) -> None:
    for seed in range(3):
        make_run(Path(f"runs/maze-{seed}"), scores={10: seed})
    assert amago("report", "runs/maze-*").code == 2
    assert "--to" in amago("report", "runs").err
    done = amago("report", "runs/maze-[01]", "--to", "both.html", "--output", "json")
    assert done.json["metrics"]["runs"] == 2
    assert len(data_of(Path("both.html").read_text())["charts"]) >= 2


def test_what_is_not_there(amago: Amago, tmp_path: Path) -> None:
    assert amago("report", "nowhere").code == 3
    (tmp_path / "empty").mkdir()
    assert amago("report", "empty").code in (2, 3)
    assert amago("report").code == 2


def test_a_place_that_cannot_be_written(amago: Amago) -> None:
    make_run(Path("maze"))
    Path("file").write_text("")
    failed = amago("report", "maze", "--to", "file/r.html")
    assert failed.code == 1
    assert "file" in failed.err
    assert "Traceback" not in failed.err


def test_damaged_files_are_named(amago: Amago) -> None:
    run = make_run(Path("runs/maze"), scores={10: 0.5})
    (run / "evaluations" / "000020-9318ba67.json").write_text("[]")
    done = amago("report", run, "--episodes", 0)
    assert done.code == 0
    assert "warning: report: runs/maze: evaluations/000020-9318ba67.json is damaged; left out\n" in done.err
