"""The table of settings that were chosen for a run without a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def table_of_choices(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of choices."""
    from amago_cli.render.table import render
    from pipelines.events import duration
    from pipelines.stages.make_recipe import read_budget

    expected = plan.get("expected_seconds")
    takes = f", about {duration(expected)}" if isinstance(expected, int) else ""
    rows = [(row["setting"], _show(row["setting"], row["value"]), row["reason"]) for row in plan["choices"]]
    title = f"choices for {read_budget(plan).text}{takes}"
    return render(("setting", "value", "reason"), rows, show=str, title=title)


def _show(setting: str, value: Any) -> str:
    """Format a chosen value for the table."""
    if setting == "stages":
        return ", ".join(dict.fromkeys(entry["stage"] for entry in value))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(str(entry.get("kind", entry)) for entry in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
