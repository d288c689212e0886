"""`amago view`."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import HOST, Common, LakeArgument, port_option, reader

_PORT = 8642
_MOST_REQUESTS = 64  # at a time
_STOP_SECONDS = 1  # for requests that are being answered


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
    port: Annotated[int | None, port_option(_PORT)] = None,
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
    import secrets
    import webbrowser

    from amago_cli.render.output import Document
    from amago_cli.render.progress import reporter
    from amago_cli.serving import open_socket, serve
    from pipelines.lake.store import Lake
    from pipelines.registry import require_package

    for module in ("starlette", "uvicorn"):
        require_package(module, "view", "`amago view`")
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    evaluator = None
    if values is not None:
        from pipelines.evaluation.values import Values

        evaluator = Values(values)
    from pipelines.view.server import application
    from pipelines.view.viewer import LakeViewer

    port_socket = open_socket(HOST, (port,) if port is not None else (_PORT, 0))
    number, token = port_socket.getsockname()[1], secrets.token_urlsafe(32)
    address = f"http://{HOST}:{number}/?token={token}"
    viewer = LakeViewer(opened, evaluator)
    app = application(viewer, token=token, port=number)

    def answer() -> None:
        has_display = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
        opens = has_display and sys.stdout.isatty() if browser is None else browser
        with reporter(quiet=common.quiet) as show:
            serve(
                app,
                port_socket,
                requests=_MOST_REQUESTS,
                drain_seconds=_STOP_SECONDS,
                listener=show,
                lifespan=True,
                ready=partial(webbrowser.open, address) if opens else None,
            )

    return Document(text=address, fields={"address": address, "port": number}, then=answer)
