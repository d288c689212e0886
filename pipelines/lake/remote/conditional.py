"""Writing to an object store only if nobody else did: through boto3, of the extra `s3`."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from pipelines.errors import StorageError
from pipelines.lake.remote.s3 import CONNECT_SECONDS, REQUEST_SECONDS, Connection, reason

INSTALL = 'pip install "amago[s3]"'
_TAKEN, _CONFLICT, _UNSUPPORTED = 412, 409, 501
_ATTEMPTS = 5


class Taken(Exception):
    """Somebody else wrote the object first."""


class Unsupported(Exception):
    """The store knows no conditional writes."""


class Tagged(NamedTuple):
    """An object's content, the tag of this version of it, and its age in seconds by the store's clock."""

    content: bytes
    tag: str
    age: float


def is_available() -> bool:
    """Whether boto3 is installed."""
    return importlib.util.find_spec("boto3") is not None


class Conditional:
    """Conditional reads and writes in a bucket. StorageError for what the store refuses."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put_new(self, name: str, content: bytes) -> str:
        """Write an object that is not there yet; its tag. Taken if it is there. No two calls have the same content."""
        try:
            return self._put(name, content, {"IfNoneMatch": "*"})
        except Taken:
            found = self.get(name)
            if found is None or found.content != content:
                raise
            return found.tag  # an attempt whose answer was lost had written it

    def put_over(self, name: str, content: bytes, tag: str) -> str:
        """Replace the version `tag` of an object; the new one's tag. Taken if it is no longer that."""
        return self._put(name, content, {"IfMatch": tag})

    def get(self, name: str) -> Tagged | None:
        """The object; None if there is none."""
        from botocore.exceptions import ClientError

        try:
            found = self._call("get_object", Key=name)
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise self._told(error) from error
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Tagged(found["Body"].read(), found["ETag"], (now - found["LastModified"]).total_seconds())

    def _put(self, name: str, content: bytes, condition: Mapping[str, str]) -> str:
        from botocore.exceptions import ClientError

        for last in (*(False,) * (_ATTEMPTS - 1), True):
            try:
                return str(self._call("put_object", Key=name, Body=content, **condition)["ETag"])
            except ClientError as error:
                if _status(error) in (_TAKEN, 404):  # 404: the version that was to be replaced is gone
                    if _code(error) == "NO_SUCH_BUCKET":
                        raise self._told(error) from error
                    raise Taken from error
                if _status(error) == _UNSUPPORTED:
                    raise Unsupported from error
                if _status(error) != _CONFLICT or last:  # somebody writes it at this moment: see how that ended
                    raise self._told(error) from error
        raise AssertionError

    def _call(self, method: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, NoCredentialsError

        try:
            return getattr(self._client, method)(Bucket=self._connection.location.bucket, **arguments)
        except NoCredentialsError as error:
            raise StorageError(reason("ACCESS_DENIED", "", self._connection.location)) from error
        except BotoCoreError as error:
            raise StorageError(reason("NETWORK_CONNECTION", "", self._connection.location)) from error

    def _told(self, error: Any) -> StorageError:
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
    """NoSuchBucket as NO_SUCH_BUCKET."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return "ACCESS_DENIED" if code == "403" else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", code).upper()
