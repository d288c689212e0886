from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipelines.lake.store import Lake
from pipelines.report import experience
from pipelines.report.page import Charts
from tests.lake import factories


def bars(lake: Lake, title: str) -> list[dict[str, Any]]:
    charts = Charts()
    experience.show_lake(lake, charts)
    titles = {"Lengths": "steps", "Returns": "return"}
    (chart,) = [c for c in charts.charts if c["spec"]["encoding"]["x"]["title"] == titles[title]]
    return chart["rows"]


def test_few_whole_numbers_have_a_bar_each(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    factories.fill(lake, [4, 4, 8, 10])
    found = bars(lake, "Lengths")
    assert [((bar["low"] + bar["high"]) / 2, bar["count"]) for bar in found] == [(4, 2), (6, 0), (8, 1), (10, 1)]


def test_many_values_share_bars_that_lose_none(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    written = factories.fill(lake, [3] * 200)
    returns = np.array([columns["reward"].sum(dtype=np.float64) for columns in written.values()])
    found = bars(lake, "Returns")
    expected, edges = np.histogram(returns, bins=30)
    assert [bar["count"] for bar in found] == expected.tolist()
    np.testing.assert_allclose([bar["low"] for bar in found], edges[:-1], rtol=1e-5, atol=1e-6)
