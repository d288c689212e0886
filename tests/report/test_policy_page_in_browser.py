"""The page of the zoo's quickstart, from a file, without a network: it plays, and adapts as evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config import zoo
from pipelines.errors import AmagoError
from pipelines.events import silent
from pipelines.files.checksums import read_sealed
from pipelines.report import onnxruntime_web, policy_page
from tests.browser.harness import Browser, BrowserPage
from tests.export.zoo import with_onnx

pytest.importorskip("onnxruntime")
_HANGS = 180_000  # milliseconds, on a busy host too
INK = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].some(part => part)"
LAKES = 60


@pytest.fixture(scope="module")
def evaluated() -> dict[str, Any]:
    """The scores of the policy, from the report of its proof."""
    report = json.loads((zoo.directory("quickstart") / "parity.json").read_text())
    return dict(report["evaluations"]["original"])


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory, evaluated: dict[str, Any]) -> Path:
    """The page, made once."""
    try:
        runtime = onnxruntime_web.files("", silent)
    except AmagoError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("page")
    exported = with_onnx("quickstart", folder / "bundle")
    record = read_sealed(exported / "policy.json")
    files = {name: (exported / name).read_bytes() for name in record.pop("files")}
    content = policy_page.page(policy_page.lakes_of(record["env"]), record, files, evaluated, runtime)
    assert len(content) < 8_000_000
    (folder / "page.html").write_bytes(content)
    return folder / "page.html"


def until(page: Any, condition: str) -> None:
    page.wait_for_function(f"() => {condition}")


def opened(browser: Browser, lakes: Path, **more: Any) -> BrowserPage:
    """Open the page, which draws its lakes from a seed, and wait until the policy is there."""
    found = browser.open(f"{lakes.as_uri()}#seed=1", **more)
    found.page.set_default_timeout(_HANGS)
    until(found.page, "!document.querySelector('#step').disabled")
    return found


def shares(page: Any) -> np.ndarray:
    return np.array([float(row.get_attribute("data-share")) for row in page.query_selector_all("#scores tr")])


def play_many(page: Any) -> np.ndarray:
    page.click("#many")
    until(page, f"document.querySelector('#played').textContent.startsWith('{LAKES} lakes')")
    return shares(page)


def interval(successes: float, count: int) -> tuple[float, float]:
    """Return a 99% interval of a share (Wilson)."""
    z, share = 2.58, successes
    middle, spread = share + z * z / (2 * count), z * np.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    return (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)


def test_five_attempts_are_played_and_drawn(browser: Browser, lakes: Path) -> None:
    page = opened(browser, lakes).page
    page.fill("#speed", "6")
    assert page.inner_text("#pace") == "no pause"
    page.click("#play")
    until(page, "document.querySelector('#status').textContent.startsWith('Done')")
    page.click("#play")
    assert page.inner_text("#play") == "Play"
    outcomes = page.locator("#attempts li").all()
    assert len(outcomes) == 5
    assert all(each.get_attribute("class") in ("goal", "fell", "late") for each in outcomes)
    assert all(canvas.evaluate(INK) for canvas in page.query_selector_all("#memory canvas"))
    assert len(page.query_selector_all("#memory canvas.tensor")) == 4  # keys and values of two layers
    assert page.inner_text("#played").startswith("1 lake played")
    page.focus("#memory")
    page.keyboard.press("End")
    said = page.inner_text("#chosen")
    assert "attempt 5: at row" in said
    page.keyboard.press("Home")
    assert page.inner_text("#chosen").startswith("Step 1, attempt 1: at row 1, column 1")
    assert "Without it, the last action's probabilities would move by" in page.inner_text("#chosen")


def test_success_rises_by_attempt_as_evaluated(browser: Browser, lakes: Path, evaluated: dict[str, Any]) -> None:
    found = play_many(opened(browser, lakes).page)
    assert found[-1] > found[0] + 0.3
    for share, attempt in zip(found, evaluated["per_attempt"], strict=True):
        low, high = interval(share, LAKES)
        assert low <= attempt["success_ci95"][1], (found, attempt)
        assert high >= attempt["success_ci95"][0], (found, attempt)


def test_without_memory_it_does_not_adapt(browser: Browser, lakes: Path) -> None:
    page = opened(browser, lakes).page
    remembering = play_many(page)
    page.check("#forget")
    until(page, "document.querySelector('#played').textContent.startsWith('No lake')")
    forgetting = play_many(page)
    assert "with its memory erased" in page.inner_text("#played")
    assert forgetting[-1] < remembering[-1] - 0.2


def test_holes_are_dug_by_keyboard(browser: Browser, lakes: Path) -> None:
    page = opened(browser, lakes).page
    page.click("#step")
    for cell in (1, 4):
        button = page.locator("#board button").nth(cell)
        button.focus()
        if button.get_attribute("aria-pressed") == "false":
            page.keyboard.press("Space")
            until(page, f"document.querySelectorAll('#board button')[{cell}].ariaPressed === 'true'")
    until(page, "document.querySelector('#status').textContent.includes('without a way to the goal')")
    assert page.inner_text("#status").startswith("Attempt 1 of 5.")
    page.click("#new")
    until(page, "!document.querySelector('#status').textContent.includes('Your lake')")


def test_steps_are_taken_one_at_a_time(browser: Browser, lakes: Path) -> None:
    page = opened(browser, lakes).page
    page.focus("#memory")
    for count in (1, 2, 3):
        page.click("#step")
        until(page, "document.querySelector('#last .taken')")
        page.focus("#memory")
        page.keyboard.press("End")
        until(page, f"document.querySelector('#chosen').textContent.startsWith('Step {count},')")


@pytest.mark.parametrize("dark", [False, True])
def test_no_accessibility_problem(browser: Browser, lakes: Path, dark: bool) -> None:
    found = opened(browser, lakes, dark=dark)
    play_many(found.page)
    found.page.click("#step")
    assert found.accessibility_problems(least="moderate") == []


def test_a_phone_scrolls_only_downwards(browser: Browser, lakes: Path) -> None:
    page = opened(browser, lakes, width=390, height=844).page
    play_many(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_an_altered_policy_does_not_play(browser: Browser, lakes: Path, tmp_path: Path) -> None:
    text = lakes.read_text()
    place = text.index('"model":"') + 1000
    (tmp_path / "page.html").write_text(text[:place] + ("B" if text[place] == "A" else "A") + text[place + 1 :])
    found = browser.open(tmp_path / "page.html")
    found.page.wait_for_selector("#failure:not([hidden])", timeout=_HANGS)
    assert "policy.onnx is not as it was written" in found.page.inner_text("#failure")
    assert found.page.is_disabled("#play")
    found.errors.clear()


def test_an_altered_script_does_not_run(browser: Browser, lakes: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(lakes.read_text().replace("class Page {", "class Page {/**/", 1))
    found = browser.open(tmp_path / "page.html")
    assert any("Content Security Policy" in error for error in found.errors)
    assert found.page.is_disabled("#play")
    found.errors.clear()
