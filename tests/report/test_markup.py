"""HTML that is safe by construction; the oracle is another parser, Python's own."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from pipelines.report.markup import Markup, element, encode_json, facts, fold, join, table

HOSTILE = (
    "<script>hacked=1</script>",
    "</script><script>hacked=1</script>",
    '"><img src=x onerror=hacked=1>',
    "' onmouseover='hacked=1",
    "<!-- <script>",
    "]]>&lt;b&gt;",
    "a\u2028b\u2029c",
    "${hacked=1} `hacked`",
)

_TAGS = "div table caption thead tbody tr th td dl dt dd details summary"


class Elements(HTMLParser):
    """The elements and the text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text_in_elements_and_attributes(text: str) -> None:
    found = Elements(element("p", text, title=text, data_x=text))
    assert found.tags == [("p", {"title": text, "data-x": text})]
    assert found.text == text


@pytest.mark.parametrize("text", HOSTILE)
def test_data_in_a_script_is_the_same_json_and_never_ends_it(text: str) -> None:
    coded = encode_json({text: [text]})
    assert json.loads(coded) == {text: [text]}
    assert not set(coded) & set("<>&\u2028\u2029")
    found = Elements(element("script", coded))
    assert [tag for tag, _ in found.tags] == ["script"]


@pytest.mark.parametrize("text", HOSTILE)
def test_tables_lists_and_folds_escape_too(text: str) -> None:
    found = Elements(join(table([text], [[text]], caption=text), facts([(text, text)]), fold(text, text)))
    assert {tag for tag, _ in found.tags} <= set(_TAGS.split())
    assert found.text.count(text) == 7


def test_markup_is_not_escaped_twice_and_nothing_is_left_out() -> None:
    inner = element("b", "x")
    assert element("p", inner, None, ["a", Markup("<i></i>")], hidden=True, open=False, title=None) == (
        "<p hidden><b>x</b>a<i></i></p>"
    )


def test_control_characters_and_lone_surrogates_can_be_written() -> None:
    assert element("p", "a\x00b\x1b[31m\ud800").encode() == "<p>a\ufffdb\ufffd[31m\ufffd</p>".encode()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "yes"),
        (1234567, "1,234,567"),
        (0.1 + 0.2, "0.3"),
        (float("nan"), "\u2013"),
        (None, "\u2013"),
        ([1], "[1]"),
    ],
)
def test_cells(value: object, shown: str) -> None:
    assert f">{shown}</td>" in table(["x"], [[value]], caption="c")
