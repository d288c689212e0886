"""A chain with two ranks does what one process does, goes on after any end, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomli_w
import torch

from pipelines.lake.maintenance.verify import verify
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from tests.ranks import assert_alike, environment, gone, lines, processes, wait_for_updates
from tests.stages.recipes import tiny

STAGES = [{"stage": "collect"}, {"stage": "train"}, {"stage": "evaluate", "start_epoch": -1}]
TRAIN = {"steps": 3, "grad_accumulation": 2, "log_every": 1, "checkpoint_every": 1000, "rank_timeout": 600}
LONG = 100_000_000


def recipe(
    place: Path, *, epochs: int = 4, train: int = 3, collect: int = 120, stages: Sequence[dict] = STAGES
) -> Path:
    """Write a small recipe."""
    settings = tiny(
        epochs=epochs,
        stages=stages,
        collect={"actors": 4, "workers": 0, "steps": collect},
        train=TRAIN | {"steps": train},
    )
    place.write_text(tomli_w.dumps(settings.document()))
    return place


def command(file: Path, run: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "amago_cli", "run", str(file), "--run", str(run), "--output", "json", *options]


def call(file: Path, run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(file, run, *options), capture_output=True, text=True, env=environment(), timeout=600, cwd=run.parent
    )


def start(file: Path, run: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(file, run, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=run.parent,
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read stderr up to a line with `text`."""
    assert process.stderr is not None
    while text not in (line := process.stderr.readline()):
        assert line, f"it ended before '{text}'"


def steps_of(run: Path) -> int:
    lake = Lake(run / "lake")
    lake.salvage()
    assert not verify(lake).corrupt
    uids = [uid for (uid,) in query(lake, "select uid from trajectories")[1]]
    assert len(uids) == len(set(uids))
    return int(query(lake, "select sum(length) from trajectories")[1][0][0] or 0)


@pytest.mark.system
@pytest.mark.parametrize("sharding", ["none", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_chain_with_two_ranks_does_what_one_process_does(tmp_path: Path, sharding: str) -> None:
    """The policies of later epochs are trained by both ranks: the same steps are collected with them."""
    file = recipe(tmp_path / "recipe.toml")
    results = []
    for run, options in (("one", ()), ("two", ("--ranks", "2", "--set", f"train.sharding={sharding}"))):
        done = call(file, tmp_path / run, *options)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout)["metrics"])
    assert_alike(tmp_path / "one", tmp_path / "two")
    one, two = results
    assert (one.get("ranks"), two["ranks"]) == (None, 2)
    assert {name: one[name] for name in ("steps", "updates", "steps_seen", "return_mean")} == {
        name: two[name] for name in ("steps", "updates", "steps_seen", "return_mean")
    }
    compute = json.loads((tmp_path / "two/run.json").read_text())["compute"]
    assert (compute["ranks"], compute["backend"], compute["micro_batches"]) == (2, "gloo", 2)
    again = call(file, tmp_path / "two", "--ranks", "2")
    assert (again.returncode, json.loads(again.stdout)["status"]) == (0, "skipped")


@pytest.mark.system
@pytest.mark.slow
def test_a_chain_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    for epochs, number in ((1, "2"), (2, "1"), (4, "2")):
        file = recipe(tmp_path / "recipe.toml", epochs=epochs)
        for run, options in (("one", ()), ("mixed", ("--ranks", number))):
            done = call(file, tmp_path / run, *options)
            assert done.returncode == 0, done.stderr
    assert_alike(tmp_path / "one", tmp_path / "mixed")


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_while_steps_are_collected_stores_them_and_ends_all_ranks(tmp_path: Path, number: int) -> None:
    file, run = recipe(tmp_path / "recipe.toml", collect=LONG), tmp_path / "run"
    with start(file, run, "--ranks", "2") as process:
        wait_for_line(process, "collect")
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert json.loads(out)["status"] == "interrupted"
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert gone(run)
    assert steps_of(run) > 0


@pytest.mark.full
def test_a_signal_in_training_saves_that_update_and_the_chain_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(recipe(tmp_path / "long.toml", epochs=1, train=LONG), run, "--ranks", "2") as process:
        wait_for_updates(process, run, 3)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 143
    assert json.loads(out)["status"] == "interrupted"
    assert err.count("error: ") == 1
    assert gone(run)
    saved = checkpoints.load(run / "checkpoints").update
    assert saved >= len(lines(run)) >= 3
    done = call(recipe(tmp_path / "short.toml", epochs=2, train=saved + 2), run, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["updates"] == 2 * (saved + 2)


@pytest.mark.system
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["collect", pytest.param("train", marks=pytest.mark.slow)])
def test_all_ranks_end_with_one_that_is_killed(tmp_path: Path, stage: str, rank: int) -> None:
    targets = {"collect": 120, "train": 3} | {stage: LONG}
    file, run = recipe(tmp_path / "long.toml", epochs=1, **targets), tmp_path / "run"
    with start(file, run, "--ranks", "2") as process:
        wait_for_line(process, "collect")
        if stage == "train":
            wait_for_updates(process, run, 2)
        os.kill(processes(run)[rank], signal.SIGKILL)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 137
    assert out.count("\n") == 1
    assert f"rank {rank} was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert gone(run)
    if stage == "collect":
        done = call(recipe(tmp_path / "short.toml", epochs=1, collect=steps_of(run) + 40), run)
        assert done.returncode == 0, done.stderr  # its locks are free


@pytest.mark.system
def test_ranks_of_a_chain_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(recipe(tmp_path / "recipe.toml", collect=LONG), run, "--ranks", "2") as process:
        wait_for_line(process, "collect")
        process.kill()
        process.wait()
        assert gone(run)
    assert steps_of(run) > 0


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_chain_whose_ranks_are_killed_and_restarted_ends_as_planned(tmp_path: Path) -> None:
    """torchrun starts all of them again: collect goes on to its target, and train from the last checkpoint."""
    stages = [{"stage": "collect", "stop_epoch": 1}, {"stage": "train"}]
    file = recipe(tmp_path / "recipe.toml", epochs=20, stages=stages)
    assert call(file, tmp_path / "whole", "--ranks", "2").returncode == 0
    run = tmp_path / "killed"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "10", "-m", "--", *command(file, run)[2:]]
    with subprocess.Popen(launcher, stderr=subprocess.DEVNULL, env=environment(), cwd=tmp_path) as process:
        for at in (5, 26, 44):
            wait_for_updates(process, run, at)
            os.kill(processes(run)[at % 2], signal.SIGKILL)
        assert process.wait(timeout=900) == 0
    assert_alike(tmp_path / "whole", run)
    a, b = (checkpoints.load(tmp_path / name / "checkpoints").weights for name in ("whole", "killed"))
    assert all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.full
def test_what_rank_0_refuses_ends_all_and_is_reported_once(tmp_path: Path) -> None:
    file, run = recipe(tmp_path / "recipe.toml"), tmp_path / "run"
    done = call(file, run, "--ranks", "3")
    assert done.returncode == 2
    assert done.stderr.count("error: train.batch_size 4 is not a multiple") == 1
    assert done.stdout.count("\n") == 1
    assert gone(run)
    with start(recipe(tmp_path / "long.toml", collect=LONG), run, "--fresh") as holder:
        wait_for_line(holder, "collect")
        done = call(file, run, "--ranks", "2")
        holder.terminate()
        holder.communicate(timeout=600)
    assert done.returncode == 75
    assert done.stderr.count("error: ") == 1
    done = call(file, run, "--ranks", "2", "--set", "train.learning_rate=1")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
