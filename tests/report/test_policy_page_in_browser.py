"""The page of the zoo's quickstart, from a file, without a network: it plays, and adapts as evaluated. Pages of other
memories play, too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config import places
from pipelines.errors import AmagoError
from pipelines.events import silent
from pipelines.export import forms
from pipelines.export.step_function import StepFunction
from pipelines.files.checksums import read_sealed
from pipelines.learning.agent import Agent
from pipelines.learning.bundle import FORMAT, VERSION
from pipelines.report import onnxruntime_web, policy_page
from tests.browser.harness import Browser, BrowserPage
from tests.export.test_step_function import TRANSFORMER
from tests.export.zoo import with_onnx
from tests.learning.factories import settings
from tests.tiers import some

pytest.importorskip("onnxruntime")
INK = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].some(part => part)"
LAST = "document.querySelector('#memory').dispatchEvent(new KeyboardEvent('keydown', { key: 'End' }))"
CHOSEN = "document.querySelector('#chosen').textContent"
LAKES = 60


def runtime() -> dict[str, bytes]:
    """Return ONNX Runtime for pages; skip the test where it cannot be had."""
    try:
        return onnxruntime_web.read_files("", silent)
    except AmagoError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def evaluated() -> dict[str, Any]:
    """The scores of the policy, from the report of its proof."""
    report = json.loads((places.locate_in_zoo("quickstart") / "parity.json").read_text())
    return dict(report["evaluations"]["original"])


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory, evaluated: dict[str, Any]) -> Path:
    """The page, made once."""
    folder = tmp_path_factory.mktemp("page")
    exported = with_onnx("quickstart", folder / "bundle")
    record = read_sealed(exported / "policy.json")
    files = {name: (exported / name).read_bytes() for name in record.pop("files")}
    content = policy_page.write_page(policy_page.make_environment(record), record, files, evaluated, runtime())
    assert len(content) < 8_000_000
    assert b"evaluated in 500 episodes, 95% interval" in content
    assert b"greedy actions" in content
    (folder / "page.html").write_bytes(content)
    return folder / "page.html"


def until(page: Any, condition: str) -> None:
    page.wait_for_function(f"() => {condition}")


def opened(browser: Browser, lakes: Path, **more: Any) -> BrowserPage:
    """Open the page, which draws its lakes from a seed, and wait until the policy is there."""
    found = browser.open(f"{lakes.as_uri()}#seed=1", **more)
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


def test_policy_without_memory_does_not_adapt(browser: Browser, lakes: Path) -> None:
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
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(box => box.scrollWidth <= box.clientWidth)")


def test_an_altered_policy_does_not_play(browser: Browser, lakes: Path, tmp_path: Path) -> None:
    text = lakes.read_text()
    place = text.index('"model":"') + 1000
    (tmp_path / "page.html").write_text(text[:place] + ("B" if text[place] == "A" else "A") + text[place + 1 :])
    found = browser.open(tmp_path / "page.html")
    found.page.wait_for_selector("#failure:not([hidden])")
    assert "policy.onnx is not as it was written" in found.page.inner_text("#failure")
    assert found.page.is_disabled("#play")
    found.errors.clear()


def test_an_altered_script_does_not_run(browser: Browser, lakes: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(lakes.read_text().replace("class Page {", "class Page {/**/", 1))
    found = browser.open(tmp_path / "page.html")
    assert any("Content Security Policy" in error for error in found.errors)
    assert found.page.is_disabled("#play")
    found.errors.clear()


STATES = {"kind": "gru", "num_layers": 2, "hidden": 12, "output": 10}
MEMORIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gru": (STATES, ["state, layer 1", "state, layer 2"]),
    "mingru": ({"kind": "mingru", "d_model": 16, "num_layers": 1}, ["state, layer 1"]),
    "mamba": ({"kind": "mamba", "d_model": 16, "num_layers": 1}, ["state 1, layer 1", "state 2, layer 1"]),
    "window": (TRANSFORMER | {"num_layers": 1, "position": "rope", "window": 4}, ["keys, layer 1", "values, layer 1"]),
}
SMALL = {"name": "meta-frozen-lake", "size": 3, "attempts": 3, "max_episode_steps": 4}


def untrained(sequence: dict[str, Any], to: Path) -> Path:
    """Write the page of a policy with random weights, whose probabilities depend on its memory."""
    agent_settings = settings(sequence=sequence)
    record = {"env": SMALL, "agent": agent_settings.model_dump(mode="json"), "update": 0}
    shown = policy_page.make_environment(record)
    owner = Agent(shown.spec.spaces, agent_settings).eval()
    with torch.no_grad():
        owner.heads.actor.net.last.weight.mul_(100)
    function = StepFunction(owner, capacity=12)
    about = record | {"spaces": owner.spaces.to_json(), **forms.describe_step(function), "format": FORMAT}
    files = forms.make_files(function, (forms.ONNX,))
    to.write_bytes(policy_page.write_page(shown, about | {"version": VERSION}, files, None, runtime()))
    return to


def step(page: Any) -> str:
    """Take a step; return what the page says of it."""
    before = page.evaluate(f"({LAST}, {CHOSEN})")
    page.click("#step")
    until(page, f"({LAST}, {CHOSEN} !== {json.dumps(before)})")
    return str(page.inner_text("#chosen"))


@pytest.mark.parametrize("kind", some(MEMORIES, 0, 3))
def test_other_memories_are_shown_step_by_step(browser: Browser, tmp_path: Path, kind: str) -> None:
    sequence, titles = MEMORIES[kind]
    found = opened(browser, untrained(sequence, tmp_path / "page.html"))
    page = found.page
    while not page.inner_text("#status").startswith("Done"):
        step(page)
    effect = "effect on the last action" if kind == "window" else "effect on each action"
    assert [each.inner_text() for each in page.query_selector_all("#memory > span")] == [
        "what happened",
        effect,
        *titles,
    ]
    assert all(canvas.evaluate(INK) for canvas in page.query_selector_all("#memory canvas"))
    page.focus("#memory")
    page.keyboard.press("Home")
    assert ("Erased from memory." in page.inner_text("#chosen")) == (kind == "window")  # it is out of the window
    assert "probabilities would move" not in page.inner_text("#chosen")  # nothing was remembered yet
    if kind != "window":
        assert "effect is that of the whole state" in page.inner_text("#memory-about")
        effects = []
        for _ in range(4):
            page.keyboard.press("ArrowRight")
            effects += re.findall(r"Without the state, this action's .* by (\d+)%", page.inner_text("#chosen"))
        assert len(effects) == 4
        assert kind != "gru" or max(map(int, effects)) > 0
    page.click("#many")
    until(page, f"document.querySelector('#played').textContent.startsWith('{LAKES + 1} lakes')")
    if kind == "gru":
        assert found.accessibility_problems(least="moderate") == []


@pytest.mark.full
def test_an_erased_state_has_no_effect_on_the_next_action(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, untrained(STATES, tmp_path / "page.html")).page
    page.check("#forget")
    said = [step(page)]
    while not said[-1].startswith(f"Step {len(said)}, attempt 2:"):
        said.append(step(page))
    assert ["Without the state" in text for text in said] == [False, *[True] * (len(said) - 2), False]
