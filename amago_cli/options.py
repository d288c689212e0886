"""Options as objects: an option means the same in every command, because all commands take it from here.

`@stage` adds the options that all stages have, `@reader` those of commands that only read. The function receives them
as one `Common`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli import completion
from amago_cli.invocation import Invocation
from amago_cli.quantities import parse_positive
from amago_cli.streams import result_alone

if TYPE_CHECKING:
    from pipelines.events import Listener


class Format(StrEnum):
    """Forms of a result."""

    TEXT = "text"
    JSON = "json"


class _TableFormat(StrEnum):
    """Forms of a result that is a table."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


class _QueryFormat(StrEnum):
    """Forms of the answer to a query of a lake."""

    TEXT = "text"
    JSON = "json"
    ARROW = "arrow"
    PARQUET = "parquet"
    CSV = "csv"


@dataclass(frozen=True)
class Sets:
    """Marker of an option that sets a setting; the help text shows the setting's default."""

    key: str


_COMMON = "Common options"

Environment = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="ENV",
        help="Environment, as `amago envs` lists it, or gym:ID.",
        autocompletion=completion.environments,
    ),
    Sets("env.name"),
]

Dataset = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="Import a dataset: a file or folder, d4rl:NAME, minari:ID, hf://ORG/NAME, or module:attr.",
    ),
    Sets("source.name"),
]


HOST = "127.0.0.1"  # servers answer this machine only, unless somebody says otherwise


def port_option(default: int) -> Any:
    """Make the option for a server's port; `default` is taken where it is free."""
    text = f"Port of the server; 0 is any free one [default: {default}, or a free one]."
    return typer.Option("--port", metavar="N", min=0, max=65535, help=text)


_A_LAKE = "a directory, a run, or s3://bucket/prefix (gs://, az://)"
_RUNS = "Runs, directories that contain runs, or patterns such as 'runs/maze-*'"
FromLake = Annotated[
    list[str] | None,
    typer.Option(
        "--from-lake",
        metavar="LAKE",
        help=f"Lake to read: {_A_LAKE}.",
        autocompletion=completion.lakes,
    ),
]
LakeArgument = Annotated[
    str,
    typer.Argument(metavar="LAKE", help=f"{_A_LAKE.capitalize()}.", autocompletion=completion.lakes),
]
RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Directory of a run, e.g. runs/quickstart.", autocompletion=completion.runs),
]
RunsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN...]", help=f"{_RUNS} (default: runs).", autocompletion=completion.runs),
]
SomeRuns = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help=f"{_RUNS}.", autocompletion=completion.runs),
]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A name from `amago examples`, FILE.toml, or FILE.toml:NAME.",
        autocompletion=completion.recipes,
    ),
]
OptionalRecipe = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="A name from `amago examples`, FILE.toml, or FILE.toml:NAME; without one, give --env.",
        autocompletion=completion.recipes,
    ),
]
Jobs = Annotated[
    int, typer.Option("--jobs", metavar="N", parser=parse_positive, help="Number of runs at a time, each a process.")
]
Metric = Annotated[str, typer.Option("--metric", metavar="NAME", help="Score of the evaluations, e.g. success_mean.")]
RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Directory of the run.", autocompletion=completion.runs)
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Seed of all randomness in this stage."), Sets("seed")
]
EnvTimeout = Annotated[
    float | None,
    typer.Option(
        "--env-timeout", metavar="SECONDS", help="Treat a step or reset that takes longer as a broken environment."
    ),
    Sets("collect.env_timeout_seconds"),
]
Collectors = Annotated[
    int | None,
    typer.Option(
        "--collectors", metavar="N", help="Collectors that play at once, each in a process with its own actors."
    ),
    Sets("collect.collectors"),
]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", metavar="ENGINE", help="Where several of them run: local (this host), or ray."),
    Sets("collect.engine"),
]
RayOption = Annotated[
    str | None,
    typer.Option("--ray", metavar="CLUSTER", help="Ray cluster to use: auto, local, or the HOST:PORT of its head."),
    Sets("collect.ray"),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        help="Processes of this host that train together, each on its share of every batch (data parallelism).",
    ),
    Sets("train.ranks"),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over instead of resuming; this replaces what the run contains.")
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Profile of the recipe to apply, e.g. smoke.",
        autocompletion=completion.profiles,
    ),
    Sets("profile"),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="TRACKER",
        help="Send metrics, pictures and videos there: tensorboard, wandb:PROJECT, mlflow, trackio; repeatable.",
    ),
    Sets("track.to"),
]
OPPONENTS = typer.Option(
    "--opponents",
    metavar="POLICY|SQL",
    help="Who plays the other seats of a game: random, expert, RUN[@CHECKPOINT], BUNDLE, module:attr, or SQL over the "
    "run's checkpoints; repeatable.",
    autocompletion=completion.policies,
)
CHECKPOINT = typer.Option(
    "--checkpoint", metavar="NAME", help="latest, best, or an update number.", autocompletion=completion.checkpoints
)
EvaluatedCheckpoint = Annotated[str | None, CHECKPOINT, Sets("evaluate.checkpoint")]
Greedy = Annotated[
    bool | None,
    typer.Option("--greedy/--sample", help="Take the policy's most likely action, or sample."),
    Sets("evaluate.greedy"),
]
EvaluationSeed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Seed of the evaluation's tasks."), Sets("evaluate.seed")
]
Init = Annotated[
    str | None,
    typer.Option(
        "--init",
        metavar="POLICY",
        help="Begin a new run with the weights of another: RUN[@CHECKPOINT], a policy bundle, zoo:NAME, hf://ORG/NAME, "
        "or amago:PATH, the policy_epoch_N.pt of AMAGO.",
        autocompletion=completion.runs,
    ),
    Sets("init.source"),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="Network size: tiny, small, base or large. Without a GPU, tiny unless a width is set.",
        autocompletion=completion.sizes,
    ),
    Sets("size"),
]

