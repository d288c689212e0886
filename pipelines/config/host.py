"""What this process may use of its host, CPU cores and memory by affinity mask and cgroups, and what a launcher
(torchrun, accelerate, srun) says in the environment: its rank among the processes it has started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_CGROUPS = Path("/sys/fs/cgroup")
_LAUNCHERS = re.compile(
    "((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|AMAGO_LAUNCHER|TORCHELASTIC_.*"
)


def count_cores() -> int:
    """Count the cores of the affinity mask, as far as cgroup quotas (a container, a batch system) allow; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        limits = _read_limits(Path("/proc/self/cgroup").read_text(), "cpu")
        cores = min([cores, *(max(1, int(share)) for share in limits)])
    return cores


def find_memory() -> int | None:
    """Find the host's memory in bytes, as far as cgroups allow; None where the system does not say."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None
    with contextlib.suppress(OSError):
        memory = min([memory, *map(int, _read_limits(Path("/proc/self/cgroup").read_text(), "memory"))])
    return memory


def choose_threads(wanted: int = 0) -> int:
    """Choose the number of CPU threads for networks: `wanted`, else OMP_NUM_THREADS, else one per available core."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return wanted or (int(given) if given.isdecimal() and int(given) else count_cores())


def _read_limits(membership: str, controller: str) -> list[float]:
    """Read the limit of "cpu" (in cores) or "memory" (in bytes) of each cgroup of this process and of those above it.

    Works for both versions of cgroups. An unlimited group is left out: its limit is "max" or negative, or has no file.
    """
    found: list[float] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        is_first_version = bool(controllers)
        root = _CGROUPS / controller if is_first_version else _CGROUPS
        here = root / path.strip("/")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):
                if controller == "memory":
                    name = "memory.limit_in_bytes" if is_first_version else "memory.max"
                    found.append(int((folder / name).read_text()))
                else:
                    if is_first_version:
                        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                    else:
                        quota, period = (folder / "cpu.max").read_text().split()
                    if int(quota) > 0:
                        found.append(int(quota) / int(period))
            if folder == root:
                break
    return found


def count_ranks() -> int:
    """Count the processes that a launcher has started together with this one, itself included."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def get_rank() -> int:
    """Get this process's number among them; 0 without a launcher."""
    number = os.environ.get("RANK", "0")
    return int(number) if count_ranks() > 1 and number.isdecimal() else 0


def find_host_ranks() -> range:
    """Find the numbers of the processes on this host, which launchers number one after the other; empty if the
    environment does not say."""
    if count_ranks() == 1:
        return range(1)
    number, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not (number.isdecimal() and count.isdecimal()):
        return range(0)
    first = get_rank() - int(number)
    return range(first, first + int(count))


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent ends, which `kill -9` leaves no chance to send it. Linux alone."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def is_main() -> bool:
    """Check whether this process writes checkpoints and logs, and prints: rank 0."""
    return get_rank() == 0


def strip_launcher() -> dict[str, str]:
    """Copy the environment without the launcher's variables, for a child that is not one of the processes."""
    return {name: value for name, value in os.environ.items() if _LAUNCHERS.fullmatch(name) is None}
