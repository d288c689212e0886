"""Segments rewritten as maintenance does it, without waiting for the grace period."""

from __future__ import annotations

import numpy as np

from pipelines.lake.folders import segment_key
from pipelines.lake.footer import read_footer
from pipelines.lake.log import lease
from pipelines.lake.maintenance import compaction
from pipelines.lake.store import Lake


def rewrite(lake: Lake, ids: list[str]) -> str:
    """Merge the segments `ids`, all overlays or none, into one, and remove their files; return its id."""
    with lease(lake) as held:
        parts = {id: np.ones(len(read_footer(lake.storage, id).uids()), dtype=bool) for id in ids}
        done = compaction.rewrite(lake, parts, held)
        assert done is not None
    for id in ids:
        lake.storage.remove(segment_key(id))
    return done.id
