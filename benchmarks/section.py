"""Sections of pages that a benchmark writes, between two marks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.files.atomic import write_atomically


@dataclass(frozen=True)
class Section:
    """The part of a page that `command` writes, by its name."""

    name: str
    command: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: written by {self.command} -->"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->"

    def write(self, page: Path, text: str) -> None:
        """Replace what is between the marks. ValueError if the page lacks one of them, or has it twice."""
        before, rest = page.read_text(encoding="utf-8").split(self.begin)
        _, after = rest.split(self.end)
        write_atomically(page, f"{before}{self.begin}\n{text}\n{self.end}{after}")
