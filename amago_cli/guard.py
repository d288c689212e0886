"""Tells when somebody else's `pipelines` would be imported instead of ours.

`pipelines` is a common folder name; with one in the current directory, `python -m amago_cli` finds it first.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent / "pipelines"


def shadow() -> Path | None:
    """The folder of the foreign `pipelines` that an import would take, or None. Imports nothing."""
    if not (OURS / "__init__.py").is_file():
        return None  # an unusual installation: no telling which one is ours
    try:
        found = importlib.util.find_spec("pipelines")
    except (ImportError, ValueError):
        return None
    places = list(found.submodule_search_locations or ()) if found else []
    if not places or any(Path(place).resolve() == OURS for place in places):
        return None
    return Path(places[0])


def explain(path: Path) -> str:
    """What the user reads: which folder is in the way of which, and the ways out."""
    return (
        f"'{path}' shadows amago's own package '{OURS}'; start amago with its console script `amago`,"
        " change to another directory, or take the folder's parent off PYTHONPATH"
    )
