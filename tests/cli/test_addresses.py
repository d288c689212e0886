"""Addresses on the command line: credentials are never shown again, schemes that are not supported are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Amago, tiny
from tests.tiers import crossed

KEY, SECRET = "AKIAKEYKEY", "Ver/y+Secret"
SECRETS = (
    f"s3://{KEY}:{SECRET}@bucket/lake",
    f"s3://{KEY}:Secret@bucket/lake",
    f"s3://bucket/lake?endpoint_override=http://{KEY}:{SECRET}@h:9000",
    f"s3://bucket/lake?endpoint_override={KEY}:{SECRET}@h:9000",
    f"s3://bucket/lake?region=eu&endpoint_override=http%3A%2F%2F{KEY}%3AVerSecret%40h",
    f"s3://bucket/lake?colour=red&endpoint_override=http://{KEY}:{SECRET}@h",
)
COMMANDS: Sequence[Sequence[str]] = (
    ("collect", "--env", "tmaze", "--lake", "{}"),
    ("collect", "--env", "tmaze", "--lake", "{}", "--dry-run"),
    ("train", "--from-lake", "{}:0.5", "--run", "r"),
    ("train", "--from-lake", "{}", "--run", "r", "--dry-run"),
    ("train", "--set", 'train.lakes=["{}"]', "--run", "r", "--dry-run"),
    ("relabel", "--from-lake", "{}"),
    ("export", "{}", "--format", "npz"),
    ("lake", "info", "{}"),
    ("lake", "copy", "{}", "there"),
    ("lake", "ls", "{}"),
)
SCHEMES = ("gcs://b", "S3://b", "http://h", "https://h", "file:///tmp", "abfs://c", "hdfs://n")
WITH_SCHEMES: Sequence[Sequence[str]] = (
    ("collect", "--env", "tmaze", "--lake", "{}", "--steps", "20"),
    ("collect", "--env", "tmaze", "--lake", "{}", "--steps", "20", "--dry-run"),
    ("collect", "--env", "tmaze", "--run", "{}", "--steps", "20"),
    ("train", "--from-lake", "small", "--run", "{}", "--steps", "1"),
    ("train", "--from-lake", "{}", "--run", "r"),
    ("lake", "copy", "small", "{}"),
    ("lake", "info", "{}"),
    ("export", "small", "--to", "{}"),
    ("export", "small", "--format", "npz", "--to", "{}"),
)


def words(value: Sequence[str] | str) -> str:
    """Name a case."""
    return value if isinstance(value, str) else "-".join(value[:4])


@pytest.mark.parametrize(("command", "secret"), crossed(COMMANDS, SECRETS), ids=words)
def test_credentials_are_not_echoed(amago: Amago, command: Sequence[str], secret: str) -> None:
    given = [word.format(secret) for word in command]
    for more in ([], ["--output", "json"], ["-v"]):
        refused = amago(*given, *more)
        assert refused.code in (2, 3), refused.err
        assert KEY not in refused.out + refused.err
        assert "Secret" not in refused.out + refused.err
    assert not any(KEY in file.read_text() for file in Path().rglob("*.json"))


def test_credentials_of_an_endpoint_in_the_environment_are_refused(
    amago: Amago, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{KEY}:{SECRET}@h:9000")
    refused = amago("lake", "info", "s3://bucket/lake")
    assert (refused.code, KEY in refused.err) == (2, False)
    assert "AWS_PROFILE" in refused.err


@pytest.mark.parametrize(("command", "scheme"), crossed(WITH_SCHEMES, SCHEMES), ids=words)
def test_a_scheme_that_is_not_supported_is_refused(
    amago: Amago, small: Path, command: Sequence[str], scheme: str
) -> None:
    before = sorted(os.listdir())
    given = [word.format(f"{scheme}/x") for word in command]
    refused = amago(*given, *(tiny() if command[0] == "train" else ()))
    assert refused.code == 2, refused.err
    assert "not supported" in refused.err
    assert sorted(os.listdir()) == before


def test_a_run_does_not_go_to_an_object_store(amago: Amago) -> None:
    refused = amago("collect", "--env", "tmaze", "--run", "s3://bucket/run", "--steps", 20)
    assert (refused.code, os.listdir()) == (2, []), refused.err


def test_the_failure_s_json_names_the_place(amago: Amago) -> None:
    failed = json.loads(amago("lake", "info", SECRETS[0], "--output", "json").out)
    assert "***@bucket/lake" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("place", "words"), [("gs://b/x", "GOOGLE_APPLICATION_CREDENTIALS"), ("az://c/x", "AZURE_STORAGE_ACCOUNT_NAME")]
)
def test_a_store_without_credentials_says_which_it_wants(
    amago: Amago, place: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    if place.startswith("gs"):
        monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:1")  # nothing listens there
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        words = "no connection to http://127.0.0.1:1"
    refused = amago("lake", "info", place)
    assert (refused.code, "Traceback" in refused.err) == (1, False), refused.err
    assert words in refused.err
