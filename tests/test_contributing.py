"""CONTRIBUTING.md: what it names exists, and what it says to type works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipelines.config import reference
from tests.cli.pages import typed

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_path_exists() -> None:
    named = re.findall(r"[`(]((?:pipelines|amago_cli|tests|docs|\.ci)/[\w./-]*)", TEXT)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_module_name_is_imported_from_where_it_is_said_to_be() -> None:
    """A name in capitals or of a class before a path in brackets is defined in that file."""
    pairs = re.findall(r"`([A-Z]\w+)`\s+\(`([\w./]+\.py)`\)", TEXT)
    assert pairs
    for name, path in pairs:
        assert re.search(rf"^(class {name}\b|{name}\b.*=)", (ROOT / path).read_text(), re.MULTILINE), (name, path)


def test_every_setting_exists() -> None:
    known = {setting.key for setting in reference.list_settings()}
    tables = {key.rpartition(".")[0] for key in known}
    named = re.findall(r"(?:--set|-s)\s+([a-z_.]+)=", TEXT) + re.findall(r"under\s+`([a-z_.]+)`", TEXT)
    assert named
    assert [key for key in named if key not in known | tables] == []


def test_every_marker_is_described() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {marker.partition(":")[0] for marker in options["markers"]}
    described = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert described == markers - {"smoke"}
    quick = re.search(r"-m '([^']*)'", options["addopts"])
    assert quick is not None
    assert set(re.findall(r"not (\w+)", quick[1])) == described - {"trials", "extras"}  # these are in the quick tier


class Fork:
    """A copy of both packages that a newcomer changes. `touched`: the files, added ones too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.touched: set[str] = set()
        for package in ("amago_cli", "pipelines"):
            shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "examples.toml", root)

    def add(self, path: str, text: str) -> None:
        assert not (self.root / path).exists()
        (self.root / path).write_text(text)
        self.touched.add(path)

    def insert(self, path: str, before: str, text: str) -> None:
        """Insert `text` in front of the only place that reads `before`."""
        found = (self.root / path).read_text()
        assert found.count(before) == 1, f"{path}: {before!r}"
        (self.root / path).write_text(found.replace(before, text + before))
        self.touched.add(path)

    def run(self, *arguments: str, code: str = "") -> str:
        code = code or "import sys; from amago_cli.app import main; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            env=os.environ | {"PYTHONPATH": str(self.root)},
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    return Fork(tmp_path)


@pytest.mark.full
def test_a_command_is_a_file_and_a_name_in_the_application(fork: Fork) -> None:
    [program] = re.findall(r"```python\n# amago_cli/commands/count.py\n(.*?)```", TEXT, re.DOTALL)
    fork.add("amago_cli/commands/count.py", program)
    fork.insert("amago_cli/app.py", "    doctor,\n", "    count,\n")
    fork.insert("amago_cli/app.py", "init.init,)", "count.count, ")
    assert len(fork.touched) == 2
    fork.run(code="from pipelines import Lake; Lake.create('lake')")
    assert '"trajectories": 0' in fork.run("count", "lake", "--output", "json")
    assert "Count the trajectories" in fork.run("--help")


def train_and_evaluate(fork: Fork, *options: str) -> str:
    """Run a small chain in the fork; returns the result as JSON."""
    size = ("--profile", "smoke", "--set", "epochs=1", "--set", "collect.workers=0", "--output", "json", "-q")
    return fork.run("run", "tmaze", "--run", "run", *size, *options)


@pytest.mark.full
def test_a_sequence_encoder_is_a_module_and_its_settings(fork: Fork) -> None:
    fork.add(
        "pipelines/nets/average.py",
        """
import torch
from pipelines.nets.cache import State
from pipelines.nets.rnn import SteppedEncoder

class Average(SteppedEncoder):
    def __init__(self, input_size, settings):
        super().__init__()
        self.output_size, self.decay = input_size, settings.decay

    def forward(self, x_BTD, time_BT, packing=None):
        memory = self.memory(num_actors=len(x_BTD), capacity=0)
        return torch.stack([self.step(x_BTD[:, t], time_BT[:, t], memory) for t in range(x_BTD.shape[1])], 1)

    def memory(self, *, num_actors, capacity, device="cpu", dtype=torch.float32):
        return State(torch.zeros(1, num_actors, self.output_size, device=device))

    def step(self, x_ND, time_N, memory):
        memory.tensors[0] = (self.decay * memory.tensors[0][0] + (1 - self.decay) * x_ND)[None]
        return memory.tensors[0][0]
""",
    )
    model = "pipelines/config/model.py"
    fork.insert(model, '        "identity": "pipelines.nets', '        "average": "pipelines.nets.average:Average",\n')
    fork.insert(
        model,
        "class SequencePluginSettings",
        """class AverageSettings(SettingsModel):
    kind: Literal["average"] = "average"
    decay: Probability = 0.9


""",
    )
    fork.insert(model, "    | Annotated[SequencePluginSettings", '    | Annotated[AverageSettings, Tag("average")]\n')
    assert len(fork.touched) == 2
    train_and_evaluate(fork, "--set", 'agent.sequence={kind="average", decay=0.5}')
    assert "decay = 0.5" in (fork.root / "run" / "config.toml").read_text()


