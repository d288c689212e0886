"""The origin of a run: its settings and how they differ from its recipe, its lineage and machine, how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from pipelines.config.changes import find_varying
from pipelines.errors import masked
from pipelines.report.markup import Child, Markup, element, facts, fold, join, table
from pipelines.report.shown import ShownRun, text
from pipelines.runs.evaluations import as_table, to_number

_MOST_SETTINGS = 2_000
_STAGES = ("run", "collect", "relabel", "train")


def show_settings(runs: Sequence[ShownRun]) -> Markup:
    """Show what differs from the recipe, or between several runs, and all settings."""
    if len(runs) == 1:
        recipe, changed, is_planned = runs[0].stored.recipe, runs[0].stored.changed, runs[0].stored.is_planned
        against = f"recipe {recipe}" if recipe else "what was chosen for it" if is_planned else "the defaults"
        pairs = list(changed.items())[:_MOST_SETTINGS]
        rows = [[key, _format_setting(before), _format_setting(after)] for key, (before, after) in pairs]
        difference = element("p", f"Nothing differs from {against}.")
        if changed:
            columns = ["setting", text(against, 80), "this run"]
            difference = table(columns, rows, caption=f"What differs from {against}")
        return join(difference, _fold_settings(runs[0]))
    keys = find_varying([run.stored.settings for run in runs], apart_from=())[:_MOST_SETTINGS]
    values = [[_format_setting(run.stored.settings.get(key)) for key in keys] for run in runs]
    labels = [run.label for run in runs]
    caption = "Settings that differ"
    if not keys:
        differing = element("p", "All settings are equal.")
    elif len(keys) <= len(runs):
        rows = [[label, *row] for label, row in zip(labels, values, strict=True)]
        differing = table(["run", *keys], rows, caption=caption)
    else:
        rows = [[key, *column] for key, column in zip(keys, zip(*values, strict=True), strict=True)]
        differing = table(["setting", *labels], rows, caption=caption)
    return join(differing, fold("All settings", *(_fold_settings(run, f"Settings of {run.label}") for run in runs)))


def _fold_settings(run: ShownRun, title: str = "All settings") -> Markup:
    rows = [[key, _format_setting(value)] for key, value in sorted(run.stored.settings.items())[:_MOST_SETTINGS]]
    return fold(f"{title} ({len(rows)})", table(["setting", "value"], rows, caption=title, numbers=False))


def _format_setting(value: Any) -> str:
    return "\N{EN DASH}" if value is None else masked(text(value))


def show_machine(runs: Sequence[ShownRun]) -> Markup:
    """Show hardware and versions: one list for one run, a table for several."""
    known = [dict(_describe_machine(run)) for run in runs]
    if len(runs) == 1:
        return facts(list(known[0].items()))
    names = list(dict.fromkeys(name for each in known for name, value in each.items() if value))
    rows = [[run.label, *(each.get(name) for name in names)] for run, each in zip(runs, known, strict=True)]
    return table(["run", *names], rows, caption="Machines and versions")


def _describe_machine(run: ShownRun) -> Iterator[tuple[str, Child]]:
    record = run.stored.record
    hardware, compute, versions = (as_table(record.get(name)) for name in ("hardware", "compute", "versions"))
    yield "host", text(hardware.get("host"), 100)
    yield "processor", " ".join(text(hardware.get(name), 100) for name in ("machine", "cpu") if hardware.get(name))
    yield "cores", text(hardware.get("cores"), 10)
    memory = to_number(hardware.get("memory_bytes"))
    yield "memory", f"{memory / 2**30:,.1f} GiB" if memory else ""
    for name in ("device", "gpu", "precision", "attention", "compiled"):
        if name in compute:
            yield name, text(compute[name], 100)
    yield "git commit", text(record.get("git_commit"), 60)
    for name, version in versions.items():
        if version is not None:
            yield text(name, 40), text(version, 60)


def show_commands(runs: Sequence[ShownRun]) -> Markup:
    """List the commands that made the runs, stage by stage with their times, and those that repeat them."""
    made, again = [], []
    for run in runs:
        stages = as_table(run.stored.record.get("stages"))
        lines = []
        for stage in dict.fromkeys((*_STAGES, *stages)):
            entry = as_table(stages.get(stage))
            argv = entry.get("argv")
            if isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv):
                # The first word is the path of the script, which says nothing and may name a home directory.
                line = text(masked(shlex.join([PurePath(argv[0]).name, *argv[1:]])), 2_000)
                lines.append((text(entry.get("time"), 40), line))
        made += [f"{line}  # {when}" if when else line for when, line in sorted(lines)]
        if "run" in stages:
            words = ["amago", "run", f"{run.stored.path}/config.toml", "--run", f"{run.stored.path}-again"]
            again.append(shlex.join(words))
    return join(
        element("pre", "\n".join(made)) if made else None,
        element("p", "With exactly these settings, in a directory of its own:") if again else None,
        element("pre", "\n".join(again)) if again else None,
    )
