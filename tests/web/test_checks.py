from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason='no server here: pip install "amago[view]"')

from starlette.datastructures import Headers

from pipelines.web.checks import is_asked, is_token, parse_bearer


@pytest.mark.parametrize(
    ("header", "ours"),
    [
        ("127.0.0.1", True),
        ("localhost:8650", True),
        ("LOCALHOST:1", True),
        ("", False),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost:80@evil.example", False),
    ],
)
def test_only_this_host_is_accepted(header: str, ours: bool) -> None:
    assert is_asked(Headers(raw=[(b"host", header.encode())])) is ours


def test_two_host_headers_are_refused() -> None:
    one, two = (b"host", b"localhost"), (b"host", b"evil.example")
    assert is_asked(Headers(raw=[one]))
    for raw in ([], [two], [one, two], [one, one]):
        assert not is_asked(Headers(raw=raw))


def test_a_bearer_token_is_compared_whole() -> None:
    assert is_token(parse_bearer("Bearer abc"), "abc")
    assert is_token(parse_bearer("bearer abc"), "abc")
    for other in ("", "abc", "Basic abc", "Bearer ab", "Bearer abcd", "Bearer \udcff"):
        assert not is_token(parse_bearer(other), "abc")
