"""Access to the local server: checks before a request, and headers of every response.

The server shows experience, and evaluates SQL, to its user only. Other users of the machine lack the token. Pages of
other sites in the user's browser lack it too, cannot read a response (no CORS), cannot become our host by DNS (the Host
header is checked), and cannot frame a page. Scripts run only from our own files, so text of a lake stays text.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.web.checks import close_after, is_asked, is_token, parse_bearer

_POLICY = "; ".join(
    [
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data: blob:"),
        *("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    ]
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
}
_READS = ("GET", "HEAD")
_NO_TOKEN = "Open the address that `amago view` printed: it has the token of this server.\n"


class GuardedApp:
    """Wrapper of an application, which passes on only requests that have the token, name this host, and do not write.

    `posts`: the paths that may be sent a query. `port` distinguishes the cookies of several servers on one host.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int, posts: frozenset[str]) -> None:
        self._app, self._token, self._posts = app, token, posts
        self._cookie = f"amago_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, with_headers)
        else:
            await refusal(scope, receive, close_after(with_headers))

    def _refusal(self, scope: Scope) -> Response | None:
        """Answer a request that is refused or redirected; None for a request that may pass."""
        headers, path = Headers(scope=scope), scope["path"]
        if not is_asked(headers):
            return PlainTextResponse("This server answers for 127.0.0.1 and localhost only.\n", 421)
        if scope["method"] not in _READS and not (scope["method"] == "POST" and path in self._posts):
            return PlainTextResponse("This server only reads.\n", 405, {"allow": ", ".join(_READS)})
        # A browser says which site sent a request. A link elsewhere may lead to the page itself.
        origin = headers.get("origin")
        is_foreign = origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
        is_own = path == "/" or headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
        if is_foreign or not is_own:
            return PlainTextResponse("Requests from other sites are refused.\n", 403)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if path == "/" and is_token(given, self._token):
            response = RedirectResponse("/", 303)  # the address no longer has the token; what is after # remains
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
            return response
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        if is_token(cookie, self._token) or is_token(parse_bearer(headers.get("authorization", "")), self._token):
            return None
        return PlainTextResponse(_NO_TOKEN, 403)
