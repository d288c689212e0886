"""Names of lakes: a run's directory stands for its lake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import UsageError

_MARK = "lake.json"


def only(given: Sequence[str] | None) -> str:
    """Return the only lake of `--from-lake`. UsageError for none or several."""
    if not given:
        raise UsageError("no lake given", hint="give --from-lake LAKE, e.g. --from-lake runs/cartpole")
    if len(given) > 1:
        raise UsageError(f"--from-lake was given {len(given)} times", hint="give one lake")
    return given[0]


def locate(place: Path | str) -> str:
    """Return where the lake at `place`, or of the run `place`, is stored. InputMissing if there is none."""
    from pipelines.lake.store import Lake

    return Lake(place).name


def directory(place: str) -> Path | None:
    """Return `place` as a directory; None in an object store."""
    from pipelines.lake.storage import is_remote

    return None if is_remote(place) else Path(place)


def below(root: Path) -> Iterator[Path]:
    """Yield every lake in `root` or below it, in order, not descending into lakes."""
    if (root / _MARK).is_file():
        yield root
        return
    for child in sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()):
        if not child.name.startswith("."):
            yield from below(child)


def overview(path: Path | str) -> dict[str, Any]:
    """Summarise the lake at `path`: trajectories, steps, episodes, overlays, segments, bytes, environments."""
    from pipelines.lake.sql.catalog import summary
    from pipelines.lake.store import Lake

    lake = Lake(path)
    return {"lake": lake.name, **summary(lake)}
