"""The difference between what is in a lake and what the index, which outlives processes, has recorded."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.files.atomic import storage_error
from pipelines.lake.folders import ROOT, folders, list_segments
from pipelines.lake.footer import Footer
from pipelines.lake.log import FOLDER
from pipelines.lake.segment import stored_bytes
from pipelines.lake.storage import FRESH_SECONDS, Storage, require_lake

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


class FolderListing(NamedTuple):
    """A folder when it was last listed: `stamp` (None if unreliable) and a digest of its names."""

    stamp: int | None
    digest: str


def changes(storage: Storage, known: Mapping[str, FolderListing]) -> dict[str, FolderListing | None]:
    """Return the folders that differ from `known`; None for those that are gone. Checks every folder."""
    here = [FOLDER, *(f"{ROOT}/{name}" for name in folders(storage, ROOT))]
    if len(here) == 1:  # without a folder of segments
        require_lake(storage)
    found: dict[str, FolderListing | None] = dict.fromkeys(known.keys() - set(here))
    due = {}
    try:
        for folder in here:
            now, stamp = time.time_ns(), storage.stamp(folder)
            if stamp is None or folder not in known or known[folder].stamp != stamp:
                settled = stamp is not None and (now - stamp > FRESH_SECONDS * 1e9 or stamp == 0)
                due[folder] = stamp if settled else None
        for (folder, stamp), names in zip(due.items(), storage.listings(list(due)), strict=True):
            listed = FolderListing(stamp, _digest(names))
            if listed != known.get(folder):
                found[folder] = listed
    except OSError as error:
        raise storage_error(error, f"list '{storage.url()}'") from error
    return found


def _digest(names: Iterable[str]) -> str:
    text = "\n".join(sorted(names))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def matter(changed: Mapping[str, FolderListing | None], known: Mapping[str, FolderListing]) -> bool:
    """Return whether files may have appeared or disappeared. A stamp that became reliable does not matter."""
    return any(
        listed is None
        or folder not in known
        or known[folder].stamp is not None
        or known[folder].digest != listed.digest
        for folder, listed in changed.items()
    )


def listed_ids(storage: Storage, changed: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the sorted ids of all segments: of the `changed` folders as they are now, of the others as `known`."""
    relisted = {folder.removeprefix(f"{ROOT}/") for folder in changed if folder.startswith(ROOT)}
    ids = [id for id in known if id.partition("/")[0] not in relisted]
    ids += [id for folder in relisted for id in list_segments(storage, folder)]
    return sorted(ids)


def segment_row(lake: Lake, id: str, footer: Footer, alive: np.ndarray) -> dict[str, Any]:
    """Return a segment's row of the table `segments`."""
    header = footer.header
    return {
        "segment": id,
        "kind": header["kind"],
        "schema": header["schema"],
        "writer": header["writer"],
        "t_commit": header["t_commit"],
        "trajectories": len(alive),
        "expired": int(len(alive) - alive.sum()),
        "rows": header["rows"],
        "bytes": stored_bytes(lake.storage, id),
        "columns": list(footer.columns),
        "replaces": list(footer.replaces),
    }


def trajectory_rows(id: str, footer: Footer, alive: np.ndarray) -> pa.Table:
    """Return a segment's rows of the table `trajectories`; uids are 16 bytes each."""
    table = footer.trajectories
    for name, value in (("segment", id), ("schema", footer.header["schema"])):
        table = table.append_column(name, pa.repeat(pa.scalar(value, pa.string()), table.num_rows))
    return table if alive.all() else table.filter(pa.array(alive))
