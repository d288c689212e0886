"""Removal of runs: only of directories that are runs, on which no process works and no other run depends."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config.places import RUN, is_run, locate_lake, parse_share, split_checkpoint
from pipelines.config.run_directory import RunDirectory, RunRecord
from pipelines.errors import AmagoError, UsageError
from pipelines.files.atomic import explain_errors
from pipelines.files.json import read_object
from pipelines.files.malformed import read_limited
from pipelines.runs.stored import read_run
from pipelines.runs.summary import Row, measure_disk

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
    here = Path.cwd()
    for path in paths:
        if path.is_symlink():
            raise UsageError(f"'{path}' is a link, not the directory of a run", hint="give the directory itself")
        RunDirectory.open(path)
        if read_object(path / "run.json", RunRecord) is None:
            raise UsageError(f"'{path}' has a config.toml but no run.json that can be read: it may not be a run")
        if path.resolve() in (here, *here.parents):
            raise UsageError(f"'{path}' contains the current directory", hint="change to another directory")
        if (inside := find_contents(path)) is not None:
            raise UsageError(inside, hint="move or remove that first")
    if not force:
        for path, reasons in find_dependents(paths).items():
            raise UsageError(
                f"other runs depend on '{path}'", hint="remove them too, or use --force", problems=tuple(reasons)
            )
    with contextlib.ExitStack() as held:
        for path in paths:
            held.enter_context(RunDirectory(path).lock(*_STAGES))
        found = [RemovedRun(path=path, bytes=measure_disk(path)) for path in paths]
    for run in () if dry_run else found:
        with explain_errors(f"remove '{run.path}'"), RunDirectory(run.path).lock(*_STAGES):
            # Under another name, so that a half-removed run does not look like a run.
            doomed = run.path.with_name(f".{run.path.name}.{secrets.token_hex(4)}.removed")
            os.rename(run.path, doomed)
            shutil.rmtree(doomed)
    return found


def find_prunable(rows: Iterable[Row], *, keep_best: int, failed: bool = False) -> list[Path]:
    """Select the runs with a score that are not among the `keep_best` best of their standard; `failed`: also those that
    failed without a score. Runs that are running are never selected.

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


def find_dependents(paths: Collection[Path]) -> dict[Path, list[str]]:
    """Find which of the runs other runs depend on, and how: they train on its lake, act with its policy, fill its lake,
    or have a link into it.

    The search covers the folders that contain these runs, and runs/. Links are read, and never followed.
    """
    own = {path.resolve() for path in paths}
    others: set[Path] = set()
    links: dict[Path, Path] = {}
    for root in {_folder_of_runs(path) for path in own} | {Path("runs").resolve()}:
        for folder in _Folder.walk(root, hidden=False, runs_alone=_is_shared(root)):
            inside = any(folder.path.is_relative_to(each) for each in own)
            if not inside and folder.is_run:
                others.add(folder.path)
            if not inside:
                links |= {folder.path / name: Path(os.path.realpath(folder.path / name)) for name in folder.links}
    found: dict[Path, list[str]] = {}
    for path in paths:
        place = path.resolve()
        into = sorted(link for link, target in links.items() if target.is_relative_to(place))
        names = {place.name, *(link.name for link in into)}
        reasons = [f"'{other}' {how}" for other in sorted(others) if (how := _find_dependence(other, path, names))]
        reasons += [f"'{link}' is a link into it" for link in into if any(map(link.is_relative_to, others))]
        reasons += [f"'{other}' collects into its lake" for other in _find_fillers(path) if other.resolve() not in own]
        if reasons:
            found[path] = reasons
    return found


