"""The formats of datasets, a row each, and their importers and exporters by name.

A dataset to import is `KIND:PLACE`, a file or folder whose kind its name shows, or `module:attr` for a user's own code.
A place hf://ORG/NAME[@REVISION][/PATH] is fetched from the Hugging Face Hub.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.config.settings import SourceSettings
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.files.hub import HubAddress, is_on_hub
from pipelines.files.malformed import MALFORMED, explain_damage
from pipelines.formats import demonstrations, learning_histories
from pipelines.formats.base import Exporter, Importer, Request
from pipelines.formats.flat.datasets import DATASETS
from pipelines.formats.hdf5 import open_file, reading
from pipelines.formats.lerobot import INFO
from pipelines.formats.manifest import verify_files
from pipelines.formats.minari.episodes import METADATA
from pipelines.formats.minari.reader import find_data
from pipelines.formats.npz import is_flat
from pipelines.lake.spaces import Spaces
from pipelines.lake.trajectory import Trajectories
from pipelines.nearest import did_you_mean, nearest
from pipelines.registry import Registry

_HINT = "fetch or make it again"
_RAISED: tuple[type[Exception], ...] = (pa.ArrowException,)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A row of `FORMATS`: importer and exporter as "module:attr" (empty: none), the suffixes of its files, and the
    extra without which it cannot be read.
    """

    importer: str = ""
    exporter: str = ""
    suffixes: tuple[str, ...] = ()
    extra: str | None = None


_HERE = "pipelines.formats"
FORMATS: dict[str, Format] = {
    "arrow": Format(importer=f"{_HERE}.tables.reader:ArrowImporter", suffixes=(".arrow",)),
    "d4rl": Format(importer=f"{_HERE}.flat.reader:FlatImporter", extra="hdf5"),
    "d3rlpy": Format(importer=f"{_HERE}.demonstrations:D3rlpyImporter", extra="hdf5"),
    "hdf5": Format(
        importer=f"{_HERE}.flat.reader:FlatImporter",
        exporter=f"{_HERE}.flat.writer:write",
        suffixes=(".hdf5", ".h5"),
        extra="hdf5",
    ),
    "lerobot": Format(importer=f"{_HERE}.lerobot:LeRobotImporter"),
    "minari": Format(importer=f"{_HERE}.minari.reader:MinariImporter", exporter=f"{_HERE}.minari.writer:write"),
    "npz": Format(importer=f"{_HERE}.npz:NpzImporter", exporter=f"{_HERE}.npz:write", suffixes=(".npz",)),
    "parquet": Format(
        importer=f"{_HERE}.tables.reader:TableImporter",
        exporter=f"{_HERE}.tables.writer:write",
        suffixes=(".parquet",),
    ),
    "robomimic": Format(importer=f"{_HERE}.demonstrations:RobomimicImporter", extra="hdf5"),
    "vintix": Format(importer=f"{_HERE}.learning_histories:VintixImporter", extra="hdf5"),
    "xland": Format(importer=f"{_HERE}.learning_histories:XLandImporter", extra="hdf5"),
}
IMPORTERS = Registry("importer", {name: row.importer for name, row in FORMATS.items() if row.importer})
EXPORTERS = Registry("exporter", {name: row.exporter for name, row in FORMATS.items() if row.exporter})
_SUFFIXES = {suffix: name for name, row in FORMATS.items() for suffix in row.suffixes}
_MODULES = {"hdf5": "h5py"}  # what an extra brings


def find_exporter(form: str) -> Exporter:
    """Find the exporter of a format, or `module:attr`. UsageError for a name that no format has."""
    if form not in EXPORTERS.names() and ":" not in form:
        known = ["bundle", "onnx", "torch", "aoti", "page", *EXPORTERS.names()]
        hint = did_you_mean(form, known, otherwise=f"known: {', '.join(known)}, or module:attr")
        raise UsageError(f"export.format: there is no format '{form}'", hint=hint)
    found: Exporter = EXPORTERS.get(form)
    return found


def find_kind_and_place(name: str) -> tuple[str, str]:
    """Find the kind of a dataset and where it is, from `KIND:PLACE`, the suffix of a file or a pattern, or what a
    folder holds; ("", "") if none of them says, and no kind where it is still to be fetched.
    """
    if is_on_hub(name):
        return "", name
    kind, colon, place = name.partition(":")
    path = Path(name)
    if colon and (kind in IMPORTERS.names() or not path.exists()):
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


def find_requirement(name: str) -> tuple[str | None, bool]:
    """Find the extra that dataset `name` needs in any case (None: none), and whether it is installed."""
    kind, place = find_kind_and_place(name)
    if is_on_hub(place):
        return "hub", importlib.util.find_spec("huggingface_hub") is not None
    row = FORMATS.get(kind)
    if row is None or row.extra is None:
        return None, True
    return row.extra, importlib.util.find_spec(_MODULES[row.extra]) is not None


class _GuardedImporter:
    """An importer whose decoding errors become IntegrityError with the name of the dataset."""

    def __init__(self, make: Callable[[Request], Importer], request: Request) -> None:
        self._what = request.place
        with explain_damage(self._what, *_RAISED, hint=_HINT):
            self._source = make(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self, start: int = 0) -> Iterator[Trajectories]:
        """Yield batches as `Importer` says."""
        found = self._source.batches(start)
        while True:
            with explain_damage(self._what, *_RAISED, hint=_HINT):
                batch = next(found, None)
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        with contextlib.suppress(*_RAISED, *MALFORMED):  # what was read was read
            self._source.close()


def open_importer(
    settings: SourceSettings, *, spaces: Spaces | None = None, horizon: int | None = None, listener: Listener = silent
) -> Importer:
    """Open the dataset `settings.name`; `spaces`, `horizon`: of the environment that its steps must fit.

    UsageError for an unknown name, InputMissing if nothing is there or it does not fit, IntegrityError if it is
    damaged.
    """
    kind, place = find_kind_and_place(settings.name)
    if is_on_hub(place):
        place = HubAddress.parse(place, kind="datasets").fetch(listener)
        kind = kind or find_kind_and_place(place)[0]
    if not kind or not place:
        raise UsageError(
            f"'{settings.name}' is not a dataset: it names no kind, and no file or folder that shows one",
            hint=f"give KIND:PLACE with one of {', '.join(IMPORTERS.names())}, or module:attr",
        )
    # Before any decoder sees the files: what they say of their spaces is as likely to be damaged as their values. An id
    # of Minari's may name a dataset that was exported to where minari keeps them.
    files = str(find_data(place)) if kind == "minari" else place
    with explain_damage(place, hint=_HINT):
        verify_files(files, nested=kind == "npz", listener=listener)
    request = Request(place=place, kind=kind, settings=settings, spaces=spaces, horizon=horizon, listener=listener)
    if kind == "npz" and is_flat(Path(place)):
        kind = "hdf5"  # the same arrays in another container
    elif kind == "hdf5" and Path(place).is_file():
        with open_file(Path(place)) as file, reading(Path(place)):
            kind = demonstrations.find_kind(file) or learning_histories.find_kind(file) or kind
    if kind in IMPORTERS.names():
        return _GuardedImporter(IMPORTERS.get(kind), request)
    close = nearest(kind, IMPORTERS.names())
    if close is not None and "." not in kind and importlib.util.find_spec(kind) is None:
        raise UsageError(f"unknown kind of source '{kind}'", hint=f"did you mean '{close}:{place}'?")
    from pipelines.formats.user import UserImporter

    return UserImporter(replace(request, place=settings.name))
