"""The lineage of a checkpoint: what it drew from, which segments, who collected them, and which checkpoints acted.

A checkpoint records, for every lake it drew from, the segments in the order that training saw them and how many had
been seen at which update, so the view of an update whose checkpoint was not kept is known from a later one. Segments
are located where they are now: rewritten ones in their new file, expired ones with the reason if the log still gives
it. Behaviour policies are followed to their runs, each run once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipelines.config.places import split_checkpoint
from pipelines.config.policy_files import list_checkpoints
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import AmagoError, InputMissing, IntegrityError, UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.files.json import Form, read_object
from pipelines.lake import collectors
from pipelines.lake.footer import hex_uids, read_footer
from pipelines.lake.live import LiveTable, Segment
from pipelines.lake.log import read_log
from pipelines.lake.store import Lake
from pipelines.lake.uids import positions


class Snapshot(Form):
    """The record of one lake."""

    id: str
    name: str
    schema_id: str = Field(alias="schema")
    where: str
    weight: str
    segments: list[str]
    dropped: list[str]
    trajectories: int
    history: list[Annotated[list[int], Field(min_length=2, max_length=2)]]


class Data(Form):
    """The record of all lakes."""

    lakes: list[Snapshot]


class _DrawnRecord(Form):
    """The fields of checkpoint.json that lineage reads."""

    update: int
    data: Data | None = None


def read_snapshots(directory: RunDirectory, which: str) -> tuple[int, int, list[dict[str, Any]]]:
    """Return the update asked for, the checkpoint whose record covers it, and the snapshots as of that update."""
    known = list_checkpoints(directory.checkpoints)
    if not known:
        raise InputMissing(
            f"no checkpoint in '{directory.checkpoints}'", hint="lineage begins at a checkpoint: amago train"
        )
    if which == "latest":
        update = known[-1]
    elif which == "best":
        record = read_object(directory.checkpoints / "best" / "checkpoint.json", _DrawnRecord)
        if record is None:
            raise InputMissing(f"no best checkpoint in '{directory.checkpoints}'", hint="name an update, or latest")
        update = int(record["update"])
    elif which.isdigit():
        update = int(which)
    else:
        raise UsageError(f"'{which}' is not a checkpoint", hint="give RUN@latest, RUN@best or RUN@UPDATE")
    told_by = next((number for number in known if number >= update), None)
    if told_by is None:
        raise InputMissing(f"run '{directory.path}' has no update {update} yet", hint=f"its newest is {known[-1]}")
    path = directory.checkpoints / f"{told_by:06d}"
    record = read_object(path / "checkpoint.json", _DrawnRecord)
    if record is None:
        raise IntegrityError(f"checkpoint '{path}' is damaged", hint="name another one")
    lakes = (record.get("data") or {"lakes": []})["lakes"]
    for snapshot in lakes:
        seen = max((int(count) for at, count in snapshot["history"] if at <= update), default=0)
        snapshot["segments"] = snapshot["segments"][:seen]
    return update, told_by, lakes


def read_drawn(name: str) -> tuple[RunDirectory, int, list[dict[str, Any]]]:
    """Return the run, the update and the snapshots of the checkpoint RUN@CHECKPOINT, from its own record, which counts
    the trajectories. InputMissing if it was not kept, or was not trained on a lake."""
    path, which = split(name)
    directory = RunDirectory.open(path)
    update, told_by, snapshots = read_snapshots(directory, which)
    if told_by != update:
        known = ", ".join(map(str, list_checkpoints(directory.checkpoints)))
        raise InputMissing(f"run '{path}' has not kept checkpoint {update}", hint=f"there are: {known}")
    if not snapshots:
        raise InputMissing(f"checkpoint {update} of run '{path}' was not trained on any lake", hint="name a later one")
    return directory, update, snapshots


def find_lake(
    snapshot: Mapping[str, Any], directory: RunDirectory, given: Sequence[str | Path], *, option: str = "--lake"
) -> Lake:
    """Find the lake of a snapshot by its id: where the user says (by `option`), where the run says it was, or the run's
    own."""
    id, name = snapshot["id"], snapshot["name"]
    recorded = [lake["lake"] for lake in directory.load_record().get("lakes", ()) if lake["id"] == id]
    for place in (*given, *recorded, name, directory.lake):
        lake = Lake.find(place) if place else None
        if lake is not None and lake.id == id:
            return lake
    was = next((f"at '{place}'" for place in (*recorded, name) if place), "here")
    raise InputMissing(
        f"the lake that run '{directory.path}' drew from is not {was} any more (its id is {id})",
        hint=f"say where it is: {option} LAKE",
    )


_MOST_RUNS = 200  # of one directory


class TrainingHistory:
    """The runs that trained on a lake: its own, its neighbours in the directory of runs, and `more`.

    Calls may come from several threads.
    """

    def __init__(self, lake: Lake, more: tuple[Path, ...] = ()) -> None:
        self._lake, self._more = lake, more
        self._tables: dict[tuple[Path, int], LiveTable] = {}
        self._lock = threading.Lock()

    def list_updates(self, uid: str, segment: str) -> list[dict[str, Any]]:
        """Return `run`, `first` (the update from which on the trajectory could be drawn) and `checkpoints` (those that
        are kept from there on) for each run that trained on it. `segment`: where the trajectory is now.
        """
        found = []
        for directory in self._list_runs():
            try:
                _, newest, snapshots = read_snapshots(directory, "latest")
                snapshot = next(each for each in snapshots if each["id"] == self._lake.id)
                first = self._find_first_update(directory, newest, snapshot, uid, segment)
            except (AmagoError, StopIteration, OSError):
                continue
            if first is not None:
                kept = [update for update in list_checkpoints(directory.checkpoints) if update >= first]
                found.append({"run": str(directory.path), "first": first, "checkpoints": kept})
        return found

    def _list_runs(self) -> Iterator[RunDirectory]:
        own = self._lake.run
        beside = []
        if own is not None and own.parent.is_dir():
            beside = sorted(path for path in own.parent.iterdir() if path.is_dir())[:_MOST_RUNS]
        seen: set[Path] = set()
        for path in (*([own] if own else []), *self._more, *beside):
            place = path.resolve()
            if place not in seen and RunDirectory(path).exists():
                seen.add(place)
                yield RunDirectory(path)

    def _find_first_update(
        self, directory: RunDirectory, newest: int, snapshot: Mapping[str, Any], uid: str, segment: str
    ) -> int | None:
        """Return the first update whose view had the trajectory; None if none had."""
        segments: list[str] = snapshot["segments"]
        if segment not in segments:  # rewritten since
            segment = self._find_original(directory, newest, snapshot, uid) or ""
        if segment not in segments or segment in snapshot["dropped"]:
            return None
        count = segments.index(segment) + 1
        first = min((int(at) for at, seen in snapshot["history"] if seen >= count), default=None)
        if first is None or not snapshot["where"].strip():
            return first
        from pipelines.lake.sql.selection import select  # imports duckdb, which starts threads: see `ForkServer`

        where = f"(\n{snapshot['where']}\n) and uid = '{uid}'"
        return first if len(select(self._lake, where).uids) else None

    def _find_original(self, directory: RunDirectory, newest: int, snapshot: Mapping[str, Any], uid: str) -> str | None:
        """Return the id of the segment where the run saw a trajectory that was rewritten since."""
        with self._lock:
            key = (directory.path, newest)
            if key not in self._tables:
                self._tables.clear()
                table = LiveTable(self._lake, thorough=True)
                table.restore(snapshot["segments"])
                self._tables[key] = table
            wanted = np.array([bytes.fromhex(uid)], dtype="S16")
            for each in self._tables[key].segments:
                if positions(each.uids, wanted)[0] >= 0:
                    return each.id
        return None


_KEY = ("collector", "policy_id", "policy_version", "relabel_method")


@dataclass(frozen=True, kw_only=True)
class LineageSource:
    """Trajectories of one collector and policy version, or derived from these by `relabel_method`.

    `segments` are the ids of the files that hold them now; `bases` counts the trajectories that overlays derive from,
    and `base_segments` are the files of those.
    """

    collector: str
    policy_id: str
    policy_version: int
    relabel_method: str | None
    trajectories: int
    steps: int
    segments: tuple[str, ...]
    bases: int = 0
    base_segments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _MissingSegment:
    """A segment that can no longer be read: when (seconds since the epoch) and why, where known."""

    segment: str
    reason: str
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class _BehaviourPolicy:
    """A policy that acted: its run, if it has one, the versions that acted, and those of them kept as checkpoints."""

    policy_id: str
    run: str | None
    versions: tuple[int, ...]
    kept: tuple[int, ...] = ()
    note: str = ""
    origin: CheckpointLineage | None = None


@dataclass(frozen=True, kw_only=True)
class LakeLineage:
    """What a checkpoint drew from one lake: `moved` maps segments to the files they were rewritten into."""

    lake: str
    id: str
    schema: str
    where: str = ""
    weight: str = ""
    segments: int = 0
    trajectories: int = 0
    steps: int = 0
    sources: tuple[LineageSource, ...] = ()
    collectors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    gone: tuple[_MissingSegment, ...] = ()
    behaviour: tuple[_BehaviourPolicy, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointLineage:
    """A run's checkpoint and all it drew from. `told_by`: the checkpoint whose record says so."""

    run: str
    identity: str
    checkpoint: int
    told_by: int
    lakes: tuple[LakeLineage, ...] = ()
    weights_from: str = ""  # POLICY@UPDATE that a warm start began with
    reference: str = ""  # POLICY@UPDATE that its policy was held near
    like: str = ""  # POLICY@UPDATE whose trajectories it drew from


