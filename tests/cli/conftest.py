"""`amago(...)` calls the command line in this process, in an empty directory; `small` is a run that has everything."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from amago_cli.app import main

TINY = (
    "agent.timestep.hidden=[8]",
    "agent.timestep.output=8",
    "agent.sequence.d_model=8",
    "agent.sequence.num_layers=1",
    "agent.sequence.d_ff=8",
    "agent.actor.hidden=[8]",
    "agent.critic.hidden=[8]",
    "train.context_length=16",
    "train.batch_size=4",
    "train.threads=1",
)


@dataclass(frozen=True)
class Call:
    """What a call of `amago` left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Amago = Callable[..., Call]


def call(*arguments: object) -> Call:
    out, err = io.StringIO(), io.StringIO()
    # This process may have been a rank in another test: it must not end as one.
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("amago_cli.ranks.end"):
        code = main([str(argument) for argument in arguments])
    return Call(code, out.getvalue(), err.getvalue())


def tiny(*more: str) -> list[str]:
    """`--set` options of a network that trains in no time."""
    return [word for assignment in (*TINY, *more) for word in ("--set", assignment)]


@pytest.fixture
def amago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Amago:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return call


@pytest.fixture(scope="session")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CartPole: some hundred random steps and a memory-free agent after three updates."""
    home, before = tmp_path_factory.mktemp("prepared"), Path.cwd()
    os.chdir(home)
    try:
        collected = call("collect", "--env", "gym:CartPole-v1", "--run", "small", "--steps", 400, "--actors", 4, "-q")
        assert collected.code == 0, collected.err
        trained = call("train", "--from-lake", "small", "--steps", 3, "--encoder", "feedforward", *tiny(), "-q")
        assert trained.code == 0, trained.err
    finally:
        os.chdir(before)
    return home / "small"


@pytest.fixture
def small(_prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared run, free to be changed; its path is `small` in the test's directory."""
    shutil.copytree(_prepared, tmp_path / "small", symlinks=True)
    return Path("small")
