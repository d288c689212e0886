"""The local server of `amago view`: JSON of a `LakeViewer`, its pictures, and the static files of the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache, partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pipelines.errors import AmagoError, InputMissing, IntegrityError, StorageError, UsageError
from pipelines.events import Event, Listener
from pipelines.report.page import read_script
from pipelines.view.guard import GuardedApp
from pipelines.view.viewer import LakeViewer
from pipelines.web.checks import TooLarge, receive_body

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = (
    *("index.html", "style.css", "icon.svg"),
    *("app.js", "api.js", "charts.js", "dom.js", "format.js", "query.js", "state.js", "table.js", "timeline.js"),
    *("trajectory.js", "frames.js", "overview.js"),
)
_SQL = "/api/sql"
_MOST_BODY = 64 << 10
_MOST_WAITING = 16  # queries
_STATUS: tuple[tuple[type[AmagoError], int], ...] = ((UsageError, 400), (InputMissing, 404), (IntegrityError, 500))


def application(viewer: LakeViewer, *, token: str, port: int) -> ASGIApp:
    """Build the ASGI application that shows a lake to clients with the token."""
    queries = _QueryLine()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        stopping = threading.Event()
        warming = asyncio.create_task(asyncio.to_thread(viewer.warm, _listen_until(stopping)))
        yield
        stopping.set()
        with contextlib.suppress(_GivenUp):
            await warming

    async def file(request: Request) -> Response:
        name = request.url.path.removeprefix("/") or "index.html"
        return Response(_read_file(name), headers={"content-type": _KINDS[name.rpartition(".")[2]]})

    async def vega(request: Request) -> Response:
        script = await asyncio.to_thread(read_script)
        headers = {"content-type": _KINDS["js"], "cache-control": "private, max-age=86400"}
        return Response(script, headers=headers)

    async def answer(ask: Callable[[LakeViewer, str, _Query], Any], request: Request) -> Response:
        uid = request.path_params.get("uid", "")
        return await _reply(asyncio.to_thread(lambda: ask(viewer, uid, _Query(request))))

    async def draw(ask: Callable[[LakeViewer, str, _Query], bytes], request: Request) -> Response:
        def respond() -> Response:
            return Response(ask(viewer, request.path_params["uid"], _Query(request)), media_type="image/png")

        return await _reply(asyncio.to_thread(respond))

    async def find(ask: Callable[[LakeViewer, _Query, Listener], Any], request: Request) -> Response:
        return await _reply(queries.run(request, lambda listener: ask(viewer, _Query(request), listener)))

    async def sql(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return JSONResponse({"error": "a query is sent as JSON"}, 415)
        try:
            body = await receive_body(request, _MOST_BODY)
        except TooLarge:
            return JSONResponse({"error": f"a query has at most {_MOST_BODY:,} bytes"}, 413)
        if body is None:
            return Response(status_code=400)
        try:
            text = json.loads(body)["sql"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            return JSONResponse({"error": 'a query is {"sql": "select ..."}'}, 400)
        return await _reply(queries.run(request, lambda listener: viewer.query(text, listener=listener)))

    routes = [
        *(Route(path, file) for path in ("/", *(f"/{name}" for name in _FILES[1:]))),
        Route("/vega.js", vega),
        *(Route(path, partial(answer, ask)) for path, ask in _ASKED.items()),
        *(Route(path, partial(find, ask)) for path, ask in _QUERIES.items()),
        *(Route(path, partial(draw, ask)) for path, ask in _PICTURES.items()),
        Route(_SQL, sql, methods=["POST"]),
    ]
    return GuardedApp(Starlette(routes=routes, lifespan=lifespan), token=token, port=port, posts=frozenset({_SQL}))


@cache
def _read_file(name: str) -> bytes:
    return resources.files("pipelines.view").joinpath("static", name).read_bytes()


class _Query:
    """The parameters of a request."""

    def __init__(self, request: Request) -> None:
        self._given = request.query_params

    def text(self, name: str) -> str:
        return self._given.get(name, "")

    def texts(self, name: str) -> list[str]:
        return self._given.getlist(name)

    def number(self, name: str, default: int) -> int:
        """Return a whole number. UsageError for anything else."""
        text = self._given.get(name, "")
        if not text:
            return default
        if len(text) > 15 or not text.removeprefix("-").isdecimal():
            raise UsageError(f"'{name}' is a whole number")
        return int(text)


class _GivenUp(Exception):
    """The client that waited for the answer to a query is gone."""


class _LineFull(Exception):
    """No more queries may wait."""


def _listen_until(stop: threading.Event) -> Listener:
    """Make a listener that ends the work that reports to it, once `stop` is set."""

    def listen(event: Event) -> None:
        if stop.is_set():
            raise _GivenUp

    return listen


class _QueryLine:
    """Waiting line of users' queries. One runs at a time, since each may take all of the memory of a query."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._count = 0

    async def run(self, request: Request, ask: Callable[[Listener], Any]) -> Any:
        """Run `ask` in a thread when it is its turn. _LineFull if too many wait; _GivenUp once the client went away,
        which ends a query that runs, as does the end of the server."""
        if self._count > _MOST_WAITING:
            raise _LineFull
        self._count += 1
        stop = threading.Event()

        async def wait_for_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        async def wait_and_ask() -> Any:
            async with self._turn:
                return await asyncio.to_thread(ask, _listen_until(stop))

        asking, leaving = asyncio.ensure_future(wait_and_ask()), asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise _GivenUp
            return asking.result()
        finally:
            self._count -= 1
            stop.set()
            asking.cancel()
            leaving.cancel()


