"""What a launcher of several processes (torchrun, accelerate, srun) says in the environment."""

from __future__ import annotations

import os


def announced() -> int:
    """Return the number of processes that a launcher has started together with this one, itself included."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def rank() -> int:
    """Return this process's number among them."""
    number = os.environ.get("RANK", "0")
    return int(number) if announced() > 1 and number.isdecimal() else 0


def is_main() -> bool:
    """Return whether this process writes checkpoints and logs, and prints: rank 0."""
    return rank() == 0
