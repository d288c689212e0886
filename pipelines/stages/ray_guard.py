"""A process that outlives the driver of a local Ray cluster, to end what Ray leaves behind where the driver is killed.

Ray's own processes notice that a driver or the raylet is gone; some of them after a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

_SECONDS = 5.0  # for Ray to end by itself


def main() -> None:
    """Wait for the end of stdin, whose other end the driver has; then end the processes whose start times, by id, are
    its first line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left = {int(pid): began for pid, began in json.loads(sys.stdin.readline()).items()}
    sys.stdin.read()
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and _find_alive(left):
        time.sleep(0.1)
    for pid in _find_alive(left):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _find_alive(known: dict[int, str]) -> list[int]:
    """Find which of these processes are alive; the id of an ended one may belong to another process by now."""
    return [pid for pid, began in known.items() if (facts := _read_facts(pid)) is not None and facts[1] == began]


def find_descendants(parent: int) -> dict[int, str]:
    """Find the start times of all processes below `parent`."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        facts = _read_facts(int(entry.name))
        if facts is not None:
            parents[int(entry.name)] = facts
    found: dict[int, str] = {}
    grown = True
    while grown:
        below = {pid: began for pid, (above, began) in parents.items() if above in found or above == parent}
        grown, found = len(below) > len(found), below
    return found


def _read_facts(pid: int) -> tuple[int, str] | None:
    """Read the parent and the start time of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), fields[19])
