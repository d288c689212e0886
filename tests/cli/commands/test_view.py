from __future__ import annotations

import importlib.util
import json
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipelines.lake.store import Lake
from tests.cli.conftest import Amago
from tests.lake.factories import fill
from tests.view.served import Served, served

for module in ("starlette", "uvicorn"):
    pytest.importorskip(module, reason='no server here: pip install "amago[view]"')


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    fill(Lake.create(tmp_path / "lake"), [3, 4])
    return tmp_path / "lake"


def raw(server: Served, request: str) -> str:
    """Send bytes as no client would, and return the status line and the rest."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(60)
        connection.sendall(request.replace("\n", "\r\n").encode("latin-1"))
        found = b""
        while part := connection.recv(65536):
            found += part
    return found.decode("latin-1")


def head(server: Served, path: str, *, host: str | None = None, method: str = "GET", token: str | None = None) -> str:
    host = f"127.0.0.1:{server.port}" if host is None else host
    token = server.token if token is None else token
    return f"{method} {path} HTTP/1.1\nHost: {host}\nAuthorization: Bearer {token}\nConnection: close\n\n"


@pytest.mark.system
def test_it_serves_the_page_and_the_lake_until_ctrl_c(lake: Path) -> None:
    with served(lake) as server:
        assert server.address.startswith("http://127.0.0.1:")
        assert raw(server, head(server, "/")).startswith("HTTP/1.1 200 ")
        answer = raw(server, head(server, "/api/lake"))
        assert json.loads(answer.partition("\r\n\r\n")[2])["trajectories"] == 2
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait() == 0
        assert server.process.stdout is not None
        assert server.process.stderr is not None
        assert (server.process.stdout.read(), server.process.stderr.read()) == ("", "")


@pytest.mark.system
def test_it_ends_with_the_code_of_another_signal(lake: Path) -> None:
    with served(lake) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 143


@pytest.mark.system
def test_what_is_sent_as_bytes_is_refused_too(lake: Path) -> None:
    with served(lake) as server:
        secret = lake.parent / "secret.txt"
        secret.write_text("secret content")
        for path in ("/../secret.txt", "/app.js/../../secret.txt", "//secret.txt", "/%2e%2e/secret.txt", str(secret)):
            answer = raw(server, head(server, path))
            assert answer.split()[1] in ("400", "404"), path
            assert "secret content" not in answer
        assert raw(server, head(server, "/api/lake", host="evil.example")).startswith("HTTP/1.1 421 ")
        assert raw(server, head(server, "/api/lake", token="")).startswith("HTTP/1.1 403 ")
        assert raw(server, head(server, "/api/lake", method="DELETE")).startswith("HTTP/1.1 405 ")
        two = head(server, "/api/lake").replace("Connection", "Host: evil.example\nConnection")
        assert not raw(server, two).startswith("HTTP/1.1 200 ")
        assert "HTTP/1.1 200 " not in raw(server, "GET /api/lake HTTP/1.0\nConnection: close\n\n")
        upgrade = head(server, "/api/lake").replace("Connection: close", "Connection: Upgrade\nUpgrade: websocket")
        assert not raw(server, upgrade).startswith("HTTP/1.1 101 ")


@pytest.mark.system
def test_it_listens_on_this_host_only(lake: Path) -> None:
    with served(lake) as server:
        port = f":{server.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"]
        assert listening == [f"0100007F{port}"]
        if Path("/proc/net/tcp6").exists():
            rows = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
            assert not [row for row in rows if row[1].endswith(port) and row[3] == "0A"]


@pytest.mark.system
def test_half_open_connections_lock_nobody_out(lake: Path) -> None:
    with served(lake, descriptors=256) as server, ExitStack() as held:
        for _ in range(300):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(b"GET /api/lake HTTP/1.1\r\nHost: 127")
        answer = raw(server, head(server, "/api/lake"))
        assert answer.startswith("HTTP/1.1 200 ")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait() == 0
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


@pytest.mark.system
def test_refused_requests_leave_no_connection_behind(lake: Path) -> None:
    with served(lake) as server:
        kept = head(server, "/api/lake", token="wrong").replace("Connection: close\n", "")
        assert raw(server, kept).startswith("HTTP/1.1 403 ")


ENDLESS = "with recursive x as (select 1 as i union all select i + 1 from x) select max(i) from x"


def ask(server: Served, sql: str) -> socket.socket:
    """Send a query, whose answer nobody has read yet."""
    body = json.dumps({"sql": sql})
    request = head(server, "/api/sql", method="POST").removesuffix("\n")
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(60)
    more = f"Content-Type: application/json\nContent-Length: {len(body)}\n\n"
    connection.sendall((request + more).replace("\n", "\r\n").encode() + body.encode())
    return connection


def answered(connections: list[socket.socket]) -> list[socket.socket]:
    return select.select(connections, [], [], 0)[0]


@pytest.mark.system
def test_heavy_queries_wait_in_a_short_line_and_keep_the_page_alive(lake: Path) -> None:
    with served(lake) as server, ExitStack() as held:
        heavy = [held.enter_context(ask(server, ENDLESS)) for _ in range(45)]
        refused = []
        while len(refused) < 45 - 1 - 16:
            refused = select.select(heavy, [], [], 60)[0]
            assert refused
        head_lines, _, body = refused[0].recv(1 << 16).decode().partition("\r\n\r\n")
        assert head_lines.startswith("HTTP/1.1 503 ")
        assert "16 queries are waiting" in json.loads(body)["error"]
        fill(Lake(lake), [5])  # the index is outdated, and the query at work reads it
        assert raw(server, head(server, "/api/state")).startswith("HTTP/1.1 200 ")
        assert len(answered(heavy)) < 45


@pytest.mark.system
def test_queries_end_with_their_clients(lake: Path) -> None:
    with served(lake) as server:
        for connection in [ask(server, ENDLESS) for _ in range(12)]:
            connection.close()
        with ask(server, "select 42 as answer") as connection, connection.makefile("rb") as answer:
            _, _, body = answer.read().partition(b"\r\n\r\n")  # to its end: head and body may come apart
            assert b"42" in body


@pytest.mark.system
def test_ctrl_c_ends_it_while_queries_run(lake: Path) -> None:
    with served(lake) as server, ExitStack() as held:
        heavy = [held.enter_context(ask(server, ENDLESS)) for _ in range(45)]
        while not answered(heavy):  # those that do not fit are refused
            pass
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait() == 0
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


@pytest.mark.system
def test_the_json_has_the_address(lake: Path) -> None:
    with served(lake, "--output", "json") as server:
        said = json.loads(server.address)
        assert said["command"] == "view"
        assert said["lake"] == str(lake)
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(said["address"].partition("?")[0])


@pytest.mark.system
def test_it_imports_no_torch_without_values(lake: Path) -> None:
    code = (
        "import sys\n"
        "from pipelines.lake.store import Lake\n"
        "from pipelines.view.server import application\n"
        "from pipelines.view.viewer import LakeViewer\n"
        f"viewer = LakeViewer(Lake({str(lake)!r}))\n"
        "application(viewer, token='x', port=1)\n"
        "viewer.about()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_busy_port_is_one_line(amago: Amago, lake: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        failed = amago("view", lake, "--port", taken.getsockname()[1])
    assert failed.code == 2
    assert "is in use; choose another one, or --port 0" in failed.err
    assert failed.err.count("\n") == 1


def test_a_missing_lake_is_one_line(amago: Amago) -> None:
    failed = amago("view", "nothing")
    assert (failed.code, failed.err.count("\n")) == (3, 1)
    assert "no lake at 'nothing'" in failed.err


def test_a_missing_extra_is_one_line(amago: Amago, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else real(name, *rest)
    )
    failed = amago("view", lake)
    assert (failed.code, failed.err.count("\n")) == (3, 1)
    assert 'pip install "amago[view]"' in failed.err


def test_a_run_without_values_is_one_line(amago: Amago, lake: Path) -> None:
    failed = amago("view", lake, "--values", "nothing")
    assert (failed.code, failed.err.count("\n")) == (3, 1)
