"""Naming lakes: wherever one is asked for, a run's directory means its lake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import UsageError

_MARK = "lake.json"
_NAME_ONE = "give --from-lake LAKE, e.g. --from-lake runs/cartpole"


def only(given: Sequence[str] | None) -> str:
    """The one lake of `--from-lake`."""
    if not given:
        raise UsageError("no lake is named", hint=_NAME_ONE)
    if len(given) > 1:
        raise UsageError(f"--from-lake was given {len(given)} times", hint="one lake at a time")
    return given[0]


def shares(given: Sequence[str], run: Path) -> list[tuple[Path | str, float, float | None]]:
    """Lakes, their weights and their last weights, of the training of `run`."""
    from pipelines.config.lakes import located, parse_share

    if not given:
        raise UsageError("no lake is named", hint=_NAME_ONE)
    return [(located(place, run), weight, last) for place, weight, last in map(parse_share, given)]


def locate(place: Path | str) -> str:
    """Where the lake at `place`, or in the run `place`, lies. InputMissing if there is none."""
    from pipelines.lake.store import Lake

    return Lake.open(place).name


def directory(place: str) -> Path | None:
    """The directory that `place` names; None for a place in an object store."""
    from pipelines.lake.storage import is_remote

    return None if is_remote(place) else Path(place)


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
    from pipelines.lake.sql.catalog import summary
    from pipelines.lake.store import Lake

    lake = Lake.open(path)
    return {"lake": lake.name, **summary(lake)}
