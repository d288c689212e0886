"""A trained run that every test may change: it is made once in a session, and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipelines.stages import collect, train
from tests.stages.recipes import tiny


@pytest.fixture(scope="session")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("prepared") / "run"
    collect.run(tiny(), run=run)
    train.run(tiny(), run=run, lakes=[(run / "lake", 1.0)])
    return run


@pytest.fixture
def trained(_prepared: Path, tmp_path: Path) -> Path:
    """A run of `tiny()`: 100 steps, six updates."""
    return Path(shutil.copytree(_prepared, tmp_path / "run", symlinks=True))


@pytest.fixture
def collected(_prepared: Path, tmp_path: Path) -> Path:
    """The lake of such a run, in a directory of its own."""
    return Path(shutil.copytree(_prepared / "lake", tmp_path / "lake", symlinks=True))
