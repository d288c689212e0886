"""The episodes of a Minari dataset in HDF5, Arrow or Parquet files, and the names in its metadata."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import InputMissing, IntegrityError
from pipelines.files.malformed import read_limited, reason
from pipelines.formats.base import decode_pictures, require_file
from pipelines.formats.hdf5 import as_scalar, open_array, open_file, reading, require_contained, walk_leaves
from pipelines.formats.minari.spaces import Leaf
from pipelines.formats.tables.files import as_array
from pipelines.lake.arrow import UNREADABLE
from pipelines.lake.spaces import Ragged

FILE = "main_data.hdf5"
METADATA = "metadata.json"
SPACES = "amago_spaces"  # in the metadata of a dataset that we wrote
INFOS = "infos"
OUR_INFOS = "amago_infos"  # in the metadata of a dataset that we wrote: columns that are infos there
RECORD = "amago"  # of an episode of it
_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations")


@dataclass(frozen=True, kw_only=True)
class MinariEpisode:
    """One episode as stored: T + 1 observations by leaf, T of the others. `attributes` say what is known of it."""

    observations: Mapping[str, Any]
    actions: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    success: bool | None
    attributes: Mapping[str, Any]


class Episodes(Protocol):
    """Episodes in files of one format."""

    files: list[Path]

    def read(self, number: int) -> MinariEpisode:
        """Read an episode. IntegrityError or InputMissing if that is not possible."""
        ...

    def infos(self, number: int) -> dict[str, np.ndarray]:
        """Read the `infos` of an episode by path, as far as they are arrays. Errors as `read`."""
        ...

    def close(self) -> None: ...


class Hdf5Episodes:
    """The episodes of a dataset in one HDF5 file, groups `episode_N`; see `Episodes`."""

    def __init__(self, data: Path, leaves: list[Leaf], action_jpeg: bool) -> None:
        self._path = data / FILE
        self.files = [self._path]
        self._leaves, self._action_jpeg = leaves, action_jpeg
        self._file = open_file(self._path)

    def close(self) -> None:
        self._file.close()

    def read(self, number: int) -> MinariEpisode:
        name = f"episode_{number}"
        with reading(self._path):
            group = self._file.get(name)
            if group is None:
                raise InputMissing(f"'{self._path}': '{name}' is missing", hint="fetch or make the dataset again")
            return MinariEpisode(
                observations={leaf.column: self._read_leaf(group, leaf) for leaf in self._leaves},
                actions=self._read_pictures(group, "actions")
                if self._action_jpeg
                else self._read_values(group, "actions"),
                rewards=self._read_values(group, "rewards").reshape(-1),
                terminations=self._read_values(group, "terminations").reshape(-1),
                truncations=self._read_values(group, "truncations").reshape(-1),
                success=self._read_success(group),
                attributes={key: as_scalar(value) for key, value in group.attrs.items()},
            )

    def _read_leaf(self, group: Any, leaf: Leaf) -> Any:
        name = leaf.root
        for key in leaf.path:
            inner = f"{name}/{key}"
            name = inner if inner in group else f"{name}/_index_{key}"  # a member of a Tuple
        if leaf.jpeg:
            return self._read_pictures(group, name)
        values = self._read_values(group, name)
        if isinstance(leaf.space, Ragged):
            return [value.decode() if isinstance(value, bytes) else value for value in values]
        return values

    def infos(self, number: int) -> dict[str, np.ndarray]:
        with reading(self._path):
            group = self._file.get(f"episode_{number}/{INFOS}")
            found = walk_leaves(group, self._path) if hasattr(group, "keys") else ()
            return {name: np.asarray(values[()]) for name, values in found}

    def _read_values(self, group: Any, name: str) -> np.ndarray:
        return np.asarray(open_array(group, name, path=self._path)[()])

    def _read_pictures(self, group: Any, name: str) -> np.ndarray:
        return decode_pictures(
            [bytes(np.asarray(data)) for data in open_array(group, name, path=self._path)[()]], str(self._path)
        )

    def _read_success(self, group: Any) -> bool | None:
        import h5py

        values = group.get("infos/success")
        return (
            bool(np.asarray(require_contained(values, self._path)[()]).any())
            if isinstance(values, h5py.Dataset)
            else None
        )


class ArrowEpisodes:
    """The episodes of a dataset in Arrow or Parquet, a folder with a number for each; see `Episodes`."""

    def __init__(self, data: Path, form: str, leaves: list[Leaf], action_jpeg: bool) -> None:
        self._data, self._form, self._leaves, self._action_jpeg = data, form, leaves, action_jpeg
        self.files: list[Path] = []  # as many as episodes: the metadata stands for them

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def read(self, number: int) -> MinariEpisode:
        folder = self._data / str(number)
        table = self._read_table(folder)
        missing = [name for name in _COLUMNS if name not in table.column_names]
        if missing:
            raise InputMissing(f"'{folder}' lacks the columns {', '.join(missing)}", hint="fetch it again")
        try:
            columns = {name: table[name].combine_chunks() for name in table.column_names}
            observed = {leaf.root: columns.get(leaf.root) for leaf in self._leaves}
            acted = columns["actions"][:-1]
            return MinariEpisode(
                observations={leaf.column: self._read_leaf(observed[leaf.root], leaf, folder) for leaf in self._leaves},
                actions=decode_pictures(acted.to_pylist(), str(folder)) if self._action_jpeg else as_array(acted),
                rewards=columns["rewards"].to_numpy(zero_copy_only=False)[:-1].astype(np.float64),
                terminations=columns["terminations"].to_numpy(zero_copy_only=False)[:-1],
                truncations=columns["truncations"].to_numpy(zero_copy_only=False)[:-1],
                success=self._read_success(columns.get("infos")),
                attributes=self._read_attributes(folder / METADATA),
            )
        except (*UNREADABLE, IndexError) as error:
            raise IntegrityError(f"'{folder}' is damaged: {reason(error)}", hint="fetch or make it again") from error

    def infos(self, number: int) -> dict[str, np.ndarray]:
        folder = self._data / str(number)
        table = self._read_table(folder)
        if INFOS not in table.column_names:
            return {}
        try:
            return dict(_walk_infos(table[INFOS].combine_chunks(), ""))
        except UNREADABLE as error:
            raise IntegrityError(f"'{folder}' is damaged: {reason(error)}", hint="fetch or make it again") from error

    def _read_table(self, folder: Path) -> pa.Table:
        files = [require_file(path) for path in sorted(folder.glob(f"*.{self._form}"))]
        if not files:
            raise InputMissing(f"'{folder}' has no {self._form} file", hint="fetch or make the dataset again")
        try:
            if self._form == "parquet":
                return pq.read_table(files, page_checksum_verification=True)
            return pa.concat_tables([pa.ipc.open_file(pa.OSFile(str(path))).read_all() for path in files])
        except UNREADABLE as error:
            raise IntegrityError(f"'{folder}' is damaged: {reason(error)}", hint="fetch or make it again") from error

    def _read_leaf(self, values: pa.Array, leaf: Leaf, folder: Path) -> Any:
        for key in leaf.path:
            values = values.field(key)
        if leaf.jpeg:
            return decode_pictures(values.to_pylist(), str(folder))
        return values.to_pylist() if isinstance(leaf.space, Ragged) else as_array(values)

    def _read_success(self, infos: pa.Array | None) -> bool | None:
        if infos is None or not pa.types.is_struct(infos.type) or infos.type.get_field_index("success") < 0:
            return None
        return bool(np.asarray(as_array(infos.field("success"))).any())

    def _read_attributes(self, path: Path) -> dict[str, Any]:
        try:
            return dict(json.loads(read_limited(path)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise IntegrityError(f"'{path}' is damaged", hint="fetch or make the dataset again") from error


def _walk_infos(values: pa.Array, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the numbers at or below a struct as ("a/b", array); what is missing somewhere is left out."""
    if pa.types.is_struct(values.type):
        for place, part in enumerate(values.type):
            yield from _walk_infos(values.field(place), f"{name}/{part.name}" if name else part.name)
        return
    with contextlib.suppress(ValueError):
        yield name, as_array(values)
