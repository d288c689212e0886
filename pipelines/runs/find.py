"""Finding runs: by directory, by the directory that contains them, or by a pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.config.places import is_run, suggest
from pipelines.errors import InputMissing

_MOST_DEEP = 6


def find_runs(places: Sequence[Path | str]) -> list[Path]:
    """Find the runs at or below each of `places`, sorted within each; a place may be a pattern such as `runs/maze-*`.

    InputMissing if a place does not exist, or a pattern matches nothing. An existing directory may contain no run.
    """
    found: dict[Path, None] = {}
    for place in places:
        text = str(place)
        matches = [Path(text)]
        if not Path(text).exists():
            matches = [Path(match) for match in sorted(glob.glob(text))] if is_pattern(text) else []
        if not matches:
            what = "a run is a directory with config.toml, e.g. runs/cartpole"
            raise InputMissing(f"no run at '{text}'", hint=suggest(Path(text), is_run, inside="", otherwise=what))
        for match in matches:
            found |= dict.fromkeys(walk_runs(match))
    return list(found)


def is_pattern(place: str) -> bool:
    """Decide whether `place` is a pattern, and not the name of something that exists."""
    return glob.has_magic(place) and not Path(place).exists()


def walk_runs(root: Path, deep: int = _MOST_DEEP) -> Iterator[Path]:
    """Yield the run at `root`, or those below it, in order. Links are not followed, and runs do not contain runs."""
    if is_run(root):
        yield root
        return
    if not deep:
        return
    try:
        with os.scandir(root) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return
    if "segments" in names and (root / "lake.json").is_file():
        return
    for name in names:
        yield from walk_runs(root / name, deep - 1)
