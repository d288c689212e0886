"""Checks of a segment's columns against its footer: as a whole, and trajectory by trajectory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from pipelines.errors import IntegrityError
from pipelines.lake.segment import SegmentFile, as_stored, checksum


def require_cover(file: SegmentFile) -> None:
    """Raise IntegrityError unless the trajectories of the footer are contiguous and fill the file."""
    table = file.footer.trajectories
    rows = table["length"].to_numpy() + 1
    if rows.sum() != file.rows or np.any(table["row0"].to_numpy() != np.cumsum(rows) - rows):
        raise IntegrityError(f"segment '{file.path}' is damaged: its trajectories do not cover its rows")


def wrong_columns(file: SegmentFile) -> list[str]:
    """Return the columns whose checksum differs from the footer's, or that cannot be read."""
    expected = file.footer.header["columns"]
    return [name for name in expected if column_checksum(file, name) != expected[name]]


def require_sound(file: SegmentFile) -> None:
    """Raise IntegrityError unless every column has the footer's checksum. Reads the whole segment."""
    wrong = wrong_columns(file)
    if wrong:
        raise IntegrityError(
            f"segment '{file.path}' is damaged: wrong checksum in {', '.join(wrong)}",
            hint="amago lake verify LAKE --repair sets the damage aside",
        )


def column_checksum(file: SegmentFile, name: str) -> int | None:
    """Return the CRC of a column; None if it cannot be read."""
    return _checksum(file, [name], _plain(file), 0, file.rows)


def sound(file: SegmentFile, keep: np.ndarray | None = None) -> np.ndarray:
    """Return (n,) bool: which trajectories have the bytes with which they were written, among those of the mask `keep`
    (None: all).
    """
    table, names, plain = file.footer.trajectories, file.footer.columns, _plain(file)
    found = np.ones(table.num_rows, dtype=bool) if keep is None else keep.copy()
    row0, rows, crcs = (table[name].to_pylist() for name in ("row0", "length", "crc"))
    for i in np.flatnonzero(found).tolist():
        found[i] = _checksum(file, names, plain, row0[i], row0[i] + rows[i] + 1) == crcs[i]
    return found


def _plain(file: SegmentFile) -> dict[str, tuple[memoryview, int]]:
    """Return the bytes of each plain column and the size of a row."""
    sizes = {column.name: column.step_bytes for column in file.schema_columns}
    return {name: (values.reshape(-1).view(np.uint8).data, sizes[name]) for name, values in file.columns.items()}


def _checksum(
    file: SegmentFile, names: Iterable[str], plain: Mapping[str, tuple[memoryview, int]], start: int, stop: int
) -> int | None:
    """Return the CRC of rows [start, stop) over columns in order; None if they cannot be read. Wide columns are decoded
    a batch at a time.
    """
    crc = 0
    try:
        for name in names:
            if name in plain:
                data, size = plain[name]
                crc = zlib.crc32(data[start * size : stop * size], crc)
                continue
            column = next(c for c in file.schema_columns if c.name == name)
            edges = [start, *range(start - start % file.batch_rows + file.batch_rows, stop, file.batch_rows), stop]
            for a, b in itertools.pairwise(edges):
                crc = checksum(as_stored(column, file.read_rows(name, a, b)), crc)
    except IntegrityError:
        return None
    return crc
