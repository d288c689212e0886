"""Whether the columns of a segment are what its footer says: as a whole, and trajectory by trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from pipelines.errors import IntegrityError
from pipelines.lake.footer import Footer
from pipelines.lake.segment import SegmentFile, as_stored, checksum


def require_cover(footer: Footer, file: SegmentFile) -> None:
    """IntegrityError unless the trajectories of the footer lie one after another and fill the file."""
    table = footer.trajectories
    rows = table["length"].to_numpy() + 1
    if rows.sum() != file.rows or np.any(table["row0"].to_numpy() != np.cumsum(rows) - rows):
        raise IntegrityError(f"segment '{footer.path}' is damaged: its trajectories do not cover its rows")


def wrong_columns(footer: Footer, file: SegmentFile) -> list[str]:
    """Names of the columns whose checksum is not the footer's, or that cannot be read."""
    return [
        name for name, expected in footer.header["columns"].items() if _checksum(file, [name], 0, file.rows) != expected
    ]


def require_sound(file: SegmentFile) -> None:
    """IntegrityError unless every column of a segment has the footer's checksum. Reads all of it."""
    wrong = wrong_columns(file.footer, file)
    if wrong:
        raise IntegrityError(
            f"segment '{file.path}' is damaged: wrong checksum in {', '.join(wrong)}",
            hint="amago lake verify LAKE --repair sets the damage aside",
        )


class Checked:
    """Which files were checked by `require_sound`: each is once, or none is where that is not `wanted`."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._sound: set[str] = set()

    def check(self, id: str) -> Callable[[SegmentFile], None] | None:
        """Return what `open_segment` needs to check the segment `id`; None if there is nothing to do."""
        return None if not self._wanted or id in self._sound else partial(self._check, id)

    def _check(self, id: str, file: SegmentFile) -> None:
        require_sound(file)
        self._sound.add(id)


def column_checksum(file: SegmentFile, name: str) -> int | None:
    """CRC of a column; None if it cannot be read."""
    return _checksum(file, [name], 0, file.rows)


def sound(footer: Footer, file: SegmentFile) -> np.ndarray:
    """(n,) bool: which trajectories have the bytes with which they were logged."""
    table = footer.trajectories
    spans = zip(table["row0"].to_pylist(), table["length"].to_pylist(), table["crc"].to_pylist(), strict=True)
    whole = [_checksum(file, footer.columns, row0, row0 + n + 1) == expected for row0, n, expected in spans]
    return np.array(whole, dtype=bool)


def _checksum(file: SegmentFile, names: Iterable[str], start: int, stop: int) -> int | None:
    """CRC of rows [start, stop) of columns, one after another; None if they cannot be read."""
    crc = 0
    try:
        for name in names:
            for values in _pieces(file, name, start, stop):
                crc = checksum(values, crc)
    except IntegrityError:
        return None
    return crc


def _pieces(file: SegmentFile, name: str, start: int, stop: int) -> Iterator[np.ndarray]:
    """Rows [start, stop) of a column in storage form; a blob a batch at a time."""
    column = next(c for c in file.schema_columns if c.name == name)
    if name in file.columns:
        yield as_stored(column, file.columns[name][start:stop])
        return
    step = file.batch_rows
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield as_stored(column, file.read_rows(name, start, end))
        start = end
