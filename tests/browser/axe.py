"""axe-core, the accessibility checker from npm, in the cache of this host; `python -m tests.browser.axe` fetches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_VERSION = "4.14.1"
IMPACTS = ("minor", "moderate", "serious", "critical")


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "amago-tests" / f"axe-core-{_VERSION}"


def source() -> str | None:
    """Return the checker's script; None where it was never fetched."""
    script = _folder() / "node_modules" / "axe-core" / "axe.min.js"
    return script.read_text(encoding="utf-8") if script.is_file() else None


def fetch() -> int:
    """Install axe-core with npm, if it is not there yet; return an exit code."""
    if source() is not None:
        return 0
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
    try:
        done = subprocess.run([*command, f"axe-core@{_VERSION}"], stdin=subprocess.DEVNULL, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"axe-core cannot be fetched: {error}", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(fetch())
