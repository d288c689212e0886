"""Naming lakes: wherever one is asked for, a run's directory means its lake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import UsageError

_MARK = "lake.json"


def only(given: Sequence[Path] | None) -> Path:
    """The one lake of `--from-lake`."""
    if not given:
        raise UsageError("no lake is named", hint="give --from-lake LAKE, e.g. --from-lake runs/cartpole")
    if len(given) > 1:
        raise UsageError(f"--from-lake was given {len(given)} times", hint="one lake at a time")
    return given[0]


def locate(path: Path) -> Path:
    """The lake at `path`. InputMissing if there is none."""
    from pipelines.lake.store import Lake

    return Lake.open(path).path


def below(root: Path) -> Iterator[Path]:
    """Every lake in `root` or in a directory below it, in order; not inside lakes."""
    if (root / _MARK).is_file():
        yield root
        return
    for child in sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()):
        if not child.name.startswith("."):
            yield from below(child)


def overview(path: Path | str) -> dict[str, Any]:
    """How much is in the lake at `path`: trajectories, steps, overlays, segments, bytes, environments."""
    from pipelines.lake.catalog import summary
    from pipelines.lake.store import Lake

    lake = Lake.open(path)
    found = summary(lake)
    figures = {name: found[name] for name in ("trajectories", "steps", "overlays", "segments", "bytes")}
    return {"lake": lake.name, **figures, "environments": sorted({task["env"] for task in found["tasks"]})}
