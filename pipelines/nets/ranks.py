"""Processes that train together (data parallelism), as torchrun and similar launchers start them.

The launcher's environment is the interface: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. A process that is
alone communicates nothing. Every function here except `list_micro_batches`, `count_joined`, `has_joined`,
`find_own_rows` and `is_sharded` is a collective: all ranks must call it, in the same order.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipelines.config.host import count_ranks, end_with_parent, find_host_ranks, get_rank, is_main
from pipelines.errors import AmagoError, StageFailed, UsageError

_has_joined = False  # ever, in this process
_POLL_SECONDS = 0.02
_ORDER, _DONE, _FAILED = 1.0, 0.0, -1.0
_ORDER_TIMEOUT = datetime.timedelta(days=365)
_END_TIMEOUT = datetime.timedelta(seconds=10)
_LOST = ("onnection closed", "onnection reset", "roken pipe", "imed out", "NCCL", "ProcessGroup", "peer", "Gloo")


class RankLost(StageFailed):
    """Another rank ended while this one needed it: its own error is the reason."""


class ReportedElsewhere(AmagoError):
    """Rank 0 reports this error, which all ranks have raised."""

    def __init__(self, error: AmagoError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.exit_code = error.exit_code


def count_joined() -> int:
    """Count the ranks; 1 before `join`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def has_joined() -> bool:
    """Check whether this process has been connected to other ranks, even if it has left them."""
    return _has_joined


def join(device: torch.device, *, timeout_seconds: float) -> None:
    """Connect to the other ranks, once. UsageError if the launcher's environment is incomplete."""
    if count_ranks() == 1 or dist.is_initialized():
        return
    end_with_parent()
    if os.environ.get("AMAGO_LAUNCHER", str(os.getppid())) != str(
        os.getppid()
    ):  # it was killed before that took effect
        raise StageFailed("the process that started the ranks has ended", hint="repeat the command to resume")
    backend, own = "gloo", None
    if device.type == "cuda":  # objects, which are on the host, go by gloo
        torch.cuda.set_device(device)
        backend, own = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store, place, number = next(rendezvous("env://", timeout=timeout))
        name = meet(store, place, number, timeout_seconds=timeout_seconds)
    except ValueError as error:
        raise UsageError(
            f"cannot join the other ranks: {error}", hint="start ranks with torchrun, or with amago train --ranks N"
        ) from error
    except dist.DistError as error:
        raise StageFailed(f"cannot join the other ranks: {error}") from error
    dist.init_process_group(
        backend,
        store=PrefixStore(name, store),
        rank=place,
        world_size=number,
        timeout=timeout,
        device_id=own,
    )
    global _has_joined
    _has_joined = True


