"""The pages of `amago view` in a browser: what is drawn, what keys do, and that a lake's texts stay text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.stages import collect, train
from tests.browser.harness import Browser, BrowserPage
from tests.lake.factories import SCHEMA, columns, derive
from tests.stages.recipes import tiny
from tests.view.lakes import episode, put
from tests.view.served import Served, served

for module in ("starlette", "uvicorn"):
    pytest.importorskip(module, reason='no server here: pip install "amago[view]"')

EVIL = "<img src=x onerror=\"document.body.dataset.hacked='yes'\"><script>document.body.dataset.hacked='yes'</script>"
INK = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].some(part => part)"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """130 trajectories with pictures and missions; the longest, of 30 steps in three attempts, is relabelled."""
    made = Lake.create(tmp_path_factory.mktemp("view") / "lake")
    rng = np.random.default_rng(0)
    with made.writer(SCHEMA, seal_seconds=1e9) as writer:
        for number in range(129):
            info = TrajectoryInfo(
                env="maze", task=f"t{number % 5}", policy_version=number // 10, success=number % 2 == 0
            )
            writer.append(columns(rng, 2 + number % 20), info)
    values = episode(30, missions={0: "go left", 9: "go right"})
    values["reset"][[10, 20]] = 1
    info = TrajectoryInfo(env="play", task="..G/.#./S..", success=True, attempts=(False, True, True), policy_version=99)
    base = put(made, values, info)
    derive(made, {base: {"reward": np.arange(31, dtype=np.float32)}})
    return made


@pytest.fixture(scope="module")
def server(lake: Lake) -> Iterator[Served]:
    with served(lake.path) as running:
        yield running


@pytest.fixture(scope="module")
def longest(lake: Lake) -> str:
    """The uid of the original of 30 steps."""
    return str(next(iter(lake.sql("select uid from trajectories where length = 30 and base_uid is null")))["uid"])


COUNT_INK = """(canvas, ink) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {
    const near = [0, 1, 2].every((part) => Math.abs(data[at + part] - ink[part]) < 30);
    if (near && data[at + 3] > 128) found += 1;
  }
  return found;
}"""


def until(page: Any, condition: str) -> None:
    """Wait for a condition, given as a function: the page's policy forbids to evaluate text."""
    page.wait_for_function(f"() => {condition}")


def rows(page: Any) -> list[str]:
    """Return the first cell of each row."""
    return [text.split("\t")[0] for text in page.locator("#table tbody tr").all_inner_texts()]


def open_list(browser: Browser, server: Served, state: str = "", **more: Any) -> BrowserPage:
    opened = browser.open(server.at(state), **more)
    opened.page.wait_for_selector("#table tbody a.uid")
    return opened


def open_one(browser: Browser, server: Served, state: str, *, lanes: int = 3, **more: Any) -> BrowserPage:
    opened = browser.open(server.at(state), **more)
    until(opened.page, f"document.querySelectorAll('.lane canvas').length >= {lanes}")
    until(opened.page, "!document.querySelector('#origin .loading')")
    return opened


def test_the_table_and_the_curve_are_drawn(browser: Browser, server: Served) -> None:
    page = open_list(browser, server).page
    until(page, "document.querySelector('#summary').textContent.includes('131 trajectories')")
    assert len(rows(page)) == 100
    assert "token" not in page.url
    curve = page.wait_for_selector("#curve canvas")
    assert curve.evaluate(INK)
    assert "Returns over time" in curve.get_attribute("aria-label")


def test_pages_follow_each_other(browser: Browser, server: Served) -> None:
    page = open_list(browser, server).page
    first = rows(page)
    until(page, "document.querySelector('#range').textContent.includes('of 131')")
    assert page.inner_text("#range") == "1–100 of 131"
    page.click("#next")
    until(page, "document.querySelector('#range').textContent.startsWith('101')")
    second = rows(page)
    assert (len(second), set(first) & set(second)) == (31, set())
    assert page.is_disabled("#next")
    page.click("#previous")
    until(page, "document.querySelector('#range').textContent.startsWith('1–')")
    assert rows(page) == first
    page.go_back()
    until(page, "document.querySelector('#range').textContent.startsWith('101')")


