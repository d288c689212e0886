"""Sources by name: `KIND:PLACE`, a file or folder whose kind its name shows, or `module:attr` for a user's own code."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.config.source import SourceSettings
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.files.malformed import MALFORMED, decoding
from pipelines.formats.base import Request, Source
from pipelines.formats.flat.datasets import DATASETS
from pipelines.formats.lerobot import INFO
from pipelines.formats.minari.reader import METADATA
from pipelines.formats.npz import is_flat
from pipelines.formats.robomimic import has_demonstrations
from pipelines.lake.spaces import Spaces
from pipelines.lake.trajectory import Trajectories
from pipelines.nearest import nearest
from pipelines.registry import Registry

_HINT = "fetch or make it again"
_RAISED: tuple[type[Exception], ...] = (pa.ArrowException,)

SOURCES = Registry(
    "source",
    {
        "d4rl": "pipelines.formats.flat.reader:D4rl",
        "hdf5": "pipelines.formats.flat.reader:D4rl",
        "minari": "pipelines.formats.minari.reader:Minari",
        "robomimic": "pipelines.formats.robomimic:Demonstrations",
        "npz": "pipelines.formats.npz:Npz",
        "parquet": "pipelines.formats.tables.reader:Tables",
        "lerobot": "pipelines.formats.lerobot:LeRobot",
        "arrow": "pipelines.formats.tables.reader:ArrowTables",
    },
)


_SUFFIXES = {".hdf5": "hdf5", ".h5": "hdf5", ".npz": "npz", ".parquet": "parquet", ".arrow": "arrow"}


def kind_and_place(name: str) -> tuple[str, str]:
    """The kind of a source and where it is, from `KIND:PLACE`, from the suffix of a file or a pattern, or from what a
    folder holds; ("", "") where nothing shows it.
    """
    kind, colon, place = name.partition(":")
    path = Path(name)
    if colon and (kind in SOURCES.names() or not path.exists()):
        return kind, place
    if path.is_dir():
        if any((folder / METADATA).is_file() for folder in (path / "data", path)):
            return "minari", name
        if (path / INFO).is_file():
            return "lerobot", name
        found = {_SUFFIXES[file.suffix] for file in path.iterdir() if file.suffix in _SUFFIXES}
        return (found.pop(), name) if len(found) == 1 else ("", "")
    if name in DATASETS:
        return "d4rl", name
    return (_SUFFIXES[path.suffix], name) if path.suffix in _SUFFIXES else ("", "")


def requirement(name: str) -> tuple[str | None, bool]:
    """The extra that source `name` needs in any case (None: none), and whether it is there."""
    if kind_and_place(name)[0] in ("d4rl", "hdf5", "robomimic"):
        return "hdf5", importlib.util.find_spec("h5py") is not None
    return None, True


class Decoded:
    """A source of a format: what decoding its files raises is IntegrityError that names it."""

    def __init__(self, make: Callable[[Request], Source], request: Request) -> None:
        self._what = request.place
        with decoding(self._what, *_RAISED, hint=_HINT):
            self._source = make(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """See `Source`."""
        found = self._source.batches(start)
        while True:
            with decoding(self._what, *_RAISED, hint=_HINT):
                batch = next(found, None)
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        with contextlib.suppress(*_RAISED, *MALFORMED):  # what was read was read
            self._source.close()


def open_source(
    settings: SourceSettings, *, spaces: Spaces | None = None, horizon: int | None = None, listener: Listener = silent
) -> Source:
    """The source that `settings.name` names; `spaces`, `horizon`: of the environment that its steps are to fit.

    UsageError for a name that is none, InputMissing where there is nothing or it does not fit, IntegrityError where
    it is damaged.
    """
    kind, place = kind_and_place(settings.name)
    if not kind or not place:
        raise UsageError(
            f"'{settings.name}' is no source, and no file or folder whose kind its name shows",
            hint=f"give KIND:PLACE with one of {', '.join(SOURCES.names())}, or module:attr",
        )
    request = Request(place=place, kind=kind, settings=settings, spaces=spaces, horizon=horizon, listener=listener)
    if kind == "npz" and is_flat(Path(place)):
        kind = "hdf5"  # the same arrays in another container
    elif kind == "hdf5" and Path(place).is_file() and has_demonstrations(Path(place)):
        kind = "robomimic"
    if kind in SOURCES.names():
        return Decoded(SOURCES.get(kind), request)
    close = nearest(kind, SOURCES.names())
    if close is not None and "." not in kind and importlib.util.find_spec(kind) is None:
        raise UsageError(f"unknown kind of source '{kind}'", hint=f"did you mean '{close}:{place}'?")
    from pipelines.formats.user import Own

    return Own(replace(request, place=settings.name))
