"""S3 locations, connections, conditional writes, and readable reasons for errors.

A location is "s3://bucket/prefix", optionally with "?endpoint_override=http://host:port&region=...&scheme=http". Its
defaults come from the usual environment variables: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
AWS_DEFAULT_REGION. A location never contains credentials: they come from the environment, a profile or the machine.
Conditional writes need boto3, of the extra `s3`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

import pyarrow as pa
from pyarrow import fs

from pipelines.errors import StorageError, UsageError

CONNECT_SECONDS, REQUEST_SECONDS = 10, 60
# Waits between attempts double from 50 ms on: 1.5 s in all before the store has ever answered, then 25 s.
HURRIED, PATIENT = 6, 10
INSTALL = 'pip install "amago[s3]"'
_TAKEN, _CONFLICT, _UNSUPPORTED = 412, 409, 501
_ATTEMPTS = 5
_OPTIONS = ("endpoint_override", "region", "scheme")
_LONGEST_REASON = 160
_CREDENTIALS = "leave credentials to AWS_PROFILE, or to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_DENIED = (
    "access was denied: check the credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) "
    "and what they permit"
)
_OVERLOADED = "the store asks for fewer requests"
_REASONS = {
    "NETWORK_CONNECTION": "no connection to {endpoint}",
    "REQUEST_TIMEOUT": "{endpoint} does not answer",
    "NO_SUCH_BUCKET": "there is no bucket '{bucket}'",
    "HTTP_301": "bucket '{bucket}' is in another region: add ?region= to the location, or set AWS_REGION",
    "VALIDATION": "'{endpoint}' is not the address of a host",
    **dict.fromkeys(("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "HTTP_403"), _DENIED),
    **dict.fromkeys(("EXPIRED_TOKEN", "INVALID_CLIENT_TOKEN_ID", "UNRECOGNIZED_CLIENT"), _DENIED),
    **dict.fromkeys(("SLOW_DOWN", "THROTTLING", "SERVICE_UNAVAILABLE"), _OVERLOADED),
}
_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during \w+ operation(?:: (.*))?", re.DOTALL)
_NOISE = re.compile(r"\s*\((?:Request|Host) ID:[^)]*\)")


@dataclass(frozen=True, kw_only=True)
class Location:
    """A bucket and a prefix ("" or "a/b"); `options` as given, for the text of the location."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Location:
        """Parse a location. UsageError if `text` is not one."""
        body, _, query = text.partition("?")
        place = body.removeprefix("s3://")
        bucket, _, prefix = place.partition("/")
        prefix = prefix.strip("/")
        if place == body or not re.fullmatch(r"[\w.\-]+", bucket) or "" in prefix.split("/")[1:] or "#" in prefix:
            hint = _CREDENTIALS if "@" in place else None
            raise UsageError(f"'{unquote(text)}' is not a location: s3://bucket/prefix", hint=hint)
        options = dict(parse_qsl(query, keep_blank_values=True))
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise UsageError(
                f"location '{unquote(text)}': unknown option {', '.join(unknown)}",
                hint=f"there are {', '.join(_OPTIONS)}",
            )
        endpoint = options.get("endpoint_override") or _environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        if endpoint and "@" in endpoint:
            raise UsageError(f"the endpoint of '{unquote(text)}' contains credentials", hint=_CREDENTIALS)
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        region = options.get("region") or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
        return cls(
            bucket=bucket,
            prefix=prefix,
            endpoint=endpoint.rstrip("/") if endpoint else None,
            region=region or ("us-east-1" if endpoint else None),
            options=tuple(options.items()),
        )

    def __str__(self) -> str:
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in self.options)
        return self.shown() + (f"?{query}" if query else "")

    def shown(self, key: str = "") -> str:
        """Return the location of a file without options."""
        return "s3://" + "/".join(filter(None, (self.bucket, self.prefix, key)))

    def path(self, key: str = "") -> str:
        """Return the path of a file or folder for the file system."""
        return "/".join(filter(None, (self.bucket, self.prefix, key)))

    def object(self, key: str) -> str:
        """Return the name of a file within its bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def below(self, folder: str) -> Location:
        return replace(self, prefix=self.object(folder))

    @property
    def identity(self) -> str:
        """A text that is equal for locations of the same place."""
        return f"{self.endpoint or ''} {self.shown()}"


def _environment(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


class BucketConnection:
    """A connection to a bucket. The first request fails fast, so a mistake is reported at once; later ones wait for a
    store that is briefly unavailable.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._reached = False

    @contextlib.contextmanager
    def asking(self) -> Iterator[fs.S3FileSystem]:
        """Yield the file system; errors of the store become StorageError, FileNotFoundError stays."""
        try:
            yield self._patient if self._reached else self._hurried
            self._reached = True
        except OSError as error:
            if error.errno is not None:  # a missing file, or an error of the local disk
                raise
            raise StorageError(refusal(str(error), self.location)) from error
        except pa.ArrowInvalid as error:
            raise StorageError(refusal(str(error), self.location)) from error

    @functools.cached_property
    def _hurried(self) -> fs.S3FileSystem:
        return self._filesystem(HURRIED)

    @functools.cached_property
    def _patient(self) -> fs.S3FileSystem:
        return self._filesystem(PATIENT)

    def _filesystem(self, attempts: int) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            endpoint_override=self.location.endpoint,
            region=self.region,
            connect_timeout=CONNECT_SECONDS,
            request_timeout=REQUEST_SECONDS,
            retry_strategy=fs.AwsDefaultS3RetryStrategy(max_attempts=attempts),
            allow_delayed_open=True,  # a small object in one request
        )

    @functools.cached_property
    def region(self) -> str:
        """The bucket's region, requested if it is not configured."""
        return self.location.region or fs.resolve_s3_region(self.location.bucket)


