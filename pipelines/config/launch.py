"""What a launcher of several processes (torchrun, accelerate, srun) says in the environment."""

from __future__ import annotations

import os
import re


def announced() -> int:
    """Return the number of processes that a launcher has started together with this one, itself included."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def alone() -> dict[str, str]:
    """Return the environment without the launcher's variables, for a child that is not one of the processes."""
    its = re.compile(
        "((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|AMAGO_LAUNCHER|TORCHELASTIC_.*"
    )
    return {name: value for name, value in os.environ.items() if its.fullmatch(name) is None}


def rank() -> int:
    """Return this process's number among them."""
    number = os.environ.get("RANK", "0")
    return int(number) if announced() > 1 and number.isdecimal() else 0


def ranks_of_host() -> range:
    """Return the numbers of the processes on this host, which launchers number one after the other; empty if the
    environment does not say."""
    if announced() == 1:
        return range(1)
    number, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not (number.isdecimal() and count.isdecimal()):
        return range(0)
    first = rank() - int(number)
    return range(first, first + int(count))


def is_main() -> bool:
    """Return whether this process writes checkpoints and logs, and prints: rank 0."""
    return rank() == 0
