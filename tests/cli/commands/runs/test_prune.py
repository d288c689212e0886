from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Amago
from tests.runs.factory import make_run


@pytest.mark.system
def test_the_best_stay_and_what_others_depend_on(amago: Amago, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))
    for name, score in {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.2}.items():
        used = {"collect": {"policy": "runs/b"}} if name == "a" else {"collect": {"policy": "runs/d"}}
        make_run(Path("runs") / name, scores={10: score}, settings=used)
    make_run(Path("runs/e"), status="failed")
    shown = amago("runs", "prune", "--keep-best", 1, "--dry-run", "--output", "json").json
    assert shown["status"] == "skipped"
    assert [row["run"] for row in shown["metrics"]["removed"]] == ["runs/c"]  # b acts with d, and a with b
    assert sorted(shown["metrics"]["kept"]) == ["runs/b", "runs/d"]
    assert len(list(Path("runs").iterdir())) == 5
    done = amago("runs", "prune", "--keep-best", 1, "--failed")
    assert done.code == 0
    assert "freed" in done.out
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a", "b", "d"]
    assert amago("runs", "prune").code == 2
