"""kill -9 at random moments: nothing acknowledged is lost or doubled, and the same command goes on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipelines.lake.maintenance.verify import verify
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.stages import collect, train
from tests.stages.recipes import tiny

_COLLECT = """
import sys
from pathlib import Path
from pipelines.lake.writer import Writer
from pipelines.stages import collect
from tests.stages.recipes import tiny
append = Writer.append_many
def acknowledged(self, trajectories):
    uids = append(self, trajectories)
    print("\\n".join(uids), flush=True)
    return uids
Writer.append_many = acknowledged
collect.run(tiny(collect={"steps": int(sys.argv[2]), "seal_seconds": 0.2}), run=Path(sys.argv[1]))
"""

_TRAIN = """
import sys
from pathlib import Path
from pipelines.stages import train
from tests.stages.recipes import tiny
train.run(tiny(train={"steps": 60, "checkpoint_every": 4}), run=Path(sys.argv[1]), lakes=[(Path(sys.argv[2]), 1.0)],
          listener=lambda event: print("update", flush=True))
"""


def killed(script: str, *arguments: str, after_lines: int, delay: float) -> list[str]:
    """Lines a process printed before it was killed, `delay` seconds after its first `after_lines` lines."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if len(lines) >= after_lines:
            break
    time.sleep(delay)
    process.kill()
    lines += [line.strip() for line in process.stdout if line.endswith("\n")]
    process.wait()
    return lines


def survives_collect(tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    run, acknowledged = tmp_path / "run", []
    for _ in range(kills):
        lines = killed(_COLLECT, str(run), "100000000", after_lines=rng.randint(1, 60), delay=rng.random() * 0.4)
        acknowledged += lines
    Lake(run).salvage()
    lake = Lake(run)
    found = [uid for (uid,) in query(lake, "select uid from trajectories")[1]]
    assert len(found) == len(set(found))
    assert set(acknowledged) <= set(found)
    assert len(set(acknowledged)) == len(acknowledged) > 0
    assert not verify(lake).corrupt
    steps = query(lake, "select sum(length) from trajectories")[1][0][0]
    more = collect.run(tiny(collect={"steps": steps + 40, "seal_seconds": 0.2}), run=run)
    assert more.metrics["steps"] == 40


def survives_train(tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    collect.run(tiny(), lake=tmp_path / "lake")
    for _ in range(kills):
        places = str(tmp_path / "run"), str(tmp_path / "lake")
        killed(_TRAIN, *places, after_lines=rng.randint(1, 9), delay=rng.random() * 0.05)
    settings = tiny(train={"steps": 60, "checkpoint_every": 4})
    resumed = train.run(settings, run=tmp_path / "run", lakes=[(tmp_path / "lake", 1.0)])
    assert resumed.metrics["updates"] == 60
    train.run(settings, run=tmp_path / "whole", lakes=[(tmp_path / "lake", 1.0)])
    a, b = (checkpoints.load(tmp_path / name / "checkpoints").weights for name in ("run", "whole"))
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.system
def test_collect_survives_a_kill(tmp_path: Path) -> None:
    survives_collect(tmp_path, kills=1, seed=0)


@pytest.mark.system
def test_train_survives_a_kill(tmp_path: Path) -> None:
    survives_train(tmp_path, kills=1, seed=0)


@pytest.mark.slow
def test_collect_survives_ten_kills(tmp_path: Path) -> None:
    survives_collect(tmp_path, kills=10, seed=1)


@pytest.mark.slow
def test_train_survives_ten_kills(tmp_path: Path) -> None:
    survives_train(tmp_path, kills=10, seed=1)
