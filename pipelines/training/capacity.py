"""Whether this host can keep at hand what it draws windows from."""

from __future__ import annotations

import numpy as np

from pipelines.data.mixture import Mixture
from pipelines.data.view import View, bases
from pipelines.events import Listener, Notice
from pipelines.lake.folders import blob_key, segment_key
from pipelines.lake.storage import is_remote

_GROWTH = 1.1  # of a lake's files, between two measurements


class CapacityCheck:
    """Warns once of each lake of `mixture` whose files outgrow the host: for an object store its cache, else its
    memory. `share`: the part of them that this host draws from."""

    def __init__(self, mixture: Mixture, *, share: float, listener: Listener) -> None:
        self._mixture, self._share, self._listener = mixture, share, listener
        self._measured = [0] * len(mixture.parts)
        self._warned: set[int] = set()

    def __call__(self) -> None:
        for number, part in enumerate(self._mixture.parts):
            count = len(part.view.files)
            if number not in self._warned and count >= self._measured[number] * _GROWTH:
                self._measured[number] = count + 1
                self._check(number, part.view)

    def _check(self, number: int, view: View) -> None:
        try:
            wanted, room = round(count_drawn_bytes(view) * self._share), view.lake.storage.room()
        except OSError:  # training says what is wrong with the store, if it needs it
            return
        if room is None or wanted <= room:
            return
        self._warned.add(number)
        sizes = f"this host draws from {_format_size(wanted)} of lake '{view.lake.name}', but"
        if is_remote(view.lake.name):
            text = (
                f"{sizes} caches {_format_size(room)}, so a window may cost the download of a whole segment; raise "
                "AMAGO_CACHE_BYTES, select less (--where), or train on more hosts with train.shard = 'host'"
            )
        else:
            text = f"{sizes} has {_format_size(room)} of memory, so windows will be read from the disk"
        self._listener(Notice(text=text, level="warning"))


def _format_size(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def count_drawn_bytes(view: View) -> int:
    """Return the size of the files that hold trajectories that may be drawn."""
    chosen = view.table[view.table["weight"] > 0]
    numbers = np.union1d(chosen["segment"], bases(chosen))
    files, storage = view.files, view.lake.storage
    has_blobs = any(column.is_blob for column in view.schema.columns)
    total = 0
    for id in (files[index] for index in np.unique(view.file_of[numbers]).tolist()):
        for key in (segment_key(id), blob_key(id)) if has_blobs else (segment_key(id),):
            try:
                total += storage.size(key)
            except FileNotFoundError:  # rewritten or removed meanwhile
                continue
    return total
