"""Contents of the pages of `amago view`, as JSON objects of bounded size."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.config.policy_files import list_checkpoints
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import AmagoError, InputMissing
from pipelines.events import Event, Listener, Notice, silent
from pipelines.lake import collectors
from pipelines.lake.lineage import TrainingHistory
from pipelines.lake.sql import catalog, pages
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from pipelines.report.page import read_script
from pipelines.view import lanes, pictures
from pipelines.view import replay as replays
from pipelines.view.columns import describe
from pipelines.view.critic import CriticLanes, Evaluator
from pipelines.view.steps import StepReader

_MOST_ROWS = 1000  # of a query
_MOST_LETTERS = 4_000_000  # of its rows
_MOST_DERIVED = 100
_MOST_WARNINGS = 3
_LOOK_SECONDS, _LOOK_SECONDS_REMOTE = 2, 15  # between looks for what is new
_MOST_CHECKPOINTS = 50
# Versions of an episode in pieces are in pieces, too: one row for each version, that of its first piece.
_DERIVED = """
select t.uid, t.relabel_method, t.base_offset, e.length, e."return", e.success, t.base_uid
from trajectories t join (from episodes where base_uid is not null) e using (episode)
where t.base_uid in ({uids}) and t.chunk = 0 order by t.relabel_method, t.t_commit, t.uid limit {most}
"""
_STATE = """
select count(*) as trajectories, coalesce(sum(length) filter (where base_uid is null), 0)::bigint as steps,
       max(t_commit) as newest, count(*) filter (where base_uid is not null) as derived,
       (select coalesce(list(distinct env order by env)[:20], []) from trajectories) as environments
from trajectories
"""
_LETTERS = 20_000
_MOST_PARTS = 1000
_DEEPEST = 6


class _Warnings:
    """The warnings that a query gives, for a page."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def hear(self, event: Event) -> None:
        if isinstance(event, Notice) and event.level == "warning" and event.text not in self._texts:
            self._texts.append(event.text)

    def show(self) -> list[str]:
        """Return the first ones, and how many there are more."""
        shown = [plain(text) for text in self._texts[:_MOST_WARNINGS]]
        more = len(self._texts) - len(shown)
        return shown if not more else [*shown, f"and {more} more like these"]


