"""Packages from npm that tests use, in the cache of this host; `python -m tests.npm` fetches them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERSIONS = {"axe-core": "4.14.1", "azurite": "3.37.0", "onnxruntime-node": "1.30.0"}


def _prefix(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "amago-tests" / f"{name}-{VERSIONS[name]}"


def folder(name: str) -> Path | None:
    """Return the directory of a package; None if it was never fetched."""
    found = _prefix(name) / "node_modules" / name
    return found if (found / "package.json").is_file() else None


def fetch(name: str) -> int:
    """Install a package with npm, if it is not there yet; return an exit code."""
    if folder(name) is not None:
        return 0
    prefix = _prefix(name)
    prefix.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(prefix)]
    try:
        done = subprocess.run(
            [*command, f"{name}@{VERSIONS[name]}"], stdin=subprocess.DEVNULL, check=False, timeout=600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{name} cannot be fetched: {error}", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(max([fetch(name) for name in VERSIONS]))
