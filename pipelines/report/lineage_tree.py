"""The lineage of a checkpoint as a tree of lines, for people."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.lake.lineage import CheckpointLineage, LakeLineage, LineageSource


@dataclass(frozen=True)
class Node:
    """A line with its children."""

    text: str
    children: Sequence[Node] = ()


def tree(origin: CheckpointLineage) -> Node:
    """Return the run and checkpoint, with the lakes it drew from, their collectors and the policies that acted."""
    reported = "" if origin.told_by == origin.checkpoint else f", as recorded by checkpoint {origin.told_by}"
    text = f"{origin.run} ({origin.identity}), checkpoint {origin.checkpoint}{reported}"
    children = [Node(f"began with the weights of {origin.weights_from}")] if origin.weights_from else []
    children += [_drawn(drawn) for drawn in origin.lakes] or [Node("not trained on any lake")]
    return Node(text, children)


def _drawn(drawn: LakeLineage) -> Node:
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
            Node(acted + (kept if trained else "") + note, [tree(behaviour.origin)] if behaviour.origin else [])
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
