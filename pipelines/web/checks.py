"""Checks of requests that all local servers make: which host they name, the token, and the size of the body."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Send

LOCAL = frozenset({"127.0.0.1", "localhost"})


class TooLarge(Exception):
    """A body has more bytes than allowed."""


def is_asked(headers: Headers, hosts: Collection[str] = LOCAL) -> bool:
    """Decide whether a request has one Host header, which names one of `hosts` at any port, as one may be forwarded.

    A request with two Host headers is refused, since parsers differ in which of them counts.
    """
    given = headers.getlist("host")
    name, _, port = given[0].partition(":") if given else ("", "", "")
    return len(given) == 1 and name.lower() in hosts and (not port or port.isdigit())


def is_token(given: str, token: str) -> bool:
    """Compare a given token in a time that does not depend on where the two differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def parse_bearer(authorization: str) -> str:
    """Extract the token of an Authorization header; "" if it has none."""
    scheme, _, token = authorization.partition(" ")
    return token if scheme.lower() == "bearer" else ""


def close_after(send: Send) -> Send:
    """Wrap `send` of a request without a token: its connection closes after the response, so strangers keep none."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return send_and_close


async def receive_body(request: Request, most: int) -> bytes | None:
    """Receive the body of a request; None if the client went away. TooLarge beyond `most` bytes."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise TooLarge
    except ClientDisconnect:
        return None
    return body