@functools.lru_cache(maxsize=32)
def connection(bucket: Location) -> BucketConnection:
    """Return the one connection of this process to a bucket; `bucket` has no prefix and no options."""
    return BucketConnection(bucket)


def connect(location: Location) -> BucketConnection:
    return connection(replace(location, prefix="", options=()))


def refusal(text: str, location: Location) -> str:
    """Describe an error of the store's client in one short line."""
    found = _AWS.search(text)
    if found is None:
        return reason("", text, location)
    return reason(f"HTTP_{found[2]}" if found[2] else found[1], found[3] or "", location)


def reason(code: str, text: str, location: Location) -> str:
    """Describe an error of known code (ACCESS_DENIED) and text, as `refusal` does."""
    if code in _REASONS:
        return _REASONS[code].format(endpoint=location.endpoint or "the store", bucket=location.bucket)
    words = " ".join(_NOISE.sub("", text).split())
    short = words if len(words) <= _LONGEST_REASON else words[: _LONGEST_REASON - 1] + "…"
    return f"{short.rstrip('.') or 'the store refused'}{f' ({code})' if code else ''}"


class AlreadyWritten(Exception):
    """Another process has written the object."""


class ConditionalWritesUnsupported(Exception):
    """The store does not support conditional writes."""


class TaggedObject(NamedTuple):
    """An object's content, the tag of this version, and its age in seconds by the store's clock."""

    content: bytes
    tag: str
    age: float


def is_available() -> bool:
    """Return whether boto3 is installed."""
    return importlib.util.find_spec("boto3") is not None


class ConditionalWrites:
    """Conditional reads and writes in a bucket. Errors of the store are raised as StorageError."""

    def __init__(self, connection: BucketConnection) -> None:
        self._connection = connection

    def put_new(self, name: str, content: bytes) -> str:
        """Write an object that does not exist yet; returns its tag. AlreadyWritten if it exists. No two calls have the
        same content.
        """
        try:
            return self._put(name, content, {"IfNoneMatch": "*"})
        except AlreadyWritten:
            found = self.get(name)
            if found is None or found.content != content:
                raise
            return found.tag  # written by an attempt whose response was lost

    def put_over(self, name: str, content: bytes, tag: str) -> str:
        """Replace the version `tag` of an object; returns the new tag. AlreadyWritten if the version is another."""
        return self._put(name, content, {"IfMatch": tag})

    def get(self, name: str) -> TaggedObject | None:
        """Return the object; None if there is none."""
        from botocore.exceptions import ClientError

        try:
            found = self._call("get_object", Key=name)
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise self._error(error) from error
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return TaggedObject(found["Body"].read(), found["ETag"], (now - found["LastModified"]).total_seconds())

    def _put(self, name: str, content: bytes, condition: Mapping[str, str]) -> str:
        from botocore.exceptions import ClientError

        for last in (*(False,) * (_ATTEMPTS - 1), True):
            try:
                return str(self._call("put_object", Key=name, Body=content, **condition)["ETag"])
            except ClientError as error:
                if _status(error) in (_TAKEN, 404):  # 404: the version to replace is gone
                    if _code(error) == "NO_SUCH_BUCKET":
                        raise self._error(error) from error
                    raise AlreadyWritten from error
                if _status(error) == _UNSUPPORTED:
                    raise ConditionalWritesUnsupported from error
                if _status(error) != _CONFLICT or last:  # another process is writing it: try again
                    raise self._error(error) from error
        raise AssertionError

    def _call(self, method: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, NoCredentialsError

        try:
            return getattr(self._client, method)(Bucket=self._connection.location.bucket, **arguments)
        except NoCredentialsError as error:
            raise StorageError(reason("ACCESS_DENIED", "", self._connection.location)) from error
        except BotoCoreError as error:
            raise StorageError(reason("NETWORK_CONNECTION", "", self._connection.location)) from error

    def _error(self, error: Any) -> StorageError:
        text = error.response.get("Error", {}).get("Message", "")
        return StorageError(reason(_code(error), text, self._connection.location))

    @functools.cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        endpoint = self._connection.location.endpoint
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=REQUEST_SECONDS,
            retries={"mode": "standard", "max_attempts": 4},
            s3={"addressing_style": "path"} if endpoint else {},
        )
        return boto3.client("s3", endpoint_url=endpoint, region_name=self._connection.region, config=config)


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: Any) -> str:
    """Convert NoSuchBucket to NO_SUCH_BUCKET."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return "ACCESS_DENIED" if code == "403" else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", code).upper()
