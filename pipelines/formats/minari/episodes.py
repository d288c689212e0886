"""An episode of a Minari dataset, whatever files it is stored in, and the names in its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

METADATA = "metadata.json"
SPACES = "amago_spaces"  # in the metadata of a dataset that we wrote
INFOS = "infos"
OUR_INFOS = "amago_infos"  # in the metadata of a dataset that we wrote: columns that are infos there
RECORD = "amago"  # of an episode of it


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
