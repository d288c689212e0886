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


def overview(path: Path) -> dict[str, Any]:
    """How much is in the lake at `path`: trajectories, steps, segments, bytes on disk, environments."""
    from pipelines.lake.catalog import query

    from pipelines.lake.store import Lake

    lake = Lake.open(path)
    _, counts = query(lake, "select count(*), coalesce(sum(length), 0)::bigint from trajectories")
    _, names = query(lake, "select distinct env from trajectories order by env")
    _, segments = query(lake, "select count(*) from segments")
    return {
        "lake": lake.path,
        "trajectories": counts[0][0],
        "steps": counts[0][1],
        "segments": segments[0][0],
        "bytes": sum(file.stat().st_size for file in (lake.path / "segments").rglob("*.arrow")),
        "environments": [name for (name,) in names],
    }
