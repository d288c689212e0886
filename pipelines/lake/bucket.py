"""Buckets of object stores: their locations, and requests to them with bounded time and retries, whose errors are one
short line.

A location is "s3://bucket/prefix", "gs://bucket/prefix" or "az://container/prefix". Of S3, it may end with
"?endpoint_override=http://host:port&region=...&scheme=http"; the defaults are the usual environment variables
AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION. A location never contains credentials: they come
from the environment, a profile or the machine.

The first request fails fast, so that a mistake is reported at once; later ones wait for a store that is briefly
unavailable. Needs obstore, of the extra `stores`.
"""

from __future__ import annotations

import configparser
import contextlib
import datetime
import errno
import functools
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pipelines import trust
from pipelines.config.places import STORES
from pipelines.errors import InputMissing, StorageError, UsageError
from pipelines.files.malformed import RECORD_BYTES

_OPTIONS = {"s3": ("endpoint_override", "region", "scheme")}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CREDENTIALS = {
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_LOCATION = re.compile(rf"(?P<scheme>{'|'.join(STORES)})://(?P<bucket>[\w.\-]+)(?:/(?P<prefix>.*))?", re.DOTALL)
_BAD_PART = re.compile(r"\.{0,2}|.*[\x00-\x1f\x7f#].*", re.DOTALL)  # empty, ".", "..", or with such characters


@dataclass(frozen=True, kw_only=True)
class Location:
    """A bucket and a prefix ("" or "a/b"); `options` as given, for the text of the location."""

    scheme: str = "s3"
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Location:
        """Parse a location. UsageError if `text` is not one; InputMissing if it names a host that the user did not."""
        body, _, query = text.partition("?")
        shown = unquote(text)
        found = _LOCATION.fullmatch(body)
        prefix = (found["prefix"] or "").strip("/") if found else ""
        if found is None or any(_BAD_PART.fullmatch(part) for part in prefix.split("/") if prefix):
            hint = f"leave credentials to {_CREDENTIALS['s3']}" if "@" in body else None
            raise UsageError(f"'{shown}' is not a location: s3://bucket/prefix, gs://... or az://...", hint=hint)
        scheme = found["scheme"]
        options = dict(parse_qsl(query, keep_blank_values=True))
        known = _OPTIONS.get(scheme, ())
        unknown = sorted(options.keys() - set(known))
        if unknown:
            hint = f"there are {', '.join(known)}" if known else f"{scheme}:// has no options"
            raise UsageError(f"location '{shown}': unknown option {', '.join(unknown)}", hint=hint)
        named = options.get("endpoint_override")
        endpoint = named or _environment(*_ENDPOINTS[scheme])
        if endpoint and "@" in endpoint:
            raise UsageError(
                f"the endpoint of '{shown}' contains credentials", hint=f"leave credentials to {_CREDENTIALS[scheme]}"
            )
        if endpoint:
            endpoint = _address(endpoint, options.get("scheme", "https"))
        if named and endpoint != _address(_environment(*_ENDPOINTS[scheme]) or "", "https"):
            trust.require_address(shown, named)
        region = None
        if scheme == "s3":
            region = options.get("region") or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
            region = region or ("us-east-1" if endpoint else None)
        return cls(
            scheme=scheme,
            bucket=found["bucket"],
            prefix=prefix,
            endpoint=endpoint,
            region=region,
            options=tuple(options.items()),
        )

    def __str__(self) -> str:
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in self.options)
        return self.format_place() + (f"?{query}" if query else "")

    def format_place(self, key: str = "") -> str:
        """Format the location of a file, without options."""
        return f"{self.scheme}://" + "/".join(filter(None, (self.bucket, self.prefix, key)))

    def object(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def below(self, folder: str) -> Location:
        return replace(self, prefix=self.object(folder))

    @property
    def identity(self) -> str:
        """A text that is equal for locations of the same place."""
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "") if self.scheme == "az" else ""
        return f"{self.endpoint or account} {self.format_place()}"

    @property
    def credentials(self) -> str:
        """The names of the variables that give credentials."""
        return _CREDENTIALS[self.scheme]


