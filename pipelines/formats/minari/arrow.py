"""Episodes of a Minari dataset in Arrow or Parquet files: a folder with a number for each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import InputMissing, IntegrityError
from pipelines.files.malformed import read_limited, reason
from pipelines.formats.base import require_file
from pipelines.formats.minari.episodes import INFOS, METADATA, MinariEpisode
from pipelines.formats.minari.spaces import Leaf
from pipelines.formats.pictures import decoded
from pipelines.lake.arrow import UNREADABLE
from pipelines.lake.spaces import Ragged

_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations")


class ArrowEpisodes:
    """The episodes of a dataset in Arrow or Parquet; see `Episodes`."""

    def __init__(self, data: Path, form: str, leaves: list[Leaf], action_jpeg: bool) -> None:
        self._data, self._form, self._leaves, self._action_jpeg = data, form, leaves, action_jpeg
        self.files: list[Path] = []  # as many as episodes: the metadata stands for them

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def read(self, number: int) -> MinariEpisode:
        folder = self._data / str(number)
        table = self._table(folder)
        missing = [name for name in _COLUMNS if name not in table.column_names]
        if missing:
            raise InputMissing(f"'{folder}' lacks the columns {', '.join(missing)}", hint="fetch it again")
        try:
            columns = {name: table[name].combine_chunks() for name in table.column_names}
            observed = {leaf.root: columns.get(leaf.root) for leaf in self._leaves}
            return MinariEpisode(
                observations={leaf.column: self._leaf(observed[leaf.root], leaf, folder) for leaf in self._leaves},
                actions=self._actions(columns["actions"][:-1], folder),
                rewards=columns["rewards"].to_numpy(zero_copy_only=False)[:-1].astype(np.float64),
                terminations=columns["terminations"].to_numpy(zero_copy_only=False)[:-1],
                truncations=columns["truncations"].to_numpy(zero_copy_only=False)[:-1],
                success=self._success(columns.get("infos")),
                attributes=self._attributes(folder / METADATA),
            )
        except (*UNREADABLE, IndexError) as error:
            raise IntegrityError(f"'{folder}' is damaged: {reason(error)}", hint="fetch or make it again") from error

    def infos(self, number: int) -> dict[str, np.ndarray]:
        folder = self._data / str(number)
        table = self._table(folder)
        if INFOS not in table.column_names:
            return {}
        try:
            return dict(_infos(table[INFOS].combine_chunks(), ""))
        except UNREADABLE as error:
            raise IntegrityError(f"'{folder}' is damaged: {reason(error)}", hint="fetch or make it again") from error

    def _table(self, folder: Path) -> pa.Table:
        files = [require_file(path) for path in sorted(folder.glob(f"*.{self._form}"))]
        if not files:
            raise InputMissing(f"'{folder}' has no {self._form} file", hint="fetch or make the dataset again")
        try:
            if self._form == "parquet":
                return pq.read_table(files, page_checksum_verification=True)
            return pa.concat_tables([pa.ipc.open_file(pa.OSFile(str(path))).read_all() for path in files])
        except UNREADABLE as error:
            raise IntegrityError(f"'{folder}' is damaged: {reason(error)}", hint="fetch or make it again") from error

    def _leaf(self, values: pa.Array, leaf: Leaf, folder: Path) -> Any:
        for key in leaf.path:
            values = values.field(key)
        if leaf.jpeg:
            return decoded(values.to_pylist(), str(folder))
        return values.to_pylist() if isinstance(leaf.space, Ragged) else flat_values(values)

    def _actions(self, values: pa.Array, folder: Path) -> np.ndarray:
        return decoded(values.to_pylist(), str(folder)) if self._action_jpeg else flat_values(values)

    def _success(self, infos: pa.Array | None) -> bool | None:
        if infos is None or not pa.types.is_struct(infos.type) or infos.type.get_field_index("success") < 0:
            return None
        return bool(np.asarray(flat_values(infos.field("success"))).any())

    def _attributes(self, path: Path) -> dict[str, Any]:
        try:
            return dict(json.loads(read_limited(path)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise IntegrityError(f"'{path}' is damaged", hint="fetch or make the dataset again") from error


def _infos(values: pa.Array, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the numbers at or below a struct as ("a/b", array); what is missing somewhere is left out."""
    if pa.types.is_struct(values.type):
        for place, part in enumerate(values.type):
            yield from _infos(values.field(place), f"{name}/{part.name}" if name else part.name)
        return
    with contextlib.suppress(ValueError):
        yield name, flat_values(values)


def flat_values(values: pa.Array) -> np.ndarray:
    """Convert an array of numbers, or of lists of equal length, to (n, ...).

    ValueError where a number is missing or lengths differ.
    """
    kind = values.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = flat_values(values.flatten())
        if values.null_count or (len(values) and len(inner) % len(values)):
            raise ValueError("a list is missing, or of another length than the others")
        if not pa.types.is_fixed_size_list(kind) and len({len(item) for item in values}) > 1:
            raise ValueError("lists of different lengths")
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else len(inner) // max(len(values), 1)
        return inner.reshape(len(values), size, *inner.shape[1:])
    if values.null_count:
        raise ValueError("a value is missing")
    return np.asarray(values.to_numpy(zero_copy_only=False))