def _page(viewer: LakeViewer, given: _Query, listener: Listener) -> Any:
    order = given.text("order") or "-t_commit"
    return viewer.page(
        where=given.text("where"),
        order=order.removeprefix("-"),
        descending=order.startswith("-"),
        after=given.text("after"),
        before=given.text("before"),
        rows=given.number("rows", 100),
        listener=listener,
    )


_ASKED: Mapping[str, Callable[[LakeViewer, str, _Query], Any]] = {
    "/api/lake": lambda viewer, uid, given: viewer.about(),
    "/api/state": lambda viewer, uid, given: viewer.state(),
    "/api/trajectory/{uid}": lambda viewer, uid, given: viewer.trajectory(uid),
    "/api/origin/{uid}": lambda viewer, uid, given: viewer.origin(uid),
    "/api/steps/{uid}": lambda viewer, uid, given: viewer.steps(
        uid,
        given.number("start", 0),
        given.number("stop", 2**53),
        given.number("points", 1000),
        given.texts("column"),
    ),
    "/api/values/{uid}": lambda viewer, uid, given: viewer.values(
        uid, given.number("start", 0), given.number("stop", 2**53)
    ),
}
_QUERIES: Mapping[str, Callable[[LakeViewer, _Query, Listener], Any]] = {
    "/api/trajectories": _page,
    "/api/count": lambda viewer, given, listener: viewer.count(given.text("where"), listener=listener),
    "/api/curve": lambda viewer, given, listener: viewer.curve(
        given.text("where"), given.text("across") or "t_commit", given.number("bins", 60), listener=listener
    ),
}
_PICTURES: Mapping[str, Callable[[LakeViewer, str, _Query], bytes]] = {
    "/api/frame/{uid}": lambda viewer, uid, given: viewer.frame(
        uid, given.text("column"), given.number("step", 0), given.number("side", 512)
    ),
    "/api/strip/{uid}": lambda viewer, uid, given: viewer.strip(
        uid,
        given.text("column"),
        given.number("start", 0),
        given.number("stop", 2**53),
        given.number("count", 16),
        given.number("side", 96),
    ),
}


async def _reply(answer: Awaitable[Any]) -> Response:
    """Wait for an answer of the engine; return it, or its error, as a response."""
    try:
        found = await answer
    except _GivenUp:
        return Response(status_code=400)
    except _LineFull:
        text = f"{_MOST_WAITING} queries are waiting already"
        return JSONResponse({"error": text, "hint": "try again when they are done"}, 503)
    except AmagoError as error:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        return JSONResponse({"error": error.message, "hint": error.hint}, status)
    except StorageError as error:
        return JSONResponse({"error": f"object store: {error}"}, 502)
    except OSError as error:
        return JSONResponse({"error": f"cannot read the lake: {error.strerror or error}"}, 500)
    return found if isinstance(found, Response) else JSONResponse(found)
