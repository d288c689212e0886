"""Several processes that train together do what one does, and end together: gloo on this host."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.learning import checkpoint as checkpoints
from pipelines.nets import ranks
from tests.cli.conftest import call
from tests.ranks import (
    assert_alike,
    environment,
    gone,
    lines,
    processes,
    small_lake,
    start,
    train,
    wait_for_updates,
    words,
)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lake(tmp_path_factory.mktemp("ranks") / "lake")


@pytest.mark.system
@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, lake: Path) -> None:
    for steps, number in ((3, 2), (5, 4), (8, 1)):
        assert train(lake, tmp_path / "mixed", "--steps", str(steps), "--ranks", str(number)).returncode == 0
    assert train(lake, tmp_path / "one", "--steps", "8").returncode == 0
    assert_alike(tmp_path / "one", tmp_path / "mixed")


@pytest.mark.system
@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.full), "fsdp"])
def test_a_signal_saves_a_whole_checkpoint_which_one_process_continues(
    tmp_path: Path, lake: Path, sharding: str
) -> None:
    run = tmp_path / "run"
    with start(lake, run, "--steps", "1000000", "--ranks", "2", train__sharding=sharding) as process:
        wait_for_updates(process, run, 3)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 143, err
    assert json.loads(out)["status"] == "interrupted"
    assert err.count("error: ") == 1
    assert err.count("stopping at the next safe point") == 1
    assert gone(run)
    assert json.loads((run / "run.json").read_text())["compute"]["sharding"] == sharding
    saved = checkpoints.load(run / "checkpoints")
    shapes = {name: each.shape for name, each in checkpoints.load_agent(saved).state_dict().items()}
    assert {name: each.shape for name, each in saved.weights.items()} == shapes
    assert saved.update >= len(lines(run)) >= 3
    done = train(lake, run, "--steps", str(saved.update + 2))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["updates_done"] == 2


@pytest.mark.system
@pytest.mark.parametrize("sharding", ["none", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_all_ranks_end_with_one_that_is_killed(tmp_path: Path, lake: Path, sharding: str) -> None:
    run, settings = tmp_path / "run", {"train__sharding": sharding, "train__rank_timeout": 6000}
    with start(lake, run, "--steps", "1000000", "--ranks", "2", **settings) as process:
        wait_for_updates(process, run, 3)
        os.kill(processes(run)[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert gone(run)
    assert train(lake, run, "--steps", "2").returncode == 0  # its lock is free


@pytest.mark.system
@pytest.mark.full
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, lake: Path) -> None:
    run = tmp_path / "run"
    with start(lake, run, "--steps", "1000000", "--ranks", "2", train__rank_timeout=6000) as process:
        wait_for_updates(process, run, 3)
        process.kill()
        process.wait()
        assert gone(run)  # while its pipes are open: they report that they stop
    assert (run / "checkpoints" / "latest").exists()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_killed_at_ten_moments_are_started_again_and_change_nothing(tmp_path: Path, lake: Path) -> None:
    """torchrun restarts all ranks from the last checkpoint: the weights are those of an undisturbed run, to the bit."""
    steps, settings = 200, {"train__checkpoint_every": 5, "train__rank_timeout": 600}
    rng = random.Random(19)
    done = train(lake, tmp_path / "whole", "--steps", str(steps), "--ranks", "2", **settings)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "killed"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "20", "-m", "--", "amago_cli", "train"]
    options = words(lake, run, "--steps", str(steps), **settings)
    with subprocess.Popen([*launcher, *options], stderr=subprocess.DEVNULL, env=environment()) as process:
        for at in sorted(rng.sample(range(3, steps - 60), 10)):
            wait_for_updates(process, run, at)
            time.sleep(rng.random() * 0.2)
            while len(found := processes(run)) < 2:  # of the last attempt
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(found[rng.randrange(2)], signal.SIGKILL)
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
        holder.communicate(timeout=600)
    assert done.returncode == 75
    assert done.stderr.count("is in use by train") == 1


def test_only_train_has_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(ranks, "_has_joined", True)  # as another test of this process may have left it
    refused = call("collect", "--env", "tmaze", "--steps", "8")
    assert refused.code == 2
    assert "'amago collect' was started 2 times by a launcher" in refused.err
    assert not (tmp_path / "runs").exists()
    assert call("--help").code == 0


def test_a_process_that_is_alone_communicates_nothing() -> None:
    assert ranks.count_joined() == 1
    assert list(ranks.list_micro_batches(3)) == [0, 1, 2]
    assert ranks.sum_number(5.0, torch.device("cpu")) == 5.0
    assert ranks.any_rank(True, False, device=torch.device("cpu")) == [True, False]
    assert ranks.gather("x") == ["x"]
    with pytest.raises(InputMissing, match="gone"), ranks.raise_together():
        raise InputMissing("gone")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("number", "rank", "wanted", "expected"),
    [(2, 0, 1, [0]), (2, 1, 1, [1]), (2, 1, 4, [1, 3]), (4, 2, 6, [2, 6]), (3, 0, 3, [0])],
)
def test_micro_batches_are_divided_among_ranks(
    monkeypatch: pytest.MonkeyPatch, number: int, rank: int, wanted: int, expected: list[int]
) -> None:
    monkeypatch.setattr(ranks, "count_joined", lambda: number)
    monkeypatch.setattr(ranks, "get_rank", lambda: rank)
    assert list(ranks.list_micro_batches(wanted)) == expected


def test_moments_are_those_of_all_rows_in_double_precision() -> None:
    """Rewards of 1e3 that differ by 1 do not cancel."""
    x = 1e3 + torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    mean, square, count = ranks.compute_moments(x)
    assert count == 1000
    exact = x.double()
    torch.testing.assert_close(mean, exact.mean(0))
    torch.testing.assert_close(square - mean.square(), exact.var(0, correction=0), rtol=1e-6, atol=0)
    assert ranks.compute_moments(x[:0])[2] == 0


def test_ranks_meet_although_the_store_has_what_an_earlier_attempt_has_left() -> None:
    """Rank 0 is the last to come, and finds the tokens of earlier ranks at first."""
    store = torch.distributed.HashStore()
    store.set("amago/0", "old")
    store.set("amago/1", "older")
    store.set("amago/proposal", "old,older")
    for place in range(2):
        store.set(f"amago/old,older/{place}", "accepted")
    found: dict[int, str] = {}

    def come(rank: int) -> None:
        found[rank] = ranks.meet(store, rank, 2, timeout_seconds=600)

    late = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    late[0].start()
    while store.get("amago/proposal") == b"old,older":
        time.sleep(0.001)
    late[1].start()
    for thread in late:
        thread.join()
    assert found[0] == found[1] != "amago/old,older"
    assert "old" not in found[0]


def test_a_rank_that_waits_in_vain_says_for_whom() -> None:
    with pytest.raises(StageFailed, match=r"rank 0 has waited 0\.1 s for rank 1, 2"):
        ranks.meet(torch.distributed.HashStore(), 0, 3, timeout_seconds=0.1)


def test_a_launcher_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="cannot join the other ranks"):
        ranks.join(torch.device("cpu"), timeout_seconds=1)
