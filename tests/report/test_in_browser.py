"""Reports in a real browser: drawn, answering to mouse, keyboard and colour scheme, accessible, and asking nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.lake.store import Lake
from pipelines.report.run_report import make_page
from pipelines.runs.stored import read_run
from tests.browser.harness import Browser
from tests.lake import factories
from tests.report.test_markup import HOSTILE
from tests.report.test_run_report import hostile_run
from tests.runs.factory import make_run, write_evaluation

# Of a canvas: the number of different colours, and the colour of most of what is drawn.
_PIXELS = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = new Map();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) {
    const color = [data[at], data[at + 1], data[at + 2]].join();
    counts.set(color, (counts.get(color) || 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]).map(([color]) => color);
}"""
_DRAWN = """() => {
  const plots = [...document.querySelectorAll(".plot")];
  return plots.length && plots.every(plot => plot.dataset.drawn);
}"""


def run_of(folder: Path, name: str = "maze") -> Path:
    """Return a run with scores, attempts, metrics and a lake."""
    run = make_run(
        folder / name, scores={n: n / 50 for n in (10, 20, 30, 40)}, metrics=("loss", "q", "q@0.9"), lines=40
    )
    attempts = [{"attempt": n + 1, "success_mean": n / 4, "success_ci95": [0.0, 1.0]} for n in range(5)]
    figures = {"return_mean": 0.9, "return_ci95": [0.8, 1.0], "episodes": 9, "per_attempt": attempts}
    settings = {"split": "test", "label": "after training"}
    known = {"random": {"success": [0.1] * 5}, "optimal": {"success": [0.5, 1, 1, 1, 1]}}
    write_evaluation(run, 40, 0.9, series="attempts", metrics=figures, settings=settings, known=known)
    factories.fill(Lake.create(run / "lake"), [5, 9, 12, 7] * 4)
    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return make_page([read_run(run_of(folder))], sample=2).write(folder / "report.html")