def test_sql_filters_and_a_heading_sorts(browser: Browser, server: Served) -> None:
    page = open_list(browser, server).page
    page.fill("#where", "success and task = 't1' and base_uid is null")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#summary').textContent.startsWith('matching: 13 ')")
    assert len(rows(page)) == 13
    page.click("th[data-name=length] button")
    page.wait_for_selector("th[data-name=length][aria-sort=descending]")
    lengths = [int(text) for text in page.locator("#table tbody tr td:nth-child(4)").all_inner_texts()]
    assert lengths == sorted(lengths, reverse=True)
    assert "where=success" in page.url


def test_wrong_sql_shows_its_error(browser: Browser, server: Served) -> None:
    opened = open_list(browser, server)
    opened.page.fill("#where", "succes")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("#where-error:not([hidden])")
    assert "LINE 1: succes\n        ^" in opened.page.text_content("#where-error")
    assert opened.page.get_attribute("#where", "aria-invalid") == "true"
    opened.errors.clear()  # the browser reports the response 400
    opened.page.click("#clear")
    opened.page.wait_for_selector("#where-error", state="hidden")


def test_a_query_shows_its_rows_with_links(browser: Browser, server: Served, longest: str) -> None:
    opened = open_list(browser, server)
    page = opened.page
    page.click("#console summary")
    page.fill("#sql", "select uid, length from trajectories where length = 30 and base_uid is null")
    page.click("#ask button")
    page.wait_for_selector("#answer a")
    assert page.inner_text("#answer tbody").split() == [longest, "30"]
    page.fill("#sql", "drop table trajectories")
    page.click("#ask button")
    page.wait_for_selector("#sql-error:not([hidden])")
    assert "one SELECT" in page.inner_text("#sql-error")
    opened.errors.clear()


def test_a_trajectory_has_pictures_lanes_texts_and_attempts(browser: Browser, server: Served, longest: str) -> None:
    page = open_one(browser, server, f"uid={longest}&t=12").page
    assert all(canvas.evaluate(INK) for canvas in page.locator(".lane canvas").all())
    assert page.locator(".lane figcaption strong").all_inner_texts()[:2] == ["reward", "action"]
    frame = page.wait_for_selector("img.frame[src*='step=12']")
    until(page, "document.querySelector('img.frame').naturalWidth === 16")
    assert frame.get_attribute("alt") == "obs.image at step 12"
    assert page.wait_for_selector("canvas.strip").evaluate(INK)
    assert page.inner_text(".texts li:nth-child(2)").split(None, 1) == ["9", "go right"]
    assert page.get_attribute(".attempts", "aria-label") == "2 of 3 attempts succeeded"
    assert page.inner_text(".map").split("\n")[0] == ". . G"
    assert page.inner_text("#moment caption") == "Step 12"


def test_the_numbers_are_those_of_the_step_under_the_cursor(
    browser: Browser, server: Served, lake: Lake, longest: str
) -> None:
    stored = list(lake.sql(f"select t, action, reward from steps where uid = '{longest}' order by t"))
    page = open_one(browser, server, f"uid={longest}").page
    for step in (0, 7, 29):
        page.locator("#slider").fill(str(step))
        until(page, f"document.querySelector('#moment caption').textContent.startsWith('Step {step}')")
        shown = dict(row.split("\t") for row in page.inner_text("#moment tbody").split("\n"))
        assert int(shown["action"]) == stored[step + 1]["action"]
        assert float(shown["reward"]) == pytest.approx(stored[step + 1]["reward"], rel=1e-5)


def test_the_pointer_moves_the_cursor_and_a_drag_zooms(browser: Browser, server: Served, longest: str) -> None:
    page = open_one(browser, server, f"uid={longest}").page
    box = page.locator(".lane .chart").first.bounding_box()
    left, width = box["x"] + 58, box["width"] - 58 - 12
    page.mouse.move(left + width * (15.5 / 31), box["y"] + 40)
    until(page, "document.querySelector('#moment caption').textContent.startsWith('Step 15')")
    until(page, "location.hash.includes('t=15')")
    page.mouse.move(left + width * (10.5 / 31), box["y"] + 40)
    page.mouse.down()
    page.mouse.move(left + width * (19.5 / 31), box["y"] + 40, steps=4)
    page.mouse.up()
    until(page, "location.hash.includes('from=10') && location.hash.includes('to=20')")
    until(page, "document.querySelector('#window').textContent === 'steps 10 to 19 of 30'")


