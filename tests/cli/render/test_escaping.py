"""What a lake of somebody else says never moves the cursor, hides or reorders text; JSON has it as it is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from amago_cli.render import escaping
from amago_cli.render.progress import Lines
from amago_cli.render.table import raw, render
from pipelines.events import Notice
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.cli.conftest import Amago
from tests.lake.factories import SCHEMA, columns

BAD = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\rover\nerror: forged\x7f"
UNSAFE = set("\x1b\x07\x9b\u202e\u2066\r\x7f")


def safe(text: str) -> bool:
    return not UNSAFE & set(text) and not any(line.startswith("error: forged") for line in text.splitlines())


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A lake whose texts are all hostile, with a damaged segment whose message names a hostile folder."""
    info = TrajectoryInfo(
        env=BAD, task=BAD, policy_id=BAD, collector=BAD, goal_text=BAD, tags=MappingProxyType({BAD: BAD})
    )
    path = tmp_path / f"lakes{BAD}".replace("/", "")
    with Lake.create(path).writer(SCHEMA, name="w") as writer:
        writer.append(columns(np.random.default_rng(0), 4), info)
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["ls", "{parent}"],
        ["info", "{lake}"],
        ["sample", "{lake}"],
        ["sql", "{lake}", "select env, task, tags, goal_text, 'a' as \"x\x1b[2J\" from trajectories"],
        ["sql", "{lake}", "select env::int from trajectories"],
        ["sql", "{lake}", "select * from nothing"],
        ["verify", "{lake}"],
        ["lineage", "{lake}"],
        ["info", "{lake}x"],
    ],
    ids=lambda words: words[0],
)
def test_nothing_of_a_foreign_lake_reaches_the_terminal_raw(amago: Amago, hostile: Path, command: list[str]) -> None:
    words = [word.format(lake=hostile, parent=hostile.parent) for word in command]
    for more in ([], ["-v"]):
        shown = amago("lake", *words, *more)
        assert safe(shown.out), repr(shown.out)
        assert not UNSAFE & set(shown.err), repr(shown.err)
        assert more or safe(shown.err), repr(shown.err)  # a traceback has lines
    found = amago("lake", *words, "--output", "json")
    if found.code == 0 and words[0] in ("ls", "info", "sample"):
        assert "\u202e" in json.dumps(found.json, ensure_ascii=False)
        assert safe(found.err)


def test_json_has_the_text_as_it_is(amago: Amago, hostile: Path) -> None:
    assert amago("lake", "sql", hostile, "select task from trajectories", "--output", "json").json == [{"task": BAD}]


def test_notices_are_escaped() -> None:
    stream = io.StringIO()
    Lines(stream, verbose=True)(Notice(text=BAD, level="warning"))
    assert safe(stream.getvalue())
    assert stream.getvalue().count("\n") == 1


def test_cells_keep_their_widths() -> None:
    lines = list(render(["a", "b"], [[BAD, "1"], ["y", "2"]], show=raw))
    assert len({len(line) for line in (lines[0], lines[2], lines[3])}) == 1


def test_what_is_harmless_stays() -> None:
    text = "Grüße, 世界 👩‍🚀 ─ ▁▂"
    assert (escaping.line(text), escaping.lines("a\n\tb")) == (text, "a\n\tb")
    assert escaping.line("a\n\tb\u2029\ud800") == "a\\n\\tb\\u2029\\ud800"