def drawn(page: Any) -> Any:
    """Scroll to the end, so that every chart is drawn."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(_DRAWN)
    return page


def test_every_chart_is_drawn(browser: Browser, report: Path) -> None:
    page = drawn(browser.open(report).page)
    canvases = page.query_selector_all(".plot canvas")
    assert len(canvases) == len(page.query_selector_all(".plot")) >= 8
    for canvas in canvases:
        assert len(canvas.evaluate(_PIXELS)) > 3  # text and lines, not an empty canvas


def test_a_tooltip_follows_the_pointer(browser: Browser, report: Path) -> None:
    page = browser.open(report).page
    plot = page.locator(".plot").first
    page.wait_for_selector(".plot[data-drawn]")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 40)
    page.wait_for_selector("#vg-tooltip-element.visible")
    said = page.locator("#vg-tooltip-element").inner_text()
    assert "after training" in said
    assert "100.0%" in said


def test_dark_pages_have_other_colours_in_page_and_charts(browser: Browser, report: Path) -> None:
    pages = [drawn(browser.open(report, dark=dark).page) for dark in (False, True)]
    background, chart = (
        [page.evaluate("getComputedStyle(document.body).backgroundColor") for page in pages],
        [page.query_selector(".plot canvas").evaluate(_PIXELS) for page in pages],
    )
    assert background[0] != background[1]
    assert chart[0][:3] != chart[1][:3]


def test_charts_change_when_the_colour_scheme_does(browser: Browser, report: Path) -> None:
    page = drawn(browser.open(report).page)
    before = page.query_selector(".plot canvas").evaluate(_PIXELS)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "before => { const c = document.querySelector('.plot canvas'); return c && ("
        + _PIXELS
        + ")(c).join() !== before; }",
        arg=",".join(before),
    )


def table_of(page: Any, chart: str) -> list[list[str]]:
    """Open the table behind a chart and return its rows."""
    figure = page.locator("figure", has=page.get_by_role("heading", name=chart, exact=True))
    if figure.locator("details[open]").count() == 0:
        figure.locator("summary").click()
    rows = figure.locator("details tr")
    rows.first.wait_for()  # made when the table is opened
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def test_the_table_behind_a_chart_has_its_data(browser: Browser, report: Path) -> None:
    head, *rows = table_of(drawn(browser.open(report).page), "Return")
    assert head[:3] == ["line", "gradient updates", "return"]
    assert [row[:3] for row in rows if row[0] == "test tasks, 50 episodes"] == [
        ["test tasks, 50 episodes", str(update), str(update / 50)] for update in (10, 20, 30, 40)
    ]


def test_the_x_axis_can_be_chosen_by_keyboard(browser: Browser, report: Path) -> None:
    page = drawn(browser.open(report).page)
    assert table_of(page, "Return")[1][1] == "10"
    page.locator("input[name=axis]").first.focus()
    page.keyboard.press("ArrowRight")
    head, first, *_ = table_of(page, "Return")
    assert (head[1], first[1]) == ("environment steps", "100")


def test_lines_are_hidden_and_shown_by_keyboard(browser: Browser, report: Path) -> None:
    page = drawn(browser.open(report).page)
    button = page.locator(".key button", has_text="optimal")
    plot = page.locator("figure", has=button).locator(".plot")
    count = "plot => plot.querySelector('canvas').toDataURL()"
    before = plot.evaluate(count)
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    page.wait_for_function(
        "([plot, before]) => plot.querySelector('canvas').toDataURL() !== before", arg=[plot.element_handle(), before]
    )
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "true"


def test_a_chart_is_zoomed_and_reset_by_keyboard_and_wheel(browser: Browser, report: Path) -> None:
    page = drawn(browser.open(report).page)
    figure = page.locator("figure", has=page.get_by_role("heading", name="loss", exact=True))
    plot = figure.locator(".plot")
    plot.scroll_into_view_if_needed()
    look = "plot => plot.querySelector('canvas').toDataURL()"
    changed = "([plot, before]) => { const c = plot.querySelector('canvas'); return c && c.toDataURL() !== before; }"
    before = plot.evaluate(look)
    plot.focus()
    page.keyboard.press("+")
    page.wait_for_function(changed, arg=[plot.element_handle(), before])
    zoomed = plot.evaluate(look)
    page.keyboard.press("ArrowRight")
    page.wait_for_function(changed, arg=[plot.element_handle(), zoomed])
    page.keyboard.press("0")
    page.wait_for_function(
        "([plot, before]) => plot.querySelector('canvas').toDataURL() === before", arg=[plot.element_handle(), before]
    )
    top = page.evaluate("scrollY")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Shift")
    page.wait_for_function(changed, arg=[plot.element_handle(), before])
    assert page.evaluate("scrollY") == top


def test_every_control_is_reached_by_the_tab_key(browser: Browser, report: Path) -> None:
    page = drawn(browser.open(report).page)
    wanted = page.evaluate("document.querySelectorAll('a, button, summary, .plot, input[name=axis]:checked').length")
    reached = set()
    for _ in range(4 * wanted):
        page.keyboard.press("Tab")
        place = page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
        if place in reached:
            break
        reached.add(place)
    kinds = page.evaluate("places => places.map(n => document.querySelectorAll('*')[n].tagName)", sorted(reached))
    assert {"A", "INPUT", "BUTTON", "SUMMARY", "DIV"} <= set(kinds)
    assert len(reached) >= wanted


@pytest.mark.parametrize("dark", [False, True])
def test_no_accessibility_problem(browser: Browser, report: Path, dark: bool) -> None:
    opened = browser.open(report, dark=dark)
    drawn(opened.page)
    opened.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert opened.accessibility_problems(least="moderate") == []


# Sets the number of each tile, and returns over how many lines each is broken.
_LINES = """number => [...document.querySelectorAll(".tile dd")].map(value => {
  value.firstChild.textContent = number;
  const range = document.createRange();
  range.selectNode(value.firstChild);
  return new Set([...range.getClientRects()].map(line => line.top)).size;
})"""


@pytest.mark.parametrize("width", [390, 700, 900, 1280])
def test_numbers_of_tiles_are_not_broken(browser: Browser, report: Path, width: int) -> None:
    page = browser.open(report, width=width).page
    assert set(page.evaluate(_LINES, "123,024,000")) == {1}
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_small_charts_are_one_row_on_a_phone(browser: Browser, report: Path) -> None:
    page = browser.open(report, width=390, height=844).page
    for grid in page.query_selector_all(".grid.small"):
        assert grid.evaluate("grid => new Set([...grid.children].map(chart => chart.offsetTop)).size") == 1


def test_a_phone_scrolls_only_downwards(browser: Browser, report: Path) -> None:
    page = drawn(browser.open(report, width=390, height=844).page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.evaluate("[...document.querySelectorAll('.plot canvas')].map(c => c.getBoundingClientRect().width)")
    assert all(150 < width <= 390 for width in widths)


def test_a_run_is_hidden_in_all_charts(browser: Browser, tmp_path: Path) -> None:
    runs = [read_run(run_of(tmp_path, name)) for name in ("first", "second")]
    page = drawn(browser.open(make_page(runs).write(tmp_path / "r.html")).page)
    assert page.locator(".key button", has_text="second").first.is_visible()
    page.get_by_role("checkbox", name="second").uncheck()
    page.locator(".key button:visible", has_text="second").first.wait_for(state="detached")
    assert page.locator(".key button", has_text="first").first.is_visible()


def test_hostile_texts_stay_text(browser: Browser, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "maze")
    lake = Lake.create(run / "lake")
    with lake.writer(factories.SCHEMA, seal_seconds=1e9) as writer:
        for text in HOSTILE:
            info = factories.TrajectoryInfo(env=text, task=text, goal_text=text, policy_id=text, collector=text)
            writer.append(factories.columns(factories.np.random.default_rng(0), 5), info)
    opened = browser.open(make_page([read_run(run)], sample=3).write(tmp_path / "r.html"))
    page = drawn(opened.page)
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    for place in range(5):
        page.mouse.move(box["x"] + 60 + place * (box["width"] - 80) / 4, box["y"] + 60)
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert page.evaluate("window.hacked") is None
    assert page.locator("#vg-tooltip-element script, #vg-tooltip-element img, main img").count() == 0
    assert page.locator("h1").inner_text().startswith(HOSTILE[1])


def test_the_page_says_what_its_data_say(browser: Browser, report: Path) -> None:
    text = browser.open(report).page.locator("#report-data").evaluate("e => e.textContent")
    assert json.loads(text)["charts"]
