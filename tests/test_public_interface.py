"""What `from pipelines import ...` offers: lazy, typed, and enough for a notebook."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

import pipelines
from pipelines import Lake, Settings, load_policy, run
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Progress
from pipelines.lake.store import QueryResult
from tests.cli.commands.test_run import RECIPE
from tests.lake.factories import fill


@pytest.mark.system
def test_every_public_name_is_there_and_is_imported_when_it_is_used() -> None:
    assert all(hasattr(pipelines, name) for name in pipelines.__all__)
    assert set(pipelines.__all__) <= set(dir(pipelines))
    code = "import sys; before = set(sys.modules); import pipelines; print(*set(sys.modules) - before)"
    assert {name.partition(".")[0] for name in _printed(code).split()} <= {"pipelines", *sys.stdlib_module_names}
    assert (
        _printed("import sys; from pipelines import Lake, Settings, collect; print('torch' in sys.modules)") == "False"
    )
    with pytest.raises(AttributeError, match="has no attribute 'lakes'"):
        pipelines.lakes  # noqa: B018


def _printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.system
def test_every_public_name_has_an_example_and_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: later examples use the run of earlier ones."""
    monkeypatch.chdir(tmp_path)
    names = {name: getattr(pipelines, name) for name in pipelines.__all__}
    order = ("Settings", "collect", "Lake", "WindowDataset", "train", "evaluate", "run", "load_policy")
    assert set(order) == set(names)
    for name in order:
        examples = [
            test
            for test in doctest.DocTestFinder().find(names[name], name, globs=dict(names))
            if test.examples and (test.name != "Lake.to_polars" or importlib.util.find_spec("polars"))
        ]
        assert examples[0].name == name
        for example in examples:
            shown: list[str] = []
            failed, tried = doctest.DocTestRunner(verbose=False).run(example, out=shown.append)
            assert (failed, tried > 0) == (0, True), "".join(shown)


@pytest.mark.system
def test_a_recipe_is_run_asked_and_its_policy_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.toml").write_text(RECIPE + '[[stages]]\nstage = "export"\nstart_epoch = -1\n')
    heard: list[object] = []
    done = run("short.toml", settings={"train.steps": 3}, listener=heard.append)
    assert (done.status, done.run) == ("done", Path("runs/short"))
    assert any(isinstance(event, Progress) for event in heard)
    assert run("short.toml", "runs/short", settings={"train.steps": 3}).status == "skipped"

    lake = Lake("runs/short")
    assert repr(lake) == f"Lake({lake.name!r})"
    (row,) = lake.sql("select count(*) as n, sum(length) as steps from trajectories")
    assert row["steps"] == 80
    with pytest.raises(UsageError, match="SQL"):
        lake.sql("select nothing from nowhere")

    assert load_policy("runs/short/export").spaces.action.shape == ()


def test_mistakes_are_those_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        run("quickstart", settings={"train.stpes": 3, "seed": -1})
    assert len(caught.value.problems) == 2
    with pytest.raises(UsageError, match="did you mean 'quickstart'"):
        run("quickstrat")
    assert not Path("runs").exists()


def test_parameters_of_no_environment_are_refused() -> None:
    with pytest.raises(ValidationError, match="name is not set"):
        Settings.model_validate({"env": {"corridoor": 3}})
    assert Settings.model_validate({"env": {"name": "tmaze", "corridor": 3}}).env.params == {"corridor": 3}


def test_an_answer_is_rows_a_short_text_and_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = QueryResult(["n", "name"], [(number, "x") for number in range(12)])
    assert len(answer) == 12
    assert next(iter(answer)) == {"n": 0, "name": "x"}
    assert repr(answer).splitlines()[0] == "<12 rows: n, name>"
    assert repr(answer).splitlines()[-1] == "... 2 more"
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns)))
    assert answer.df() == ([[number, "x"] for number in range(12)], ["n", "name"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputMissing, match="pip install pandas"):
        answer.df()


def test_a_polars_frame_is_made_of_the_table_and_needs_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.create(tmp_path / "lake")
    fill(lake, [3, 4])
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(from_arrow=lambda table: ("frame", table)))
    assert lake.to_polars() == ("frame", lake.to_arrow("select * from trajectories"))
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(InputMissing, match="pip install polars"):
        lake.to_polars("this is not SQL")


@pytest.mark.system
def test_the_page_names_all_of_it_and_its_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(pipelines.__file__).parent.parent / "docs" / "python.md").read_text()
    assert all(f"`{name}" in page for name in pipelines.__all__)
    monkeypatch.chdir(tmp_path)
    done: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, done)
    assert done["number"] == 20
    assert done["done"].metrics["updates"] == 20  # type: ignore[attr-defined]
    assert done["row"]["episodes"] > 0  # type: ignore[index]
