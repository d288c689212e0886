"""The harness reports what a page does wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.harness import Browser

_PAGE = '<!doctype html><html lang="en"><title>Page</title><main><h1>Page</h1>{}</main></html>'


def _write(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(_PAGE.format(body), encoding="utf-8")
    return path


def test_script_errors_are_recorded(browser: Browser, tmp_path: Path) -> None:
    opened = browser.open(_write(tmp_path, "<script>console.error('first'); nothing();</script>"))
    assert [error.split(":")[0] for error in opened.errors] == ["first", "nothing is not defined"]
    opened.errors.clear()


def test_requests_to_other_hosts_and_files_are_recorded(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "other.js").write_text("")
    body = '<img alt="" src="http://192.0.2.1/a.png"><script src="other.js"></script><img alt="" src="data:,">'
    opened = browser.open(_write(tmp_path, body))
    found = sorted(opened.foreign)
    opened.foreign.clear()
    opened.errors.clear()
    assert [url.rpartition("/")[2] for url in found] == ["other.js", "a.png"]


def test_a_page_that_is_not_clean_fails_its_test(browser: Browser, tmp_path: Path) -> None:
    opened = browser.open(_write(tmp_path, "<script>nothing();</script>"))
    with pytest.raises(AssertionError, match="nothing is not defined"):
        opened.require_clean()
    opened.errors.clear()


def test_the_colour_scheme_and_the_width_are_the_wanted_ones(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(_write(tmp_path, ""), dark=True, width=390).page
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert page.evaluate("innerWidth") == 390


def test_accessibility_problems_are_found(browser: Browser, tmp_path: Path) -> None:
    found = browser.open(_write(tmp_path, "<input><p style='color:#eee;background:#fff'>pale</p>"))
    rules = " ".join(found.accessibility_problems())
    assert "(label)" in rules
    assert "(color-contrast)" in rules
    assert browser.open(_write(tmp_path, "<p>text</p>")).accessibility_problems() == []
