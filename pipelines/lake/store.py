"""A lake: a directory of experience.

    lake.json      format name, version, lake id, required features
    schemas/       <sha256[:16]>.json, the columns of a step
    segments/      <YYYYMMDDHH>/<us>-<writer>-<seq>.arrow, the data: a file present here is committed
    wal/ tmp/      logs of living writers, staged files
    log/           <n>.json, in order: what was rewritten, expired, quarantined, protected
    quarantine/    damaged files, kept aside
    index.duckdb   an index that can be deleted

Any number of processes read and write it concurrently.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config.places import is_lake, suggest
from pipelines.errors import InputMissing, IntegrityError, StorageError
from pipelines.events import Event, Listener, Notice, silent
from pipelines.files.atomic import explain_errors, make_storage_error
from pipelines.files.json import Form, parse_object
from pipelines.files.malformed import MALFORMED, UNREADABLE, reason
from pipelines.lake.schema import LABEL, OPTIONAL, Schema, digest
from pipelines.lake.spaces import OBSERVATION, Spaces, find_widest, format_type, space_to_json
from pipelines.lake.storage import HEADER, LocalStorage, Storage, connect, is_remote
from pipelines.lake.writer import Writer, salvage

if TYPE_CHECKING:
    import pyarrow

_FORMAT_NAME, VERSION = "amago-lake", 4
_FEATURES: frozenset[str] = frozenset()  # required features that this version supports
_SHOWN = 10  # rows
_SCHEMA_NAME = re.compile(r"[0-9a-f]{16}\.json")
HEAL = "restore it from a copy, or collect into the lake with the environment that filled it: that writes it again"


@dataclass(frozen=True)
class QueryResult:
    """Column names and rows. Iterating gives a dictionary per row.

    >>> list(QueryResult(["a", "b"], [(1, 2)]))
    [{'a': 1, 'b': 2}]
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def df(self) -> Any:
        """Convert to a `pandas.DataFrame`. InputMissing if pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise InputMissing("a DataFrame needs pandas, which is not installed", hint="pip install pandas") from error
        return pandas.DataFrame([list(row) for row in self.rows], columns=list(self.columns))

    def __repr__(self) -> str:
        head = [", ".join(f"{name}={value!r}" for name, value in row.items()) for row in islice(self, _SHOWN)]
        more = [f"... {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        count = "1 row" if len(self) == 1 else f"{len(self)} rows"
        return "\n".join([f"<{count}: {', '.join(self.columns)}>", *head, *more])


class _LakeHeader(Form):
    """The fields that are read from lake.json."""

    format: str
    version: int
    id: str
    required_features: list[str]


class Lake:
    """An open lake: `Lake("runs/x")`. Opening reads `lake.json` only; any number of processes may hold one.

    `place` is a directory, a run (for its lake) or "s3://bucket/prefix" (gs://, az://). `storage` holds the
    files; `local` is the directory of this host for logs, locks and the index (for a lake in a directory, the lake
    itself). InputMissing if there is no lake, or if it needs a newer version; IntegrityError if its header is damaged.

    >>> lake = Lake("runs/maze")
    >>> lake.sql("select sum(length) as steps from trajectories")
    <1 row: steps>
    steps=400
    """

    def __init__(self, place: Path | str) -> None:
        found = _find_header(place)
        if found is None:
            make = "make one with: amago collect --env ENV --lake DIR"
            if not is_remote(place):
                inside = f"it contains lakes (amago lake ls {place})"
                make = suggest(Path(place), is_lake, inside=inside, otherwise=make)
            raise InputMissing(f"no lake at '{place}'", hint=make)
        self._open(*found)

    def _open(self, storage: Storage, header: bytes) -> None:
        self.storage, self.id = storage, _read_id(storage, header)
        self.local = storage.local
        self._schemas: dict[str, Schema] = {}

    def __repr__(self) -> str:
        return f"Lake({self.name!r})"

    def sql(
        self, query: str, *, seconds: float = 60.0, megabytes: int = 1024, listener: Listener | None = None
    ) -> QueryResult:
        """Query the lake, read-only, as `amago lake sql` does: iterate over the answer, or take its `.df()`.

        `seconds` and `megabytes` limit time and memory. UsageError shows the position of a mistake. A segment that
        cannot be read is left out, and `listener` hears of it; without one it is a Python warning.
        """
        from pipelines.lake.sql import catalog
        from pipelines.lake.sql.sandbox import QueryLimits

        limits = QueryLimits(seconds=seconds, megabytes=megabytes)
        return QueryResult(*catalog.query(self, query, limits=limits, listener=listener or _warn))

    def to_arrow(
        self, query: str = "from trajectories", *, seconds: float = 60.0, megabytes: int = 1024
    ) -> pyarrow.Table:
        """Query the lake as `sql` does, for a `pyarrow.Table`: no value becomes a Python object, so that millions of
        steps arrive in seconds.

        Step columns of several values are lists of fixed size, `tags` is a map, and a sum of integers is int64.
        UsageError for a type that readers of Arrow do not share, which SQL can cast, and for two columns of one name.

        >>> Lake("runs/maze").to_arrow("select t, reward from steps limit 3").schema
        t: int64
        reward: float
        """
        from pipelines.lake.sql.columnar import read_table
        from pipelines.lake.sql.sandbox import QueryLimits

        return read_table(self, query, limits=QueryLimits(seconds=seconds, megabytes=megabytes), listener=_warn)

    def to_polars(self, query: str = "from trajectories", *, seconds: float = 60.0, megabytes: int = 1024) -> Any:
        """Query the lake as `to_arrow` does, for a `polars.DataFrame`. InputMissing if polars is not installed.

        >>> Lake("runs/maze").to_polars("select sum(length) as steps from trajectories").to_dicts()
        [{'steps': 400}]
        """
        try:
            import polars
        except ModuleNotFoundError as error:
            raise InputMissing(
                "a polars.DataFrame needs polars, which is not installed", hint="pip install polars"
            ) from error
        return polars.from_arrow(self.to_arrow(query, seconds=seconds, megabytes=megabytes))

    @property
    def name(self) -> str:
        """The location of the lake, for messages and records."""
        return self.storage.url()

    @property
    def path(self) -> Path:
        """The lake's directory; InputMissing if it is in an object store."""
        if isinstance(self.storage, LocalStorage):
            return self.storage.root
        raise InputMissing(f"lake '{self.name}' is not in a directory of this host")

    @property
    def run(self) -> Path | None:
        """The parent directory of the lake, which may be a run; None in an object store."""
        return self.path.resolve().parent if isinstance(self.storage, LocalStorage) else None

    @classmethod
    def create(cls, path: Path | str) -> Lake:
        """Create an empty lake; there must not be one at `path`. StageFailed if it cannot be written."""
        storage = connect(path)
        header = {
            "format": _FORMAT_NAME,
            "version": VERSION,
            "id": uuid.uuid4().hex,
            "required_features": [],
            "created": time.time(),
        }
        with explain_errors(f"create lake '{path}'"):
            storage.create_folders()
            try:
                storage.create(HEADER, (json.dumps(header, indent=1) + "\n").encode())
            except FileExistsError as error:
                raise InputMissing(
                    f"'{path}' is a lake already", hint="open it, or choose another directory"
                ) from error
        return cls(path)

    @classmethod
    def find(cls, path: Path | str) -> Lake | None:
        """Open the lake at `path`; None if there is none."""
        found = _find_header(path)
        if found is None:
            return None
        lake = cls.__new__(cls)
        lake._open(*found)
        return lake

    @classmethod
    def open_or_create(cls, path: Path | str) -> Lake:
        """Open the lake at `path`, creating it if necessary; concurrent processes get the same one."""
        found = cls.find(path)
        if found is None:
            with contextlib.suppress(InputMissing):  # another process was first
                return cls.create(path)
        return found or cls(path)

    def register(self, schema: Schema) -> str:
        """Write `schema` for readers; returns its id. Repeating it changes nothing; a damaged file is rewritten."""
        key = f"schemas/{schema.id}.json"
        data = schema.to_json()
        with explain_errors(f"write '{self.storage.url(key)}'"):
            found = None
            with contextlib.suppress(FileNotFoundError, ValueError):
                found = parse_object(self.storage.read(key))
            if found != data:
                self.storage.write(key, (json.dumps(data, indent=1) + "\n").encode())
        self._schemas[schema.id] = schema
        return schema.id

    def schema(self, schema_id: str) -> Schema:
        """Return the schema of an id. InputMissing if it is unknown or of a newer version, IntegrityError if its file
        does not match its name.
        """
        if schema_id not in self._schemas:
            key = f"schemas/{schema_id}.json"
            path = self.storage.url(key)
            try:
                data = json.loads(self.storage.read(key))
            except FileNotFoundError as error:
                raise InputMissing(f"lake '{self.name}' has no schema {schema_id}", hint=HEAL) from error
            except StorageError as error:
                raise make_storage_error(error, f"read '{path}'") from error
            except UNREADABLE as error:
                raise IntegrityError(f"schema '{path}' is damaged: {reason(error)}", hint=HEAL) from error
            if digest(data) != schema_id:
                raise IntegrityError(f"schema '{path}' does not match its name", hint=HEAL)
            try:
                schema = Schema.from_json(data)
                known = schema.id == schema_id
            except MALFORMED:
                known = False
            if not known:  # it is intact, for its name is the hash of its content
                raise InputMissing(f"schema '{path}' has fields that this version does not know", hint="upgrade amago")
            self._schemas[schema_id] = schema
        return self._schemas[schema_id]

    def schemas(self) -> dict[str, Schema]:
        """Read every schema, by id."""
        return {id: self.schema(id) for id in self._schema_ids()}

    def _schema_ids(self) -> list[str]:
        try:
            names = self.storage.names("schemas")
        except OSError as error:
            raise make_storage_error(error, f"read '{self.storage.url('schemas')}'") from error
        return sorted(name.removesuffix(".json") for name in names if _SCHEMA_NAME.fullmatch(name))

    def require_schema(self, schema: Schema, *, to_write: bool = False) -> str:
        """Return the id of `schema` if the lake holds it, or is empty; InputMissing lists the differences. `to_write`:
        original steps, which have labels in all of a lake or in none of it.
        """
        adds_labels = to_write and schema.labelled
        if schema.id in self._schemas and not adds_labels:
            return schema.id
        known = self._schema_ids()
        if known and (schema.id not in known or (adds_labels and replace(schema, labelled=False).id in known)):
            alike = [held for held in self.schemas().values() if held.spaces == schema.spaces]
            if column := next(filter(None, (held.find_difference(schema) for held in alike)), None):
                holds, wanted = ("without", "with") if column in schema.optional else ("with", "without")
                also = ", and relabel --with label:POLICY adds them" if column == LABEL else ""
                raise InputMissing(
                    f"lake '{self.name}' holds steps {holds} {OPTIONAL[column]}, not {wanted}",
                    hint=f"choose another lake; collect.{column} stores {OPTIONAL[column]}{also}",
                )
            held = min(self.list_spaces(), key=lambda spaces: len(describe_difference(spaces, schema.spaces)))
            hint = "choose another lake, or the environment that filled this one"
            # Of the originals that lack most, which must be given all columns at once.
            least = min(self.list_spaces(), key=lambda spaces: len(spaces.observation))
            if to_write and (added := describe_added(least, schema.spaces)):
                hint = f"choose another lake; or add to what it has: amago relabel --from-lake {self.name} {added}"
            raise InputMissing(
                f"lake '{self.name}' holds steps of other spaces: "
                f"{'; '.join(describe_difference(held, schema.spaces))}",
                hint=hint,
            )
        return schema.id

    def schema_of(self, spaces: Spaces, *, labels: bool = False) -> Schema:
        """Return the lake's schema of these spaces; one without optional columns if it has none.

        Where originals have no labels but versions of them do, `labels` chooses the schema of these versions.
        """
        held = sorted((each for each in self.schemas().values() if each.spaces == spaces), key=lambda s: s.labelled)
        return held[-1 if labels else 0] if held else Schema(spaces)

    def list_spaces(self) -> list[Spaces]:
        """List the different spaces of the lake's steps."""
        known: list[Spaces] = []
        for schema in self.schemas().values():
            known += [schema.spaces] if schema.spaces not in known else []
        return known

    def only_schema(self, *, labels: bool = False, lacking: Collection[str] = ()) -> Schema:
        """Return the schema of the lake's only spaces, or of those with the most columns, where columns were added;
        `labels` as for `schema_of`. `lacking`: of the spaces without these columns, if there are any. InputMissing if
        there are none yet, or several that do not cover each other.
        """
        known = self.list_spaces()
        known = [spaces for spaces in known if not spaces.observation.keys() & {*lacking}] or known
        if (widest := find_widest(known)) is not None:
            return self.schema_of(widest, labels=labels)
        what = "is empty" if not known else f"holds steps of {len(known)} different spaces"
        hint = "fill it with: amago collect" if not known else "name the environment whose steps are meant"
        raise InputMissing(f"lake '{self.name}' {what}", hint=hint)

    def writer(
        self, schema: Schema, *, name: str | None = None, seal_bytes: int = 64 << 20, seal_seconds: float = 10.0
    ) -> Writer:
        """Open a new writer of `schema`, after salvaging the logs of dead writers."""
        with explain_errors(f"write into lake '{self.name}'"):
            self.storage.create_folders()  # copying a lake loses empty folders
        self.salvage()
        self.register(schema)
        return Writer(self.storage, schema, name=name, seal_bytes=seal_bytes, seal_seconds=seal_seconds)

    def salvage(self, *, listener: Listener = silent) -> int:
        """Seal the logs of dead writers; returns the number of trajectories saved."""
        return salvage(self.storage, self.schema, listener=listener)


def _warn(event: Event) -> None:
    """Pass on what a query warns of to a caller in Python, who has no listener."""
    if isinstance(event, Notice) and event.level == "warning":
        warnings.warn(event.text, stacklevel=2)


def _read_id(storage: Storage, content: bytes) -> str:
    """Return the id in a lake.json. IntegrityError if it is damaged, InputMissing if it is of a newer version."""
    found, header = storage.url(), parse_object(content, _LakeHeader)
    if header is None:
        raise IntegrityError(
            f"'{storage.url(HEADER)}' is damaged", hint="restore it from a copy; the segments are unaffected"
        )
    name, version, features = header["format"], header["version"], set(header["required_features"])
    if name != _FORMAT_NAME or version > VERSION:
        raise InputMissing(
            f"lake '{found}' has format {name} {version}, this one reads {_FORMAT_NAME} up to {VERSION}",
            hint="upgrade amago",
        )
    if version < VERSION:
        raise InputMissing(
            f"lake '{found}' was written by an earlier version of amago (format {version}, this one reads {VERSION})",
            hint="collect again, or export it by that version and import the files with: amago collect --from",
        )
    unknown = sorted(features - _FEATURES)
    if unknown:
        raise InputMissing(
            f"lake '{found}' needs features that this version lacks: {', '.join(unknown)}", hint="upgrade amago"
        )
    return header["id"]


def _find_header(place: Path | str) -> tuple[Storage, bytes] | None:
    """Return the storage of the lake at `place`, or of the run there, and its lake.json; None if there is no lake."""
    storage = connect(place)
    for each in (storage,) if is_remote(place) else (storage, storage.below("lake")):
        try:
            return each, each.read(HEADER)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have such a name
            continue
        except StorageError as error:
            raise make_storage_error(error, f"read '{place}'") from error
        except OSError as error:
            raise InputMissing(f"lake '{each.url()}' cannot be read: {error.strerror or error}") from error
    return None


def describe_difference(
    ours: Spaces, theirs: Spaces, sides: tuple[str, str] = ("in the lake", "asked for")
) -> list[str]:
    """Describe the differences of two space signatures, one phrase each; `sides` names their origins."""
    a, b = dict(ours.observation), dict(theirs.observation)
    here, there = sides
    pairs = [(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])]
    phrases = [
        f"{name}: {_format_space(one)} {here}, {_format_space(other)} {there}"
        for name, one, other in (*pairs, ("action", ours.action, theirs.action))
        if one != other
    ]
    return phrases or ["the order of the observation's columns"]


def describe_added(before: Spaces, after: Spaces) -> str:
    """Write the options of `amago relabel` that make `after` of `before`, with values of 0; "" if there are none."""
    spaces, options = before, []
    for name, space in after.observation.items():
        if name not in before.observation and name.startswith(f"{OBSERVATION}.") and (kind := format_type(space)):
            spaces = spaces.with_column(name, space)
            options.append(f"--with column:{name}:{kind}=0")
    return " ".join(options) if options and spaces.to_json() == after.to_json() else ""


def _format_space(space: Any) -> str:
    if space is None:
        return "nothing"
    fields = space_to_json(space)
    kind = fields.pop("kind")
    return f"{kind}({', '.join(f'{k}={v}' for k, v in fields.items() if k not in ('low', 'high'))})"