def split(name: str) -> tuple[Path, str]:
    """Split RUN[@CHECKPOINT] into a directory and "latest", "best" or a number."""
    path, which = split_checkpoint(name)
    return Path(path), which or "latest"


def trace(
    run: Path, which: str = "latest", *, lakes: Sequence[str | Path] = (), depth: int = 8, listener: Listener = silent
) -> CheckpointLineage:
    """Return the lineage of a checkpoint; `lakes` are places to look for its lakes first, `depth` limits how many runs
    are followed in sequence.

    InputMissing: no such run or checkpoint, or a lake that is not where it was.
    """
    return _Walk(lakes, depth, listener).trace_checkpoint(RunDirectory.open(run), which, 0)


def trajectories(
    run: Path, which: str = "latest", *, lakes: Sequence[str | Path] = (), listener: Listener = silent
) -> Iterator[str]:
    """Yield the uids (32 hex digits) of the live trajectories that a checkpoint could draw, in the order in which it
    saw them. Errors as in `trace`.
    """
    directory, walk = RunDirectory.open(run), _Walk(lakes, 1, listener)
    for snapshot in read_snapshots(directory, which)[2]:
        lake = find_lake(snapshot, directory, lakes)
        for segment, chosen in walk.replay(lake, snapshot)[1]:
            yield from hex_uids(segment.uids[chosen])