def test_the_relabelled_version_is_beside_its_original(browser: Browser, server: Served, longest: str) -> None:
    page = open_one(browser, server, f"uid={longest}").page
    label = page.locator(".lane canvas").first.get_attribute("aria-label")
    assert "relabelled" not in label
    page.click("#origin li button")
    until(
        page,
        "document.querySelector('.lane canvas').getAttribute('aria-label').includes('relabelled reward from 1 to 30')",
    )
    assert "original" in page.locator(".lane canvas").first.get_attribute("aria-label")
    assert "with=" in page.url
    page.click("#origin li a")
    until(page, "document.querySelector('#origin h3')?.textContent === 'Who acted in its original'")
    until(page, "document.querySelector('.lane canvas')?.getAttribute('aria-label').includes('original reward')")


def test_a_link_reopens_exactly_this(browser: Browser, server: Served, longest: str) -> None:
    page = open_one(browser, server, f"uid={longest}&from=5&to=25&t=9&with=none&lanes=reward%1Fobs.many", lanes=2).page
    state = page.url.partition("#")[2]
    again = open_one(browser, server, state, lanes=2).page
    assert again.inner_text("#window") == "steps 5 to 24 of 30"
    assert again.inner_text("#moment caption") == "Step 9"
    assert again.locator(".lane figcaption strong").all_inner_texts() == ["reward", "obs.many"]


def test_everything_can_be_done_with_keys(browser: Browser, server: Served) -> None:
    page = open_list(browser, server).page
    page.keyboard.press("/")
    page.keyboard.type("length = 30 and base_uid is null")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#table tbody a.uid').length === 1")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.lane canvas').length >= 3")
    caption = "document.querySelector('#moment caption').textContent"
    for key, step in (("ArrowRight", 1), ("Shift+ArrowRight", 11), ("ArrowLeft", 10), ("End", 30), ("Home", 0)):
        page.keyboard.press(key)
        until(page, f"{caption}.startsWith('Step {step}')")
    page.keyboard.press("+")
    until(page, "location.hash.includes('to=')")
    page.keyboard.press("0")
    until(page, "!location.hash.includes('to=')")
    page.keyboard.press(" ")
    until(page, "document.querySelector('#play').textContent === 'Pause'")
    until(page, f"{caption}.startsWith('Step 2')")
    page.keyboard.press(" ")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector("#list:not([hidden])")
    assert page.evaluate("document.activeElement.className") == "uid"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")


