"""One thread of torch per test process, the tiers of the suite, Hypothesis profiles, an S3 server on this host for
tests that use the fixture `bucket`, and a browser for those that use `browser`.

CONTRIBUTING.md describes the tiers.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import tiers as tiers  # registers the profiles of Hypothesis
from tests.browser.harness import Browser, launched

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="amago-state-")  # not this user's own
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job: the commands of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the S3 server or the browser as one of the tier `system`."""
    for item in items:
        if {"s3_server", "browser"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("system")


gc.disable()  # collecting tests makes objects that stay: looking at all of them again and again takes seconds


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    _keep_environment()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    _keep_environment()


def _keep_environment() -> None:
    """Remove the variable that pytest changes for each test: a changed environment restarts the SQL helper process."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


MOTO = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "{port}")


class Server:
    """A process of an object store with its own, empty memory. `{port}` in its command and variables is its port."""

    def __init__(self, command: Sequence[str] = MOTO, **variables: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [word.format(port=port) for word in command],
            env=os.environ | {name: value.format(port=port) for name, value in variables.items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while self._process.poll() is None:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        self.stop()
        raise RuntimeError(f"{command} did not start")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def start_server() -> Server:
    for module in ("moto.server", "flask", "boto3"):
        pytest.importorskip(module, reason='no S3 server here: pip install "amago[test]"')
    return Server()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    server = start_server()
    yield server
    server.stop()


def use(server: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and its children work with `server`, with `home` for what the host keeps."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AMAGO_CACHE": str(home),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new, empty bucket."""
    import boto3

    use(s3_server, tmp_path / "host", monkeypatch)
    name = f"bucket-{os.urandom(4).hex()}"
    boto3.client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="module")
def _chromium() -> Iterator[Browser]:
    # Per module: playwright's event loop must not run during tests that start one of their own.
    with launched() as browser:
        yield browser


@pytest.fixture
def browser(_chromium: Browser) -> Iterator[Browser]:
    """Headless Chromium. A page that logged an error, or asked another host for something, fails the test."""
    yield _chromium
    for page in _chromium.close_pages():
        page.require_clean()
