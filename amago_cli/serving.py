"""Servers of commands: the socket, and uvicorn until a signal."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from amago_cli.stopping import Stopped

if TYPE_CHECKING:
    import socket

HOST = "127.0.0.1"
# Longer than clients keep idle connections (httpx: 5 s): a server that closes first resets a request on its way.
_IDLE_SECONDS = 20


def listening(host: str, ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on the first of `ports` that can be had; UsageError if none can."""
    import socket

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
    listener: socket.socket,
    *,
    requests: int,
    drain_seconds: int,
    ends: Sequence[int] = (signal.SIGINT,),
    websockets: bool = False,
    message_bytes: int = 0,
    lifespan: bool = False,
    ready: Callable[[], object] | None = None,
) -> None:
    """Answer at most `requests` at a time until a signal: one of `ends` is how the server is meant to end. `ready` is
    called once it answers; requests that are being answered at the end have `drain_seconds`."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="on" if lifespan else "off",
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=message_bytes or 1,
        ws_per_message_deflate=False,  # messages are small: it costs more than it saves
        server_header=False,
        date_header=False,
        limit_concurrency=requests,
        timeout_keep_alive=_IDLE_SECONDS,
        backlog=1024,
        timeout_graceful_shutdown=drain_seconds,
    )
    server = uvicorn.Server(config)
    # In a thread of its own: the main thread keeps the signal handlers of the command line.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
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
        thread.join(drain_seconds + 1)
        server.force_exit = True  # do not wait for a request that takes longer
        thread.join(drain_seconds + 1)
