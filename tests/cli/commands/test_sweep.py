from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from amago_cli.cells import parse_varied
from pipelines.errors import UsageError
from pipelines.runs.stored import read_run
from tests.cli.conftest import Amago
from tests.stages.recipes import TINY

STAGES = [{"stage": "collect"}, {"stage": "train"}, {"stage": "evaluate", "split": "train"}]


def recipe(epochs: int = 1) -> Path:
    path = Path("tiny.toml")
    path.write_text(tomli_w.dumps({**TINY, "epochs": epochs, "stages": STAGES}))
    return path


def test_values_are_split_at_commas_outside_of_brackets_and_quotes() -> None:
    assert parse_varied(["a.b=1,2.5,x", "c=[1,2],[3]", 'd="p,q",r', "e=true,false"]) == {
        "a.b": [1, 2.5, "x"],
        "c": [[1, 2], [3]],
        "d": ["p,q", "r"],
        "e": [True, False],
    }
    for wrong in ("a", "a=", "=1", "a=1,,2"):
        with pytest.raises(UsageError):
            parse_varied([wrong])
    with pytest.raises(UsageError, match="twice"):
        parse_varied(["a=1", "a=2"])


def test_a_dry_run_lists_commands_that_can_be_typed(amago: Amago) -> None:
    recipe()
    shown = amago("sweep", "tiny.toml", "--vary", "train.batch_size=4,8", "--seeds", 2, "--dry-run")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert len(lines) == 4
    words = shlex.split(lines[-1].removeprefix("to run").strip())
    expected = "runs/tiny-sweep/batch_size-8-seed-1"
    assert words == shlex.split(f"amago run tiny.toml --run {expected} --set train.batch_size=8 --set seed=1")
    assert not Path("runs").exists()
    assert amago(*words[1:], "--dry-run").code == 0


def test_mistakes_are_reported_before_anything_runs(amago: Amago) -> None:
    recipe()
    for given in ("train.batch_siz=4,8", "train.batch_size=4,none", "train.batch_size", "seed=1,2"):
        refused = amago("sweep", "tiny.toml", "--vary", given)
        assert refused.code == 2, given
    assert amago("sweep", "nothing.toml", "--vary", "train.batch_size=4").code in (2, 3)
    assert not Path("runs").exists()


@pytest.mark.full
def test_a_sweep_that_was_killed_resumes_by_the_same_command(amago: Amago) -> None:
    recipe(epochs=12)
    words = ["sweep", "tiny.toml", "--vary", "train.batch_size=4,8", "--seeds", "1", "--jobs", "2", "--run", "sweep"]
    code = "import sys; from amago_cli.app import main; sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.DEVNULL)
    cells = [Path("sweep/batch_size-4-seed-0"), Path("sweep/batch_size-8-seed-0")]
    try:
        while not any((cell / "checkpoints" / "latest").exists() for cell in cells):
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = amago(*words, "--output", "json")
    assert done.code == 0, done.err
    assert done.json["metrics"]["done"] == 2
    for cell in cells:
        run = read_run(cell)
        assert run.state.status == "finished"
        assert run.updates == 72
        assert [each.split for each in run.scores.curve].count("train") == 12
    assert amago(*words, "--output", "json").json["status"] == "skipped"


@pytest.mark.system
def test_a_sweep_of_another_recipe_is_refused(amago: Amago) -> None:
    recipe()
    words = ("--vary", "train.batch_size=4", "--run", "sweep")
    assert amago("sweep", "tiny.toml", *words).code == 0
    refused = amago("sweep", "tiny.toml", "--set", "env.name=bandit", *words, "--seeds", 2)
    assert refused.code == 2
    assert "env.name: 'tmaze' -> 'bandit'" in refused.err
    assert not Path("sweep/batch_size-4-seed-1").exists()
