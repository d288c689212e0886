"""Ranks on CUDA devices, where NCCL carries tensors and gloo objects; a group of one is tried on the CPU as well."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed

from pipelines.nets import ranks
from pipelines.training.learner import Learner
from tests.ranks import find_free_port, lines, small_lake, train
from tests.tiers import crossed
from tests.training.test_learner import batch, learner

CUDA = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of this process, which is the only rank of a group."""
    found = torch.device(request.param, 0)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}).items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as joining:
        joining.setattr(ranks, "count_ranks", lambda: 2)  # else nothing is joined
        joining.setattr(ctypes, "CDLL", _no_library)  # this process shall outlive its parent's threads
        ranks.join(found, timeout_seconds=600)
    assert distributed.is_initialized()
    yield found
    ranks.leave()
    assert not distributed.is_initialized()


def _no_library(name: object) -> object:
    raise OSError("not here")


def test_tensors_and_objects_go_through_the_group(device: torch.device) -> None:
    backend = distributed.distributed_c10d._get_default_group()._get_backend(device).name()
    assert backend == ("nccl" if device.type == "cuda" else "gloo")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = torch.arange(5, device=device, dtype=dtype)
        distributed.all_reduce(values)
        assert values.tolist() == [0, 1, 2, 3, 4]
    distributed.all_reduce(highest := torch.tensor(2.5, device=device), op=distributed.ReduceOp.MAX)
    assert float(highest) == 2.5
    found = [None]
    distributed.all_gather_object(found, {"a": [1]})
    assert found == [{"a": [1]}]
    sent = ["order"]
    distributed.broadcast_object_list(sent, src=0)
    assert sent == ["order"]
    orders = distributed.new_group(backend="gloo")  # chains wait in it, on the host
    distributed.broadcast(torch.tensor([1.0]), src=0, group=orders)
    distributed.barrier(orders)


@pytest.mark.parametrize(
    ("way", "sharding"), crossed([{}, {"packing": True}, {"precision": "bf16"}], ["none", "fsdp"]), ids=str
)
def test_updates_through_the_group_are_those_without_it(
    device: torch.device, way: dict[str, object], sharding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"device": device.type, "grad_accumulation": 2, "ema_decay": 0.9, **way}
    plain, parallel = learner(**settings), learner(**settings, sharding=sharding)
    parallel.is_sharded = sharding == "fsdp"  # as with several ranks

    def wrapped() -> object:
        with monkeypatch.context() as several:
            several.setattr(ranks, "count_joined", lambda: 2)
            return Learner._next_loss(parallel)

    parallel._next_loss = wrapped  # type: ignore[method-assign]
    data = [batch(np.random.default_rng(update), size=8) for update in range(3)]
    for each in data:
        one, other = (made.step(lambda size, each=each: each) for made in (plain, parallel))
        for name in ("loss", "grad_norm"):
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)
    assert isinstance(parallel._parallel, torch.nn.parallel.DistributedDataParallel)
    assert bool(parallel.shards.of) == (sharding == "fsdp")
    for of, its in zip(plain.state().values(), parallel.state().values(), strict=True):
        torch.testing.assert_close(its, of, rtol=1e-4, atol=1e-5, check_device=False)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("way", ["plain", "bf16", "compile", "fsdp"])
def test_two_devices_do_what_one_does(tmp_path: Path, way: str) -> None:
    lake = small_lake(tmp_path / "lake")
    ways: dict[str, dict[str, object]] = {
        "bf16": {"train__precision": "bf16"},
        "compile": {"train__compile": True},
        "fsdp": {"train__sharding": "fsdp", "train__activation_checkpointing": True},
    }
    more = ways.get(way, {})
    for run, options in (("one", ()), ("two", ("--ranks", "2"))):
        done = train(lake, tmp_path / run, "--steps", "6", *options, train__device="cuda", **more)
        assert done.returncode == 0, done.stderr
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["steps_seen"] for line in one] == [line["steps_seen"] for line in two]
    close = 0.05 if way == "bf16" else 1e-3
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=close)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one CUDA device")
def test_a_rank_without_a_device_of_its_own_is_refused_once(tmp_path: Path) -> None:
    done = train(small_lake(tmp_path / "lake"), tmp_path / "run", "--steps", "2", "--ranks", "2", train__device="cuda")
    assert done.returncode == 3
    assert done.stderr.count("error: ") == 1
    assert "train.device 'cuda:1' is not here: 1 CUDA device found" in done.stderr
