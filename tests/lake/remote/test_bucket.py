"""Stores that answer otherwise than S3: what was seen of other servers."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pipelines.errors import StorageError
from pipelines.lake.bucket import Bucket, Location


@pytest.fixture
def bucket() -> Bucket:
    pytest.importorskip("obstore")
    from obstore.store import MemoryStore

    memory = MemoryStore()
    for number in range(5):
        memory.put(f"l/segments/{number}.arrow", b"abcde"[:number])
    made = Bucket(Location(bucket="b"))
    made.__dict__["_hurried"] = made.__dict__["_patient"] = memory
    return made


def test_a_server_that_lists_from_the_beginning(bucket: Bucket) -> None:
    """Azurite ignores where a listing is to begin."""
    memory = bucket._patient

    class Whole:
        def list(self, prefix: str, **options: Any) -> Any:
            return memory.list(prefix, chunk_size=options["chunk_size"])

    bucket.__dict__["_hurried"] = bucket.__dict__["_patient"] = Whole()
    assert list(bucket.keys("l", after="segments/2.arrow")) == ["segments/3.arrow", "segments/4.arrow"]
    assert list(bucket.keys("l", after="segments/0.arrow", limit=2)) == ["segments/1.arrow", "segments/2.arrow"]


def test_a_server_that_returns_another_range_than_the_end(bucket: Bucket) -> None:
    """s3rver returns the beginning for a range from the end."""
    from obstore.exceptions import GenericError

    memory = bucket._patient

    class Wrong:
        head = memory.head

        def get(self, name: str, *, options: dict[str, Any] | None = None) -> Any:
            if options and isinstance(options["range"], dict):
                raise GenericError("Generic S3 error: Requested 2..4, got 0..1\n\nDebug source:\n")
            return memory.get(name, options=options)

    bucket.__dict__["_hurried"] = bucket.__dict__["_patient"] = Wrong()
    assert bucket.tail("l/segments/4.arrow", 2) == b"cd"
    assert bucket.tail("l/segments/4.arrow", 9) == b"abcd"
    assert bucket.tail("l/segments/0.arrow", 2) == b""


def test_the_first_request_of_a_command_does_not_wait_long_for_a_host_that_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr("pipelines.lake.bucket.HURRIED_SECONDS", 0.3)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog accepts, nobody reads
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StorageError, match=f"{endpoint} does not answer"):
            Bucket(Location.parse(f"s3://b/l?endpoint_override={endpoint}")).read("lake.json")
