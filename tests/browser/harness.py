"""Pages in a real browser: Debian's Chromium, headless, driven by playwright.

Tests use the fixture `browser` (tests/conftest.py). A page that logs an error, or asks another host for something,
fails its test when the test ends. What is missing on this host (playwright, Chromium, axe-core) skips the test with the
reason. `python -m tests.npm` fetches axe-core.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import npm

IMPACTS = ("minor", "moderate", "serious", "critical")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Without a sandbox: containers have no user namespaces. Only our own pages are opened.
_ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking")
_HANGS = 180_000  # milliseconds, on a busy host too
_LOCAL = ("data", "blob", "about")


@dataclass
class BrowserPage:
    """An open page with what went wrong on it: `errors` of its scripts, and `foreign` requests, which are blocked.

    `page` is playwright's. A test that expects errors clears the list.
    """

    page: Any
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def require_clean(self) -> None:
        """Fail on a script error or a request to another host."""
        assert not self.errors, self.errors
        assert not self.foreign, self.foreign

    def accessibility_problems(self, *, least: str = "serious") -> list[str]:
        """Return axe-core's findings of impact `least` or worse, one line each; skip the test without axe-core."""
        axe = npm.folder("axe-core")
        if axe is None:
            pytest.skip("no axe-core here: python -m tests.npm")
        source = (axe / "axe.min.js").read_text(encoding="utf-8")
        session = self.page.context.new_cdp_session(self.page)  # not subject to the page's Content-Security-Policy
        session.send("Runtime.evaluate", {"expression": source})
        wanted = {"expression": "axe.run()", "awaitPromise": True, "returnByValue": True}
        answer = session.send("Runtime.evaluate", wanted)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        worst = IMPACTS[IMPACTS.index(least) :]
        return [
            f"{found['impact']}: {found['help']} ({found['id']}): {found['nodes'][0]['html'][:200]}"
            for found in answer["result"]["value"]["violations"]
            if found["impact"] in worst
        ]


class Browser:
    """A running Chromium; every page has a profile of its own."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self._opened: list[tuple[Any, BrowserPage]] = []

    def open(self, address: str | Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> BrowserPage:
        """Open a file, or a URL, and wait until it is loaded."""
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        context = self._chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(_HANGS)
        opened = BrowserPage(context.new_page())
        self._opened.append((context, opened))
        context.route(lambda requested: not _is_own(url, requested), lambda route: route.abort())
        page = opened.page
        page.on("request", lambda request: _is_own(url, request.url) or opened.foreign.append(request.url))
        page.on("websocket", lambda socket: _same_host(url, socket.url) or opened.foreign.append(socket.url))
        page.on("console", lambda message: message.type == "error" and opened.errors.append(message.text))
        page.on("pageerror", lambda error: opened.errors.append(str(error)))
        page.goto(url, wait_until="load")
        return opened

    def close_pages(self) -> list[BrowserPage]:
        """Close every page; return them, with what they reported."""
        opened, self._opened = self._opened, []
        for context, _ in opened:
            context.close()
        return [page for _, page in opened]


@contextmanager
def launched() -> Iterator[Browser]:
    """Start Chromium; skip the test where that is impossible."""
    sync_api = pytest.importorskip("playwright.sync_api", reason='no playwright here: pip install "amago[test]"')
    executable = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        try:
            yield Browser(chromium)
        finally:
            chromium.close()


def _is_own(page: str, requested: str) -> bool:
    """Return whether a page may ask for `requested`: its own host, or for a file nothing but itself."""
    if urlsplit(requested).scheme in _LOCAL:
        return True
    if urlsplit(page).scheme == "file":
        return requested.partition("#")[0] == page.partition("#")[0]
    return urlsplit(requested).scheme == urlsplit(page).scheme and _same_host(page, requested)


def _same_host(page: str, requested: str) -> bool:
    return urlsplit(requested).netloc == urlsplit(page).netloc
