"""How many CPU cores this process may use: by its affinity mask, its cgroups, and for threads by what the user says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Those of the affinity mask, as far as the quotas of cgroups (a container, a batch system) allow; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        cores = min([cores, *(max(1, int(share)) for share in _quotas(Path("/proc/self/cgroup").read_text()))])
    return cores


def threads(wanted: int = 0) -> int:
    """CPU threads for the networks: as `wanted`, else as OMP_NUM_THREADS says, else one for each available core."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return wanted or (int(said) if said.isdecimal() and int(said) else available_cores())


def _quotas(membership: str) -> list[float]:
    """Cores that each cgroup about this process grants, of both versions of cgroups; none where there is no limit."""
    found = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS
        here = root / path.strip("/")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):
                found.append(_quota(folder, is_first_version=bool(controllers)))
            if folder == root:
                break
    return found


def _quota(folder: Path, *, is_first_version: bool) -> float:
    """ValueError where there is no limit ("max", -1), OSError where there is no such file."""
    if is_first_version:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    else:
        quota, period = (folder / "cpu.max").read_text().split()
    if int(quota) <= 0:
        raise ValueError("no limit")
    return int(quota) / int(period)
