"""Object stores on this host besides moto's, and a bucket in each. Tests skip where one is not installed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import npm
from tests.conftest import Server, use

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # as documented


@pytest.fixture(scope="session")
def ministack_server() -> Iterator[Server]:
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    program = shutil.which("ministack", path=os.pathsep.join(places))
    if program is None:
        pytest.skip("MiniStack is not installed: pip install ministack")
    server = Server([program], GATEWAY_PORT="{port}", BIND_HOST="127.0.0.1", SERVICES="s3")
    yield server
    server.stop()


@pytest.fixture
def ministack(ministack_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket of MiniStack's S3."""
    import boto3

    use(ministack_server, tmp_path / "host", monkeypatch)
    name = f"bucket-{os.urandom(4).hex()}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    node, package = shutil.which("node"), npm.folder("azurite")
    if node is None or package is None:
        pytest.skip("Azurite is not installed: python -m tests.npm")
    options = ("--blobHost", "127.0.0.1", "--blobPort", "{port}", "--silent", "--skipApiVersionCheck")
    home = tmp_path_factory.mktemp("azurite")
    server = Server([node, str(package / "dist/src/blob/main.js"), *options, "--location", str(home)])
    yield server
    server.stop()


@pytest.fixture
def azurite(azurite_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new container of Azurite's."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{azurite_server.url}/{ACCOUNT}")
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "host"))
    name = f"container-{os.urandom(4).hex()}"
    _create_container(azurite_server.url, name)
    return f"az://{name}"


def _create_container(url: str, name: str) -> None:
    """Create a container by a signed request, which obstore has no call for."""
    headers = {
        "x-ms-date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
        "x-ms-version": "2021-08-06",
    }
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(f"{url}/{ACCOUNT}/{name}?restype=container", method="PUT", headers=headers)
    with urllib.request.urlopen(request):
        pass
