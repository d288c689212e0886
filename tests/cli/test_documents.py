"""Every `amago ...` line that our documents show must be one that the command line understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from amago_cli.app import command as whole
from amago_cli.help import DefaultGroup

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")) if path.is_file()
]


def shown(path: Path) -> Iterator[str]:
    """Commands in blocks, continued lines joined and comments dropped."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines() if language in ("", "sh", "bash", "console") else ():
            for part in re.split(r"&&|\|(?!\|)", line):
                if part.strip().startswith("amago "):
                    yield part.strip()


COMMANDS = [pytest.param(line, id=f"{path.name}: {line[:60]}") for path in DOCUMENTS for line in shown(path)]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_is_shown_is_understood(line: str) -> None:
    line = re.sub(r"\$\w+_ID\b", "3", line)  # a number that a scheduler sets
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    command = whole()
    context = command.make_context("amago", list(words[:1]), resilient_parsing=True)
    while hasattr(command, "commands"):
        if isinstance(command, DefaultGroup) and words[:1] not in ([name] for name in command.commands):
            words = [next(iter(command.commands)), *words]
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, f"no command '{name}'"
    command.make_context("amago", list(words), parent=context)


def test_documents_show_commands() -> None:
    assert len(COMMANDS) > 5
