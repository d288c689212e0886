"""Servers of commands: the socket, its connections, and uvicorn until a signal.

uvicorn speaks HTTP and WebSocket; what a client may hold is bounded here, in one place for every server. A connection
waits for its client (for headers, or idle between two requests) or is at work. One that waits has a deadline, and gives
its place to a newcomer when the server is full: first those that never had an answer, then idle ones, the oldest first.
Strangers are never kept after an answer (`pipelines.web.checks.close_after`), so they cannot displace clients with a
token.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import json
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from amago_cli.stopping import Stopped
from pipelines.events import Listener, Notice, silent
from pipelines.files.descriptors import reserve_descriptors

_SPARE_CONNECTIONS = 32  # above the requests at a time: for those that wait, and for answers of 503
_HEADER_BYTES = 64 << 10
_REPORT_SECONDS = 60.0  # between two reports that no connection can be accepted
_RETRY_SECONDS = 0.1
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a client has for the `headers` of a request, its `body`, and for reading an `answer`, each as a
    whole; and how long its connection may be `idle` between two requests."""

    headers: float = 20.0
    body: float = 60.0
    answer: float = 60.0
    # Longer than clients keep idle connections (httpx: 5 s): a server that closes first resets a request on its way.
    idle: float = 20.0


_DEADLINES = Deadlines()


def open_socket(host: str, ports: Sequence[int]) -> socket.socket:
    """Open a socket that listens on the first of `ports` that is free; UsageError if none is."""
    from pipelines.errors import UsageError

    for number in ports:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            if number != ports[-1]:
                continue
            if error.errno == errno.EADDRINUSE:
                text, hint = f"port {number} is in use", "choose another one, or --port 0 for any free one"
            else:
                text = f"port {number} of '{host}' cannot be used: {error.strerror or error}"
                hint = "choose another one, or --port 0 for any free one"
            raise UsageError(text, hint=hint) from error
        return listener
    raise AssertionError


