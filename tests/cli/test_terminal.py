"""What a terminal shows, on a pseudo-terminal: a bar in one place, evaluations as lines that stay."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import TINY

pytestmark = pytest.mark.system

RECIPE = """
epochs = 2
env.name = "tmaze"
env.corridor = 3
collect = {steps = 100, actors = 4, workers = 0}
train = {steps = 4}
evaluate = {episodes = 4}
stages = [{stage = "collect"}, {stage = "train"}, {stage = "evaluate", label = "after"}]
"""


def typed(*words: str, until: bytes = b"", send: bytes = b"", cwd: Path) -> tuple[int, str]:
    """Run amago on a terminal of 80 columns; return its exit code and what it wrote. `send` is typed at `until`."""
    program = "import sys; from amago_cli.app import main; sys.exit(main())"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "80", "LINES": "24"}
        os.execv(sys.executable, [sys.executable, "-c", program, *words])
    written, answered = b"", not until
    while True:
        ready, _, _ = select.select([terminal], [], [], 120)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        written += chunk
        if not answered and until in written:
            os.write(terminal, send)
            answered = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode().replace("\r\n", "\n")


def lines(text: str) -> list[str]:
    """The lines as they stay: of each, what was written after the last return to its beginning."""
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r")[-1].rstrip() for line in text.split("\n")]
    return [line for line in shown if line]


def test_a_run_on_a_terminal_keeps_its_evaluations_as_lines(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(RECIPE)
    options = [word for assignment in TINY for word in ("--set", assignment)]
    code, text = typed("run", "short.toml", *options, cwd=tmp_path)
    assert code == 0, text
    found = lines(text)
    assert found[0] == "run runs/short: starting"
    evaluations = [line for line in found if " evaluate: after: update " in line]
    assert [line.partition(": return")[0] for line in evaluations] == [
        "epoch 1/2 evaluate: after: update 4 on train tasks",
        "epoch 2/2 evaluate: after: update 8 on test tasks",
    ]
    assert re.search(r"epoch [12]/2 \w+ +\d+% \|", text)  # the bar, which does not stay
    assert not any(re.search(r"% \|", line) for line in found)
    assert found[-1] == "next: amago watch runs/short"


@pytest.mark.full
def test_an_episode_is_played_in_place_and_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(RECIPE)
    options = [word for assignment in TINY for word in ("--set", assignment)]
    assert typed("run", "short.toml", *options, "-q", cwd=tmp_path)[0] == 0
    code, text = typed("watch", "runs/short", "--speed", "50", cwd=tmp_path)
    assert code == 0, text
    assert text.count("\x1b[J") == 5  # four steps, and the first observation
    assert text.endswith("\x1b[?7h\x1b[?25h")
    code, text = typed("watch", "runs/short", "--speed", "0.5", until=b"step 0/4", send=b"\x03", cwd=tmp_path)
    assert code == 130
    assert "\x1b[?7h\x1b[?25h" in text
    assert "Traceback" not in text
    assert lines(text)[-1].endswith("error: interrupted")  # after the ^C that the terminal echoes


def test_columns_are_refused_before_the_query_runs(tmp_path: Path) -> None:
    for form in ("arrow", "parquet"):
        code, text = typed("lake", "sql", "nothing", "select 1", "--output", form, cwd=tmp_path)
        assert code == 2
        assert lines(text) == [f"error: --output {form} is not for a terminal; name a file with --to, or a pipe"]