def _address(text: str, scheme: str) -> str:
    """Return an endpoint with its scheme. UsageError if it is not the address of a host."""
    if not text:
        return ""
    address = text.rstrip("/") if "://" in text else f"{scheme}://{text}".rstrip("/")
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or re.search(r"[^\x21-\x7e]|[\"<>\\^`{|}]", address):
        raise UsageError(f"'{text}' is not the address of a host", hint="give http://HOST:PORT or https://HOST")
    return address


def _environment(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


_CONNECT_SECONDS = 5
HURRIED_SECONDS, PATIENT_SECONDS = 10, 60  # of a request until it is answered whole
_HURRIED, PATIENT = 5, 11  # retries, after 50 ms at first and 5 s at most: about 1 s, and 25 s, in all
_CHUNK = 16 << 20  # bytes in one request
_PAGE = 1000  # keys in one request
_UPLOADS = 4  # parts of a file at once
_PAUSES = (0.05, 0.15, 0.5, 1.5, 5.0, 5.0)  # seconds before a request without an answer is repeated
_CONFLICTS = 5  # attempts of a write that others make at the same moment
_CLOCK_SECONDS = 600.0  # after which the store's clock is compared with ours again
_LONGEST_REASON = 160

T = TypeVar("T")
Version = Mapping[str, str]
"""What identifies the version of an object: its entity tag, its generation, or both."""

_FIELD = r"(?:<{0}>|\"{1}\"\s*:\s*\")([^<\"]*)"
_CODE, _MESSAGE = re.compile(_FIELD.format("Code", "code")), re.compile(_FIELD.format("Message", "message"))
_ATTEMPTS = re.compile(r"Generic \w+ error: |Error performing .*? - |HTTP error: |Server returned .*? code: ")
_NO_RANGE = re.compile(r"status code: 416|non-partial response|Requested \d+\.\.\d+, got|CONTENT_RANGE")
_NO_ANSWER = re.compile(r"kind: (?:Timeout|Connect|Interrupted|Request|Decode|Body)|error sending request|code: 5\d\d")
_REASONS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist", "there is no bucket '{bucket}'"),
        (
            r"169\.254\.\d+\.\d+|metadata\.google\.internal|latest/(?:api/token|meta-data)|Account must be specified",
            "no credentials were found: give {credentials}",
        ),
        (
            r"status code: 301|PermanentRedirect|AuthorizationHeaderMalformed|without LOCATION",
            "bucket '{bucket}' is in another region: add ?region= to the location, or set AWS_REGION",
        ),
        (
            r"status code: 40[13]|ExpiredToken|InvalidClientTokenId",
            "access was denied: check the credentials ({credentials}) and what they permit",
        ),
        (r"status code: (?:429|503)|SlowDown|Throttl", "the store asks for fewer requests"),
        (r"kind: Timeout|timed out", "{endpoint} does not answer"),
        (r"kind: (?:Connect|Interrupted|Request|Decode|Body)|error sending request", "no connection to {endpoint}"),
    )
)


class AlreadyWritten(Exception):
    """Another process has written the object."""


class _RangeRefused(StorageError):
    """The store did not return part of an object: it is empty, or the store cannot."""


class _TaggedObject(NamedTuple):
    """An object's content, its version, and when it was written, by the store's clock (seconds since 1970)."""

    content: bytes
    version: Version
    written: float


class Status(NamedTuple):
    """The size of an object in bytes, and when it was written, by the store's clock (seconds since 1970)."""

    size: int
    written: float


