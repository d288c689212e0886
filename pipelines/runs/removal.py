"""Removing runs: only what is a run, that nobody works on and no other run depends on."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config.lakes import parse_share
from pipelines.config.places import is_run
from pipelines.config.run_directory import RunDirectory, RunRecord
from pipelines.errors import AmagoError, UsageError
from pipelines.files.atomic import explained
from pipelines.files.json import read_object
from pipelines.files.malformed import read_limited
from pipelines.runs.find import runs_below
from pipelines.runs.stored import StoredRun, read_run
from pipelines.runs.summary import Row, disk_bytes

_MOST_BYTES = 16 << 20
_STAGES = ("run", "train", "collect")


@dataclass(frozen=True, kw_only=True)
class RemovedRun:
    """A run that was removed, or would be, and the bytes that this frees."""

    path: Path
    bytes: int


def remove(paths: Sequence[Path], *, force: bool = False, dry_run: bool = False) -> list[RemovedRun]:
    """Remove runs with all that is in their directories; nothing if one of them must stay.

    UsageError for a directory that is not a run, or on which other runs depend unless `force`; Locked for a run that a
    process works on.
    """
    for path in paths:
        _require_removable(path)
    if not force:
        for path, reasons in dependents(paths).items():
            raise UsageError(
                f"other runs depend on '{path}'", hint="remove them too, or use --force", problems=tuple(reasons)
            )
    with contextlib.ExitStack() as held:
        for path in paths:
            held.enter_context(RunDirectory(path).lock(*_STAGES))
        found = [RemovedRun(path=path, bytes=disk_bytes(path)) for path in paths]
    return found if dry_run else [_removed(each) for each in found]


def prunable(rows: Iterable[Row], *, keep_best: int, failed: bool = False) -> list[Path]:
    """Return the runs that are not among the `keep_best` best of their standard, of those that are not running and have
    a score; `failed`: also those that failed without a score.

    Scores in environments of different parameters, on different tasks or of different ways to act say nothing about
    which run is better, so each such group keeps its best.
    """
    by_standard: dict[str, list[Row]] = {}
    chosen: list[Path] = []
    for row in rows:
        if row["state"] == "running":
            continue
        if row["score"] is not None:
            by_standard.setdefault(row["standard"], []).append(row)
        elif failed and row["state"] == "failed":
            chosen.append(Path(row["run"]))
    for alike in by_standard.values():
        ordered = sorted(alike, key=lambda row: -row["score"])
        chosen += [Path(row["run"]) for row in ordered[keep_best:]]
    return sorted(chosen)


def dependents(paths: Collection[Path]) -> dict[Path, list[str]]:
    """Return which of the runs other runs depend on, and how: they train on its lake, act with its policy, or fill its
    lake. Looks at the runs beside these, and in runs/."""
    own = {path.resolve() for path in paths}
    folders = {path.absolute().parent for path in paths} | {Path("runs").absolute()}
    others = {each.resolve() for folder in folders for each in runs_below(folder)} - own
    found: dict[Path, list[str]] = {}
    for path in paths:
        reasons = [f"'{other}' {how}" for other in sorted(others) if (how := _depends(other, path)) is not None]
        reasons += [f"'{other}' collects into its lake" for other in _fillers(path) if other.resolve() not in own]
        if reasons:
            found[path] = reasons
    return found


def _require_removable(path: Path) -> None:
    if path.is_symlink():
        raise UsageError(f"'{path}' is a link, not the directory of a run", hint="give the directory itself")
    RunDirectory.open(path)
    if read_object(path / "run.json", RunRecord) is None:
        raise UsageError(f"'{path}' has a config.toml but no run.json that can be read: it may not be a run")
    place = path.resolve()
    if place in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"'{path}' contains the current directory", hint="change to another directory")
    inside = [child for child in sorted(path.iterdir()) if child.is_dir() and is_run(child)]
    if inside:
        raise UsageError(f"'{path}' contains other runs, such as '{inside[0].name}'", hint="move or remove them first")


def _removed(run: RemovedRun) -> RemovedRun:
    """Remove a run under another name, so that a half-removed one does not look like a run."""
    with explained(f"remove '{run.path}'"), RunDirectory(run.path).lock(*_STAGES):
        doomed = run.path.with_name(f".{run.path.name}.{secrets.token_hex(4)}.removed")
        os.rename(run.path, doomed)
        shutil.rmtree(doomed)
    return run


def _depends(other: Path, path: Path) -> str | None:
    """Return how the run `other` depends on the run at `path`; None if it does not."""
    names = {path.resolve().name.encode(), _lake_id(path).encode() or b"\0"}
    texts = [_content(other / name) for name in ("run.json", "config.toml")]
    if not any(name in text for name in names for text in texts):
        return None
    run = read_run(other)
    lakes = run.record.get("lakes")
    for lake in lakes if isinstance(lakes, list) else []:
        if isinstance(lake, dict) and (lake.get("id") == _lake_id(path) or _is_inside(lake.get("lake"), path)):
            return "was trained on its lake"
    for text in _strings(run, "train", "lakes"):
        with contextlib.suppress(AmagoError):
            if _is_inside(parse_share(text)[0], path):
                return "trains on its lake"
    if any(_is_inside(text.partition("@")[0], path) for text in _strings(run, "collect", "policy", "follow")):
        return "acts with its policy"
    return None


def _strings(run: StoredRun, table: str, *keys: str) -> list[str]:
    settings = run.document.get(table)
    found: list[Any] = [settings.get(key) for key in keys] if isinstance(settings, dict) else []
    found = [part for value in found for part in (value if isinstance(value, list) else [value])]
    return [value for value in found if isinstance(value, str) and value]


def _is_inside(place: Any, path: Path) -> bool:
    if not isinstance(place, str) or "\0" in place or "://" in place:
        return False
    return Path(place).resolve().is_relative_to(path.resolve())


def _fillers(path: Path) -> list[Path]:
    """Return the other runs, as far as they exist, that collected into the run's lake."""
    found: set[Path] = set()
    for file in (path / "lake" / "collectors").glob("*.json"):
        run = (read_object(file) or {}).get("run")
        place = run.get("absolute") if isinstance(run, dict) else None
        if isinstance(place, str) and "\0" not in place and is_run(Path(place)):
            found.add(Path(place))
    return sorted(each for each in found if each.resolve() != path.resolve())


def _lake_id(path: Path) -> str:
    found = (read_object(path / "lake" / "lake.json") or {}).get("id")
    return found if isinstance(found, str) else ""


def _content(path: Path) -> bytes:
    try:
        return read_limited(path, _MOST_BYTES)
    except OSError:
        return b""
