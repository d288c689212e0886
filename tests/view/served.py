"""`amago view` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Served:
    """A running server: the `address` that it printed, and its process."""

    address: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.address).query)["token"][0]

    def at(self, state: str) -> str:
        """Return the address of a state of the page."""
        return f"{self.address}#{state}"


@contextmanager
def served(place: Path | str, *options: str, descriptors: int | None = None) -> Iterator[Served]:
    """Run `amago view PLACE --port 0`, with a limit on open files, and wait until it has printed its address."""
    command = [sys.executable, "-m", "amago_cli", "view", str(place), "--port", "0", "--no-browser", *options]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            assert process.stderr is not None
            raise AssertionError(process.stderr.read())
        try:
            yield Served(address, process)
        finally:
            process.kill()
