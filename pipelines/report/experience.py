"""The lake of a run: its tasks, returns and lengths of its episodes, and the age of the policies that acted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipelines.events import Listener, silent
from pipelines.lake.sql.describing import describe
from pipelines.lake.store import Lake
from pipelines.report.charts import specify_histogram
from pipelines.report.markup import Child, Markup, element, facts, fold, join, table
from pipelines.report.page import Charts, Curve
from pipelines.report.shown import ShownRun, text

_BINS = 30
_MOST_TASKS = 20
_MOST_VERSIONS = 300
# Columns of the tables, with their titles.
_TASKS = {
    **{"env": "environment", "task": "task", "trajectories": "trajectories", "episodes": "episodes", "steps": "steps"},
    **{"length_mean": "mean length", "return_mean": "mean return", "success_mean": "success"},
}
_POLICIES = {
    **{"policy_id": "policy", "trajectories": "trajectories", "versions": "versions", "oldest_version": "oldest"},
    **{"newest_version": "newest", "newest_checkpoint": "newest checkpoint", "lag": "updates behind"},
}
_COLLECTORS = {name: name for name in ("collector", "trajectories", "steps", "run", "host")}
_ORIGINAL = "base_uid is null and complete"
# Of more versions than _MOST_VERSIONS, neighbours share a point.
_BY_VERSION = f"""
with acted as (
    select policy_version as v, "return" as r, success, length,
           greatest(1, ceil((max(policy_version) over () - min(policy_version) over ()) / {_MOST_VERSIONS})) as w
    from episodes where {_ORIGINAL} and policy_version >= 0
)
select max(v) as version, avg(r) as r, avg(success::int) as success, avg(length) as length, count(*) as count
from acted group by floor(v / w) order by 1
"""
_HISTOGRAM = f"""
with found as (select {{column}}::double as x from episodes where {_ORIGINAL} and isfinite({{column}}::double)),
range as (select min(x) as low, max(x) as high from found)
select low, high, least(floor((x - low) / nullif(high - low, 0) * {_BINS}), {_BINS - 1})::int as bin, count(*) as count
from found, range group by all order by bin
"""

_VALUES = f"""
select {{column}}::double as x, count(*) as count from episodes
where {_ORIGINAL} and isfinite({{column}}::double) group by 1 order by 1 limit {2 * _BINS + 1}
"""


def find_lake(run: ShownRun) -> Lake | None:
    """Find the run's own lake, or else the first one that it was trained on, if that is still there."""
    recorded = run.stored.record.get("lakes")
    entries = recorded if isinstance(recorded, list) else []
    places = [entry.get("lake") for entry in entries if isinstance(entry, Mapping)]
    for place in (run.stored.path / "lake", *places):
        if isinstance(place, str) and "://" in place:  # a report opens nothing on the network that a file names
            continue
        if place is not None and (lake := Lake.find(place)) is not None:
            return lake
    return None


def draw_collection(run: ShownRun, lake: Lake, charts: Charts) -> Markup | None:
    """Draw the success, or else the return, of collected episodes by the version of the policy that acted.

    None if fewer than two versions acted.
    """
    rows = list(lake.sql(_BY_VERSION, listener=silent))  # `show_lake` says what cannot be read
    if len(rows) < 2:
        return None
    along = run.at_updates([float(row["version"]) for row in rows])
    counts = [float(row["count"]) for row in rows]
    for key, name, share in (("success", "Success", True), ("r", "Return", False)):
        if all(row[key] is None for row in rows):
            continue
        values = [float("nan") if row[key] is None else float(row[key]) for row in rows]
        curve = Curve(name="collected episodes", values=values, along=along, run=run.number)
        about = f"Each point is the mean of about {sum(counts) / len(counts):,.0f} episodes, with exploration. It"
        about += " stands where the policy that played them was saved."
        title = f"{name} of collected episodes"
        return charts.lines(title, [curve], y=f"mean {name.lower()}", about=about, share=share)
    return None


