"""Write the catalogue of environments into docs/environments.md, and what metrics mean into docs/learning.md: `python
docs/generate.py`.

In each page it replaces the lines between `<!-- NAME -->` and `<!-- end of NAME -->`; the rest is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.envs.suites.catalogue import suites
from pipelines.report.training import Meaning

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {
    "reference": "Reference",
    "observation": "Observation",
    "action": "Action",
    "reward": "Reward",
    "horizon": "Horizon",
    "termination": "Termination",
    "hidden": "Hidden",
    "split": "Train-test split",
    "protocol": "Published protocol",
}


def pages() -> dict[Path, str]:
    """Return the pages that have generated parts, as they should be."""
    parts = {
        "list of environments": listing,
        "environments": sections,
        "metrics": metrics,
    }
    names = ("docs/environments.md", "docs/learning.md")
    return {ROOT / name: _filled((ROOT / name).read_text(), parts) for name in names}


def _filled(text: str, parts: dict[str, Callable[[], Iterator[str]]]) -> str:
    for name, lines in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        if mark:
            end = f"<!-- end of {name} -->"
            text = "\n".join([before + mark, *lines(), "", end + rest.partition(end)[2]])
    return text


def listing() -> Iterator[str]:
    """Yield a table of the sections."""
    yield "| section | names | extra |"
    yield "|---|---|---|"
    for suite in suites():
        names = ", ".join(f"`{own['name']}`" for own in suite["environment"])
        extra = f"`{suite['extra']}`" if "extra" in suite else ""
        yield f"| [{suite['title']}](#{_anchor(suite['title'])}) | {names} | {extra} |"


def metrics() -> Iterator[str]:
    """Yield a table of the metrics of training."""
    yield "| metric | meaning |"
    yield "|---|---|"
    for entry in Meaning.read_all():
        yield f"| {', '.join(f'`{name}`' for name in entry.names)} | {entry.meaning} |"


def sections() -> Iterator[str]:
    """Yield a section for each suite, with what holds for all of its environments first."""
    for number, suite in enumerate(suites()):
        several = len(suite["environment"]) > 1
        yield from [""] * (number > 0)
        yield f"## {suite['title']}"
        yield from _described(suite, several=several)
        for own in suite["environment"]:
            yield from ("", f"### {own['name']}") if several else ()
            yield from ("", f"{own['about']}.")
            yield from _described(own, several=several)


def _described(table: dict[str, Any], *, several: bool) -> Iterator[str]:
    """Yield the prose and the fields of a suite or an environment."""
    if "intro" in table:
        yield from ("", table["intro"].strip())
    fields = [f"- **{title}**: {' '.join(table[key].split())}" for key, title in FIELDS.items() if key in table]
    yield from ("", *fields) if fields else ()
    if "notes" in table:
        yield from ("", table["notes"].strip())


def _anchor(title: str) -> str:
    """The fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
