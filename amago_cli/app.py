"""The application: its commands, and the only place where an exception becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from amago_cli import completion as completing
from amago_cli import ranks, streams
from amago_cli.commands import (
    collect,
    compare,
    completion,
    doctor,
    envs,
    evaluate,
    examples,
    export,
    init,
    lake,
    relabel,
    report,
    run,
    runs,
    serve,
    settings,
    sweep,
    train,
    tune,
    verify,
    view,
    watch,
)
from amago_cli.help import DefaultGroup, Group, LazyCommands
from amago_cli.invocation import Invocation, common_options_last
from amago_cli.stopping import Stopped, stoppable

app = typer.Typer(
    name="amago",
    cls=Group,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_lake_app = typer.Typer(
    cls=Group, rich_markup_mode=None, help="List, describe, query, check and maintain lakes of trajectories."
)

_runs_app = typer.Typer(
    cls=DefaultGroup,
    rich_markup_mode=None,
    help="List, query and remove runs. `amago runs DIR` is `amago runs ls DIR`.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from amago_cli.version import version

        print(f"amago {version()}")
        raise typer.Exit


_ABOUT = (
    "In-context reinforcement learning from the command line.\n\n"
    "A lake is a directory of trajectories; a run is a directory runs/NAME with a configuration,"
    " checkpoints and evaluations. Repeating a command resumes it. Start with `amago examples` and"
    " `amago run quickstart`, or with an environment of your own: `amago init mymaze`."
)


@app.callback(help=_ABOUT)
def amago(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """In-context reinforcement learning from the command line."""


_COMMANDS: tuple[tuple[str, Sequence[Callable[..., Any]]], ...] = (
    ("Start", (init.init,)),
    ("Stages", (collect.collect, relabel.relabel, train.train, evaluate.evaluate, export.export, run.run)),
    ("Stages", (sweep.sweep, tune.tune, serve.serve)),
    ("Inspect", (compare.compare, report.report, view.view, watch.watch, verify.verify)),
    ("Inspect", (envs.envs, examples.examples, settings.settings, doctor.doctor, completion.completion)),
)
_LAKE_COMMANDS = (
    lake.ls,
    lake.info,
    lake.sql,
    lake.sample,
    lake.lineage,
    lake.verify,
    lake.reindex,
    lake.compact,
    lake.expire,
    lake.protect,
    lake.copy,
    lake.merge,
)
_RUNS_COMMANDS = (runs.ls, runs.sql, runs.rm, runs.prune)


_CHANGING = ("train", "evaluate", "run")  # commands that change what `amago runs` shows


@functools.cache
def command() -> Any:
    """Return the groups of commands, built once in a process that calls `main` repeatedly."""
    return build()


def build() -> Any:
    """Build the groups of commands; each command is built when it is first asked for."""
    built: Any = typer.main.get_command(app)
    built.commands = commands = LazyCommands()
    for panel, functions in _COMMANDS:
        for function in functions:
            commands.add(function, section=panel)
    for name, typed, members in (("lake", _lake_app, _LAKE_COMMANDS), ("runs", _runs_app, _RUNS_COMMANDS)):
        group: Any = typer.main.get_group(typed)
        group.name, group.rich_help_panel, group.commands = name, "Inspect", LazyCommands()
        for function in members:
            group.commands.add(function)
        commands[name] = group
    return built


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `amago` with `arguments` (default: the process's own) and return its exit code."""
    from amago_cli import errors
    from amago_cli.next_step import suggest_command
    from amago_cli.render import escaping
    from amago_cli.render.output import output_of

    streams.prepare()
    words = common_options_last(sys.argv[1:] if arguments is None else arguments)
    invocation = Invocation.from_arguments(words)
    try:
        try:
            errors.refuse_shadowed_engine()
            from pipelines import trust
            from pipelines.config.host import is_main

            ranks.end_with_launcher()
            ranks.refuse_other_commands(invocation)
            completing.register()
            with stoppable(), trust.only(words):
                outcome = command().main(words or ["--help"], prog_name="amago", standalone_mode=False, obj=invocation)
            if isinstance(outcome, int):  # --help and --version have already printed
                return outcome
            if isinstance(outcome, ranks.Launch):
                return outcome.run()
            if not is_main():
                ranks.end(0)
                return 0
            if (then := getattr(outcome, "then", None)) is None:
                output_of(invocation).show(outcome)
                sys.stdout.flush()
            else:
                with stoppable(), trust.only(words):  # from the first printed line on: others may react to it
                    output_of(invocation).show(outcome)
                    sys.stdout.flush()
                    then()
            if not (invocation.json or invocation.quiet) and (step := suggest_command(outcome)) is not None:
                print(escaping.line(f"next: {step}"), file=sys.stderr)
            _remember(outcome)
            ranks.end(0)
            return 0
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt, Stopped) as error:
            code = errors.report(error, invocation)
            ranks.end(code)
            return code
    except BrokenPipeError:
        # The reader closed the pipe, as in `amago lake sql ... | head`; the exit code is that of SIGPIPE.
        streams.drop_stdout()
        return errors.BROKEN_PIPE


def _remember(outcome: Any) -> None:
    """Put a run that a stage has changed into the cache of `amago runs`, which then need not read it."""
    run = getattr(outcome, "run", None)
    if run is None or getattr(outcome, "command", "") not in _CHANGING:
        return
    from pipelines.errors import AmagoError
    from pipelines.runs.summary import summarize_runs

    with contextlib.suppress(AmagoError):
        summarize_runs([run])
