"""The bounds of both servers, met by clients that no library would write: one small application in a process of its
own."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

for module in ("uvicorn", "websockets"):
    pytest.importorskip(module, reason='no server here: pip install "amago[serve]"')

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
HANGS = 120
FOREVER = 1e6
DESCRIPTORS = 128
SERVER = """
import os, resource, sys
from amago_cli.serving import Deadlines, open_socket, serve
from amago_cli.stopping import stoppable

arguments = eval(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (arguments["descriptors"],) * 2)
held = []

def change_descriptors(text):
    try:
        while text == "take":
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    while text == "free" and held:
        os.close(held.pop())

async def app(scope, receive, send):
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] != "websocket.disconnect":
            change_descriptors(message["text"])
            await send({"type": "websocket.send", "text": message["text"]})
        return
    body, message = b"", {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
    answer = bytes(64 << 20) if scope["path"] == "/large" else str(len(body)).encode()
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": answer})

listener = open_socket("127.0.0.1", [0])
print(listener.getsockname()[1], flush=True)
with stoppable():
    serve(
        app, listener, requests=arguments["requests"], drain_seconds=1, websockets=True, message_bytes=1000,
        deadlines=Deadlines(**arguments["deadlines"]),
        listener=lambda event: print(event.text, file=sys.stderr, flush=True),
    )
"""


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[str]

    def connect(self, text: str = "") -> socket.socket:
        """Connect and send `text`."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=HANGS)
        connection.sendall(text.replace("\n", "\r\n").encode())
        return connection

    def get(self, path: str = "/") -> int:
        """Return the status of a request of a well-behaved client."""
        client = HTTPConnection("127.0.0.1", self.port, timeout=HANGS)
        client.request("GET", path)
        status = client.getresponse().status
        client.close()
        return status

    def stop(self) -> str:
        """Interrupt the server; return what it wrote to stderr."""
        self.process.send_signal(2)
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        self.process.wait()
        return said


@contextmanager
def running(*, descriptors: int = DESCRIPTORS, requests: int = 1000, **deadlines: float) -> Iterator[Server]:
    """Run the application with so many file descriptors; its deadlines never pass unless given."""
    times = {"headers": FOREVER, "body": FOREVER, "answer": FOREVER} | deadlines
    arguments = repr({"descriptors": descriptors, "requests": requests, "deadlines": times})
    command = [sys.executable, "-c", textwrap.dedent(SERVER), arguments]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            assert process.stderr is not None
            raise AssertionError(process.stderr.read())
        try:
            yield Server(int(line), process)
        finally:
            process.kill()


def everything(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


HALF = {
    "nothing": "",
    "half a header": "GET / HTTP/1.1\nHost: 127.0.0.1\nX-Slow: ",
    "half a handshake": "GET / HTTP/1.1\nHost: a\nConnection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n",
    "half a body": "POST / HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 10\n\n12345",
}

WHOLE = "GET / HTTP/1.1\nHost: 127.0.0.1\n\n"


@pytest.mark.parametrize("text", [HALF["nothing"], HALF["half a header"], HALF["half a handshake"]])
def test_more_half_open_connections_than_descriptors_lock_nobody_out(text: str) -> None:
    with running() as server, ExitStack() as held:
        for _ in range(2 * DESCRIPTORS):
            held.enter_context(server.connect(text))
        assert [server.get() for _ in range(5)] == [200] * 5
        assert server.stop() == ""


def test_idle_connections_make_room_for_new_ones() -> None:
    with running() as server, ExitStack() as held:
        for _ in range(2 * DESCRIPTORS):
            connection = held.enter_context(server.connect(WHOLE))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert server.get() == 200
        assert server.stop() == ""


@pytest.mark.parametrize("kind", ["nothing", "half a header", "half a handshake"])
def test_headers_have_a_deadline(kind: str) -> None:
    with running(headers=0.2) as server, server.connect(HALF[kind]) as connection:
        assert everything(connection) == b""
        assert server.get() == 200


def test_dribbling_headers_do_not_extend_their_deadline() -> None:
    with running(headers=0.5) as server, server.connect("GET / HTTP/1.1\n") as connection:
        connection.settimeout(0.01)
        while True:
            try:
                connection.sendall(b"X: 1\r\n")
                if not connection.recv(1):
                    break
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break


def test_second_request_has_a_deadline_for_its_headers_too() -> None:
    with running(headers=0.2, idle=0.1) as server, server.connect(f"{WHOLE}GET / HTTP/1.1\nHost") as connection:
        assert everything(connection).count(b"HTTP/1.1 200 ") == 1


def test_body_has_a_deadline() -> None:
    with running(body=0.2) as server, server.connect(HALF["half a body"]) as connection:
        head, _, body = everything(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head
        assert "was not sent within" in json.loads(body)["error"]
        assert server.stop() == ""


def test_headers_without_end_are_cut_off() -> None:
    endless = (b"X: " + b"x" * 8187 + b"\r\n") * (1 << 12)
    with running() as server, server.connect("GET / HTTP/1.1\n") as connection:
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connection.sendall(endless)
        assert server.get() == 200


def test_clients_that_do_not_read_are_dropped() -> None:
    with running(requests=1, answer=0.2) as server, server.connect("GET /large HTTP/1.1\nHost: a\n\n") as connection:
        assert connection.recv(1)
        while server.get() != 200:  # 503 while the answer above is being sent
            pass
        assert server.stop() == ""


def test_requests_above_the_limit_get_503() -> None:
    with running(requests=2) as server, server.connect(HALF["half a body"]), server.connect(HALF["half a body"]):
        client: Any = server.connect(WHOLE)
        head, _, body = everything(client).partition(b"\r\n\r\n")
        client.close()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert "2 requests" in json.loads(body)["error"]


def test_running_out_of_descriptors_is_one_line() -> None:
    from websockets.sync.client import connect

    with running() as server, connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as client:
        client.send("take")
        assert client.recv() == "take"
        with server.connect(WHOLE.replace("\n\n", "\nConnection: close\n\n")) as waiting:
            assert server.process.stderr is not None
            assert "Too many open files" in server.process.stderr.readline()
            client.send("free")
            assert client.recv() == "free"
            assert everything(waiting).startswith(b"HTTP/1.1 200 ")
        assert server.stop() == ""


def test_clients_that_vanish_leave_no_lines() -> None:
    from websockets.sync.client import connect

    with running() as server:
        for _ in range(5):
            with connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as client:
                for _ in range(300):
                    client.send("hello")
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.socket.close()  # a reset, with hundreds of answers on their way
        assert server.get() == 200
        assert server.stop() == ""


def test_websockets_outlast_the_deadlines() -> None:
    from websockets.sync.client import connect

    with (
        running(headers=0.2, body=0.2, answer=0.2, idle=0.1) as server,
        connect(f"ws://127.0.0.1:{server.port}/", proxy=None) as client,
        server.connect(HALF["nothing"]) as other,
    ):
        assert everything(other) == b""
        client.send("hello")
        assert client.recv() == "hello"
