"""`amago lake lineage`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, reader

if TYPE_CHECKING:
    from amago_cli.render.tree import Node
    from pipelines.lake.lineage import CheckpointLineage, LakeLineage, LineageSource


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
    from amago_cli.render.tree import draw
    from amago_cli.streams import carries_unicode
    from pipelines.lake import lineage as engine

    path, which = engine.split(run)
    common.concerns(run=path)
    with common.listening() as listener:
        if trajectories:
            uids = list(engine.trajectories(path, which, lakes=lake or (), listener=listener))
            return Document(text="\n".join(uids), fields={"trajectories": uids})
        found = engine.trace(path, which, lakes=lake or (), depth=depth, listener=listener)
    return Document(text=draw(_origin(found), unicode=carries_unicode()), fields={"lineage": asdict(found)})


def _origin(origin: CheckpointLineage) -> Node:
    from amago_cli.render.tree import Node

    reported = "" if origin.told_by == origin.checkpoint else f", as recorded by checkpoint {origin.told_by}"
    text = f"{origin.run} ({origin.identity}), checkpoint {origin.checkpoint}{reported}"
    return Node(text, [_drawn(drawn) for drawn in origin.lakes] or [Node("not trained on any lake")])


def _drawn(drawn: LakeLineage) -> Node:
    from amago_cli.render.tree import Node

    if drawn.note:
        return Node(f"lake {drawn.lake}: {drawn.note}")
    chosen = f" where {drawn.where}" if drawn.where else ""
    text = f"lake {drawn.lake}{chosen}: {_amount([drawn])} in {_count(drawn.segments, 'segment')}"
    original = [source for source in drawn.sources if source.relabel_method is None]
    children = [
        Node(_collector(name, drawn), [_acted(part) for part in _by(of, "policy_id")])
        for name, of in ((part[0].collector, part) for part in _by(original, "collector"))
    ]
    derived = [source for source in drawn.sources if source.relabel_method is not None]
    for part in _by(derived, "relabel_method"):
        bases = sum(source.bases for source in part)
        children.append(Node(f"relabelled by {part[0].relabel_method}: {_amount(part)} from {bases} originals"))
    if drawn.moved:
        files = len(set(drawn.moved.values()))
        children.append(Node(f"{_count(len(drawn.moved), 'segment')} since rewritten into {files}"))
    children += [Node(f"missing: {gone.segment}{_when(gone.time)} {gone.reason}") for gone in drawn.gone]
    for behaviour in drawn.behaviour:
        if behaviour.run is None and not behaviour.note:
            continue
        trained = [version for version in behaviour.versions if version >= 0]
        kept = f", checkpoints kept: {_span(behaviour.kept)}" if behaviour.kept else ", their checkpoints were deleted"
        note = f"; {behaviour.note}" if behaviour.note else ""
        acted = f"policy {behaviour.policy_id} of {behaviour.run} acted at {_span(trained)}"
        children.append(
            Node(acted + (kept if trained else "") + note, [_origin(behaviour.origin)] if behaviour.origin else [])
        )
    return Node(text, children)


def _collector(name: str, drawn: LakeLineage) -> str:
    record = drawn.collectors.get(name, {})
    run, processes = record.get("run"), record.get("processes") or [{}]
    facts = [
        *([run["path"]] if run else []),
        *([f"{record['env'].get('name')}, seed {record.get('seed')}"] if "env" in record else []),
        *([f"on {processes[-1]['host']}"] if "host" in processes[-1] else []),
    ]
    own = [source for source in drawn.sources if source.collector == name and source.relabel_method is None]
    details = f" ({', '.join(facts)})" if facts else ""
    return f"{name or '(no collector)'}{details}: {_amount(own)}"


def _acted(part: Sequence[LineageSource]) -> Node:
    from amago_cli.render.tree import Node

    versions = sorted(source.policy_version for source in part)
    at = "" if versions[-1] < 0 else f" at {_span(versions)}"
    segments = len({segment for source in part for segment in source.segments})
    return Node(f"{part[0].policy_id or '(no policy)'}{at}: {_amount(part)}, {_count(segments, 'segment')}")


def _by(sources: Iterable[LineageSource], name: str) -> list[list[LineageSource]]:
    groups: dict[Any, list[LineageSource]] = {}
    for source in sources:
        groups.setdefault(getattr(source, name), []).append(source)
    return list(groups.values())


def _amount(parts: Sequence[Any]) -> str:
    trajectories, steps = sum(part.trajectories for part in parts), sum(part.steps for part in parts)
    return f"{_count(trajectories, 'trajectory', 'trajectories')}, {_count(steps, 'step')}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _span(versions: Sequence[int]) -> str:
    """Abbreviate update numbers."""
    if len(versions) <= 3:
        return ", ".join(map(str, versions))
    return f"{min(versions)}..{max(versions)} ({len(versions)} versions)"


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime(" on %Y-%m-%d %H:%M,", time.localtime(seconds))
