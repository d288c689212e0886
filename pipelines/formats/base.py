"""What every source of trajectories offers, and how a source says what is wrong with it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, silent
from pipelines.files.malformed import open_regular, reason
from pipelines.lake.reading import Reader, join_rows, read_pieces
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Spaces
from pipelines.lake.trajectory import Trajectories, Trajectory
from pipelines.registry import require_package

EPISODE = "episode"  # the tag that holds a trajectory's number in its source
BATCH_BYTES = 8 << 20  # of steps that a source hands over at a time, where one trajectory is not longer
_EDGE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Request:
    """A dataset to import: its `kind` and what follows `KIND:` in its name, its settings, and of the environment
    that its steps are to fit the spaces and the time limit (None: as the source has them).
    """

    place: str
    kind: str = ""
    settings: SourceSettings
    spaces: Spaces | None = None
    horizon: int | None = None
    listener: Listener = silent


class Importer(Protocol):
    """Trajectories in a fixed order; a trajectory's number is its place in it.

    `label` names it in file names, `fingerprint` changes with what is in it, `env` is its environment as far as it
    knows. `steps` is an estimate of all there are (None: unknown); `dropped` counts those that `batches` could not use.
    `labelled`: its steps have labels; `logp`: they have log-probabilities of actions.
    """

    label: str
    fingerprint: str
    env: str
    spaces: Spaces
    steps: int | None
    dropped: int
    labelled: bool
    logp: bool

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield trajectories from number `start` on, as the lake stores them; each `info` has the tag `episode`.

        IntegrityError for damaged or impossible values, InputMissing for what does not fit the spaces.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The counts of an export: `trajectories` and `steps` that are there now, and the trajectories `written` by it."""

    trajectories: int
    steps: int
    written: int
    bytes: int


@dataclass(frozen=True)
class Item:
    """A trajectory, read when it is asked for: an episode, whose pieces have the uids `pieces`."""

    pieces: tuple[str, ...]
    reader: Reader

    @property
    def uid(self) -> str:
        return self.pieces[0]

    def trajectory(self) -> Trajectory:
        """Read its columns, pieces joined and overlays applied."""
        return read_pieces(self.reader, self.pieces)

    def row(self) -> dict[str, Any]:
        """Read its row of the table `trajectories`, of all its pieces."""
        return join_rows([self.reader.row(uid) for uid in self.pieces])

    def schema(self) -> Schema:
        """Find the schema of its steps."""
        return self.reader.lake.schema(self.reader.locate(self.uid)[0].schema_id)


class Exporter(Protocol):
    """A function that writes trajectories into a folder; `about` describes them."""

    def __call__(self, items: Iterable[Item], to: Path, about: Mapping[str, Any]) -> Exported: ...


def require_file(path: Path, hint: str = "check the path") -> Path:
    """Return `path`. InputMissing unless it is a regular file: a pipe or a device might never begin, or never end."""
    if not path.is_file():
        text = f"'{path}' is not a regular file" if path.exists() else f"no file '{path}'"
        raise InputMissing(text, hint=hint)
    return path


def hash_files(files: Iterable[Path], *more: Any) -> str:
    """Hash the sizes and both ends of some files, and `more`, to 16 hex digits; a file may be moved."""
    digest = hashlib.sha256(repr(more).encode())
    for path in files:
        size = path.stat().st_size
        with open_regular(path) as file:
            digest.update(f"{path.name} {size}".encode() + file.read(_EDGE))
            file.seek(max(size - _EDGE, 0))
            digest.update(file.read(_EDGE))
    return digest.hexdigest()[:16]


def as_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Convert tags to texts, as the lake takes them, without empty ones."""
    return {name: str(value) for name, value in tags.items() if value not in (None, "")}


def decode_pictures(pictures: Sequence[bytes], what: str, *, extra: str = "minari") -> np.ndarray:
    """Decode compressed pictures to (n, height, width[, channels]) uint8. InputMissing without pillow, which `extra`
    brings; IntegrityError for what is not a picture.
    """
    require_package("PIL", extra, f"'{what}' with its compressed pictures")
    from PIL import Image, UnidentifiedImageError

    try:
        return np.stack([np.asarray(Image.open(io.BytesIO(picture)), dtype=np.uint8) for picture in pictures])
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise IntegrityError(
            f"'{what}': a picture is damaged: {reason(error)}", hint="fetch or make it again"
        ) from error