def find_contents(path: Path) -> str | None:
    """Describe other runs and lakes in the directory of a run, at any depth, which would be lost with it.

    None if there are none. StageFailed for a directory that cannot be read.
    """
    own = _own_lakes(path)
    for folder in _Folder.walk(path, hidden=True):
        name = folder.path.relative_to(path).as_posix()
        if folder.path == path:
            continue
        if folder.is_run:
            return f"'{path}' contains other runs, such as '{name}'"
        if "lake.json" in folder.files and folder.path not in own:
            return f"'{path}' contains another lake, '{name}'"
    return None


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """A directory, and the names of what is in it."""

    path: Path
    files: frozenset[str]
    links: frozenset[str]

    @property
    def is_run(self) -> bool:
        # By name, without opening the file: some directories, such as /proc/1/fdinfo, refuse even that question.
        return "config.toml" in self.files

    @classmethod
    def walk(cls, root: Path, *, hidden: bool, runs_alone: bool = False) -> Iterator[_Folder]:
        """Yield `root` and the directories below it, on the same device. Links are not followed.

        With `hidden`, all of them, and StageFailed for one that cannot be read. Otherwise hidden directories, the
        contents of lakes and what cannot be read are skipped. `runs_alone`: of the directories in `root`, only runs.
        """
        waiting = [root]
        try:
            device = root.stat().st_dev
        except OSError:
            return
        while waiting:
            path = waiting.pop()
            files, links, folders = set(), set(), []
            with (
                explain_errors(f"read '{path}'") if hidden else contextlib.suppress(OSError),
                os.scandir(path) as entries,
            ):
                for entry in entries:
                    if entry.is_symlink():
                        links.add(entry.name)
                    elif not entry.is_dir(follow_symlinks=False):
                        files.add(entry.name)
                    elif hidden or not entry.name.startswith("."):
                        folders.append(entry)
                if hidden or "lake.json" not in files:
                    near = [Path(entry.path) for entry in folders if entry.stat(follow_symlinks=False).st_dev == device]
                    if runs_alone and path == root:
                        near = [each for each in near if os.path.lexists(each / "config.toml")]
                    waiting += sorted(near, reverse=True)
            yield cls(path=path, files=frozenset(files), links=frozenset(links))


def _folder_of_runs(path: Path) -> Path:
    """Find the folder whose runs may depend on the run at `path`: the outermost folder that is called runs.

    Without one, it is the folder that contains the outermost run on the path.
    """
    outermost = next(each for each in (*reversed(path.parents), path) if each == path or is_run(each))
    return next((each for each in reversed(outermost.parents) if each.name == "runs"), outermost.parent)


def _is_shared(folder: Path) -> bool:
    """Decide whether a directory is shared with other things than runs: the root of a file system, a home, or /tmp.

    A walk through all of it could take hours, so only the runs directly in it are looked at.
    """
    try:
        return os.path.ismount(folder) or folder == Path.home() or bool(folder.stat().st_mode & stat.S_ISVTX)
    except (OSError, RuntimeError):
        return False


def _find_dependence(other: Path, path: Path, names: Collection[str]) -> str | None:
    """Say how the run `other` depends on the run at `path`; None if it does not.

    `other` can refer to that run only by one of `names` or by the ids of its lakes. Files without any of these need
    not be parsed.
    """
    found = [(read_object(lake / "lake.json") or {}).get("id") for lake in _own_lakes(path)]
    ids = {id for id in found if isinstance(id, str) and id}
    texts = []
    for name in ("run.json", "config.toml"):
        with contextlib.suppress(OSError):
            texts.append(read_limited(other / name, _MOST_BYTES))
    if not any(name.encode() in text for name in {*names, *ids} for text in texts):
        return None
    run = read_run(other)

    def is_inside(place: Any) -> bool:
        if not isinstance(place, str) or "\0" in place or "://" in place:
            return False
        return Path(os.path.realpath(place)).is_relative_to(path.resolve())

    def read_texts(table: str, *keys: str) -> list[str]:
        settings = run.document.get(table)
        values: list[Any] = [settings.get(key) for key in keys] if isinstance(settings, dict) else []
        parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
        return [part for part in parts if isinstance(part, str) and part]

    lakes = run.record.get("lakes")
    for lake in lakes if isinstance(lakes, list) else []:
        if isinstance(lake, dict) and (lake.get("id") in ids or is_inside(lake.get("lake"))):
            return "was trained on its lake"
    for text in read_texts("train", "lakes"):
        with contextlib.suppress(AmagoError):
            if is_inside(str(locate_lake(parse_share(text)[0], other))):
                return "trains on its lake"
    if any(is_inside(split_checkpoint(text)[0]) for text in read_texts("collect", "policy", "follow")):
        return "acts with its policy"
    return None


def _find_fillers(path: Path) -> list[Path]:
    """Find the other runs that collected into the run's lake, as far as they still exist."""
    found: set[Path] = set()
    for file in [file for lake in _own_lakes(path) for file in (lake / "collectors").glob("*.json")]:
        run = (read_object(file) or {}).get("run")
        place = run.get("absolute") if isinstance(run, dict) else None
        if isinstance(place, str) and "\0" not in place and is_run(Path(place)):
            found.add(Path(place))
    return sorted(each for each in found if each.resolve() != path.resolve())


def _own_lakes(path: Path) -> list[Path]:
    """Locate the lakes in the directory of a run: the one that it fills, and the one for imported trajectories."""
    source = read_run(path).document.get("source")
    place = source.get("lake") if isinstance(source, dict) else None
    given = locate_lake(place, path) if isinstance(place, str) and place.startswith(f"{RUN}/") else path / "offline"
    return [path / "lake", Path(given)]
