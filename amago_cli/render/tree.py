"""Trees as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from amago_cli.render import escaping

if TYPE_CHECKING:
    from pipelines.report.lineage_tree import Node


def draw(node: Node, *, unicode: bool = True) -> str:
    """Draw the tree, one line per node; in ASCII without `unicode`."""
    marks = ("├─ ", "└─ ", "│  ") if unicode else ("|- ", "`- ", "|  ")
    return "\n".join([escaping.line(node.text), *_below(node.children, marks)])


def _below(children: Sequence[Node], marks: tuple[str, str, str]) -> Iterator[str]:
    branch, last, through = marks
    for place, child in enumerate(children, 1):
        end = place == len(children)
        yield (last if end else branch) + escaping.line(child.text)
        yield from (("   " if end else through) + line for line in _below(child.children, marks))
