from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Amago
from tests.runs.factory import make_run

pytestmark = pytest.mark.system


def test_rows_in_three_forms(amago: Amago, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))
    make_run(Path("runs/a"), scores={10: 0.5})
    query = "select run, max(return_mean) as best from evaluations group by run"
    assert amago("runs", "sql", query, "--output", "json").json == [{"run": "runs/a", "best": 0.5}]
    assert amago("runs", "sql", query, "runs/a", "--output", "csv").out == "run,best\nruns/a,0.5\n"
    assert "runs/a" in amago("runs", "sql", query).out
    assert amago("runs", "sql", "drop table runs").code == 2
    assert amago("runs", "sql", query, "nowhere").code == 3
