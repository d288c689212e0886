"""`amago view`."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import sys
import threading
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, LakeArgument, reader
from amago_cli.stopping import Stopped

_HOST, _PORT = "127.0.0.1", 8642
_MOST_REQUESTS = 64  # at a time
_STOP_SECONDS = 2.0  # for requests that are being answered


@reader
def view(
    common: Common,
    lake: LakeArgument,
    values: Annotated[
        str | None,
        typer.Option(
            "--values",
            metavar="RUN[@CHECKPOINT]",
            help="Show q, v, advantage, weight and entropy of this run's agent at each step.",
            autocompletion=completion.runs_at_checkpoints,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help=f"Port of the server; 0 is any free one [default: {_PORT}, or a free one].",
        ),
    ] = None,
    browser: Annotated[
        bool | None,
        typer.Option("--open/--no-browser", help="Open the page in a browser [default: where there is a display]."),
    ] = None,
) -> Any:
    """Show the experience in a lake, in a browser: a table that SQL filters, and each trajectory step by step.

    The page shows frames, observations, actions, rewards and attempts over time, a relabelled trajectory beside its
    original, who acted, and which checkpoints trained on it; while collectors write, it follows. Every state of the
    page has its own address. The server answers this machine only, only with the token in its address, and never
    writes. Stop it with Ctrl-C.

    Example: amago view runs/quickstart --values runs/quickstart
    """
    from amago_cli.render.output import Document
    from pipelines.formats.base import require
    from pipelines.lake.store import Lake

    for module in ("starlette", "uvicorn"):
        require(module, "view", "`amago view`")
    opened = Lake.open(lake)
    common.concerns(lake=opened.name)
    evaluator = None
    if values is not None:
        from pipelines.evaluation.values import Values

        evaluator = Values(values)
    from pipelines.view.server import application
    from pipelines.view.viewer import LakeViewer

    listener = _listen(port)
    number, token = listener.getsockname()[1], secrets.token_urlsafe(32)
    address = f"http://{_HOST}:{number}/?token={token}"
    viewer = LakeViewer(opened, evaluator)
    app = application(viewer, token=token, port=number)

    def serve() -> None:
        threading.Thread(target=viewer.warm, daemon=True).start()
        _serve(app, listener, address if _wants_browser(browser) else None)

    return Document(text=address, fields={"address": address, "port": number}, then=serve)


def _listen(port: int | None) -> socket.socket:
    """Return a socket that listens on this host only; UsageError if the port cannot be had."""
    from pipelines.errors import UsageError

    wanted = (port,) if port is not None else (_PORT, 0)
    for number in wanted:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, number))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if number != wanted[-1]:
                continue
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise UsageError(f"port {number} {why}", hint="choose another one, or --port 0 for any free one") from error
        return listener
    raise AssertionError


def _wants_browser(asked: bool | None) -> bool:
    if asked is not None:
        return asked
    has_display = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return has_display and sys.stdout.isatty()


def _serve(app: Any, listener: socket.socket, address: str | None) -> None:
    """Answer requests until a signal; SIGINT is how the server is meant to end."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # In a thread of its own: the main thread keeps the signal handlers of the command line.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        if address is not None:
            import webbrowser

            webbrowser.open(address)
        while thread.is_alive():
            thread.join(0.5)
    except Stopped as stop:
        if stop.number != signal.SIGINT:
            raise
    finally:
        server.should_exit = True
        thread.join(_STOP_SECONDS)
        server.force_exit = True  # do not wait for a request that takes longer
        thread.join(_STOP_SECONDS)
