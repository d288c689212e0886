"""Episodes of a Minari dataset in one HDF5 file: groups `episode_N`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.formats.hdf5 import array, contained, leaves, open_file, reading, scalar
from pipelines.formats.minari.episodes import INFOS, MinariEpisode
from pipelines.formats.minari.spaces import Leaf
from pipelines.formats.pictures import decoded
from pipelines.lake.spaces import Ragged

FILE = "main_data.hdf5"


class Hdf5Episodes:
    """The episodes of a dataset in HDF5; see `Episodes`."""

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
                observations={leaf.column: self._leaf(group, leaf) for leaf in self._leaves},
                actions=self._pictures(group, "actions") if self._action_jpeg else self._values(group, "actions"),
                rewards=self._values(group, "rewards").reshape(-1),
                terminations=self._values(group, "terminations").reshape(-1),
                truncations=self._values(group, "truncations").reshape(-1),
                success=self._success(group),
                attributes={key: scalar(value) for key, value in group.attrs.items()},
            )

    def _leaf(self, group: Any, leaf: Leaf) -> Any:
        name = leaf.root
        for key in leaf.path:
            inner = f"{name}/{key}"
            name = inner if inner in group else f"{name}/_index_{key}"  # a member of a Tuple
        if leaf.jpeg:
            return self._pictures(group, name)
        values = self._values(group, name)
        if isinstance(leaf.space, Ragged):
            return [value.decode() if isinstance(value, bytes) else value for value in values]
        return values

    def infos(self, number: int) -> dict[str, np.ndarray]:
        with reading(self._path):
            group = self._file.get(f"episode_{number}/{INFOS}")
            found = leaves(group, self._path) if hasattr(group, "keys") else ()
            return {name: np.asarray(values[()]) for name, values in found}

    def _values(self, group: Any, name: str) -> np.ndarray:
        return np.asarray(array(group, name, path=self._path)[()])

    def _pictures(self, group: Any, name: str) -> np.ndarray:
        return decoded([bytes(np.asarray(data)) for data in array(group, name, path=self._path)[()]], str(self._path))

    def _success(self, group: Any) -> bool | None:
        import h5py

        values = group.get("infos/success")
        return bool(np.asarray(contained(values, self._path)[()]).any()) if isinstance(values, h5py.Dataset) else None