def serve(
    app: Any,
    port_socket: socket.socket,
    *,
    requests: int,
    drain_seconds: int,
    deadlines: Deadlines = _DEADLINES,
    listener: Listener = silent,
    ends: Sequence[int] = (signal.SIGINT,),
    websockets: bool = False,
    message_bytes: int = 0,
    lifespan: bool = False,
    ready: Callable[[], object] | None = None,
) -> None:
    """Answer at most `requests` at a time until a signal: one of `ends` is how the server is meant to end. `ready` is
    called once it answers; requests that are being answered at the end have `drain_seconds`, after which they are
    cancelled. `listener` hears why connections cannot be accepted."""
    import uvicorn

    most = reserve_descriptors(requests + _SPARE_CONNECTIONS)
    limited = _LimitedApp(app, most=max(1, min(requests, most - _SPARE_CONNECTIONS)), deadlines=deadlines)
    config = uvicorn.Config(
        limited,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="on" if lifespan else "off",
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=message_bytes or 1,
        ws_per_message_deflate=False,  # messages are small: it costs more than it saves
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=deadlines.idle,  # type: ignore[arg-type]  # any number of seconds
        timeout_graceful_shutdown=drain_seconds,
    )

    class Server(uvicorn.Server):
        """uvicorn, with connections that `_Connections` accepts in place of asyncio: a full process would log a
        traceback for every place of asyncio's backlog, thousands a second."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=[])

            def make() -> asyncio.Protocol:
                protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                )
                return protocol

            connections = _Connections(make, most=most, deadlines=deadlines, listener=listener)
            self.accepting = asyncio.create_task(connections.accept(port_socket))

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self.accepting.cancel()
            await super().shutdown(sockets=[port_socket])

    server = Server(config)
    # In a thread of its own: the main thread keeps the signal handlers of the command line.
    thread = threading.Thread(target=server.run, kwargs={"sockets": []}, daemon=True)
    thread.start()
    try:
        if ready is not None:
            ready()
        while thread.is_alive():
            thread.join(0.5)
    except Stopped as stop:
        if stop.number not in ends:
            raise
    finally:
        server.should_exit = True
        # Until the end: a thread that is inside a C++ library while the interpreter exits aborts the process.
        thread.join()


class _Connections:
    """The connections of a server, `most` at a time."""

    def __init__(
        self, make: Callable[[], asyncio.Protocol], *, most: int, deadlines: Deadlines, listener: Listener
    ) -> None:
        self.make, self.most, self.deadlines, self.listener = make, most, deadlines, listener
        self.count = 0
        # In the order in which they began to wait.
        self.unanswered: dict[_Connection, None] = {}
        self.idle: dict[_Connection, None] = {}
        self._reported = -_REPORT_SECONDS

    async def accept(self, port_socket: socket.socket) -> None:
        """Accept connections, one after another, until cancelled."""
        port_socket.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(port_socket)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._report(error)
                    self._displace()
                    await asyncio.sleep(_RETRY_SECONDS)
                continue  # otherwise the client went away meanwhile
            if self.count >= self.most and not self._displace():
                client.close()
                continue
            await loop.connect_accepted_socket(lambda: _Connection(self), client)

    def _displace(self) -> bool:
        """Close the connection that has waited longest for its client. False if no connection waits."""
        for waiting in (self.unanswered, self.idle):
            for connection in waiting:
                connection.abort()
                return True
        return False

    def _report(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            text = f"new connections wait: {error.strerror} ({self.count} connections are open)"
            self.listener(Notice(text=text, level="warning"))


class _Connection(asyncio.Protocol):
    """One connection: hands everything to uvicorn's protocol, HTTP first and WebSocket after an upgrade, and knows
    whether it waits for its client."""

    def __init__(self, connections: _Connections) -> None:
        self._all = connections
        self._answered = False
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None
        # Tasks take over the context of the code that makes them: this is how the application finds its connection.
        self._context = contextvars.copy_context()
        self._context.run(_current.set, self)
        self.inner = connections.make()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._all.count += 1
        self._wait(self._all.deadlines.headers)
        self.inner.connection_made(_Transport(self, transport))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.count -= 1
        self._stop_waiting()
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._answered and self._deadline is not None:
            self._received += len(data)
            if self._received - len(data) > _HEADER_BYTES:
                self.abort()
                return
        self._context.run(self.inner.data_received, data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def begin(self) -> None:
        """Note that the headers of a request have arrived."""
        self._stop_waiting()

    def end(self) -> None:
        """Note that a request has been answered."""
        self._answered = True
        if not self._transport.is_closing() or self._transport.get_write_buffer_size():
            self._wait(self._all.deadlines.idle + self._all.deadlines.headers)

    def abort(self) -> None:
        """Close at once, whatever the client has not read."""
        self._stop_waiting()
        self._transport.abort()

    def _wait(self, seconds: float) -> None:
        (self._all.idle if self._answered else self._all.unanswered)[self] = None
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _stop_waiting(self) -> None:
        self._all.unanswered.pop(self, None)
        self._all.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


_current: contextvars.ContextVar[_Connection] = contextvars.ContextVar("connection")


class _Transport:
    """The transport of a connection, as uvicorn's protocols see it: the next protocol becomes the inner one."""

    def __init__(self, connection: _Connection, transport: Any) -> None:
        self._connection, self._transport = connection, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        # A client that vanished: asyncio logs a line for every further write.
        if not self._transport.is_closing():
            self._transport.write(data)

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self._connection.inner = protocol

    def get_protocol(self) -> asyncio.Protocol:
        return self._connection.inner


class _LimitedApp:
    """An ASGI application that runs at most `most` requests at a time, whose clients have deadlines."""

    def __init__(self, app: Any, *, most: int, deadlines: Deadlines) -> None:
        self._app, self._most, self._deadlines = app, most, deadlines
        self._running = 0

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection = _current.get()
        connection.begin()
        self._running += 1
        try:
            if self._running <= self._most:
                await self._answer(connection, scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1013})
            else:
                await _refuse(send, 503, f"{self._most} requests are being answered, the most at a time", "try again")
        finally:
            self._running -= 1
            connection.end()

    async def _answer(self, connection: _Connection, scope: _Message, receive: _Receive, send: _Send) -> None:
        is_complete = scope["type"] == "websocket"
        is_begun = is_given_up = False
        body_deadline = asyncio.get_running_loop().time() + self._deadlines.body

        async def receive_in_time() -> _Message:
            nonlocal is_complete, is_given_up
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(body_deadline):
                    message = await receive()
            except TimeoutError:
                if not is_begun:
                    await _refuse(send, 408, f"the body was not sent within {self._deadlines.body:g} s")
                is_complete = is_given_up = True
                return {"type": "http.disconnect"}
            is_complete = not message.get("more_body", False)
            return message

        async def send_in_time(message: _Message) -> None:
            nonlocal is_begun
            if is_given_up:
                return
            is_begun = True
            try:
                async with asyncio.timeout(self._deadlines.answer):
                    await send(message)
            except TimeoutError:
                connection.abort()

        await self._app(scope, receive_in_time, send_in_time)


async def _refuse(send: _Send, status: int, error: str, hint: str = "") -> None:
    """Answer with an error, and close the connection."""
    body = json.dumps({"error": error} | ({"hint": hint} if hint else {})).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
