"""Segments rewritten as maintenance does it: the trajectories of some in one new file, the old files gone."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from pipelines.lake import footer
from pipelines.lake.keys import segment_key
from pipelines.lake.segment import new_segment, open_segment, publish, stage_files
from pipelines.lake.store import Lake


def rewrite(lake: Lake, ids: list[str], *, remove: bool = True) -> str:
    """Merge the segments `ids`, all overlays or none, into one; returns its id."""
    footers = [footer.read_footer(lake.storage, id) for id in ids]
    header = footers[0].header
    schema = lake.schema(header["schema"])
    columns = [c for c in schema.columns if c.name in header["columns"]]
    files = [open_segment(lake.storage, id, schema.columns) for id in ids]
    values = {c.name: np.concatenate([f.read_rows(c.name, 0, f.rows) for f in files]) for c in columns}
    tables, replaces, row0, first = [], {}, 0, 0
    for id, file, old in zip(ids, files, footers, strict=True):
        table = old.trajectories
        shifted = pa.array(table["row0"].to_numpy() + row0)
        tables.append(table.set_column(table.schema.get_field_index("row0"), "row0", shifted))
        replaces[id] = [first, len(table)]
        row0, first = row0 + file.rows, first + len(table)
    new, _ = new_segment("compact.0", 0, overlay=footers[0].is_overlay)
    written = {**header, "rows": row0, "replaces": replaces, "t_commit": time.time()}
    staged = stage_files(
        lake.local / "tmp", "compact.0", columns, values, lambda: footer.metadata(written, pa.concat_tables(tables))
    )
    publish(lake.storage, staged, new)
    for id in ids if remove else []:
        lake.storage.remove(segment_key(id))
    return new