def show_lake(lake: Lake, charts: Charts, listener: Listener = silent) -> Markup:
    """Describe a lake: its size, distributions of its episodes, and tables of tasks, policies and collectors."""
    found = describe(lake, listener=listener)
    known = facts(
        [
            ("lake", lake.name),
            ("trajectories", f"{found['trajectories']:,}"),
            ("complete episodes", f"{found['episodes']:,}"),
            ("relabelled copies among them", f"{found['overlays']:,}" if found["overlays"] else None),
            ("environment steps", f"{found['steps']:,}"),
            ("tasks", f"{found['task_count']:,}"),
            ("size", f"{found['bytes'] / 2**20:,.1f} MiB in {found['segments']:,} segments"),
            ("expired trajectories", f"{found['expired_trajectories']:,}" if found["expired_trajectories"] else None),
        ]
    )
    histograms = [
        _draw_histogram(lake, charts, "Returns", '"return"', "return"),
        _draw_histogram(lake, charts, "Lengths", "length", "steps"),
        _draw_histogram(lake, charts, "Policy versions", "policy_version", "update at which the policy acted"),
    ]

    def fold_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], caption: str) -> Markup:
        cells = [[text(v, 120) if isinstance(v := row[name], str) else v for name in columns] for row in rows]
        return fold(title, table(list(columns.values()), cells, caption=caption))

    most = f", the {_MOST_TASKS} with the most trajectories" if found["task_count"] > _MOST_TASKS else ""
    tables: list[Child] = [
        fold_table(f"Tasks ({found['task_count']:,})", found["tasks"][:_MOST_TASKS], _TASKS, f"Tasks{most}")
    ]
    if found["policies"]:
        caption = "Policies that acted, and how far the newest of each is behind its run's newest checkpoint"
        tables.append(fold_table("Policies and staleness", found["policies"], _POLICIES, caption))
    if found["collectors"]:
        tables.append(fold_table("Collectors", found["collectors"], _COLLECTORS, "Collectors"))
    return join(known, element("div", *histograms, class_="grid small"), *tables)


def _draw_histogram(lake: Lake, charts: Charts, title: str, column: str, value: str) -> Markup | None:
    """Draw a histogram of a column of episodes; None if all values are equal.

    Few evenly spaced values, such as whole numbers, have a bar each.
    """
    rows = list(lake.sql(_VALUES.format(column=column), listener=silent))
    if len(rows) < 2:
        return None
    places = [float(row["x"]) for row in rows]
    width = min(after - before for before, after in pairwise(places))
    if len(rows) <= 2 * _BINS and (places[-1] - places[0]) / width <= 2 * _BINS:
        counts = {round((place - places[0]) / width): row["count"] for place, row in zip(places, rows, strict=True)}
        low, bins = places[0] - width / 2, max(counts) + 1
    else:
        rows = list(lake.sql(_HISTOGRAM.format(column=column), listener=silent))
        counts = {row["bin"]: row["count"] for row in rows}
        low, bins = float(rows[0]["low"]), _BINS
        width = (float(rows[0]["high"]) - low) / bins
    found = [
        {"low": low + place * width, "high": low + (place + 1) * width, "count": counts.get(place, 0)}
        for place in range(bins)
    ]
    columns = {"low": "from", "high": "to", "count": "episodes"}
    return charts.rows(title, specify_histogram(value=value, height=150), found, columns)


def compare_lakes(lakes: Sequence[tuple[ShownRun, Lake]], listener: Listener = silent) -> Markup | None:
    """Tabulate the lakes of several runs; None if there are none."""
    rows = []
    for run, lake in lakes:
        found = describe(lake, listener=listener)
        size = f"{found['bytes'] / 2**20:,.1f} MiB"
        rows.append([run.label, lake.name, found["trajectories"], found["steps"], found["task_count"], size])
    titles = ["run", "lake", "trajectories", "environment steps", "tasks", "size"]
    return table(titles, rows, caption="The runs' lakes") if rows else None
