"""Frames in the reports of runs."""

from __future__ import annotations

from pathlib import Path

from pipelines.lake.store import Lake
from pipelines.stages import collect, report
from pipelines.view.replay import draw_trajectory
from tests.lake import factories
from tests.report.test_markup import Elements
from tests.report.test_run_report import make_run
from tests.stages.recipes import tiny


def frames(page: Path) -> list[str]:
    """Return the addresses of the pictures in a report."""
    found = [attributes.get("src") or "" for tag, attributes in Elements(page.read_text()).tags if tag == "img"]
    return [source for source in found if source.startswith("data:image/png;base64,")]


def test_episodes_of_built_in_environments_are_drawn(tmp_path: Path) -> None:
    collect.run(tiny(env={"name": "meta-frozen-lake", "size": 3, "attempts": 2}), run=tmp_path / "run")
    report.run([tmp_path / "run"], episodes=1)
    lake = Lake(tmp_path / "run/lake")
    [row] = lake.sql("select uid, length from trajectories limit 1")
    pictures = draw_trajectory(lake, row["uid"], 1000)
    assert pictures is not None
    assert len(pictures) == row["length"] + 1
    assert pictures.shape[-1] == 3
    assert len(draw_trajectory(lake, row["uid"], 2)) == 2
    assert len(frames(tmp_path / "run/report.html")) >= 2


def test_images_are_shown_as_they_were_observed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    factories.fill(Lake.create(run / "lake"), [30, 30], schema=factories.IMAGES)
    report.run([run], episodes=1)
    assert len(frames(run / "report.html")) == 31


def test_other_environments_are_not_made(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    written = factories.fill(Lake.create(run / "lake"), [6])
    assert draw_trajectory(Lake(run / "lake"), next(iter(written)), 10) is None
    report.run([run], episodes=1)
    assert frames(run / "report.html") == []