class Bucket:
    """A connection to a bucket; a `name` is a full one in it. FileNotFoundError for an object that does not exist;
    other errors of the store are raised as StorageError.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._reached = False
        self._clock: tuple[float, float] | None = None  # our clock, and the store's then, or somewhat earlier
        self.is_conditional: bool | None = None
        """Whether the store has honoured the condition of a write; None if it is unknown."""

    def read(self, name: str) -> bytes:
        return self.get(name).content

    def get(self, name: str, *, limit: int = RECORD_BYTES) -> _TaggedObject:
        """Read an object. StorageError if it has more than `limit` bytes."""
        with self._ask_store(name) as store:
            found = store.get(name)
            if found.meta["size"] > limit:
                raise StorageError(f"'{name}' has {found.meta['size']} bytes; at most {limit} are read")
            return _TaggedObject(
                bytes(found.bytes()), self._name_version(found.meta), found.meta["last_modified"].timestamp()
            )

    def tail(self, name: str, count: int) -> bytes:
        """Read the last `count` bytes of an object, or all of it."""
        if self.location.scheme != "az":  # has no ranges from the end
            with contextlib.suppress(_RangeRefused), self._ask_store(name) as store:
                return bytes(store.get(name, options={"range": {"suffix": count}}).bytes())
        size = self.status(name).size
        return self._range(name, max(0, size - count), size)[0] if size else b""

    def download(self, name: str, path: Path) -> int:
        """Write an object into a file; returns its size."""
        try:
            chunk, size, tag = self._range(name, 0, _CHUNK)
        except _RangeRefused:
            if self.status(name).size:
                raise
            chunk, size, tag = b"", 0, None  # stores refuse any range of nothing
        with open(path, "wb") as file:
            done = file.write(chunk)
            while done < size:
                chunk, *_ = self._range(name, done, min(done + _CHUNK, size), tag)
                if not chunk:
                    raise StorageError(f"'{name}' ended after {done} of {size} bytes")
                done += file.write(chunk)
        return size

    def status(self, name: str) -> Status:
        with self._ask_store(name) as store:
            found = store.head(name)
            return Status(found["size"], found["last_modified"].timestamp())

    def exists(self, name: str) -> bool:
        try:
            self.status(name)
        except FileNotFoundError:
            return False
        return True

    def folder(self, folder: str) -> tuple[list[str], dict[str, int]]:
        """Return the names of the folders in a folder, and those of the objects with their sizes."""
        with self._list_store(folder) as store:
            found = store.list_with_delimiter(folder or None)
        inside = f"{folder}/" if folder else ""
        folders = [path.removeprefix(inside) for path in found["common_prefixes"]]
        return folders, dict(self._select_below(inside, found["objects"]))

    def keys(self, folder: str, *, after: str, limit: int | None = None) -> dict[str, int]:
        """Return the names of all objects below a folder, in order, with their sizes: those that sort after the name
        `after`, `limit` at most. Each thousand is a request.
        """
        found: dict[str, int] = {}
        inside = f"{folder}/" if folder else ""
        with self._list_store(folder) as store:
            for page in store.list(folder or None, offset=f"{inside}{after}", chunk_size=_PAGE):
                listed = self._select_below(inside, page)
                found.update((name, size) for name, size in listed if name > after)  # some stores list all
                if limit is not None and len(found) >= limit:
                    break
        return dict(islice(found.items(), limit))

    def put(self, name: str, content: bytes | Path) -> None:
        """Write an object, whole or not at all, of bytes or of a local file."""
        with self._ask_store(name, writing=True) as store:
            store.put(name, content, chunk_size=_CHUNK, max_concurrency=_UPLOADS)

    def put_new(self, name: str, content: bytes) -> Version:
        """Write an object that does not exist yet; returns its version. AlreadyWritten if it exists. No two calls have
        the same content.
        """
        for _ in range(_CONFLICTS):
            try:
                return self._put(name, content, "create")
            except AlreadyWritten:
                found = self.find(name)
                if found is not None and found.content == content:
                    return found.version  # written by an attempt whose response was lost
                if found is not None:
                    break  # else another write was in progress
        raise AlreadyWritten

    def put_over(self, name: str, content: bytes, version: Version) -> Version:
        """Replace a version of an object; returns the new one. AlreadyWritten if the version is another. No two calls
        have the same content.
        """
        try:
            return self._put(name, content, dict(version))
        except AlreadyWritten:
            found = self.find(name)
            if found is None or found.content != content:
                raise
            return found.version

    def find(self, name: str) -> _TaggedObject | None:
        """Read an object; None if there is none."""
        try:
            return self.get(name)
        except FileNotFoundError:
            return None

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, in one request where the store can. Those that do not exist are ignored."""
        bulk = [list(names)] if self.location.scheme == "s3" and len(names) > 1 else names

        def delete(some: str | Sequence[str]) -> None:
            with contextlib.suppress(FileNotFoundError), self._ask_store(names[0]) as store:
                store.delete(some)

        for some in bulk:
            self._repeat(functools.partial(delete, some))

    def now(self, name: str) -> float:
        """Return the time of the store's clock, never a later one. It is read by writing the object `name`, and for
        some minutes our clock continues it.
        """
        if self._clock is None or time.monotonic() - self._clock[0] > _CLOCK_SECONDS:
            self.put(name, b"")
            written = self.status(name).written
            self._clock = time.monotonic(), written
        ours, theirs = self._clock
        return theirs + time.monotonic() - ours

    def _put(self, name: str, content: bytes, mode: str | dict[str, str]) -> Version:
        """Write an object on a condition; the callers recognise their own content."""

        def put() -> Version:
            with self._ask_store(name, writing=True) as store:
                return self._name_version(store.put(name, content, mode=mode))

        return self._repeat(put)

    def _repeat(self, act: Callable[[], T]) -> T:
        """Call `act`, again if its answer is lost: the client does not repeat what may have succeeded."""
        for pause in _PAUSES:
            try:
                return act()
            except StorageError as error:
                if not self._reached or not _NO_ANSWER.search(str(error.__cause__)):
                    raise
                time.sleep(pause)
        return act()

    def _range(self, name: str, start: int, end: int, tag: str | None = None) -> tuple[bytes, int, str | None]:
        """Return bytes of an object, its size and its entity tag. StorageError if the tag is not `tag` any more."""
        options: dict[str, Any] = {"range": (start, end)} | ({"if_match": tag} if tag else {})
        try:
            with self._ask_store(name) as store:
                found = store.get(name, options=options)
                return bytes(found.bytes()), found.meta["size"], found.meta["e_tag"]
        except AlreadyWritten as error:
            raise StorageError(f"'{name}' was replaced while it was read") from error

    @contextlib.contextmanager
    def _list_store(self, folder: str) -> Iterator[Any]:
        try:
            with self._ask_store(folder) as store:
                yield store
        except FileNotFoundError as error:
            raise StorageError(f"there is no bucket '{self.location.bucket}'") from error

    @contextlib.contextmanager
    def _ask_store(self, name: str, *, writing: bool = False) -> Iterator[Any]:
        """Yield the store. Errors become FileNotFoundError, AlreadyWritten and StorageError."""
        try:
            from obstore import exceptions
        except ModuleNotFoundError as error:
            raise InputMissing(
                "lakes in object stores need obstore, which is not installed", hint='pip install "amago[stores]"'
            ) from error
        try:
            yield self._patient if self._reached else self._hurried
        except (FileNotFoundError, ValueError) as error:  # ValueError: no object can have such a name
            self._reached = self._reached or isinstance(error, FileNotFoundError)
            if writing:
                raise StorageError(reason(str(error), self.location)) from error
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise AlreadyWritten from error
        except exceptions.BaseError as error:
            kind = _RangeRefused if _NO_RANGE.search(str(error)) else StorageError
            raise kind(reason(str(error), self.location)) from error
        self._reached = True

    @functools.cached_property
    def _hurried(self) -> Any:
        return _open_client(self.location, _HURRIED, HURRIED_SECONDS)

    @functools.cached_property
    def _patient(self) -> Any:
        return _open_client(self.location, PATIENT, PATIENT_SECONDS)

    @staticmethod
    def _name_version(found: Mapping[str, Any]) -> Version:
        return {name: found[name] for name in ("e_tag", "version") if found[name] is not None}

    @staticmethod
    def _select_below(inside: str, objects: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
        """Yield name and size of the objects in a folder, except the folder's own."""
        for found in objects:
            if found["path"].startswith(inside):
                yield found["path"][len(inside) :], found["size"]


def connect(location: Location) -> Bucket:
    """Connect to the bucket of a location; a process has one connection to each."""
    return _open_bucket(replace(location, prefix="", options=()))


_open_bucket = functools.lru_cache(maxsize=32)(Bucket)


def reason(text: str, location: Location) -> str:
    """Describe an error of the store's client in one short line."""
    for pattern, known in _REASONS:
        if pattern.search(text):
            return known.format(
                bucket=location.bucket, endpoint=location.endpoint or "the store", credentials=location.credentials
            )
    code, message = _CODE.search(text), _MESSAGE.search(text)
    line = message[1] if message else _ATTEMPTS.sub("", text.partition("\n\nDebug source:")[0].partition("<?xml")[0])
    words = " ".join(line.split()).rstrip(".: ") or "the store refused"
    short = words if len(words) <= _LONGEST_REASON else words[: _LONGEST_REASON - 1] + "…"
    return f"{short} ({code[1]})" if code and message else short


def _open_client(location: Location, retries: int, seconds: float) -> Any:
    """Open a client that waits so many seconds for an answer, and twice as long in all where it repeats a request."""
    from obstore import store as module

    stores: Any = module
    options = {
        "client_options": {
            "allow_http": (location.endpoint or "").startswith("http://"),
            "connect_timeout": datetime.timedelta(seconds=_CONNECT_SECONDS),
            "timeout": datetime.timedelta(seconds=seconds),
        },
        "retry_config": {
            "max_retries": retries,
            "backoff": {
                "init_backoff": datetime.timedelta(milliseconds=50),
                "max_backoff": datetime.timedelta(seconds=5),
                "base": 3,
            },
            "retry_timeout": datetime.timedelta(seconds=2 * seconds),
        },
    }
    endpoint = {"endpoint": location.endpoint} if location.endpoint else {}
    if location.scheme == "gs":
        base = {"base_url": location.endpoint} if location.endpoint else {}
        return stores.GCSStore(location.bucket, config=base, **options)
    if location.scheme == "az":
        return stores.AzureStore(location.bucket, config=endpoint, **options)
    config = find_credentials(location)
    if location.region:
        config["region"] = location.region
    if location.endpoint:
        config["aws_endpoint_url_s3"] = location.endpoint  # which takes precedence over any variable
    return stores.S3Store(location.bucket, config=config, **options)


_ELSEWHERE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_FIELDS = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region",
}
_METADATA = "http://169.254.169.254"
_METADATA_SECONDS = 1.0


