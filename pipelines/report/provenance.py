"""Where a run comes from: its settings and how they differ from its recipe, lineage, machine, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pipelines.config.difference import varying
from pipelines.errors import masked
from pipelines.report.lineage_tree import Node
from pipelines.report.markup import Child, Markup, element, facts, folded, joined, table
from pipelines.report.shown import ShownRun, text
from pipelines.runs.evaluations import number

_MOST_SETTINGS = 2_000
_STAGES = ("run", "collect", "relabel", "train")


def settings(runs: Sequence[ShownRun]) -> Markup:
    """Return what differs from the recipe, or between runs, and all settings."""
    if len(runs) == 1:
        return joined(_changed(runs[0]), _all(runs[0]))
    keys = varying([run.stored.settings for run in runs], apart_from=())[:_MOST_SETTINGS]
    values = [[_value(run.stored.settings.get(key)) for key in keys] for run in runs]
    labels = [run.label for run in runs]
    caption = "Settings that differ"
    if not keys:
        differing = element("p", "All settings are equal.")
    elif len(keys) <= len(runs):
        rows = [[label, *row] for label, row in zip(labels, values, strict=True)]
        differing = table(["run", *keys], rows, caption=caption)
    else:
        columns = [[key, *column] for key, column in zip(keys, zip(*values, strict=True), strict=True)]
        differing = table(["setting", *labels], columns, caption=caption)
    return joined(differing, folded("All settings", *(_all(run, f"Settings of {run.label}") for run in runs)))


def _changed(run: ShownRun) -> Markup:
    recipe = run.stored.recipe
    changed = run.stored.changed
    against = f"recipe {recipe}" if recipe else "what was chosen for it" if run.stored.is_planned else "the defaults"
    if not changed:
        return element("p", f"Nothing differs from {against}.")
    rows = [[key, _value(before), _value(after)] for key, (before, after) in list(changed.items())[:_MOST_SETTINGS]]
    return table(["setting", text(against, 80), "this run"], rows, caption=f"What differs from {against}")


def _all(run: ShownRun, title: str = "All settings") -> Markup:
    rows = [[key, _value(value)] for key, value in sorted(run.stored.settings.items())[:_MOST_SETTINGS]]
    return folded(f"{title} ({len(rows)})", table(["setting", "value"], rows, caption=title, numbers=False))


def _value(value: Any) -> str:
    return "\N{EN DASH}" if value is None else masked(text(value))


def lineage(root: Node) -> Markup:
    """Return a tree as nested lists."""
    return element("ul", _item(root), class_="tree")


def _item(node: Node) -> Markup:
    inner = element("ul", (_item(child) for child in node.children)) if node.children else None
    return element("li", masked(node.text), inner)


def machine(runs: Sequence[ShownRun]) -> Markup:
    """Return hardware and versions: one list for one run, a table for several."""
    known = [dict(_machine(run)) for run in runs]
    if len(runs) == 1:
        return facts(list(known[0].items()))
    names = list(dict.fromkeys(name for each in known for name, value in each.items() if value))
    rows = [[run.label, *(each.get(name) for name in names)] for run, each in zip(runs, known, strict=True)]
    return table(["run", *names], rows, caption="Machines and versions")


def _machine(run: ShownRun) -> Iterator[tuple[str, Child]]:
    record = run.stored.record
    hardware, compute, versions = (_table(record.get(name)) for name in ("hardware", "compute", "versions"))
    yield "host", text(hardware.get("host"), 100)
    yield "processor", " ".join(text(hardware.get(name), 100) for name in ("machine", "cpu") if hardware.get(name))
    yield "cores", text(hardware.get("cores"), 10)
    memory = number(hardware.get("memory_bytes"))
    yield "memory", f"{memory / 2**30:,.1f} GiB" if memory else ""
    for name in ("device", "gpu", "precision", "attention", "compiled"):
        if name in compute:
            yield name, text(compute[name], 100)
    yield "git commit", text(record.get("git_commit"), 60)
    for name, version in versions.items():
        if version is not None:
            yield text(name, 40), text(version, 60)


def repeat(runs: Sequence[ShownRun]) -> Markup:
    """Return the commands that made the runs, and those that repeat them with their settings."""
    made = [line for run in runs for line in _made(run)]
    again = [
        shlex.join(["amago", "run", f"{run.stored.path}/config.toml", "--run", f"{run.stored.path}-again"])
        for run in runs
        if "run" in _table(run.stored.record.get("stages"))
    ]
    return joined(
        element("pre", "\n".join(made)) if made else None,
        element("p", "With exactly these settings, in a directory of its own:") if again else None,
        element("pre", "\n".join(again)) if again else None,
    )


def _made(run: ShownRun) -> list[str]:
    """Return the commands of a run's stages with their times, in their order."""
    stages = _table(run.stored.record.get("stages"))
    made = []
    for stage in dict.fromkeys((*_STAGES, *stages)):
        entry = _table(stages.get(stage))
        if (line := _command(entry.get("argv"))) is not None:
            made.append((text(entry.get("time"), 40), line))
    return [f"{line}  # {when}" if when else line for when, line in sorted(made)]


def _command(argv: Any) -> str | None:
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        return None
    return text(masked(shlex.join([PurePath(argv[0]).name, *argv[1:]])), 2_000)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
