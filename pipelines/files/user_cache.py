"""Where what can be fetched or computed again is kept for this user on this host."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Find the folder: $AMAGO_CACHE, else `amago` in $XDG_CACHE_HOME, else in ~/.cache. It need not exist."""
    home = os.environ.get("AMAGO_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amago"
