"""Processes that train together (data parallelism), as torchrun and similar launchers start them.

The launcher's environment is the interface: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. A process that is
alone communicates nothing. Every function here except `micro_batches` and `size` is a collective: all ranks must call
it, in the same order.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.config.launch import announced, is_main, rank
from pipelines.errors import AmagoError, StageFailed, UsageError

_PR_SET_PDEATHSIG = 1
_REPORT_SECONDS = 3.0
_LOST = ("onnection closed", "onnection reset", "roken pipe", "imed out", "NCCL", "ProcessGroup", "peer", "Gloo")


class RankLost(StageFailed):
    """Another rank ended while this one needed it: its own error is the reason."""


class ReportedElsewhere(AmagoError):
    """Rank 0 reports this error, which all ranks have raised."""

    def __init__(self, error: AmagoError) -> None:
        super().__init__(error.message, hint=error.hint)
        self.exit_code = error.exit_code


def size() -> int:
    """Return the number of ranks, 1 before `join`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join(device: torch.device, *, timeout_seconds: float) -> None:
    """Connect to the other ranks, once. UsageError if the launcher's environment is incomplete."""
    if announced() == 1 or dist.is_initialized():
        return
    with contextlib.suppress(OSError, AttributeError):  # Linux: end with the launcher, which kill -9 leaves no chance
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))
    except ValueError as error:
        raise UsageError(
            f"cannot join the other ranks: {error}", hint="start ranks with torchrun, or with amago train --ranks N"
        ) from error


def leave() -> None:
    """Disconnect from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def micro_batches(wanted: int) -> range:
    """Return this rank's share of an update's micro-batches, numbered over all ranks: `wanted` in total, or the next
    multiple of the number of ranks."""
    number = -(-wanted // size()) * size()
    return range(rank(), number, size()) if size() > 1 else range(number)


def total(tensor: Tensor) -> Tensor:
    """Sum over all ranks, in place."""
    if size() > 1:
        dist.all_reduce(tensor)
    return tensor


def total_of(number: float, device: torch.device) -> float:
    """Sum a number over all ranks, in float64."""
    return float(total(torch.tensor(number, dtype=torch.float64, device=device))) if size() > 1 else number


def maximum(number: float, device: torch.device) -> float:
    """Return the maximum over all ranks."""
    if size() == 1:
        return number
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def moments(x_NF: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and mean square (F,) over the rows of all ranks, in float64, and the number of rows."""
    rows = x_NF.double()
    sums = torch.stack((rows.sum(0), rows.square().sum(0), torch.full_like(rows[0:1].sum(0), len(rows))))
    total(sums)
    count = int(sums[2].flatten()[0])
    return sums[0] / count, sums[1] / count, count


def means(figures: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Average each figure over all ranks, which have the same figures."""
    if size() == 1:
        return dict(figures)
    names = sorted(figures)
    values = total(torch.tensor([figures[name] for name in names], dtype=torch.float64, device=device)) / size()
    found = dict(zip(names, values.tolist(), strict=True))
    return {name: found[name] for name in figures}


def any_rank(*flags: bool, device: torch.device) -> list[bool]:
    """Return for each flag whether it is set on some rank."""
    if size() == 1:
        return list(flags)
    return [count > 0 for count in total(torch.tensor([float(flag) for flag in flags], device=device)).tolist()]


def broadcast(value: Any) -> Any:
    """Return rank 0's value, a small picklable object."""
    if size() == 1:
        return value
    sent = [value]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]


def gather(value: Any) -> list[Any]:
    """Return every rank's value, a small picklable object, by rank."""
    if size() == 1:
        return [value]
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, value)
    return found


def wait_for_main() -> None:
    """Wait until rank 0 has ended: a launcher stops all ranks when one ends, and rank 0 has an error to report."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        with contextlib.suppress(RuntimeError):  # rank 0 never takes part
            dist.broadcast(torch.zeros(1), src=0)
    else:
        time.sleep(_REPORT_SECONDS)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raise on all ranks what any rank raises inside: rank 0 raises the error itself, others `ReportedElsewhere`.

    No collective may be called inside: a rank that has raised would not take part.
    """
    own: AmagoError | None = None
    try:
        yield
    except AmagoError as error:
        own = error
    if size() == 1:
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
def connected() -> Iterator[None]:
    """Turn errors of communication into RankLost."""
    try:
        yield
    except RuntimeError as error:
        if size() > 1 and any(text in str(error) for text in _LOST):
            raise RankLost(
                f"rank {rank()}: another rank has ended", hint="repeat the command to resume from the last checkpoint"
            ) from error
        raise