class LakeViewer:
    """A lake, and optionally the agent of a run, behind the pages. Calls may come from several threads.

    `seconds` and `megabytes` limit each query of the user.
    """

    def __init__(
        self, lake: Lake, evaluator: Evaluator | None = None, *, seconds: float = 20.0, megabytes: int = 1024
    ) -> None:
        self.lake = lake
        self.limits = QueryLimits(seconds=seconds, megabytes=megabytes)
        self._steps = StepReader(lake)
        self._replays = replays.Replays(lake, self._steps)
        self._critic = None if evaluator is None else CriticLanes(evaluator)
        self._history = TrainingHistory(lake, () if evaluator is None else (evaluator.run,))

    def about(self) -> dict[str, Any]:
        """Describe the lake and the agent; the columns that trajectories can be sorted by."""
        return {
            "lake": self.lake.name,
            "run": None if self.lake.run is None or not RunDirectory(self.lake.run).exists() else str(self.lake.run),
            "values": None if self._critic is None else self._critic.about,
            "orders": pages.ORDERS,
            "look_seconds": _LOOK_SECONDS if isinstance(self.lake.storage, LocalStorage) else _LOOK_SECONDS_REMOTE,
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Query what changes while a collector writes: trajectories, steps, the time of the newest, and first warnings.

        Warnings are, for example, about segments that cannot be read. While a query of the user runs, the state is that
        at its start.
        """
        warnings = _Warnings()
        names, rows = catalog.query(self.lake, _STATE, wait=False, listener=warnings.hear)
        return {**dict(zip(names, plain(rows[0]), strict=True)), "warnings": warnings.show()}

    def warm(self, listener: Listener = silent) -> None:
        """Prepare what the first page needs: the index, the process that evaluates SQL, the charting library."""
        with contextlib.suppress(AmagoError, OSError):
            self.page(where="", order="t_commit", descending=True, rows=1, listener=listener)
        read_script()

    def page(
        self,
        *,
        where: str,
        order: str,
        descending: bool,
        after: str = "",
        before: str = "",
        rows: int = 100,
        listener: Listener = silent,
    ) -> dict[str, Any]:
        """Fetch one page of the table; see `pages.fetch_page`."""
        found = pages.fetch_page(
            self.lake,
            where=where,
            order=order,
            descending=descending,
            after=after,
            before=before,
            rows=rows,
            limits=self.limits,
            listener=listener,
        )
        return plain(found._asdict())

    def count(self, where: str, *, listener: Listener = silent) -> dict[str, Any]:
        """Summarise the trajectories that match."""
        return plain(pages.fetch_count(self.lake, where, limits=self.limits, listener=listener))

    def curve(self, where: str, across: str, bins: int, *, listener: Listener = silent) -> dict[str, Any]:
        """Compute the curve of returns of the trajectories that match."""
        found = pages.fetch_curve(self.lake, where, across=across, bins=bins, limits=self.limits, listener=listener)
        return {"bins": plain(found)}

    def query(self, text: str, *, listener: Listener = silent) -> dict[str, Any]:
        """Fetch the first rows of one SELECT of the user, as far as they fit a page, and first warnings: segments that
        cannot be read are left out."""
        warnings = _Warnings()

        def hear(event: Event) -> None:
            warnings.hear(event)
            listener(event)

        columns, rows = catalog.query(self.lake, text, limits=self.limits, most=_MOST_ROWS + 1, listener=hear)
        shown, letters = [], 0
        for row in rows[:_MOST_ROWS]:
            shown.append(plain(row))
            letters += len(json.dumps(shown[-1]))
            if letters > _MOST_LETTERS:
                break
        return {"columns": columns, "rows": shown, "more": len(rows) > len(shown), "warnings": warnings.show()}

    def trajectory(self, uid: str) -> dict[str, Any]:
        """Describe a trajectory: its row and columns, those that an overlay changes, and its relabelled versions."""
        found = self._steps.find(uid)
        uids = ", ".join(f"'{uid}'" for uid in found.uids)
        names, rows = catalog.query(self.lake, _DERIVED.format(uids=uids, most=_MOST_DERIVED + 1))
        derived = [dict(zip(names, row, strict=True)) for row in rows[:_MOST_DERIVED]]
        for each in derived:
            each["base_offset"] += found.start_of(each.pop("base_uid"))
        replay = self._replays.find(found)
        drawn = [] if replay is None else [replay.describe()]
        facts = {name: value for name, value in found.facts.items() if name not in ("base_segment", "base_row0")}
        return plain(
            {
                "facts": facts,
                "columns": [*drawn, *describe(found.schema)],
                "changed": found.changed,
                "derived": derived,
                "more_derived": len(rows) > _MOST_DERIVED,
                "step_bytes": found.schema.step_bytes,
            }
        )

    def steps(self, uid: str, start: int, stop: int, points: int, columns: Sequence[str]) -> dict[str, Any]:
        """Read lanes of a window; see `lanes.lanes`."""
        found = self._steps.find(uid)
        return lanes.lanes(self._steps, found, lanes.StepWindow.of(found.length, start, stop, points), columns)

    def values(self, uid: str, start: int, stop: int) -> dict[str, Any]:
        """Compute the agent's figures of a window. InputMissing without an agent."""
        if self._critic is None:
            raise InputMissing("no agent to compute values with", hint="start with: amago view LAKE --values RUN")
        return {**self._critic.lanes(self._steps, self._steps.find(uid), start, stop), **self._critic.about}

    def frame(self, uid: str, column: str, step: int, side: int) -> bytes:
        """Draw an observation, or the environment as it draws itself, as PNG."""
        return self._pictures(uid, column).frame(step, side)

    def strip(self, uid: str, column: str, start: int, stop: int, count: int, side: int) -> bytes:
        """Draw several steps side by side, as PNG."""
        return self._pictures(uid, column).strip(start, stop, count, side)

    def _pictures(self, uid: str, column: str) -> pictures.Pictures:
        found = self._steps.find(uid)
        replay = self._replays.find(found) if column == replays.NAME else None
        if replay is not None:
            return pictures.Pictures(found.length, replay.picture(0).nbytes, replay.picture)
        return pictures.find_pictures(self._steps, found, column)

    def origin(self, uid: str) -> dict[str, Any]:
        """Describe who acted, in an overlay who acted in its base, and which runs trained on the trajectory."""
        facts = self._steps.find(uid).facts
        record = collectors.read(self.lake, facts["collector"]) if facts["collector"] else None
        collector = None
        if record is not None:  # a file of the lake, which may be damaged or hostile: texts and lists are cut
            processes = record.get("processes") or [{}]
            newest = processes[-1]
            env = list((record.get("env") or {}).items())[:50]
            collector = {
                "name": str(record["collector"])[:400],
                "run": str((record.get("run") or {}).get("path") or "")[:400],
                "env": {str(key)[:100]: str(value)[:200] for key, value in env},
                "seed": record.get("seed"),
                "started": record.get("started"),
                "host": str(newest.get("host") or "")[:200],
                "pid": newest.get("pid"),
                "command": " ".join(map(str, newest.get("argv") or []))[:1000],
                "processes": len(processes),
            }
        return plain(
            {
                "collector": collector,
                "policy": self._policy(facts, record),
                "trained": [
                    {**run, "checkpoints": run["checkpoints"][-_MOST_CHECKPOINTS:]}
                    for run in self._history.list_updates(uid, facts["segment"])
                ],
            }
        )

    def _policy(self, facts: dict[str, Any], record: dict[str, Any] | None) -> dict[str, Any]:
        """Describe the policy that acted, its run, and whether its checkpoint is still kept there."""
        places = (record or {}).get("policies", {}).get(facts["policy_id"]) or {}
        run = next(
            (
                RunDirectory(place)
                for place in (places.get("absolute"), places.get("path"), self.lake.run)
                if place is not None and RunDirectory(Path(place)).exists()
            ),
            None,
        )
        own = run if run is not None and run.identity == facts["policy_id"] else None
        version = facts["policy_version"]
        return {
            "id": facts["policy_id"],
            "version": version,
            "run": places.get("path") if own is None else str(own.path),
            "kept": None if own is None or version < 0 else version in list_checkpoints(own.checkpoints),
        }


def plain(value: Any, depth: int = 0) -> Any:
    """Convert `value` to JSON types: NaN and infinities become None, unknown types their string.

    Texts, lists and nesting are cut: a value of a query can be of any size.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)  # JavaScript's numbers are float64
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _LETTERS else f"{value[:_LETTERS]}..."
    if depth == _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {str(key)[:_LETTERS]: plain(part, depth + 1) for key, part in list(value.items())[:_MOST_PARTS]}
    if isinstance(value, list | tuple):
        return [plain(part, depth + 1) for part in value[:_MOST_PARTS]]
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text[:_LETTERS]
