"""Several processes that train together do what one does, and end together: gloo on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from amago_cli.ranks import without_ranks
from pipelines.errors import InputMissing, UsageError
from pipelines.learning import checkpoint as checkpoints
from pipelines.nets import ranks
from pipelines.stages.library import collect
from tests.cli.conftest import call, tiny

COMMAND = [sys.executable, "-m", "amago_cli", "train"]
ALONE = ("train.grad_accumulation=4", "train.log_every=1", "train.checkpoint_every=1000")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks") / "lake"
    collect("tmaze", lake=place, steps=1_500, settings={"collect.workers": 0, "collect.actors": 8})
    return place


def words(lake: Path, run: Path, *options: str, **settings: object) -> list[str]:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    fixed = [each for each in ALONE if each.partition("=")[0] not in named]
    more = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in named.items()]
    return ["--from-lake", str(lake), "--run", str(run), *tiny(*fixed, *more), *options]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def train(lake: Path, run: Path, *options: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Call `amago train`; more of its options, then its settings."""
    command = [*COMMAND, *words(lake, run, *options, **settings), "--output", "json"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)


def start(lake: Path, run: Path, *options: str, **settings: object) -> subprocess.Popen[str]:
    command = [*COMMAND, *words(lake, run, *options, **settings), "--output", "json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_alike(one: Path, other: Path) -> None:
    """The same windows, and the same losses and gradients up to the order of sums."""
    assert len(lines(one)) == len(lines(other)) > 0
    for a, b in zip(lines(one), lines(other), strict=True):
        assert (a["update"], a["steps_seen"]) == (b["update"], b["steps_seen"])
        for name in ("loss", "grad_norm", "entropy", "log_prob"):
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=2e-5, abs=1e-7), (name, a["update"])


