"""A proxy in front of an S3 server that fails a share of the requests, and notes each of them.

    python tests/benchmarks/failing_proxy.py PORT SERVER_PORT LOG [--share 0.333] [--seed 0]

A failed request is answered by 500 or 503, or its connection is reset, before the server has seen it or after it has
carried it out; some never get an answer. LOG gets a line of JSON per request: who (the access key), what, and its fate.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

FATES = ("500", "503", "reset", "lost", "silent")  # lost: carried out, but the answer is not sent
SHARES = (30, 30, 20, 17, 3)
SILENCE_SECONDS = 90.0  # longer than a client waits
ERROR = "<Error><Code>{}</Code><Message>failed on purpose</Message></Error>"
_WHO = re.compile(r"Credential=([^/]+)/")


class Proxy(ThreadingHTTPServer):
    """The proxy; `draw` returns the fate of the next request, "" for one that is served."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, server: int, log: str, *, share: float, seed: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.upstream = server
        self._share, self._rng, self._lock = share, random.Random(seed), threading.Lock()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def draw(self) -> str:
        with self._lock:
            return self._rng.choices(FATES, SHARES)[0] if self._rng.random() < self._share else ""

    def note(self, **fields: object) -> None:
        os.write(self._log, (json.dumps(fields) + "\n").encode())

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that have gone."""


class Handler(BaseHTTPRequestHandler):
    """Forwards requests one by one on a connection that stays open."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def _handle(self) -> None:
        body = self._body()
        who = _WHO.search(self.headers.get("Authorization", ""))
        place, fate = urlsplit(self.path), self.server.draw()
        query = parse_qs(place.query, keep_blank_values=True)
        kind = "LIST" if self.command == "GET" and "list-type" in query else self.command
        key = unquote(place.path) if kind != "LIST" else query.get("prefix", [""])[0]
        self.server.note(
            time=time.time(),
            who=who[1] if who else "",
            kind=kind,
            key=key,
            delimited="delimiter" in query,
            fate=fate,
            status=(status := self._serve(body, fate)),
        )
        if status is None:
            self._reset()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle

    def _serve(self, body: bytes, fate: str) -> int | None:
        """Answer; returns the server's status, None if there is no answer."""
        if fate in ("500", "503"):
            text = ERROR.format("InternalError" if fate == "500" else "SlowDown").encode()
            self._answer(int(fate), {"Content-Type": "application/xml"}, text)
            return int(fate)
        if fate == "reset":
            return None
        if fate == "silent":
            time.sleep(SILENCE_SECONDS)
            return None
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
        if fate == "lost":
            return None
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN}
        size = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(answer.status, headers, content, size=size)
        return answer.status

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, size: str | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", size or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


_OWN = {"transfer-encoding", "content-length", "connection", "server", "date"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("server_port", type=int)
    parser.add_argument("log")
    parser.add_argument("--share", type=float, default=1 / 3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    Proxy(options.port, options.server_port, options.log, share=options.share, seed=options.seed).serve_forever()


if __name__ == "__main__":
    main()