@pytest.mark.full
def test_a_stage_of_a_chain_is_a_name_and_a_method(fork: Fork) -> None:
    fork.insert("pipelines/config/settings.py", '"ingest", "collect", "relabel", "train"', '"census", ')
    chain = "pipelines/stages/run.py"
    fork.insert(chain, '            "ingest": self._ingest,', '            "census": self._census,\n')
    fork.insert(
        chain,
        "    def _ingest(self",
        """    def _census(self, step, listener):
        (self.directory.path / "census.txt").write_text(str(self._steps()))

""",
    )
    assert len(fork.touched) == 2
    stages = '[{stage="collect"}, {stage="census"}, {stage="train"}, {stage="evaluate"}]'
    train_and_evaluate(fork, "--set", f"stages={stages}")
    assert int((fork.root / "run" / "census.txt").read_text()) > 0


@pytest.mark.full
def test_a_tracker_is_a_module_and_a_name(fork: Fork) -> None:
    fork.add(
        "pipelines/tracking/lines.py",
        """
class LinesTracker:
    def __init__(self, argument, run):
        self.id, self.place, self.file = run.identity, argument, open(argument, "a")

    def log(self, figures, *, step, seconds):
        print(step, sorted(figures), file=self.file)

    def picture(self, name, path, *, step): ...
    def video(self, name, path, *, step): ...

    def close(self, ending):
        print(ending, file=self.file)
        self.file.close()
""",
    )
    row = '        "lines": "pipelines.tracking.lines:LinesTracker",\n'
    fork.insert("pipelines/tracking/base.py", '        "tensorboard": "pipelines', row)
    assert len(fork.touched) == 2
    train_and_evaluate(fork, "--track", "lines:figures.txt")
    *figures, ending = (fork.root / "figures.txt").read_text().splitlines()
    assert ending == "finished"
    assert any("actor_loss" in line for line in figures)


@pytest.mark.full
def test_a_loss_term_is_a_function_with_a_row_and_a_weight(fork: Fork) -> None:
    objectives = "pipelines/learning/objectives.py"
    fork.insert(
        objectives,
        "# By the name of their metric.",
        """def likelihood_loss(inputs):
    return -inputs.log_prob_NG.sum()


""",
    )
    row = '    "likelihood_loss": _Term(likelihood_loss, lambda settings: settings.likelihood_weight),\n'
    fork.insert(objectives, '    "reference_loss": _Term(', row)
    fork.insert("pipelines/config/model.py", "    reference_weight: Annotated", "    likelihood_weight: float = 0.0\n")
    assert len(fork.touched) == 2  # the third is its literal version for the tests
    train_and_evaluate(fork, "--set", "agent.likelihood_weight=0.5")
    lines = [json.loads(line) for line in (fork.root / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("likelihood_loss", 0) > 0 for line in lines)


@pytest.mark.full
def test_a_metric_is_an_entry_of_one_file(fork: Fork) -> None:
    row = '        "return_middle": float(np.median(results.returns)),\n'
    fork.insert("pipelines/evaluation/adaptation.py", '        "return_std": float', row)
    assert len(fork.touched) == 1
    train_and_evaluate(fork)
    reports = [json.loads(path.read_text()) for path in (fork.root / "run" / "evaluations").rglob("*.json")]
    assert reports
    assert all("return_middle" in report["metrics"] for report in reports)
    columns = fork.run("runs", "sql", "select return_middle from evaluations", "run", "--output", "csv").splitlines()
    assert columns[0] == "return_middle"
    assert len(columns) > 1


@pytest.mark.full
def test_a_data_format_is_a_module_and_a_row(fork: Fork) -> None:
    fork.add(
        "pipelines/formats/returns.py",
        """
from pipelines.formats.base import Exported

def write(items, to, about):
    rows = [item.row() for item in items]
    (to / "returns.txt").write_text("".join(f"{row['uid']} {row['return']}\\n" for row in rows))
    return Exported(trajectories=len(rows), steps=sum(row["length"] for row in rows), written=len(rows), bytes=1)
""",
    )
    row = '    "returns": Format(exporter=f"{_HERE}.returns:write"),\n'
    fork.insert("pipelines/formats/make.py", '    "robomimic": Format(', row)
    assert len(fork.touched) == 2
    fork.run("collect", "--env", "tmaze", "--steps", "100", "--run", "run", "--set", "collect.workers=0")
    fork.run("export", "run", "--format", "returns", "--to", "out")
    assert len((fork.root / "out" / "returns.txt").read_text().splitlines()) > 0


def test_the_page_has_commands_to_type() -> None:
    """`tests/cli/test_pages.py` types them."""
    found = list(typed("CONTRIBUTING.md"))
    assert {one.file for one in found} >= {"plugins.py"}
    assert sum(one.language == "sh" for one in found) >= 6


def test_ci_tests_every_python_that_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    matrix = re.search(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert matrix is not None
    assert re.findall(r"3\.\d+", matrix[1]) == named
    assert f"Linux with Python {named[0]} to {named[-1]} is supported" in (ROOT / "README.md").read_text()
    assert project["requires-python"] == f">={named[0]}"