def find_credentials(location: Location) -> dict[str, str]:
    """Return the keys and the region of the chosen profile; none where the environment has others.

    AWS_PROFILE (else `default`) names a section of AWS_SHARED_CREDENTIALS_FILE (else ~/.aws/credentials) and of
    AWS_CONFIG_FILE (else ~/.aws/config). Web identities, containers and instances are left to the store's client.
    UsageError if AWS_PROFILE names a profile without keys; StorageError if neither the environment, the files nor the
    machine have any.
    """
    name = os.environ.get("AWS_PROFILE")
    if any(os.environ.get(variable) for variable in _ELSEWHERE):
        return {}
    sections: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", f"profile {name}" if name else "default"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name or "default"),
    ):
        parser = configparser.RawConfigParser(strict=False)
        with contextlib.suppress(configparser.Error, UnicodeDecodeError, OSError):
            parser.read(os.environ.get(variable) or Path.home() / ".aws" / file, encoding="utf-8")
            sections |= dict(parser[section]) if parser.has_section(section) else {}
    keys = {key: sections[field] for key, field in _FIELDS.items() if sections.get(field)}
    if {"access_key_id", "secret_access_key"} <= keys.keys():
        return keys
    if name is not None:
        raise UsageError(
            f"AWS_PROFILE is '{name}', which has no access keys in the files of AWS",
            hint=f'if it signs in otherwise: eval "$(aws configure export-credentials --profile {name} --format env)"',
        )
    # A machine of AWS has a service that gives credentials to its programs.
    address = urlsplit(os.environ.get("AWS_METADATA_ENDPOINT") or _METADATA)
    try:
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise ValueError
        socket.create_connection((address.hostname or "", address.port or 80), timeout=_METADATA_SECONDS).close()
    except (OSError, ValueError) as error:
        raise StorageError(f"no credentials were found: give {location.credentials}") from error
    return {key: value for key, value in keys.items() if key == "region"}
