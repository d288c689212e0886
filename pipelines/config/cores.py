"""CPU cores and memory this process may use: by affinity mask and cgroups, and for threads by the user's choice."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CGROUPS = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Count the cores of the affinity mask, as far as cgroup quotas (a container, a batch system) allow; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        limits = _limits(Path("/proc/self/cgroup").read_text(), "cpu", _quota)
        cores = min([cores, *(max(1, int(share)) for share in limits)])
    return cores


def memory_bytes() -> int | None:
    """Return the host's memory in bytes, as far as cgroups allow; None where the system does not say."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None
    with contextlib.suppress(OSError):
        memory = min([memory, *_limits(Path("/proc/self/cgroup").read_text(), "memory", _memory)])
    return memory


def threads(wanted: int = 0) -> int:
    """Return the CPU threads for networks: `wanted`, else OMP_NUM_THREADS, else one per available core."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return wanted or (int(said) if said.isdecimal() and int(said) else available_cores())


def _limits(membership: str, controller: str, read: Callable[..., T]) -> list[T]:
    """Return what `read` finds in each cgroup of this process, for both versions of cgroups; none if unlimited."""
    found: list[T] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        here = root / path.strip("/")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):
                found.append(read(folder, is_first_version=bool(controllers)))
            if folder == root:
                break
    return found


def _quota(folder: Path, *, is_first_version: bool) -> float:
    """Return one cgroup's quota. ValueError if it is unlimited ("max", -1), OSError if there is no such file."""
    if is_first_version:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    else:
        quota, period = (folder / "cpu.max").read_text().split()
    if int(quota) <= 0:
        raise ValueError("no limit")
    return int(quota) / int(period)


def _memory(folder: Path, *, is_first_version: bool) -> int:
    """Return one cgroup's limit in bytes. ValueError if it is unlimited ("max"), OSError if there is no such file."""
    return int((folder / ("memory.limit_in_bytes" if is_first_version else "memory.max")).read_text())
