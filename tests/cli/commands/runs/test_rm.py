from __future__ import annotations

from pathlib import Path

from pipelines.config.run_directory import RunDirectory
from tests.cli.conftest import Amago
from tests.runs.factory import make_run


def test_runs_are_removed_and_the_freed_space_is_reported(amago: Amago) -> None:
    for name in ("a-1", "a-2", "b"):
        make_run(Path("runs") / name)
    looked = amago("runs", "rm", "runs/a-*", "--dry-run")
    assert looked.code == 0
    assert "would free" in looked.out
    assert Path("runs/a-1").exists()
    done = amago("runs", "rm", "runs/a-*", "--output", "json").json
    assert [row["run"] for row in done["metrics"]["removed"]] == ["runs/a-1", "runs/a-2"]
    assert done["metrics"]["bytes"] > 0
    assert [path.name for path in Path("runs").iterdir()] == ["b"]


def test_a_running_run_and_a_directory_of_runs_are_refused(amago: Amago) -> None:
    make_run(Path("runs/a"))
    with RunDirectory("runs/a").lock("run"):
        refused = amago("runs", "rm", "runs/a")
    assert refused.code == 75
    assert "in use by run, pid" in refused.err
    folder = amago("runs", "rm", "runs")
    assert folder.code == 2
    assert "amago runs rm 'runs/*'" in folder.err
    assert amago("runs", "rm", "runs/b").code == 3
    assert Path("runs/a/run.json").exists()
