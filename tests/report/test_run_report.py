"""Pages about runs, made from directories that no training wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from pipelines.report.run_report import make_page
from pipelines.runs.stored import read_run
from tests.report.test_markup import HOSTILE, Elements
from tests.runs.factory import make_run, train_line, write_evaluation


def data_of(html: str) -> dict[str, Any]:
    """Return the data that the page's script reads."""
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def column(data: dict[str, Any], title: str, series: str, which: str = "y") -> list[float]:
    """Return what a line of the chart `title` draws."""
    charts = [chart for chart in data["charts"] if chart.get("y") == title or chart.get("title") == title]
    (line,) = [each for chart in charts for each in chart["series"] if each["name"] == series]
    return data["columns"][line["along"]["steps"] if which == "steps" else line[which]]


def page_of(*runs: Path) -> str:
    return make_page([read_run(run) for run in runs]).html()


def test_scores_are_drawn_with_their_intervals_and_environment_steps(tmp_path: Path) -> None:
    data = data_of(page_of(make_run(tmp_path / "maze", scores={10: 0.5, 30: 1.5})))
    assert column(data, "return", "test tasks") == [0.5, 1.5]
    assert column(data, "return", "test tasks", "low") == pytest.approx([0.4, 1.4])
    assert column(data, "return", "test tasks", "steps") == [100, 300]
    assert [axis["name"] for axis in data["axes"]] == ["updates", "steps", "seconds"]


def test_an_evaluation_without_an_interval_leaves_the_band_of_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "maze", scores={10: 0.5, 30: 1.5})
    write_evaluation(run, 20, 1.0, metrics={"episodes": 1, "return_mean": 1.0})
    data = data_of(page_of(run))
    assert column(data, "return", "test tasks") == [0.5, 1.0, 1.5]
    low, without, high = column(data, "return", "test tasks", "low")
    assert (low, high) == pytest.approx((0.4, 1.4))
    assert without is None


def test_adaptation_is_drawn_beside_that_without_memory(tmp_path: Path) -> None:
    stages = [
        {"stage": "evaluate", "memory": "attempt", "label": "memory cleared"},
        {"stage": "evaluate", "label": "after training"},
    ]
    run = make_run(tmp_path / "run", settings={"stages": stages})
    for label, memory, gain in (("memory cleared", "attempt", 0.0), ("after training", "episode", 0.2)):
        attempts = [{"attempt": n + 1, "success_mean": 0.1 + gain * n, "success_ci95": [0, 1]} for n in range(3)]
        settings = {"split": "test", "label": label, "memory": memory}
        write_evaluation(run, 40, 0.5, series=memory[:8], metrics={"per_attempt": attempts}, settings=settings)
    data = data_of(page_of(run))
    assert column(data, "success", "memory cleared") == pytest.approx([0.1, 0.1, 0.1])
    assert column(data, "success", "after training") == pytest.approx([0.1, 0.3, 0.5])


def test_metrics_are_small_charts_in_the_documented_order(tmp_path: Path) -> None:
    html = page_of(make_run(tmp_path / "maze", metrics=("mine", "q", "q@0.9", "loss")))
    assert re.findall(r"<h3>(loss|q|mine)</h3>", html) == ["loss", "q", "mine"]
    assert "regression target" not in html
    assert "value of the dataset actions" in html
    assert "discount 0.9" in html


def test_several_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"r{seed}", scores={10: seed}, settings={"seed": seed, "train": {"batch_size": 8 + seed}})
        for seed in range(3)
    ]
    page = make_page([read_run(run) for run in runs])
    html = page.html()
    assert [name for name, _, _ in page.runs] == ["r0", "r1", "r2"]
    assert "train.batch_size" in html
    assert len(re.findall(r'<input type="checkbox" name="run"', html)) == 3


def test_runs_of_one_name_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / folder / "maze") for folder in ("a", "b")]
    assert [name for name, _, _ in make_page([read_run(run) for run in runs]).runs] == [str(run) for run in runs]


def hostile_run(path: Path) -> Path:
    """Return a run whose names, settings, metrics, labels and record are hostile texts."""
    run = make_run(path, metrics=(*HOSTILE, "loss"), settings={"env": {"name": HOSTILE[0]}})
    record = json.loads((run / "run.json").read_text())
    record |= {
        "name": HOSTILE[1],
        "hardware": {"host": HOSTILE[2], "machine": HOSTILE[3], "cores": HOSTILE[0]},
        "versions": {HOSTILE[1]: HOSTILE[1]},
        "git_commit": HOSTILE[4],
        "compute": {"device": HOSTILE[2]},
        "recipe": {"name": HOSTILE[5], "profile": HOSTILE[1], "changed": {HOSTILE[2]: [HOSTILE[1], HOSTILE[0]]}},
    }
    record["stages"][HOSTILE[0]] = {"argv": ["amago", *HOSTILE], "time": HOSTILE[1], "error": HOSTILE[2]}
    (run / "run.json").write_text(json.dumps(record))
    attempts = [{"attempt": n, "success_mean": n / 5, "success_ci95": [0.0, 1.0]} for n in range(5)]
    for number, text in enumerate(HOSTILE):
        write_evaluation(
            run,
            number,
            0.5,
            series=f"s{number}",
            settings={"split": text, "label": text},
            env={"name": text},
            metrics={"return_mean": 0.5, "episodes": text, "per_attempt": attempts},
        )
    return run


