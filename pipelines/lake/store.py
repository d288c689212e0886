"""A lake: a directory of experience.

    lake.json      format name, version, lake id, required features
    schemas/       <sha256[:16]>.json, what a step holds
    segments/      <YYYYMMDDHH>/<us>-<writer>-<seq>.arrow, the truth: a file present here is committed
    wal/ tmp/      logs of living writers, files on their way
    tombstones/ quarantine/   markers that take a segment out of every reader's sight
    index.duckdb   an index that can be deleted

Any number of processes read and write it at once.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config import atomic
from pipelines.config.atomic import explained, write_atomically
from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, silent
from pipelines.lake.schema import Schema
from pipelines.lake.spaces import Spaces, space_to_json
from pipelines.lake.writer import Writer

if TYPE_CHECKING:
    from pipelines.lake.overlay import OverlayWriter

FORMAT_NAME, VERSION = "amago-lake", 1
FEATURES: frozenset[str] = frozenset()  # required features that this version understands
_DIRECTORIES = ("schemas", "segments", "wal", "tmp", "locks")


class Lake:
    """An open lake. Opening reads `lake.json` only; any number of processes may hold one."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.id: str = header["id"]
        self._schemas: dict[str, Schema] = {}

    @classmethod
    def create(cls, path: Path | str) -> Lake:
        """A new, empty lake; the directory must not hold one. StageFailed when it cannot be written."""
        path = Path(path)
        header = {
            "format": FORMAT_NAME,
            "version": VERSION,
            "id": uuid.uuid4().hex,
            "required_features": [],
            "created": time.time(),
        }
        text = json.dumps(header, indent=1) + "\n"
        with explained(f"create lake '{path}'"):
            for name in _DIRECTORIES:
                (path / name).mkdir(parents=True, exist_ok=True)
            try:
                staged = atomic.stage(path / "tmp", "lake.json", lambda file: file.write(text.encode()))
                atomic.publish_new(staged, path / "lake.json")
            except FileExistsError as error:
                raise InputMissing(
                    f"'{path}' is a lake already", hint="open it, or choose another directory"
                ) from error
        return cls(path, header)

    @classmethod
    def open(cls, path: Path | str) -> Lake:
        """The lake at `path`, or in the run directory `path`.

        InputMissing if there is none, or if it needs a newer version; IntegrityError if its header is
        damaged.
        """
        found = _locate(Path(path))
        if found is None:
            raise InputMissing(f"no lake at '{path}'", hint="make one with: amago collect --env ENV --lake DIR")
        try:
            header = json.loads((found / "lake.json").read_text())
            name, version, features = header["format"], int(header["version"]), header["required_features"]
            lake = cls(found, header)
        except OSError as error:
            raise InputMissing(f"lake '{found}' cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"'{found / 'lake.json'}' is damaged", hint="restore it from a copy; the segments need it not"
            ) from error
        if name != FORMAT_NAME or version > VERSION:
            raise InputMissing(
                f"lake '{found}' has format {name} {version}, this one reads {FORMAT_NAME} up to {VERSION}",
                hint="upgrade amago",
            )
        unknown = sorted(set(features) - FEATURES)
        if unknown:
            raise InputMissing(
                f"lake '{found}' needs features that this version lacks: {', '.join(unknown)}",
                hint="upgrade amago",
            )
        return lake

    @classmethod
    def find(cls, path: Path | str) -> Lake | None:
        """As `open`, but None if there is none."""
        return cls.open(path) if _locate(Path(path)) else None

    @classmethod
    def open_or_create(cls, path: Path | str) -> Lake:
        """The lake at `path`, made first if it is not there; processes that do so at once get the same one."""
        if _locate(Path(path)) is None:
            with contextlib.suppress(InputMissing):  # somebody else was first
                return cls.create(path)
        return cls.open(path)

    def register(self, schema: Schema) -> str:
        """Make `schema` known to readers; returns its id. Repeating it changes nothing."""
        target = self.path / "schemas" / f"{schema.id}.json"
        if not target.exists():
            write_atomically(target, json.dumps(schema.to_json(), indent=1) + "\n")
        self._schemas[schema.id] = schema
        return schema.id

    def schema(self, schema_id: str) -> Schema:
        """The schema of an id. InputMissing if unknown, IntegrityError if its file is not what it says."""
        if schema_id not in self._schemas:
            path = self.path / "schemas" / f"{schema_id}.json"
            try:
                schema = Schema.from_json(json.loads(path.read_text()))
            except FileNotFoundError as error:
                raise InputMissing(f"lake '{self.path}' has no schema {schema_id}") from error
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise IntegrityError(f"schema '{path}' is damaged") from error
            if schema.id != schema_id:
                raise IntegrityError(f"schema '{path}' does not hold what its name says")
            self._schemas[schema_id] = schema
        return self._schemas[schema_id]

    def schemas(self) -> dict[str, Schema]:
        """Every schema by id."""
        return {p.stem: self.schema(p.stem) for p in sorted((self.path / "schemas").glob("*.json"))}

    def require_schema(self, schema: Schema) -> str:
        """The id of `schema` if the lake holds it, or holds nothing yet; InputMissing says what differs."""
        known = self.schemas()
        if known and schema.id not in known:
            nearest = min((difference(s.spaces, schema.spaces) for s in known.values()), key=len)
            raise InputMissing(
                f"lake '{self.path}' holds steps of other spaces: {'; '.join(nearest)}",
                hint="choose another lake, or the environment that filled this one",
            )
        return schema.id

    def only_schema(self) -> Schema:
        """The one schema of the lake. InputMissing if it has none yet, or several."""
        known = self.schemas()
        if len(known) == 1:
            return next(iter(known.values()))
        what = "is empty" if not known else f"holds steps of {len(known)} different spaces"
        hint = "fill it with: amago collect" if not known else "name the environment whose steps are meant"
        raise InputMissing(f"lake '{self.path}' {what}", hint=hint)

    def writer(
        self,
        schema: Schema,
        *,
        name: str | None = None,
        seal_bytes: int = 64 << 20,
        seal_seconds: float = 10.0,
    ) -> Writer:
        """A new writer of `schema`, after salvage of what dead writers left."""
        self.salvage()
        self.register(schema)
        return Writer(self.path, schema, name=name, seal_bytes=seal_bytes, seal_seconds=seal_seconds)

    def overlay_writer(
        self,
        schema: Schema,
        columns: Sequence[str],
        *,
        name: str | None = None,
        seal_bytes: int = 64 << 20,
        seal_seconds: float = 10.0,
    ) -> OverlayWriter:
        """A writer of trajectories derived from others of this lake: it stores `columns` only."""
        from pipelines.lake.overlay import OverlayWriter

        self.salvage()
        return OverlayWriter(self, schema, columns, name=name, seal_bytes=seal_bytes, seal_seconds=seal_seconds)

    def salvage(self, *, listener: Listener = silent) -> int:
        """Seal the logs of dead writers; returns the number of trajectories saved."""
        from pipelines.lake.salvage import salvage

        return salvage(self.path, self.schema, listener=listener)


def _locate(path: Path) -> Path | None:
    return next((p for p in (path, path / "lake") if (p / "lake.json").is_file()), None)


def difference(ours: Spaces, theirs: Spaces, sides: tuple[str, str] = ("in the lake", "asked for")) -> list[str]:
    """What differs between two space signatures, one phrase each; `sides` says whose they are."""
    a, b = dict(ours.observation), dict(theirs.observation)
    here, there = sides
    phrases = [
        f"{name}: {_shown(a.get(name))} {here}, {_shown(b.get(name))} {there}"
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    ]
    if ours.action != theirs.action:
        phrases.append(f"action: {_shown(ours.action)} {here}, {_shown(theirs.action)} {there}")
    if not phrases:
        phrases.append("the order of the observation's columns")
    return phrases


def _shown(space: Any) -> str:
    if space is None:
        return "nothing"
    fields = space_to_json(space)
    kind = fields.pop("kind")
    return f"{kind}({', '.join(f'{k}={v}' for k, v in fields.items() if k not in ('low', 'high'))})"
