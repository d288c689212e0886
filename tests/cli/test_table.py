from __future__ import annotations

import time

from amago_cli.table import cell, raw, render


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


def test_line_breaks_do_not_break_the_table() -> None:
    assert len(list(render(("a",), [("x\ny",)], show=raw))) == 3


def test_a_hundred_thousand_rows_take_a_moment() -> None:
    rows = [(number, f"uid-{number}", 0.5) for number in range(100_000)]
    began = time.process_time()
    assert sum(1 for _ in render(("n", "uid", "x"), rows, show=raw)) == 100_002
    assert time.process_time() - began < 3