@dataclass
class _Walk:
    """A walk from a checkpoint to the checkpoints that acted, at most `depth` runs deep, each run once."""

    lakes: Sequence[str | Path]
    depth: int
    listener: Listener
    seen: set[Path] = field(default_factory=set)

    def trace_checkpoint(self, directory: RunDirectory, which: str, depth: int) -> CheckpointLineage:
        self.seen.add(directory.path.resolve())
        update, told_by, snapshots = read_snapshots(directory, which)
        drawn = []
        for snapshot in snapshots:
            try:
                lake = find_lake(snapshot, directory, self.lakes)
            except AmagoError as error:
                if depth == 0:
                    raise
                about = {"lake": snapshot["name"], "id": snapshot["id"], "schema": snapshot["schema"]}
                drawn.append(LakeLineage(**about, segments=len(snapshot["segments"]), note=str(error)))
                continue
            drawn.append(self._trace_lake(lake, snapshot, directory, depth))
        return CheckpointLineage(
            run=str(directory.path),
            identity=directory.identity,
            checkpoint=update,
            told_by=told_by,
            lakes=tuple(drawn),
            weights_from=directory.weights_from,
            reference=directory.reference,
            like=directory.like,
        )

    def _trace_lake(self, lake: Lake, snapshot: Mapping[str, Any], directory: RunDirectory, depth: int) -> LakeLineage:
        live, parts = self.replay(lake, snapshot)
        sources = self._group_sources(lake, live, parts)
        known = collectors.read_all(lake)
        names = dict.fromkeys(source.collector for source in sources)
        present = {segment.id for segment in live.segments}
        return LakeLineage(
            lake=lake.name,
            id=lake.id,
            schema=snapshot["schema"],
            where=snapshot["where"],
            weight=snapshot["weight"],
            segments=len(snapshot["segments"]),
            trajectories=sum(source.trajectories for source in sources),
            steps=sum(source.steps for source in sources),
            sources=tuple(sources),
            collectors={name: known[name] for name in names if name in known},
            moved={s.id: s.file for s in live.segments if s.file != s.id},
            gone=tuple(self._explain_missing(lake, [id for id in snapshot["segments"] if id not in present])),
            behaviour=tuple(self._trace_policies(lake, sources, known, directory, depth)),
        )

    def _trace_policies(
        self,
        lake: Lake,
        sources: Sequence[LineageSource],
        known: Mapping[str, Mapping[str, Any]],
        directory: RunDirectory,
        depth: int,
    ) -> Iterator[_BehaviourPolicy]:
        versions: dict[str, set[int]] = defaultdict(set)
        names: dict[str, str] = {}
        for source in sources:
            versions[source.policy_id].add(source.policy_version)
            names.setdefault(source.policy_id, source.collector)
        for policy_id, acted in sorted(versions.items()):
            trained = sorted(version for version in acted if version >= 0)
            recorded = known.get(names[policy_id], {}).get("policies", {}).get(policy_id)
            found = collectors.find_run(policy_id, recorded, directory.path, lake.run)
            recorded_path = recorded["absolute"] if isinstance(recorded, Mapping) else None
            if found is None:
                note = f"its run is no longer at '{recorded_path}'" if recorded_path else ""
                yield _BehaviourPolicy(policy_id=policy_id, run=recorded_path, versions=tuple(sorted(acted)), note=note)
                continue
            kept = set(list_checkpoints(found.checkpoints))
            origin, note = None, ""
            if found.path.resolve() in self.seen:
                note = "its own lineage is shown above"
            elif depth + 1 >= self.depth:
                note = "not followed further"
            else:
                try:
                    origin = self.trace_checkpoint(found, str(max(trained, default=0)), depth + 1)
                except AmagoError as error:
                    note = str(error)
            yield _BehaviourPolicy(
                policy_id=policy_id,
                run=str(found.path),
                versions=tuple(sorted(acted)),
                kept=tuple(version for version in trained if version in kept),
                note=note,
                origin=origin,
            )

    def replay(self, lake: Lake, snapshot: Mapping[str, Any]) -> tuple[LiveTable, list[tuple[Segment, np.ndarray]]]:
        """Return the live table of a snapshot, and its segments of the snapshot's schema with a mask of what could be
        drawn.
        """
        table = LiveTable(lake, self.listener, thorough=True)
        table.restore(snapshot["segments"])
        where, chosen = snapshot["where"], None
        if where:
            from pipelines.lake.sql.selection import select  # see above

            chosen = select(lake, where, schema_id=snapshot["schema"], listener=self.listener).uids
        dropped = set(snapshot["dropped"])
        for id in sorted(dropped):
            self.listener(Notice(text=f"segment '{id}' could not be read in training, so nothing was drawn from it"))
        parts = []
        for segment in table.segments:
            if segment.schema_id == snapshot["schema"] and len(segment.uids) and segment.id not in dropped:
                every = np.ones(len(segment.uids), dtype=bool)
                parts.append((segment, every if chosen is None else positions(chosen, segment.uids) >= 0))
        return table, parts

    def _group_sources(
        self, lake: Lake, live: LiveTable, parts: Sequence[tuple[Segment, np.ndarray]]
    ) -> list[LineageSource]:
        """Group the drawn trajectories by collector, policy version and relabelling, as read from the footers."""
        counts: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
        files: dict[tuple[Any, ...], set[str]] = defaultdict(set)
        bases: dict[tuple[Any, ...], set[tuple[int, int]]] = defaultdict(set)
        tables: dict[str, tuple[pa.Table, np.ndarray]] = {}
        for segment, mask in parts:
            if segment.file not in tables:
                footer = read_footer(lake.storage, segment.file)
                tables = {segment.file: (footer.trajectories, footer.uids())}  # neighbours are in the same file
            table, uids = tables[segment.file]
            rows = table.take(positions(uids, segment.uids[mask]))
            for group in rows.group_by(list(_KEY)).aggregate([("length", "sum"), ("length", "count")]).to_pylist():
                key = tuple(group[name] for name in _KEY)
                counts[key][0] += group["length_count"]
                counts[key][1] += group["length_sum"]
                files[key].add(segment.file)
                if segment.bases is not None:
                    same = np.ones(rows.num_rows, dtype=bool)
                    for name, value in zip(_KEY, key, strict=True):
                        same &= pc.equal(rows[name], value).to_numpy(zero_copy_only=False)
                    numbers, row0 = (part[mask][same] for part in segment.bases)
                    bases[key].update(zip(numbers.tolist(), row0.tolist(), strict=True))
        return [
            LineageSource(
                **dict(zip(_KEY, key, strict=True)),
                trajectories=counts[key][0],
                steps=counts[key][1],
                segments=tuple(sorted(files[key])),
                bases=len(bases[key]),
                base_segments=tuple(sorted({live.segments[number].file for number, _ in bases[key]})),
            )
            for key in sorted(counts, key=lambda key: tuple((part is not None, part) for part in (*key[1:], key[0])))
        ]

    def _explain_missing(self, lake: Lake, ids: Sequence[str]) -> Iterator[_MissingSegment]:
        """Yield what the log says of segments that cannot be read."""
        log = read_log(lake.storage)
        for id in ids:
            removal, damage = log.removals.get(id), log.quarantined.get(id)
            if damage is not None:
                yield _MissingSegment(segment=id, reason=str(damage.get("reason", "quarantined")))
            elif removal is not None and id not in log.moved:
                yield _MissingSegment(segment=id, reason=f"expired: {removal.reason}", time=removal.time)
            else:
                yield _MissingSegment(segment=id, reason="no longer in the lake")
