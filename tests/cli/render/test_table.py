from __future__ import annotations

import time

import pytest

from amago_cli.render.table import cell, raw, render


def test_numbers_stand_right_and_text_left() -> None:
    assert list(render(("name", "n"), [("a", 1), ("bcdef", 20)], show=cell)) == [
        "name    n",
        "─────────",
        "a       1",
        "bcdef  20",
    ]


def test_no_rows_still_show_the_columns() -> None:
    assert list(render(("a", "b"), [], show=raw)) == ["a  b", "────"]


def test_a_pipe_gets_whole_cells_and_a_terminal_folded_ones() -> None:
    text = "one two three four five six seven eight nine ten"
    piped = list(render(("k", "text"), [("x", text)], show=raw))
    assert piped[-1] == f"x  {text}"
    folded = list(render(("k", "text"), [("x", text)], show=raw, width=30))
    assert max(len(line) for line in folded[2:]) <= 30
    assert " ".join(" ".join(line[3:].split()) for line in folded[2:]) == text


def test_several_columns_share_what_room_there_is_and_the_first_stays_whole() -> None:
    name, long, longer = "a-name-of-24-letters-here", "some words " * 5, "other words " * 9
    lines = list(render(("name", "a", "b", "n"), [(name, long, longer, 3)], show=raw, width=70))
    assert max(len(line) for line in lines[2:]) <= 70
    assert lines[2].startswith(f"{name}  some words")
    starts = [lines[0].index(title) - len("\x1b[1m") for title in ("a  ", "b  ")] + [69]
    assert " ".join(line[starts[0] : starts[1]].strip() for line in lines[2:]).split() == long.split()
    assert " ".join(line[starts[1] : starts[2]].strip() for line in lines[2:]).split() == longer.split()


def test_where_columns_would_be_too_narrow_every_row_is_a_block() -> None:
    rows = [("one", "a b c d e f g h i j k", "", 7), ("two", "x", "y z" * 9, None)]
    lines = list(render(("name", "first", "second", "n"), rows, show=raw, width=24))
    assert lines == [
        "\x1b[1mone\x1b[0m",
        "  first   a b c d e f g",
        "          h i j k",
        "  n       7",
        "\x1b[1mtwo\x1b[0m",
        "  first   x",
        "  second  y zy zy zy zy",
        "          zy zy zy zy z",
        "  n       -",
    ]


def test_line_breaks_do_not_break_the_table() -> None:
    assert len(list(render(("a",), [("x\ny",)], show=raw))) == 3


@pytest.mark.system
def test_a_hundred_thousand_rows_take_a_moment() -> None:
    rows = [(number, f"uid-{number}", 0.5) for number in range(100_000)]
    began = time.process_time()
    assert sum(1 for _ in render(("n", "uid", "x"), rows, show=raw)) == 100_002
    assert time.process_time() - began < 3


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
@pytest.mark.parametrize("width", [80, 10])
def test_no_escapes_where_none_are_wanted(name: str, value: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a" * 20, "b" * 20)]
    for other in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(other, raising=False)
    assert "\x1b" in "".join(render(("one", "two"), rows, show=str, title="t", width=width))
    monkeypatch.setenv(name, value)
    assert "\x1b" not in "".join(render(("one", "two"), rows, show=str, title="t", width=width))
