"""Help in sections, as plain text.

Typer's own boxes load rich, which takes longer than everything else `--help` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Long enough that no sentence is cut off: text that does not fit is wrapped.
_WHOLE = 1000


class Group(TyperGroup):
    """Group of commands, listed by section."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (getattr(command, "rich_help_panel", None), (name, command.get_short_help_str(_WHOLE)))
            for name, command in found
            if command is not None and not command.hidden
        ]
        _write(formatter, rows, "Commands")


class DefaultGroup(Group):
    """Group whose first command is meant where none is named: `amago runs DIR` is `amago runs ls DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


class Command(TyperCommand):
    """Command whose options are listed by section, with the defaults of the settings that they set."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = []
        keys: Mapping[str, str] = getattr(self.callback, "settings", {})
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                if (key := keys.get(parameter.name)) is not None:
                    record = (record[0], f"{record[1]}  {_setting(key)}")
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                rows.append((getattr(parameter, "rich_help_panel", None) or kind, record))
        _write(formatter, rows, "Options")


def _setting(key: str) -> str:
    """Return the setting and its default: `[train.steps, default: 1000]`."""
    from pipelines.config.reference import default

    value = default(key)
    if isinstance(value, bool):
        value = str(value).lower()
    return f"[{key}]" if value in (None, "", ()) else f"[{key}, default: {value}]"


def _write(formatter: Any, rows: Iterable[tuple[Any, tuple[str, str]]], default: str) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for section, row in rows:
        name = section if isinstance(section, str) else default
        sections.setdefault(name, []).append(row)
    for name, members in sections.items():
        with formatter.section(name):
            formatter.write_dl(members)
