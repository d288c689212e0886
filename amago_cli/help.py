"""Help in sections, as plain text.

Typer's own boxes load rich, which takes longer than everything else `--help` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from amago_cli.options import with_common_options

# Long enough that no sentence is cut off: text that does not fit is wrapped.
_WHOLE = 1000


class LazyCommands(dict[str, Any]):
    """Commands by name, each built from its function when it is first asked for: only one of them is carried out."""

    def add(self, function: Callable[..., Any], *, section: str | None = None) -> None:
        """Add the command of a function, under its name, in a section of the help."""
        self[function.__name__] = CommandInfo(callback=function, cls=Command, rich_help_panel=section)

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, CommandInfo):
            assert found.callback is not None
            found.callback = with_common_options(found.callback)
            self[name] = found = get_command_from_info(found, pretty_exceptions_short=False, rich_markup_mode=None)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - it builds the command

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def describe(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield the name, the section and the short help of each, without building it."""
        for name, found in super().items():
            command = found
            if isinstance(found, CommandInfo):
                command = TyperCommand(name=name, help=inspect.getdoc(found.callback), rich_markup_mode=None)
            section = getattr(found, "rich_help_panel", None)
            yield name, section if isinstance(section, str) else None, command.get_short_help_str(_WHOLE)


class Group(TyperGroup):
    """Group of commands, listed by section."""

    commands: LazyCommands

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        _write_sections(
            formatter, [(section, (name, text)) for name, section, text in self.commands.describe()], "Commands"
        )


class DefaultGroup(Group):
    """Group whose first command is meant where none is named: `amago runs DIR` is `amago runs ls DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


class Command(TyperCommand):
    """Command whose options are listed by section, with the defaults of the settings that they set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. None may be empty, as in `--run "$UNSET"`: the path would be the current directory."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.get_params(ctx):
            value = given.get(parameter.name)
            if "" in (value if isinstance(value, list | tuple) else (value,)):
                metavar = (parameter.metavar or parameter.name).strip("[]")
                is_argument = parameter.param_type_name == "argument"
                ctx.fail(f"argument '{metavar}' is empty" if is_argument else f"{parameter.opts[0]} is empty")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = []
        keys: Mapping[str, str] = getattr(self.callback, "settings", {})
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                if (key := keys.get(parameter.name)) is not None:
                    from pipelines.config.reference import find_default

                    value = find_default(key)
                    if isinstance(value, bool):
                        value = str(value).lower()
                    setting = f"[{key}]" if value in (None, "", ()) else f"[{key}, default: {value}]"
                    record = (record[0], f"{record[1]}  {setting}")
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                rows.append((getattr(parameter, "rich_help_panel", None) or kind, record))
        _write_sections(formatter, rows, "Options")


def _write_sections(formatter: Any, rows: Iterable[tuple[Any, tuple[str, str]]], default: str) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for section, row in rows:
        name = section if isinstance(section, str) else default
        sections.setdefault(name, []).append(row)
    for name, members in sections.items():
        with formatter.section(name):
            formatter.write_dl(members)
