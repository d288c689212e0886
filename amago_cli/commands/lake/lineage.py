"""`amago lake lineage`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, reader
from amago_cli.render import escaping

if TYPE_CHECKING:
    from pipelines.report.lineage_tree import Node


@reader
def lineage(
    common: Common,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@CHECKPOINT]",
            help="A run, and latest, best or an update (default: latest).",
            autocompletion=completion.runs_at_checkpoints,
        ),
    ],
    trajectories: Annotated[
        bool, typer.Option("--trajectories", help="List the uids that the checkpoint could sample, one per line.")
    ] = False,
    lake: Annotated[
        list[str] | None,
        typer.Option("--lake", metavar="LAKE", help="Current place of a lake that was moved; repeatable."),
    ] = None,
    depth: Annotated[
        int, typer.Option("--depth", metavar="N", min=1, help="How many runs to follow back at most.")
    ] = 8,
) -> Any:
    """Show what a checkpoint was trained on, which collectors wrote it and which checkpoints acted, across runs.

    CHECKPOINT may be an update whose checkpoint was deleted. Trajectories that expired since are not counted; missing
    segments are listed, with the reason if known.

    Example: amago lake lineage runs/quickstart@500
    """
    from amago_cli.render.output import Document
    from amago_cli.streams import carries_unicode
    from pipelines.lake import lineage as engine
    from pipelines.report.lineage_tree import Node

    path, which = engine.split(run)
    common.concerns(run=path)
    with common.listening() as listener:
        if trajectories:
            uids = list(engine.trajectories(path, which, lakes=lake or (), listener=listener))
            return Document(text="\n".join(uids), fields={"trajectories": uids})
        found = engine.trace(path, which, lakes=lake or (), depth=depth, listener=listener)
    return Document(text=_draw(Node.of_checkpoint(found), unicode=carries_unicode()), fields={"lineage": asdict(found)})


def _draw(node: Node, *, unicode: bool) -> str:
    """Draw the tree, one line per node; in ASCII without `unicode`."""
    branch, last, through = ("├─ ", "└─ ", "│  ") if unicode else ("|- ", "`- ", "|  ")

    def draw_below(children: Sequence[Node]) -> Iterator[str]:
        for place, child in enumerate(children, 1):
            is_last = place == len(children)
            yield (last if is_last else branch) + escaping.line(child.text)
            yield from (("   " if is_last else through) + line for line in draw_below(child.children))

    return "\n".join([escaping.line(node.text), *draw_below(node.children)])