def test_hostile_texts_stay_text(tmp_path: Path) -> None:
    html = page_of(hostile_run(tmp_path / "<img src=x onerror=hacked=1>"))
    found = Elements(html)
    assert [tag for tag, _ in found.tags].count("script") == 3
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "base", "form")]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    names = {line["name"] for chart in data_of(html)["charts"] for line in chart.get("series", ())}
    assert names >= {HOSTILE[0], HOSTILE[1]}


def test_only_the_two_scripts_of_the_page_may_run_and_nothing_is_loaded(tmp_path: Path) -> None:
    html = page_of(make_run(tmp_path / "maze", scores={10: 0.5}))
    policy = next(a["content"] for tag, a in Elements(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts}
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert set(directives["script-src"].split()) == hashes
    assert directives["default-src"] == "'none'"
    attributes = [(tag, name) for tag, given in Elements(html).tags for name in given]
    assert not {("link", "href"), ("script", "src"), ("iframe", "src")} & set(attributes)


def test_a_damaged_part_does_not_hide_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "maze", scores={10: 0.5, 20: 0.7})
    (run / "run.json").write_text("{")
    (run / "evaluations" / "000020-9318ba67.json").write_text("[]")
    (run / "lake").mkdir()
    (run / "lake" / "lake.json").write_text('{"format": "amago-lake", "version": 99}')
    (run / "checkpoints").mkdir()
    html = page_of(run)
    assert "run.json is damaged" in html
    assert "000020-9318ba67.json is damaged" in html
    assert column(data_of(html), "return", "test tasks") == [0.5]


def test_a_run_without_anything_is_a_page_too(tmp_path: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    (run / "config.toml").write_text("seed = 3\n")
    html = page_of(run)
    assert "seed 3" in html
    assert "nan" not in html.partition("<style>")[0]


@pytest.mark.system
def test_the_page_of_many_runs_stays_small(tmp_path: Path) -> None:
    rng, names = random.Random(0), [f"metric_{number}" for number in range(40)]
    runs = [make_run(tmp_path / f"r{number}", scores={10: number}) for number in range(20)]
    for run in runs:
        lines = [train_line(10 * n + 10) | {name: rng.gauss(0, 1) for name in names} for n in range(600)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    written = make_page([read_run(run) for run in runs]).write(tmp_path / "report.html")
    assert 2_000_000 < written.stat().st_size < 5_000_000


def test_runs_that_differ_in_their_seed_only_are_a_group_with_a_band(tmp_path: Path) -> None:
    runs = [
        make_run(
            tmp_path / f"r{rate}-{seed}",
            scores={10: seed, 20: 10 * rate + seed},
            settings={"seed": seed, "train": {"learning_rate": rate}},
        )
        for rate in (0.1, 0.2)
        for seed in range(3)
    ]
    page = make_page([read_run(run) for run in runs])
    assert [color for _, _, color in page.runs] == [0, 0, 0, 1, 1, 1]
    data = data_of(page.html())
    lines = [line for chart in data["charts"] for line in chart["series"] if line["name"] == "train.learning_rate=0.1"]
    assert [line["axis"] for line in lines] == ["updates", "steps", "seconds"]
    assert data["columns"][lines[0]["y"]] == [1, 2]  # the middle one of 0, 1, 2, and of 1, 2, 3
    assert data["columns"][lines[1]["x"]] == [100, 200]
    assert "Probability of improvement" in page.html()


def test_numbers_that_json_does_not_have_are_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "maze", scores={10: 0.5})
    values = (1.0, float("inf"), float("nan"), 1.7976931348623157e308, 10**400, -3.0)
    lines = [train_line(10 * place + 10) | {"loss": value, "time": value} for place, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    huge = write_evaluation(run, 20, 0.5, series="huge")
    huge.write_text(huge.read_text().replace('"update": 20', f'"update": {10**400}'))
    data = data_of(page_of(run))
    (chart,) = [chart for chart in data["charts"] if [line["name"] for line in chart.get("series", ())] == ["loss"]]
    assert [value for value in data["columns"][chart["series"][0]["y"]] if value is not None] == [1, -3]
