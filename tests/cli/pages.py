"""Pages of documentation, as somebody types them who reads from top to bottom."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.\w+)\n")

# What a shell finds in place of the installed commands. `pip` would need a network; in a checkout `pytest` is what runs
# at this moment.
_COMMANDS = {
    "amago": 'exec "{python}" -P -c "import sys; from amago_cli.app import main; sys.exit(main())" "$@"',
    "python": 'exec "{python}" "$@"',
    "pytest": '[ "$PWD" = "$CHECKOUT" ] || exec "{python}" -P -m pytest -p no:cacheprovider "$@"',
    "pip": "true",
}


@dataclass(frozen=True)
class Typed:
    """A line for the shell, or a Python program, of a page; `file` is where a program is to be saved, if it says so."""

    place: str
    text: str
    language: str
    file: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def typed(page: str) -> Iterator[Typed]:
    """All commands and programs of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        language, body, line = found[1], found[2], text.count("\n", 0, found.start()) + 2
        if language == "sh":
            for number, command in enumerate(body.splitlines()):
                yield Typed(f"{page}:{line + number}", command, language)
        elif language == "python":
            name = _FILE.match(body)
            yield Typed(f"{page}:{line}", body, language, name[1] if name else "")


def script(page: str) -> str:
    """A program for bash that types the whole page and stops where something does not exit as it should."""
    return "set -u -o pipefail\n" + "".join(map(_checked, typed(page)))


def _checked(one: Typed) -> str:
    if one.language == "python":
        act = f"cat > {one.file}" if one.file else "python -"
        line = f"{act} <<'END_OF_PROGRAM'\n{one.text}END_OF_PROGRAM\n"
    else:
        line = one.text + "\n"
    failed = f'echo "{one.place} exits with $code, not 0" >&2; exit 1'
    return f"echo '{one.place}' >&2\n{{\n{line}}}\ncode=$?; [ $code = 0 ] || {{ {failed}; }}\n"


def install(folder: Path) -> None:
    """Put the commands that a page uses into `folder`."""
    for name, line in _COMMANDS.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{line.format(python=sys.executable)}\n")
        path.chmod(0o755)