_TOUCH_NOTHING = "Show what would be done (for a stage, its resolved settings) without doing it."
DryRun = Annotated[bool, typer.Option("--dry-run", help=_TOUCH_NOTHING)]

_OUTPUT = Annotated[Format, typer.Option("--output", help="Format of the result on stdout.", rich_help_panel=_COMMON)]
_QUIET = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only errors, and results of queries.", rich_help_panel=_COMMON),
]
_VERBOSE = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print more, tracebacks included.", rich_help_panel=_COMMON)
]
_CONFIG = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE[:NAME]",
        help="Settings from a TOML file, or from one of its tables.",
        autocompletion=completion.recipes,
        rich_help_panel=_COMMON,
    ),
]
_ASSIGNMENTS = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="One setting, e.g. train.steps=2000; repeatable.",
        autocompletion=completion.assignments,
        rich_help_panel=_COMMON,
    ),
]
_DRY_RUN = Annotated[
    bool,
    typer.Option("--dry-run", help=_TOUCH_NOTHING, rich_help_panel=_COMMON),
]

_TRUST = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import modules named by a run, checkpoint or lake; by default only those that you name.",
        rich_help_panel=_COMMON,
    ),
]

_READER: Mapping[str, tuple[Any, Any]] = {
    "output": (_OUTPUT, Format.TEXT),
    "trust": (_TRUST, False),
    "quiet": (_QUIET, False),
    "verbose": (_VERBOSE, False),
}
_TABLE_OUTPUT = Annotated[
    _TableFormat, typer.Option("--output", help="Format of the result on stdout.", rich_help_panel=_COMMON)
]
_TABLE: Mapping[str, tuple[Any, Any]] = {**_READER, "output": (_TABLE_OUTPUT, _TableFormat.TEXT)}
_QUERY_OUTPUT = Annotated[
    _QueryFormat, typer.Option("--output", help="Format of the result on stdout.", rich_help_panel=_COMMON)
]
_QUERY: Mapping[str, tuple[Any, Any]] = {**_READER, "output": (_QUERY_OUTPUT, _QueryFormat.TEXT)}
_STAGE: Mapping[str, tuple[Any, Any]] = {
    "config": (_CONFIG, None),
    "assignments": (_ASSIGNMENTS, None),
    "output": (_OUTPUT, Format.TEXT),
    "dry_run": (_DRY_RUN, False),
    "trust": (_TRUST, False),
    "quiet": (_QUIET, False),
    "verbose": (_VERBOSE, False),
}


