"""Locations of object stores, where their credentials come from, and what their errors mean."""

import os
from pathlib import Path

import pytest

from pipelines import trust
from pipelines.errors import InputMissing, StorageError, UsageError
from pipelines.lake import bucket
from pipelines.lake.bucket import Location, reason


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)


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
    assert found.below("z").object("k") == "/".join(filter(None, (prefix, "z/k")))
    assert found.object("k") == (f"{prefix}/k" if prefix else "k")
    assert "?" not in found.format_place("k")


def test_what_a_location_does_not_say_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu")
    found = Location.parse("s3://b/x")
    assert (found.endpoint, found.region, str(found)) == ("http://h:9", "eu", "s3://b/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:9")
    assert Location.parse("s3://b/x").endpoint == "http://s3:9"
    assert Location.parse("s3://b/x?endpoint_override=http://mine").endpoint == "http://mine"
    assert Location.parse("s3://b/x").identity != found.identity


@pytest.mark.parametrize(
    ("variable", "place"), [("GOOGLE_BASE_URL", "gs://b/x"), ("AZURE_STORAGE_ENDPOINT", "az://b/x")]
)
def test_other_stores_have_endpoints_too(variable: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Location.parse(place)
    assert (before.scheme, before.bucket, before.prefix, before.endpoint) == (place[:2], "b", "x", None)
    monkeypatch.setenv(variable, "http://h:9")
    found = Location.parse(place)
    assert (found.endpoint, str(found)) == ("http://h:9", place)
    assert found.identity != before.identity


@pytest.mark.parametrize("address", ["ftp://h", "http://", "http://a b", "h:port", "http://h:99999", "http://[h"])
def test_an_endpoint_that_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(UsageError, match="is not the address of a host"):
        Location.parse("s3://b/x")


def test_only_the_user_names_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run or a lake of somebody else may name a lake: requests to it go to the hosts of the environment."""
    foreign = "s3://b/x?endpoint_override=http://theirs:9"
    with trust.only(["s3://b/y?endpoint_override=http%3A%2F%2Fmine%3A9"]):
        assert Location.parse("s3://b/x").endpoint is None
        assert Location.parse("s3://b/x?endpoint_override=http://mine:9").endpoint == "http://mine:9"
        with pytest.raises(InputMissing, match="names the host 'http://theirs:9'; a file says so, not you"):
            Location.parse(foreign)
        for part in ("http://mine", "mine:9", "http://mine:90", "http://min"):
            with pytest.raises(InputMissing, match="a file says so"):
                Location.parse(f"s3://b/x?endpoint_override={part}")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://theirs:9/")
        assert Location.parse(foreign).endpoint == "http://theirs:9"
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        trust.trust_everything()
        assert Location.parse(foreign).endpoint == "http://theirs:9"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of AWS's tools, with two profiles."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = A\naws_secret_access_key = B%%\n"
        "[other]\naws_access_key_id = C\naws_secret_access_key = D\naws_session_token = E\n"
    )
    (tmp_path / "config").write_text("[profile other]\nregion = eu-west-1\n[profile sso]\nsso_session = x\n")
    return tmp_path


def test_keys_come_from_the_environment_or_a_profile(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = Location.parse("s3://b")
    assert bucket.find_credentials(location) == {"access_key_id": "A", "secret_access_key": "B%%"}
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert bucket.find_credentials(location) == {
        "access_key_id": "C",
        "secret_access_key": "D",
        "session_token": "E",
        "region": "eu-west-1",
    }
    monkeypatch.setenv("AWS_PROFILE", "sso")
    with pytest.raises(UsageError, match=r"AWS_PROFILE is 'sso'.*export-credentials --profile sso"):
        bucket.find_credentials(location)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "F")  # the client reads it itself
    assert bucket.find_credentials(location) == {}


def test_without_any_credentials_no_request_is_sent(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "credentials").write_text("not a file\x00 of [AWS")
    with pytest.raises(StorageError, match="no credentials were found: give AWS_PROFILE, or AWS_ACCESS_KEY_ID"):
        bucket.find_credentials(Location.parse("s3://b"))


HEAD = "Generic S3 error: Error performing GET http://h:9/b/p in 1.5ms, after 2 retries, max_retries: 2 - "
STATUS = f"{HEAD}Server returned non-2xx status code: "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{HEAD}HTTP error: error sending request\n\nDebug source:\nGeneric {{ kind: Connect }}",
            "no connection to http://h:9",
        ),
        (f"{HEAD}HTTP error: operation timed out\n\nDebug source:\nkind: Timeout", "http://h:9 does not answer"),
        (f"{STATUS}404 Not Found: <Error><Code>NoSuchBucket</Code></Error>", "there is no bucket 'b'"),
        (f"{STATUS}503 Service Unavailable: ", "the store asks for fewer requests"),
        (
            f'{STATUS}418 Teapot: <?xml version="1.0"?><Error><Code>Teapot</Code><Message>I am\n a teapot.</Message>',
            "I am a teapot (Teapot)",
        ),
        (f"{STATUS}418 I'm a teapot: ", "418 I'm a teapot"),
        ("Something else  entirely.", "Something else entirely"),
        ("x" * 1000, "x" * 159 + "…"),
    ],
)
def test_an_error_is_one_short_line(text: str, expected: str) -> None:
    assert reason(text, Location.parse("s3://b/p?endpoint_override=http://h:9")) == expected


@pytest.mark.parametrize(
    ("scheme", "name"),
    [("s3", "AWS_PROFILE"), ("gs", "GOOGLE_APPLICATION_CREDENTIALS"), ("az", "AZURE_STORAGE_ACCOUNT_KEY")],
)
def test_refused_credentials_say_where_credentials_come_from(scheme: str, name: str) -> None:
    for status in (401, 403):
        assert name in reason(f"{STATUS}{status} Forbidden: ", Location(scheme=scheme, bucket="b"))
