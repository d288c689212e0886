"""Datasets out: whole trajectories of a lake, overlays applied, in files that need nothing of this project.

`dataset.json` says what a folder holds and the digests of its files; `complete` is true once all is there. The formats
are in `make`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import UsageError
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object
from pipelines.formats.base import Exported, Item
from pipelines.formats.make import find_exporter
from pipelines.formats.manifest import MARK, digest_files, find_altered
from pipelines.formats.tables import croissant
from pipelines.lake.reading import Reader, group_by_episode
from pipelines.lake.schema import OPTIONAL
from pipelines.lake.store import Lake

_WITHOUT_OPTIONAL = ("hdf5", "minari")


def export(
    lake: Lake, uids: Sequence[str], to: Path, *, form: str, about: Mapping[str, Any], listener: Listener = silent
) -> Exported:
    """Write the trajectories `uids` into the folder `to`, episodes as a whole where a piece is among them; one is read
    at a time.

    `about` says what they are; a folder that holds something else is refused (UsageError). StageFailed when the disk
    refuses, IntegrityError for a damaged segment.
    """
    episodes = group_by_episode(lake, uids, listener=listener)
    mark = {"format": form, **about}
    digest = hashlib.sha256("".join(uid for pieces in episodes for uid in pieces).encode()).hexdigest()
    known = _claim(to, mark)
    is_finished = known.get("complete") is True and bool(known.get("files"))
    altered = find_altered(to, listener) if is_finished else []
    for name in altered:  # a file that is there would not be written again
        (to / name).unlink(missing_ok=True)
    if is_finished and not altered and known.get("digest") == digest:
        return Exported(trajectories=len(episodes), steps=known["steps"], written=0, bytes=known["bytes"])
    optional = [OPTIONAL[name] for name in OPTIONAL if any(name in each.optional for each in lake.schemas().values())]
    if form in _WITHOUT_OPTIONAL and optional:
        text = f"{form} has no place for {' and '.join(optional)}: they are left out"
        listener(Notice(text=text, level="warning"))
    write_atomically(to / MARK, json.dumps({**mark, "complete": False}, indent=1))
    reader = Reader(lake, listener=listener, verify=True)

    def read_items() -> Iterator[Item]:
        for number, pieces in enumerate(episodes, 1):
            yield Item(pieces, reader)
            listener(Progress(stage="export", done=number, total=len(episodes), unit="trajectories"))

    done = find_exporter(form)(read_items(), to, about)
    counts = {"trajectories": len(episodes), "steps": done.steps, "bytes": done.bytes, "digest": digest}
    files = digest_files(to, listener)
    if form == "parquet":
        croissant.write(to, about, files)
        files[croissant.NAME] = hashlib.sha256((to / croissant.NAME).read_bytes()).hexdigest()
    counts |= {"files": files}
    write_atomically(to / MARK, json.dumps({**mark, "complete": True, **counts}, indent=1))
    return done


def _claim(to: Path, mark: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read `dataset.json` of a dataset there. UsageError if the folder holds something else."""
    known = read_object(to / MARK)
    if known is None and to.exists() and any(to.iterdir()):
        raise UsageError(f"'{to}' is not empty, and amago did not export it", hint="choose another --to")
    if known is not None and {name: known.get(name) for name in mark} != dict(mark):
        raise UsageError(
            f"'{to}' holds another dataset",
            hint="choose another --to, or remove it",
            problems=tuple(
                f"{name}: {known.get(name)!r} there, {value!r} asked for"
                for name, value in mark.items()
                if known.get(name) != value
            ),
        )
    return known or {}
