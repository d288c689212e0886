"""Hints for a path where nothing was found: what it contains, or similar names beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipelines.config import zoo
from pipelines.nearest import nearest

_SHOWN = 3


def is_run(path: Path) -> bool:
    """Return whether a run is recorded at `path`."""
    return (path / "config.toml").is_file()


def is_lake(path: Path) -> bool:
    """Return whether `path` is a lake or a run that has one."""
    return (path / "lake.json").is_file() or (path / "lake" / "lake.json").is_file()


def bundle_directory(name: Path | str) -> Path | None:
    """Return the directory of the policy bundle called `name`, a path or zoo:NAME; None if there is none.

    InputMissing if the zoo lacks it.
    """
    if str(name).startswith(zoo.PREFIX):
        return zoo.directory(str(name))
    path = Path(name)
    return path if (path / "policy.json").is_file() else None


def hint(path: Path, wanted: Callable[[Path], bool], *, inside: str, otherwise: str) -> str:
    """Return where something `wanted` can be found instead of at `path`: in it (preceded by `inside`), beside it, or in
    runs/ under that name; else `otherwise`."""
    try:
        found = _members(path, wanted)
        if found:
            return f"{inside}: {', '.join(map(str, found[:_SHOWN]))}{', ...' if len(found) > _SHOWN else ''}"
        known = [*_members(path.parent, wanted), *_members(Path("runs"), wanted)]
        names = {place.name: str(place) for place in reversed(known)}
        close = nearest(path.name, names, cutoff=0.6)
    except OSError:
        close = None
    return otherwise if close is None else f"did you mean '{names[close]}'?"


def _members(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    return [child for child in sorted(folder.iterdir()) if wanted(child)] if folder.is_dir() else []
