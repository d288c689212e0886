from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amago_cli
from amago_cli import completion
from amago_cli.app import main
from tests.cli.conftest import Amago

ROOT = Path(amago_cli.__file__).parent.parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the runs `cart`, which has two checkpoints, and `b d`."""
    monkeypatch.chdir(tmp_path)
    for name in ("cart", "b d"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    for name in ("000200", "best"):
        (tmp_path / "runs" / "cart" / "checkpoints" / name).mkdir(parents=True)
    return tmp_path


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `amago` answers a shell that asks for the last word of `line`."""
    words = line.split(" ")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv(completion.VARIABLE, "complete_bash")
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("amago ev", {"evaluate"}),
        ("amago lake lin", {"lineage"}),
        ("amago run quick", {"quickstart"}),
        ("amago run quickstart --profile s", {"smoke"}),
        ("amago run quickstart --size ", {"tiny", "small", "base", "large"}),
        ("amago examples quick", {"quickstart"}),
        ("amago collect --env tma", {"tmaze"}),
        ("amago collect --env gym:CartPole", {"gym:CartPole-v0", "gym:CartPole-v1"}),
        ("amago envs procgen-m", {"procgen-multi"}),
        ("amago evaluate ", {"runs/cart", "zoo:alchemy", "zoo:cartpole", "zoo:quickstart", "zoo:tmaze"}),
        ("amago evaluate ru", {"runs/cart"}),
        ("amago verify zoo:t", {"zoo:tmaze"}),
        ("amago lake info runs/", {"runs/cart"}),
        ("amago evaluate runs/cart --checkpoint ", {"200", "best"}),
        ("amago lake lineage runs/cart@", {"runs/cart@200", "runs/cart@best"}),
        ("amago collect --policy rand", {"random"}),
        ("amago train --set train.batch", {"train.batch_size="}),
        (
            "amago train --set train.precision=",
            {f"train.precision={each}" for each in ("auto", "float32", "tf32", "bf16")},
        ),
        ("amago train --set train.packing=", {"train.packing=true", "train.packing=false"}),
        ("amago settings train.batch", {"train.batch_size"}),
        ("amago completion z", {"zsh"}),
    ],
)
def test_a_shell_completes(
    line: str, wanted: set[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(completed(line, monkeypatch, capsys)) == wanted


@pytest.mark.parametrize("line", ["amago evaluate nowhere --checkpoint ", "amago run nothing --profile "])
def test_a_mistake_completes_to_nothing(
    line: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(line, monkeypatch, capsys) == []


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_has_a_script_that_asks_amago(shell: str, amago: Amago) -> None:
    shown = amago("completion", shell)
    assert shown.code == 0
    assert f"{completion.VARIABLE}=complete_{shell}" in shown.out


def test_an_unknown_shell_is_refused_with_those_that_are_known(amago: Amago) -> None:
    failed = amago("completion", "csh")
    assert (failed.code, failed.out) == (2, "")
    assert "bash, zsh, fish" in failed.err


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.system
def test_bash_completes_the_part_of_a_word_after_a_colon(here: Path) -> None:
    program = here / "amago"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m amago_cli "$@"\n')
    program.chmod(0o755)
    asked = (
        'eval "$(amago completion bash)"; COMP_LINE="amago collect --env gym:CartPole-v"; COMP_POINT=${#COMP_LINE};'
        ' _amago_completion 2>/dev/null; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{here}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", asked], capture_output=True, text=True, env=environment, check=True, cwd=here
    )
    assert done.stdout.split() == ["CartPole-v0", "CartPole-v1"]
