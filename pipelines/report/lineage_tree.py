"""The lineage of a checkpoint as a tree of lines to read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.lake.lineage import CheckpointLineage, LakeLineage, LineageSource


@dataclass(frozen=True)
class Node:
    """A line with its children."""

    text: str
    children: Sequence[Node] = ()

    @classmethod
    def of_checkpoint(cls, origin: CheckpointLineage) -> Node:
        """Build the tree of a checkpoint: the lakes it was trained on, their collectors, and the policies that
        acted."""
        reported = "" if origin.told_by == origin.checkpoint else f", as recorded by checkpoint {origin.told_by}"
        text = f"{origin.run} ({origin.identity}), checkpoint {origin.checkpoint}{reported}"
        children = [cls(f"began with the weights of {origin.weights_from}")] if origin.weights_from else []
        children += [cls(f"held near {origin.reference}")] if origin.reference else []
        children += [cls(f"trained on what {origin.like} was trained on")] if origin.like else []
        children += [cls._of_lake(drawn) for drawn in origin.lakes] or [cls("not trained on any lake")]
        return cls(text, children)

    @classmethod
    def _of_lake(cls, drawn: LakeLineage) -> Node:
        if drawn.note:
            return cls(f"lake {drawn.lake}: {drawn.note}")
        chosen = f" where {drawn.where}" if drawn.where else ""
        text = f"lake {drawn.lake}{chosen}: {_count_all([drawn])} in {_count(drawn.segments, 'segment')}"
        original = [source for source in drawn.sources if source.relabel_method is None]
        children = []
        for own in _group(original, "collector"):
            name = own[0].collector
            record = drawn.collectors.get(name, {})
            run, processes = record.get("run"), record.get("processes") or [{}]
            facts = [
                *([run["path"]] if run else []),
                *([f"{record['env'].get('name')}, seed {record.get('seed')}"] if "env" in record else []),
                *([f"on {processes[-1]['host']}"] if "host" in processes[-1] else []),
            ]
            details = f" ({', '.join(facts)})" if facts else ""
            acted = []
            for part in _group(own, "policy_id"):
                versions = sorted(source.policy_version for source in part)
                at = "" if versions[-1] < 0 else f" at {_format_versions(versions)}"
                segments = _count(len({segment for source in part for segment in source.segments}), "segment")
                acted.append(cls(f"{part[0].policy_id or '(no policy)'}{at}: {_count_all(part)}, {segments}"))
            children.append(cls(f"{name or '(no collector)'}{details}: {_count_all(own)}", acted))
        derived = [source for source in drawn.sources if source.relabel_method is not None]
        for part in _group(derived, "relabel_method"):
            bases = sum(source.bases for source in part)
            children.append(cls(f"relabelled by {part[0].relabel_method}: {_count_all(part)} from {bases} originals"))
        if drawn.moved:
            files = len(set(drawn.moved.values()))
            children.append(cls(f"{_count(len(drawn.moved), 'segment')} since rewritten into {files}"))
        for gone in drawn.gone:
            when = "" if gone.time is None else time.strftime(" on %Y-%m-%d %H:%M,", time.localtime(gone.time))
            children.append(cls(f"missing: {gone.segment}{when} {gone.reason}"))
        return cls(text, [*children, *cls._list_policies(drawn)])

    @classmethod
    def _list_policies(cls, drawn: LakeLineage) -> Iterator[Node]:
        """Yield the policies of runs that acted, each with the lineage of its own checkpoint."""
        for behaviour in drawn.behaviour:
            if behaviour.run is None and not behaviour.note:
                continue
            trained = [version for version in behaviour.versions if version >= 0]  # -1: a policy without updates
            kept = (
                f", checkpoints kept: {_format_versions(behaviour.kept)}"
                if behaviour.kept
                else ", their checkpoints were deleted"
            )
            note = f"; {behaviour.note}" if behaviour.note else ""
            acted = f"policy {behaviour.policy_id} of {behaviour.run} acted at {_format_versions(trained)}"
            origin = [cls.of_checkpoint(behaviour.origin)] if behaviour.origin else []
            yield cls(acted + (kept if trained else "") + note, origin)


def _group(sources: Iterable[LineageSource], name: str) -> list[list[LineageSource]]:
    groups: dict[Any, list[LineageSource]] = {}
    for source in sources:
        groups.setdefault(getattr(source, name), []).append(source)
    return list(groups.values())


def _count_all(parts: Sequence[Any]) -> str:
    trajectories, steps = sum(part.trajectories for part in parts), sum(part.steps for part in parts)
    return f"{_count(trajectories, 'trajectory', 'trajectories')}, {_count(steps, 'step')}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _format_versions(versions: Sequence[int]) -> str:
    """Format update numbers: all of up to three, else their range and count."""
    if len(versions) <= 3:
        return ", ".join(map(str, versions))
    return f"{min(versions)}..{max(versions)} ({len(versions)} versions)"
