"""Locations of object stores, and what their refusals mean."""

import pytest

from pipelines.lake.remote.s3 import Location, reason, refusal


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "bucket", "prefix", "endpoint", "region"),
    [
        ("s3://b", "b", "", None, None),
        ("s3://b/", "b", "", None, None),
        ("s3://b/x/y/", "b", "x/y", None, None),
        ("s3://b/x?region=eu-west-1", "b", "x", None, "eu-west-1"),
        ("s3://b/x?endpoint_override=http://h:9", "b", "x", "http://h:9", "us-east-1"),
        ("s3://b/x?endpoint_override=http%3A%2F%2Fh%3A9", "b", "x", "http://h:9", "us-east-1"),
        ("s3://b/x?endpoint_override=h:9", "b", "x", "https://h:9", "us-east-1"),
        ("s3://b/x?endpoint_override=h:9&scheme=http&region=r", "b", "x", "http://h:9", "r"),
    ],
)
def test_a_location_names_its_parts(
    text: str, bucket: str, prefix: str, endpoint: str | None, region: str | None
) -> None:
    found = Location.parse(text)
    assert (found.bucket, found.prefix, found.endpoint, found.region) == (bucket, prefix, endpoint, region)
    assert Location.parse(str(found)) == found
    assert found.below("z").path("k") == "/".join(filter(None, (bucket, prefix, "z/k")))
    assert found.object("k") == (f"{prefix}/k" if prefix else "k")
    assert "?" not in found.shown("k")


def test_what_a_location_does_not_say_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu")
    found = Location.parse("s3://b/x")
    assert (found.endpoint, found.region, str(found)) == ("http://h:9", "eu", "s3://b/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:9")
    assert Location.parse("s3://b/x").endpoint == "http://s3:9"
    assert Location.parse("s3://b/x?endpoint_override=http://mine").endpoint == "http://mine"
    assert Location.parse("s3://b/x").identity != found.identity


_REFUSED = ["ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "EXPIRED_TOKEN", "UNKNOWN (HTTP status 403)"]
HEAD = "When getting information for key 'p/x' in bucket 'b': AWS Error"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{HEAD} NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Could not connect; Details: Fail",
            "no connection to http://h:9",
        ),
        (
            "When initiating multiple part upload for key 'p' in bucket 'b': AWS Error NO_SUCH_BUCKET during "
            "CreateMultipartUpload operation: The specified bucket does not exist (Request ID: UqpUUiBxL)",
            "there is no bucket 'b'",
        ),
        (
            f"{HEAD} UNKNOWN (HTTP status 418) during HeadObject operation: I am a teapot\n (Request ID: 1)\n",
            "I am a teapot (HTTP_418)",
        ),
        ("Something else  entirely.", "Something else entirely"),
        ("x" * 1000, "x" * 159 + "…"),
    ],
)
def test_a_refusal_is_one_short_line(text: str, expected: str) -> None:
    assert refusal(text, Location.parse("s3://b/p?endpoint_override=http://h:9")) == expected


@pytest.mark.parametrize(
    "code", ["ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "EXPIRED_TOKEN"]
)
def test_refused_credentials_say_where_credentials_come_from(code: str) -> None:
    assert "AWS_PROFILE" in refusal(
        f"{HEAD} {code} during HeadObject operation: No response body.", Location(bucket="b")
    )
    assert "AWS_PROFILE" in reason(code, "", Location(bucket="b"))