@dataclass(frozen=True, kw_only=True)
class Common:
    """Common options of one call. `named` maps settings keys to the values of their options; None: not given.
    `has_terminal`: stdout is a terminal. A command cannot ask that itself, since its stdout is stderr."""

    invocation: Invocation
    named: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    assignments: Sequence[str] = ()
    output: Format | _TableFormat | _QueryFormat = Format.TEXT
    dry_run: bool = False
    trust: bool = False
    quiet: bool = False
    verbose: bool = False
    starts_stage: bool = False
    has_terminal: bool = False

    def concerns(self, *, run: Path | None = None, lake: Path | str | None = None) -> None:
        """Record which run and lake the command works on, for the error report."""
        self.invocation.run, self.invocation.lake = run, lake

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        """Yield a listener that shows progress and turns SIGINT, SIGTERM or SIGHUP into a stop at a safe point."""
        from amago_cli.render.progress import reporter
        from amago_cli.signals import interruptible
        from pipelines.config.host import is_main
        from pipelines.errors import masked
        from pipelines.events import Notice

        with reporter(quiet=self.quiet or not is_main(), verbose=self.verbose) as show, interruptible(show) as listener:
            if self.starts_stage:  # importing the libraries takes several seconds
                place = self.invocation.run or self.invocation.lake or ""
                listener(Notice(stage=f"{self.invocation.command} {masked(str(place))}".strip(), text="starting"))
            yield listener


def _make_decorator(shared: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator that notes which common options a command has.

    They are added when the command is built: all signatures together would take longer than the rest of `--help`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.shared = shared  # type: ignore[attr-defined]
        return function

    return decorate


stage = _make_decorator(_STAGE)  # a command that runs a stage: settings, --dry-run, --output, -q, -v
reader = _make_decorator(_READER)  # a command that only reads: --output, -q, -v
lister = _make_decorator(_TABLE)  # a command that only reads and prints a table: --output (also csv), -q, -v
querier = _make_decorator(_QUERY)  # a command that answers from a lake: --output (also arrow, parquet, csv), -q, -v


def with_common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Build the command of a function that `stage`, `reader`, `lister` or `querier` has decorated, which takes a
    `Common`."""
    shared: Mapping[str, tuple[Any, Any]] = function.shared  # type: ignore[attr-defined]
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(function, eval_str=True).parameters
    keys = {
        name: marker.key
        for name, parameter in own.items()
        for marker in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(marker, Sets)
    }
    parameters = [
        inspect.Parameter("context", keyword, annotation=typer.Context),
        *(parameter.replace(kind=keyword) for name, parameter in own.items() if name != "common"),
        *(
            inspect.Parameter(name, keyword, annotation=kind, default=default)
            for name, (kind, default) in shared.items()
        ),
    ]

    @functools.wraps(function)
    def command(context: typer.Context, **values: Any) -> Any:
        invocation: Invocation = context.obj
        options = {name: values.pop(name) for name in shared}
        options["assignments"] = tuple(options.get("assignments") or ())
        if options["trust"]:
            from pipelines.trust import trust_everything

            trust_everything()
        invocation.json, invocation.csv = (options["output"].value == form for form in ("json", "csv"))
        invocation.verbose = options["verbose"]
        invocation.quiet = options["quiet"]
        named = {}  # as the values would stand in a settings document
        for name, key in keys.items():
            value = values[name]
            named[key] = str(value) if isinstance(value, Path) else value
            if isinstance(value, list | tuple):
                named[key] = list(value) or None
        has_terminal = sys.stdout.isatty()
        with result_alone():
            common = Common(
                invocation=invocation,
                named=named,
                starts_stage=shared is _STAGE,
                has_terminal=has_terminal,
                **options,
            )
            return function(common, **values)

    # Help is wrapped to the terminal, not to the source, so each paragraph of the docstring becomes one line. \b keeps
    # a paragraph unwrapped: an example is meant to be copied.
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(function.__doc__ or "").split("\n\n")]
    command.__doc__ = "\n\n".join(f"\b\n{part}" if part.startswith("Example: ") else part for part in paragraphs)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.settings = keys  # type: ignore[attr-defined]
    return command
