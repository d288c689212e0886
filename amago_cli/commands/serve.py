"""`amago serve`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import HOST, Common, port_option, reader

_PORT = 8650
_DRAIN_SECONDS = 10
_MORE_REQUESTS = 256  # than sessions: for health, metrics and sockets
_LEAST_TOKEN = 16


@reader
def serve(
    common: Common,
    bundle: Annotated[
        str,
        typer.Argument(metavar="BUNDLE", help="A policy that `amago export` wrote.", autocompletion=completion.bundles),
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is every network.")
    ] = HOST,
    port: Annotated[int | None, port_option(_PORT)] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File with the token of clients [default: a random token]."),
    ] = None,
    greedy: Annotated[
        bool | None,
        typer.Option("--greedy/--sample", help="Take the policy's most likely action, or sample; default: as it says."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=2**31 - 1, help="Seed of sampled actions.")
    ] = 0,
    sessions: Annotated[
        int, typer.Option("--sessions", metavar="N", min=1, max=1_000_000, help="Most sessions at a time.")
    ] = 1_000,
    idle: Annotated[
        float, typer.Option("--idle", metavar="SECONDS", min=0.1, help="End sessions that are unused for so long.")
    ] = 600.0,
    body: Annotated[int, typer.Option("--body", metavar="BYTES", min=1, help="Largest request or message.")] = 1 << 22,
    form: Annotated[
        str,
        typer.Option("--form", metavar="FORM", help="Form of the bundle that acts: weights, onnx, torch, aoti."),
    ] = "weights",
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Threads of a step.")] = 1,
) -> Any:
    """Act with a bundle for clients on HTTP and WebSocket, each in a session with a memory of its own.

    Sessions that ask at the same time share one step of the policy. The server answers this machine only, unless --host
    says otherwise, and only requests with the token that it prints. /openapi.json describes the requests, /health and
    /metrics the state. Nothing in the bundle is executed, unless --trust admits the form torch or aoti. Ctrl-C and
    SIGTERM end it once it has answered what it was asked.

    Example: amago serve runs/short/export
    """
    from amago_cli.render.output import Document
    from amago_cli.render.progress import reporter
    from amago_cli.serving import open_socket
    from amago_cli.serving import serve as answer
    from pipelines.config.places import find_bundle
    from pipelines.errors import InputMissing
    from pipelines.registry import require_package

    for module in ("starlette", "uvicorn", "websockets"):
        require_package(module, "serve", "`amago serve`")
    directory = find_bundle(bundle)
    if directory is None:
        raise InputMissing(f"no policy bundle at '{bundle}'", hint="make one with: amago export RUN")
    import secrets

    token = secrets.token_urlsafe(32) if token_file is None else _token(token_file)
    from pipelines.learning import bundle as bundles
    from pipelines.serve.acting import of_bundle
    from pipelines.serve.app import application
    from pipelines.serve.sessions import SessionPool
    from pipelines.training.learner import use_threads

    use_threads(threads)
    found = bundles.read(directory)
    greedy = found.greedy if greedy is None else greedy
    policy = of_bundle(found, form=form, trust=common.trust, most=sessions, greedy=greedy, seed=seed)
    pool = SessionPool(policy, most=sessions, idle_seconds=idle)
    port_socket = open_socket(host, (port,) if port is not None else (_PORT, 0))
    number, shown = port_socket.getsockname()[1], f"[{host}]" if ":" in host else host
    about = {"policy": found.identity, "update": found.update, "env": found.env.get("name", "")}
    hosts = {HOST, "localhost"} if host in (HOST, "localhost") else set()
    app = application(pool, about=about, token=token, hosts=hosts, body_bytes=body)
    fields: dict[str, Any] = {"address": f"http://{shown}:{number}", "port": number, "greedy": greedy}
    if token_file is None:
        fields["token"] = token

    def run() -> None:
        with reporter(quiet=common.quiet) as show:
            answer(
                app,
                port_socket,
                requests=sessions + _MORE_REQUESTS,
                drain_seconds=_DRAIN_SECONDS,
                listener=show,
                ends=(signal.SIGINT, signal.SIGTERM),
                message_bytes=body,
                websockets=True,
                lifespan=True,
            )

    return Document(text="\n".join(f"{name}: {value}" for name, value in fields.items()), fields=fields, then=run)


def _token(path: Path) -> str:
    """Return the token in a file. InputMissing if there is none, UsageError if it could be guessed."""
    from pipelines.errors import InputMissing, UsageError
    from pipelines.files.malformed import read_limited

    try:
        token = read_limited(path, 4096).decode("utf-8", "replace").strip()
    except FileNotFoundError as error:
        raise InputMissing(f"no token at '{path}'") from error
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"'{path}' holds no token of {_LEAST_TOKEN} or more printable characters",
            hint="make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token
