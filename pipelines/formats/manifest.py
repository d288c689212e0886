"""`dataset.json` of an exported dataset: what it holds, and the SHA-256 of each of its files.

Formats differ in what they check themselves: NPZ every array, Parquet and HDF5 the pages and chunks of values but not
all that describes them. The digests cover every byte. A dataset of another tool has none, and is read without.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from pydantic import Field

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, Progress, silent
from pipelines.files.json import Form, read_object
from pipelines.files.malformed import open_regular, read_limited, reason
from pipelines.formats.tables.files import TRAJECTORIES

MARK = "dataset.json"
_PIECE = 8 << 20
_HINT = "fetch or export it again"


class _Manifest(Form):
    """The fields of `dataset.json` that an import relies on."""

    format: str
    complete: bool
    files: dict[str, str] = Field(default_factory=dict)


def digest_files(folder: Path, listener: Listener = silent) -> dict[str, str]:
    """Map every file of an export, by its path below `folder`, to its SHA-256.

    Every file is read once more, at 0.7 GB a second where the processor is the limit.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARK)
    return {path.relative_to(folder).as_posix(): digest for path, digest in _digest(paths, listener).items()}


def find_altered(folder: Path, listener: Listener = silent) -> list[str]:
    """List the files of a finished export that are missing or not as they were, by their path below `folder`."""
    wanted = _read_digests(folder)
    found = _digest([folder / name for name in wanted if (folder / name).is_file()], listener)
    return [name for name, digest in wanted.items() if found.get(folder / name) != digest]


def verify_files(place: str, *, nested: bool = False, listener: Listener = silent) -> None:
    """Compare the files of an exported dataset with their digests, before anything else is read from them.

    `place` is a folder, a file or a pattern of files; `nested` adds the exports further below a folder. All that is
    listed of a folder has to be there; of the files that match a pattern, these are compared. Files that no
    `dataset.json` lists pass. IntegrityError for a file that was altered or is missing, InputMissing for an export that
    has not finished.
    """
    path = Path(place)
    wanted: dict[Path, str] = {}
    if path.is_dir():
        for folder in [path, *(mark.parent for mark in path.rglob(MARK) if nested)]:
            wanted |= {folder / name: digest for name, digest in _read_digests(folder).items()}
        # A folder within an export, such as `data` of Minari's.
        inner = f"{path.absolute().name}/"
        listed = _read_digests(path.absolute().parent)
        wanted |= {path / name[len(inner) :]: digest for name, digest in listed.items() if name.startswith(inner)}
    else:
        matches = {path} if path.exists() else {Path(found) for found in glob.glob(place, recursive=True)}
        for folder in {match.parent for match in matches}:
            # The importer of tables reads this one beside the files it was asked for.
            chosen = matches | {folder / TRAJECTORIES}
            places = {folder / name: digest for name, digest in _read_digests(folder).items()}
            wanted |= {place: digest for place, digest in places.items() if place in chosen}
    for file in wanted:
        if not file.is_file():
            raise IntegrityError(f"'{file}' is missing, and {MARK} lists it", hint=_HINT)
    for file, found in _digest(wanted, listener).items():
        if found != wanted[file]:
            raise IntegrityError(
                f"'{file}' is damaged: it is not as it was exported (SHA-256)",
                hint=f"{_HINT}; if you changed it on purpose, remove {MARK}",
            )


def _read_digests(folder: Path) -> Mapping[str, str]:
    """Read the digests of a folder by name; {} where `dataset.json` is missing or not ours."""
    found = read_object(folder / MARK, _Manifest)
    if found is None:
        _require_json(folder / MARK)
        return {}
    manifest = _Manifest.model_validate(found)
    if not manifest.complete:
        raise InputMissing(f"the export in '{folder}' has not finished", hint="repeat `amago export`, or wait for it")
    for name in manifest.files:
        # A forged list must not make an import read files elsewhere.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise IntegrityError(f"'{folder / MARK}' lists '{name}', which is not below it", hint=_HINT)
    return manifest.files


def _require_json(path: Path) -> None:
    """Raise IntegrityError for a file that is there and not JSON: its digests would be left out without a word."""
    if not path.exists():
        return
    try:
        json.loads(read_limited(path))
    except (OSError, ValueError, RecursionError) as error:
        hint = f"{_HINT}; if it belongs to something else, rename it"
        raise IntegrityError(f"'{path}' is damaged: {reason(error)}", hint=hint) from error


def _digest(paths: Iterable[Path], listener: Listener) -> dict[Path, str]:
    """Hash files a piece at a time, and report how far that is."""
    sizes = {path: path.stat().st_size for path in paths}
    found, done = {}, 0
    for path in sizes:
        digest = hashlib.sha256()
        with open_regular(path) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                done += len(piece)
                listener(Progress(stage="checksums", done=done, total=sum(sizes.values()), unit="B"))
        found[path] = digest.hexdigest()
    return found