def test_the_table_follows_a_collector(browser: Browser, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    with served(lake.path) as server:
        page = browser.open(server.address).page
        page.wait_for_selector("td.empty")
        assert "No trajectories yet" in page.inner_text("td.empty")
        uid = put(lake, columns(np.random.default_rng(0), 3), schema=SCHEMA)
        page.wait_for_selector(f"a.uid[title='{uid}']")
        second = put(lake, columns(np.random.default_rng(1), 4), schema=SCHEMA)
        page.wait_for_selector(f"tr.new a.uid[title='{second}']")
        until(page, "document.querySelector('#figures').textContent.startsWith('2 trajectories')")
        page.fill("#where", "length < 9")
        page.keyboard.press("Enter")
        page.click("th[data-name=length] button")
        page.wait_for_selector("th[aria-sort=descending][data-name=length]")
        put(lake, columns(np.random.default_rng(2), 5), schema=SCHEMA)
        page.wait_for_selector("#fresh:not([hidden])")
        page.click("#fresh")
        until(page, "document.querySelectorAll('#table tbody a.uid').length === 3")
        page.goto("about:blank")  # it would miss the server


def test_values_are_drawn_over_the_steps(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "run"
    collect.run(tiny(collect={"actors": 2, "steps": 20}), run=run)
    train.run(tiny(), run=run, lakes=[(run / "lake", 1.0)])
    with served(run, "--values", str(run)) as server:
        page = open_list(browser, server).page
        page.locator("#table tbody a.uid").first.click()
        until(page, "document.querySelectorAll('.lane canvas').length >= 6")
        names = page.locator(".lane figcaption strong").all_inner_texts()
        assert {"q and v", "advantage", "weight", "entropy"} <= set(names)
        assert all(canvas.evaluate(INK) for canvas in page.locator(".lane canvas").all())
        page.wait_for_selector("#moment th:text-is('advantage')")
        shown = dict(row.split("\t") for row in page.inner_text("#moment tbody").split("\n"))
        q, v, advantage = (float(shown[name].replace(",", "")) for name in ("q", "v", "advantage"))
        assert advantage == pytest.approx(q - v, abs=2e-3)
        page.wait_for_selector("img.frame[alt^='environment (drawn)']")
        until(page, "document.querySelector('img.frame').naturalWidth > 100")
        page.wait_for_selector("#origin h3")
        assert "could draw it from update 1 on" in page.inner_text("#origin")
        page.goto("about:blank")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    lake = Lake.create(tmp_path_factory.mktemp("hostile") / "lake")
    info = TrajectoryInfo(env=EVIL, task=EVIL, policy_id=EVIL, collector=EVIL, goal_text=EVIL, tags={EVIL: EVIL})
    uid = put(lake, episode(4, missions={0: EVIL[:80]}), info)
    with served(lake.path) as server:
        yield server, uid


def test_what_others_wrote_stays_text(browser: Browser, hostile: tuple[Served, str]) -> None:
    server, uid = hostile
    opened = open_list(browser, server, f"cols={'%1F'.join(['uid', 'env', 'task', 'goal_text', 'collector', 'tags'])}")
    page = opened.page
    assert EVIL[:40] in page.inner_text("#table")
    page.click("#console summary")
    page.fill("#sql", f"select '{EVIL.replace(chr(39), chr(39) * 2)}' as \"{EVIL.replace(chr(34), chr(34) * 2)}\"")
    page.click("#ask button")
    page.wait_for_selector("#answer td")
    assert page.locator("#answer th").inner_text() == page.locator("#answer td").inner_text() == EVIL
    page.fill("#where", EVIL)
    page.keyboard.press("Enter")
    page.wait_for_selector("#where-error:not([hidden])")
    assert "<img" in page.inner_text("#where-error")
    opened.errors.clear()  # the browser reports the response 400
    one = open_one(browser, server, f"uid={uid}").page
    assert EVIL in one.inner_text(".goal")
    assert EVIL[:80] in one.inner_text(".texts")
    assert one.locator("dl.facts dt").last.inner_text() == EVIL
    for each in (page, one):
        assert each.evaluate("document.body.dataset.hacked") is None
        assert each.locator("main script, main img:not(.frame)").count() == 0
        assert not [
            request for request in each.evaluate("performance.getEntries().map(entry => entry.name)") if "/x" in request
        ]


def test_the_policy_would_stop_a_script_that_got_in(browser: Browser, server: Served) -> None:
    opened = open_list(browser, server)
    opened.page.evaluate("html => { document.querySelector('#said').innerHTML = html }", EVIL)
    opened.page.evaluate(
        "() => { const added = document.createElement('script');"
        " added.textContent = 'document.body.dataset.hacked = 1'; document.body.append(added) }"
    )
    opened.page.wait_for_timeout(300)
    assert opened.page.evaluate("document.body.dataset.hacked") is None
    assert any("Content Security Policy" in error for error in opened.errors)
    opened.errors.clear()


def test_a_server_that_is_gone_is_reported(browser: Browser, lake: Lake) -> None:
    with served(lake.path) as server:
        opened = open_list(browser, server)
    opened.page.wait_for_selector("#banner:not([hidden])")
    assert "still running" in opened.page.inner_text("#banner")
    opened.errors.clear()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_are_accessible_and_fit(browser: Browser, server: Served, longest: str, dark: bool, width: int) -> None:
    table = open_list(browser, server, dark=dark, width=width)
    table.page.wait_for_selector("#curve canvas")
    one = open_one(browser, server, f"uid={longest}", dark=dark, width=width)
    one.page.click("#rows summary")
    for opened in (table, one):
        assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        colour = opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (colour == "rgb(20, 23, 27)") == dark
        assert opened.accessibility_problems() == []


@pytest.mark.parametrize(("dark", "ink"), [(False, (77, 85, 96)), (True, (169, 177, 187))])
def test_axes_have_labels_in_the_colour_of_the_theme(
    browser: Browser, server: Served, longest: str, dark: bool, ink: tuple[int, int, int]
) -> None:
    for opened in (open_list(browser, server, dark=dark), open_one(browser, server, f"uid={longest}", dark=dark)):
        opened.page.wait_for_selector("canvas[role=img]")
        counts = [canvas.evaluate(COUNT_INK, ink) for canvas in opened.page.locator("canvas[role=img]").all()]
        assert max(counts) > 50, counts


def test_the_theme_can_be_switched_and_is_remembered(browser: Browser, server: Served) -> None:
    page = open_list(browser, server).page
    page.click("#theme")
    dark = "getComputedStyle(document.documentElement).backgroundColor === 'rgb(20, 23, 27)'"
    assert page.evaluate(dark)
    page.reload()
    until(page, dark)