def meet(store: Store, rank: int, size: int, *, timeout_seconds: float) -> str:
    """Agree with the other ranks on a name that no earlier attempt has used, and return it.

    A launcher keeps its store when it restarts all ranks, with the addresses of those that have ended. So each rank
    announces itself by a token; rank 0 proposes a name for the newest tokens of all, until all accept it.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout_seconds
    others = [f"amago/{number}" for number in range(size)]
    store.set(others[rank], token)
    proposed: list[str] = []
    while time.monotonic() < deadline:
        if rank == 0 and store.check(others):
            tokens = [store.get(each).decode() for each in others]
            if tokens != proposed:
                proposed = tokens
                store.set("amago/proposal", ",".join(tokens))
        if store.check(["amago/proposal"]):
            proposal = store.get("amago/proposal").decode()
            if proposal.split(",")[rank : rank + 1] == [token]:
                store.set(f"amago/{proposal}/{rank}", "accepted")
                if store.check([f"amago/{proposal}/{number}" for number in range(size)]):
                    return f"amago/{proposal}"
        time.sleep(_POLL_SECONDS)
    absent = ", ".join(str(number) for number in range(size) if not store.check(others[number : number + 1]))
    raise StageFailed(
        f"rank {rank} has waited {timeout_seconds:g} s for rank {absent or 0}",
        hint="start all ranks together, or set a longer train.rank_timeout",
    )


def leave() -> None:
    """Disconnect from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def list_micro_batches(wanted: int) -> range:
    """List this rank's share of an update's micro-batches, numbered over all ranks: `wanted` in total, or the next
    multiple of the number of ranks."""
    number = -(-wanted // count_joined()) * count_joined()
    return range(get_rank(), number, count_joined()) if count_joined() > 1 else range(number)


def sum_tensor(tensor: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    if count_joined() > 1:
        dist.all_reduce(tensor)
    return tensor


def is_sharded(weight: Tensor) -> bool:
    """Check whether each rank has only its rows of `weight`."""
    tensor = sys.modules.get("torch.distributed.tensor")  # which takes half a second to import: sharding has done so
    return tensor is not None and isinstance(weight, tensor.DTensor)


def find_own_rows(count: int) -> slice:
    """Find the place of this rank's rows of a sharded tensor of `count` rows, which torch.chunk divides."""
    most = -(-count // count_joined())
    return slice(min(get_rank() * most, count), min((get_rank() + 1) * most, count))


def join_rows(rows: Tensor, count: int) -> Tensor:
    """Gather the sharded tensor of `count` rows of which each rank has its `rows`."""
    most = -(-count // count_joined())
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(count_joined())]
    dist.all_gather(parts, padded)
    return torch.cat(parts)[:count]


def sum_number(number: float, device: torch.device) -> float:
    """Sum a number over all ranks, in float64."""
    return float(sum_tensor(torch.tensor(number, dtype=torch.float64, device=device))) if count_joined() > 1 else number


def find_maximum(number: float, device: torch.device) -> float:
    """Find the maximum of a number over all ranks."""
    if count_joined() == 1:
        return number
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def compute_moments(x_NF: Tensor, valid_N: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean and mean square (F,) over the rows of all ranks, or over the `valid_N` (bool) of them, and their
    number, in float64. Without rows, means are NaN."""
    rows = x_NF.double()
    if valid_N is None:
        count = rows.new_full((1,), len(rows))
    else:
        rows, count = rows.masked_fill(~valid_N[:, None], 0.0), valid_N.sum(dtype=torch.float64)[None]
    features = rows.shape[1]
    sums = sum_tensor(torch.cat((rows.sum(0), rows.square().sum(0), count)))
    mean, square = (sums[:-1] / sums[-1]).split(features)
    return mean, square, sums[-1]


def average(figures: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Average each figure over all ranks, which have the same figures."""
    if count_joined() == 1:
        return dict(figures)
    names = sorted(figures)
    values = (
        sum_tensor(torch.tensor([figures[name] for name in names], dtype=torch.float64, device=device)) / count_joined()
    )
    found = dict(zip(names, values.tolist(), strict=True))
    return {name: found[name] for name in figures}


def describe(device: torch.device) -> dict[str, Any]:
    """Describe the ranks for the run's record."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    return {"ranks": count_joined(), "backend": backend, "hosts": sorted(set(gather(socket.gethostname())))}


def find_host_span() -> tuple[float, float]:
    """Find the part [start, stop) of [0, 1) that falls to this host, in proportion to its ranks; the parts of all
    hosts are [0, 1). UsageError on all ranks if the launcher does not say which ranks share a host."""
    own = find_host_ranks()
    hosts = sorted({(each.start, each.stop) for each in gather(own)})
    if [start for start, _ in hosts] != [0, *(stop for _, stop in hosts[:-1])] or hosts[-1][1] != count_joined():
        with raise_together():
            raise UsageError(
                "train.shard = 'host' needs to know which ranks share a host, and the launcher does not say it",
                hint="start ranks with torchrun, which sets LOCAL_RANK and LOCAL_WORLD_SIZE",
            )
    return own.start / count_joined(), own.stop / count_joined()


def any_rank(*flags: bool, device: torch.device) -> list[bool]:
    """Check for each flag whether it is set on some rank."""
    if count_joined() == 1:
        return list(flags)
    return [count > 0 for count in sum_tensor(torch.tensor([float(flag) for flag in flags], device=device)).tolist()]


def broadcast(value: Any) -> Any:
    """Give every rank the value of rank 0, a small picklable object."""
    if count_joined() == 1:
        return value
    sent = [value]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]


def gather(value: Any) -> list[Any]:
    """Collect every rank's value, a small picklable object, by rank."""
    if count_joined() == 1:
        return [value]
    found: list[Any] = [None] * count_joined()
    dist.all_gather_object(found, value)
    return found


def wait_for_main() -> None:
    """Wait until rank 0 has ended: a launcher stops all ranks when one ends, and rank 0 has an error to report."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # rank 0 never takes part
            dist.broadcast(torch.zeros(1), src=0)


@contextlib.contextmanager
def send_orders() -> Iterator[Callable[[Any], None]]:
    """Yield the function by which rank 0 sends an order, a picklable object, to the other ranks, which iterate over
    `receive_orders`; the end of the block is the end of their orders."""
    if count_joined() == 1:
        yield lambda order: None
        return
    group = dist.new_group(backend="gloo", timeout=_ORDER_TIMEOUT)

    def send(order: Any) -> None:
        with raise_rank_lost():
            dist.broadcast(torch.tensor([_ORDER]), src=0, group=group)
            dist.broadcast_object_list([order], src=0, group=group)

    try:
        yield send
    except BaseException:
        with contextlib.suppress(RuntimeError):
            dist.broadcast(torch.tensor([_FAILED]), src=0, group=group, async_op=True).wait(_END_TIMEOUT)
        raise
    with raise_rank_lost():
        dist.broadcast(torch.tensor([_DONE]), src=0, group=group)
        dist.barrier(group)


def receive_orders() -> Iterator[Any]:
    """Yield rank 0's orders as they come, however long that takes. RankLost if rank 0 has ended without a word."""
    group = dist.new_group(backend="gloo", timeout=_ORDER_TIMEOUT)
    while True:
        kind, order = torch.zeros(1), [None]
        with raise_rank_lost():
            message = dist.broadcast(kind, src=0, group=group, async_op=True)
            while not message.is_completed():  # signals are handled here
                time.sleep(_POLL_SECONDS)
            message.wait()
            if kind == _DONE:
                dist.barrier(group)
            if kind != _ORDER:
                return
            dist.broadcast_object_list(order, src=0, group=group)
        yield order[0]


@contextlib.contextmanager
def raise_together() -> Iterator[None]:
    """Raise on all ranks what any rank raises inside: rank 0 raises the error itself, others `ReportedElsewhere`.

    No collective may be called inside: a rank that has raised would not take part.
    """
    own: AmagoError | None = None
    try:
        yield
    except AmagoError as error:
        own = error
    if count_joined() == 1:
        if own is not None:
            raise own
        return
    first: tuple[int, AmagoError] | None = next(((r, e) for r, e in enumerate(gather(own)) if e is not None), None)
    if first is None:
        return
    place, raised = first
    if not is_main():
        raise ReportedElsewhere(raised)
    if place:
        raised.message = f"rank {place}: {raised.message}"
    raise raised


@contextlib.contextmanager
def raise_rank_lost() -> Iterator[None]:
    """Turn errors of communication into RankLost."""
    try:
        yield
    except RuntimeError as error:
        if count_joined() > 1 and any(text in str(error) for text in _LOST):
            what = "has not answered within train.rank_timeout" if "imed out" in str(error) else "has ended"
            raise RankLost(
                f"rank {get_rank()}: another rank {what}", hint="repeat the command to resume from the last checkpoint"
            ) from error
        raise
