"""The server of a policy: sessions over HTTP and WebSocket, with a token, limits, metrics and a description."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from pipelines.export.assets import policy as runtime
from pipelines.serve.openapi import description
from pipelines.serve.sessions import Refused, Session, SessionPool
from pipelines.serve.values import Observations, parse, rewards, unpack
from pipelines.web.checks import TooLarge, close_after, is_asked, is_token, parse_bearer, receive_body

_OPEN = frozenset({"/health"})
_JSON, _PACKED = "application/json", "application/octet-stream"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
Answer = tuple[int, dict[str, Any]]


class _JsonResponse(JSONResponse):
    """A JSON response that orjson encodes, which is several times as fast as `json` for arrays of numbers."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class _PolicyServer:
    """Requests of clients as calls of a pool of sessions. Every answer is a status and a JSON object."""

    def __init__(self, pool: SessionPool, *, body_bytes: int) -> None:
        self.pool, self.body_bytes = pool, body_bytes
        self._observations = Observations(pool.spaces)
        self._action_space = pool.spaces.to_json()["action"]

    def begin(self, given: Mapping[str, Any]) -> Answer:
        """Begin one session, or `count`."""
        _only(given, "count")
        if "count" not in given:
            return 201, {"session": self.pool.begin()[0]}
        count = given["count"]
        if type(count) is not int or count < 1:
            raise Refused(422, "'count' is a whole number from 1 on")
        return 201, {"sessions": self.pool.begin(count)}

    async def act(self, given: Mapping[str, Any]) -> Answer:
        """Act for one `session`, or for several `sessions`, whose values have a first axis."""
        several = "sessions" in given
        _only(given, "sessions" if several else "session", "observation", "reward")
        sessions = self._sessions(given)
        if "observation" not in given:
            raise Refused(422, "'observation' is missing", "see /openapi.json")
        value, count = given["observation"], len(sessions)
        try:
            columns = self._observations.many(value, count) if several else self._observations.one(value)
            reward = rewards(given.get("reward", [0.0] * count), count)
        except ValueError as error:
            raise Refused(422, str(error), "see /openapi.json") from error
        actions = runtime.executed(await self.pool.act(sessions, columns, reward), self._action_space).tolist()
        return 200, {"actions": actions} if several else {"action": actions[0]}

    def reset(self, given: Mapping[str, Any]) -> Answer:
        """Begin a new episode of `session` or `sessions`."""
        _only(given, "session", "sessions")
        self.pool.reset(self._sessions(given))
        return 200, {}

    def end(self, given: Mapping[str, Any]) -> Answer:
        """Close `session` or `sessions`."""
        _only(given, "session", "sessions")
        self.pool.end(self._sessions(given))
        return 200, {}

    def _sessions(self, given: Mapping[str, Any]) -> list[Session]:
        ids = given.get("sessions", [given.get("session")])
        if not isinstance(ids, list) or not ids or not all(isinstance(id, str) for id in ids):
            raise Refused(422, "name a 'session', or a list of 'sessions'")
        return self.pool.find(ids)

    def metrics(self) -> str:
        """Write the figures in Prometheus' text format."""
        counters = self.pool.counters
        lines = []
        for name, kind, meaning, value in (
            ("sessions", "gauge", "Sessions now.", self.pool.count),
            ("sessions_limit", "gauge", "Most sessions.", self.pool.most),
            ("waiting", "gauge", "Actions that are waited for.", self.pool.waiting),
            ("sessions_begun_total", "counter", "Sessions begun.", counters.begun),
            ("sessions_ended_total", "counter", "Sessions ended, those that were idle included.", counters.ended),
            ("sessions_expired_total", "counter", "Sessions ended because they were idle.", counters.expired),
            ("actions_total", "counter", "Actions chosen.", counters.actions),
            ("steps_total", "counter", "Steps of the batched policy.", counters.steps),
            ("step_seconds_total", "counter", "Seconds spent in steps.", counters.step_seconds),
            ("step_actions_max", "gauge", "Most actions of one step.", counters.largest),
        ):
            lines += [f"# HELP amago_{name} {meaning}", f"# TYPE amago_{name} {kind}", f"amago_{name} {value}"]
        lines += ["# HELP amago_responses_total Answers by status.", "# TYPE amago_responses_total counter"]
        found = sorted(counters.responses.items())
        lines += [f'amago_responses_total{{status="{status}"}} {count}' for status, count in found]
        return "\n".join(lines) + "\n"

    async def http(self, request: Request, do: Callable[[dict[str, Any]], Any], more: Mapping[str, Any]) -> Response:
        """Answer a request whose body is a JSON object, packed, or empty."""
        try:
            body = await receive_body(request, self.body_bytes)
            if body is None:
                return Response(status_code=400)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if body and kind not in (_JSON, _PACKED):
                raise Refused(415, "the body is not JSON", f"send content-type: {_JSON}, or {_PACKED}")
            given = _read(body, unpack if kind == _PACKED else parse) if body else {}
            if more.keys() & given.keys():
                raise Refused(422, "the session is named in the path", "leave it out of the body")
            status, found = await self._call(do, {**given, **more})
        except TooLarge:
            status, found = 413, _error(f"a body has at most {self.body_bytes:,} bytes", "see --body")
        except Refused as refused:
            status, found = refused.status, _error(refused.error, refused.hint)
        self.count(status)
        return _JsonResponse(found, status)

    async def socket(self, socket: WebSocket) -> None:
        """Answer the messages of a WebSocket, one after another."""
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                status, found = await self._answer(message)
                self.count(status)
                await socket.send_text(orjson.dumps(found | ({} if status < 300 else {"status": status})).decode())

    async def _answer(self, message: Mapping[str, Any]) -> Answer:
        """Answer a text, which is JSON, or a packed message."""
        text = message.get("text")
        try:
            given = _read(message["bytes"], unpack) if text is None else _read(text, parse)
            do = given.pop("do", None)
            known = {"begin": self.begin, "act": self.act, "reset": self.reset, "end": self.end}
            if not isinstance(do, str) or do not in known:
                raise Refused(422, "'do' is begin, act, reset or end")
            return await self._call(known[do], given)
        except Refused as refused:
            return refused.status, _error(refused.error, refused.hint)

    async def _call(self, do: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Answer:
        found = do(given)
        answer: Answer = await found if isinstance(found, Awaitable) else found
        return answer

    def count(self, status: int) -> None:
        """Count an answer by its status."""
        responses = self.pool.counters.responses
        responses[status] = responses.get(status, 0) + 1


def application(
    pool: SessionPool, *, about: Mapping[str, Any], token: str, hosts: Collection[str], body_bytes: int
) -> ASGIApp:
    """Build the ASGI application that acts for clients with the token.

    `about` is what /health says of the policy. `hosts` are those that the Host header may name; empty: any.
    """
    server = _PolicyServer(pool, body_bytes=body_bytes)
    document = description(pool.spaces)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def expire() -> None:
            while True:
                await asyncio.sleep(1.0)
                pool.expire()

        tasks = [asyncio.create_task(pool.run()), asyncio.create_task(expire())]
        yield
        for task in tasks:
            task.cancel()
        pool.close()

    async def health(request: Request) -> Response:
        return _JsonResponse({"status": "ok", **about, "sessions": pool.count, "most_sessions": pool.most})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(server.metrics(), media_type=_METRICS)

    async def openapi(request: Request) -> Response:
        return _JsonResponse(document)

    def post(do: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            id = request.path_params.get("id")
            return await server.http(request, do, {} if id is None else {"session": id})

        return answer

    async def missing(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        text = "there is no such path" if status == 404 else "the path has no such method"
        return _JsonResponse(_error(text, "see /openapi.json"), status, getattr(error, "headers", None))

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/sessions", post(server.begin), methods=["POST"]),
        Route("/sessions/{id}/act", post(server.act), methods=["POST"]),
        Route("/sessions/{id}/reset", post(server.reset), methods=["POST"]),
        Route("/sessions/{id}", post(server.end), methods=["DELETE"]),
        Route("/act", post(server.act), methods=["POST"]),
        WebSocketRoute("/ws", server.socket),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: missing, 405: missing})
    return _Guard(app, server, token=token, hosts=hosts)


class _Guard:
    """Refuses requests without the token, for another host, or from a page of another site."""

    def __init__(self, app: ASGIApp, server: _PolicyServer, *, token: str, hosts: Collection[str]) -> None:
        self._app, self._server, self._token, self._hosts = app, server, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        has_token = is_token(parse_bearer(headers.get("authorization", "")), self._token)
        if not has_token and scope["type"] == "http":
            send = close_after(send)
        refusal = self._refusal(scope["path"], headers, has_token=has_token)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._server.count(refusal.status_code)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await refusal(scope, receive, send)

    def _refusal(self, path: str, headers: Headers, *, has_token: bool) -> Response | None:
        if self._hosts and not is_asked(headers, self._hosts):
            return _JsonResponse(_error("this server answers for other hosts only", "see --host"), 421)
        if has_token or path in _OPEN:
            return None
        text = "the token is missing or wrong"
        return _JsonResponse(_error(text, "send Authorization: Bearer TOKEN"), 401, {"www-authenticate": "Bearer"})


def _read(content: Any, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read(content)
    except ValueError as error:
        raise Refused(400, f"the body cannot be read: {str(error)[:200]}", "send a JSON object") from error


def _only(given: Mapping[str, Any], *names: str) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise Refused(422, f"'{unknown[0][:50]}' is unknown", f"known are {', '.join(names)}")


def _error(error: str, hint: str) -> dict[str, Any]:
    return {"error": error} | ({"hint": hint} if hint else {})