def processes(run: Path) -> list[int]:
    """Ranks of the run, by their command lines."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                command = (place / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run).encode() in command and b"--ranks" not in command and b"torch.distributed.run" not in command:
                found.append(int(place.name))
    return sorted(found)


def wait_for_updates(process: subprocess.Popen[str], run: Path, number: int) -> None:
    while not (run / "metrics.jsonl").exists() or len(lines(run)) < number:
        assert process.poll() is None, "it has ended"
        time.sleep(0.05)


def gone(run: Path, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while processes(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


KINDS: dict[str, dict[str, object]] = {
    "actor-critic": {},
    "multi-task": {"agent__kind": "multi-task"},
    "behaviour-cloning": {"agent__kind": "behaviour-cloning"},
    "priorities": {"train__per_alpha": 0.6},
    "packed-bf16": {"train__packing": True, "train__precision": "bf16"},
    "auxiliary": {"agent__auxiliary_losses": "[{ kind = 'next-step' }]"},
    "mixture-of-weights": {"train__weighting": "task", "train__half_life": 500.0},
}


@pytest.mark.system
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "actor-critic" else pytest.mark.slow) for kind in KINDS],
)
def test_two_ranks_do_what_one_does(tmp_path: Path, lake: Path, kind: str) -> None:
    settings = KINDS[kind]
    for run, options in (("one", ()), ("two", ("--ranks", "2"))):
        done = train(lake, tmp_path / run, "--steps", "6", *options, **settings)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["metrics"].get("ranks", 1) == (2 if options else 1)
    if kind == "packed-bf16":
        one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
        assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=0.02)
    else:
        assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.system
@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, lake: Path) -> None:
    for steps, number in ((3, 2), (5, 4), (8, 1)):
        assert train(lake, tmp_path / "mixed", "--steps", str(steps), "--ranks", str(number)).returncode == 0
    assert train(lake, tmp_path / "one", "--steps", "8").returncode == 0
    assert_alike(tmp_path / "one", tmp_path / "mixed")


@pytest.mark.system
def test_a_signal_saves_the_same_update_on_all_ranks(tmp_path: Path, lake: Path) -> None:
    run = tmp_path / "run"
    with start(lake, run, "--steps", "1000000", "--ranks", "2") as process:
        wait_for_updates(process, run, 3)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert json.loads(out)["status"] == "interrupted"
    assert err.count("error: ") == 1
    assert err.count("stopping at the next safe point") == 1
    assert gone(run)
    saved = checkpoints.load(run / "checkpoints").update
    assert saved >= len(lines(run)) >= 3
    done = train(lake, run, "--steps", str(saved + 2))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["updates_done"] == 2


@pytest.mark.system
def test_all_ranks_end_with_one_that_is_killed(tmp_path: Path, lake: Path) -> None:
    run = tmp_path / "run"
    with start(lake, run, "--steps", "1000000", "--ranks", "2", train__rank_timeout=60) as process:
        wait_for_updates(process, run, 3)
        os.kill(processes(run)[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert gone(run)
    assert train(lake, run, "--steps", "2").returncode == 0  # its lock is free


@pytest.mark.system
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, lake: Path) -> None:
    run = tmp_path / "run"
    with start(lake, run, "--steps", "1000000", "--ranks", "2", train__rank_timeout=60) as process:
        wait_for_updates(process, run, 3)
        process.kill()
        process.wait()
        assert gone(run)  # while its pipes are open: they report that they stop
    assert (run / "checkpoints" / "latest").exists()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_rank_is_started_again_and_changes_nothing(tmp_path: Path, lake: Path) -> None:
    """torchrun restarts all ranks from the last checkpoint: the weights are those of an undisturbed run, to the bit."""
    steps, settings = 60, {"train__checkpoint_every": 5, "train__rank_timeout": 60}
    done = train(lake, tmp_path / "whole", "--steps", str(steps), "--ranks", "2", **settings)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "killed"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "20", "-m", "--", "amago_cli", "train"]
    options = words(lake, run, "--steps", str(steps), **settings)
    with subprocess.Popen([*launcher, *options], stderr=subprocess.DEVNULL, env=environment()) as process:
        for at in (7, 23, 41):
            wait_for_updates(process, run, at)
            os.kill(processes(run)[at % 2], signal.SIGKILL)
        assert process.wait(timeout=900) == 0
    a, b = (checkpoints.load(tmp_path / name / "checkpoints").weights for name in ("whole", "killed"))
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.system
def test_what_one_rank_refuses_all_refuse_and_it_is_reported_once(tmp_path: Path, lake: Path) -> None:
    done = train(tmp_path / "nowhere", tmp_path / "run", "--steps", "2", "--ranks", "2")
    assert done.returncode == 3
    assert done.stderr.count("error: ") == 1
    done = train(lake, tmp_path / "run", "--steps", "2", "--ranks", "3")
    assert done.returncode == 2
    assert done.stderr.count("error: train.batch_size 4 is not a multiple") == 1
    with start(lake, tmp_path / "run", "--steps", "1000000") as holder:
        wait_for_updates(holder, tmp_path / "run", 1)
        done = train(lake, tmp_path / "run", "--steps", "2", "--ranks", "2")
        holder.terminate()
        holder.communicate(timeout=60)
    assert done.returncode == 75
    assert done.stderr.count("is in use by train") == 1


def test_only_train_has_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    refused = call("collect", "--env", "tmaze", "--steps", "8")
    assert refused.code == 2
    assert "'amago collect' was started 2 times by a launcher" in refused.err
    assert not (tmp_path / "runs").exists()
    assert call("--help").code == 0


def test_the_option_is_taken_from_the_arguments_of_each_rank() -> None:
    assert without_ranks(["train", "--ranks", "4", "--steps", "2"]) == ["train", "--steps", "2"]
    assert without_ranks(["train", "--ranks=4", "--run", "--ranks-of-mine"]) == ["train", "--run", "--ranks-of-mine"]


def test_a_process_that_is_alone_communicates_nothing() -> None:
    assert ranks.size() == 1
    assert list(ranks.micro_batches(3)) == [0, 1, 2]
    assert ranks.total_of(5.0, torch.device("cpu")) == 5.0
    assert ranks.any_rank(True, False, device=torch.device("cpu")) == [True, False]
    assert ranks.gather("x") == ["x"]
    with pytest.raises(InputMissing, match="gone"), ranks.together():
        raise InputMissing("gone")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("number", "rank", "wanted", "expected"),
    [(2, 0, 1, [0]), (2, 1, 1, [1]), (2, 1, 4, [1, 3]), (4, 2, 6, [2, 6]), (3, 0, 3, [0])],
)
def test_micro_batches_are_divided_among_ranks(
    monkeypatch: pytest.MonkeyPatch, number: int, rank: int, wanted: int, expected: list[int]
) -> None:
    monkeypatch.setattr(ranks, "size", lambda: number)
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    assert list(ranks.micro_batches(wanted)) == expected


def test_moments_are_those_of_all_rows_in_double_precision() -> None:
    """Rewards of 1e3 that differ by 1 do not cancel."""
    x = 1e3 + torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    mean, square, count = ranks.moments(x)
    assert count == 1000
    exact = x.double()
    torch.testing.assert_close(mean, exact.mean(0))
    torch.testing.assert_close(square - mean.square(), exact.var(0, correction=0), rtol=1e-6, atol=0)
    assert ranks.moments(x[:0])[2] == 0


def test_a_launcher_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="cannot join the other ranks"):
        ranks.join(torch.device("cpu"), timeout_seconds=1)
