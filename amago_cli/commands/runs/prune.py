"""`amago runs prune`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, DryRun, Metric, RunsArgument, reader
from amago_cli.quantities import parse_positive


@reader
def prune(
    common: Common,
    runs: RunsArgument = None,
    keep_best: Annotated[
        int,
        typer.Option(
            "--keep-best", metavar="N", parser=parse_positive, help="Runs to keep of each environment, by their score."
        ),
    ] = ...,  # type: ignore[assignment]
    failed: Annotated[bool, typer.Option("--failed", help="Also remove runs that failed without a score.")] = False,
    metric: Metric = "return_mean",
    dry_run: DryRun = False,
) -> Any:
    """Remove all runs but the best of each environment, by their scores as `amago runs` shows them.

    Runs in environments of other parameters, on other tasks or of another way to act are not compared: each such group
    keeps its best.

    Runs that a process works on stay, as do those without a score (except --failed) and those whose lake or policy a
    remaining run uses.

    Example: amago runs prune runs --keep-best 3 --dry-run
    """
    from amago_cli.runs import find_named, report_removal
    from pipelines.runs.removal import find_contents, find_dependents, find_prunable, remove
    from pipelines.runs.summary import summarize_runs

    chosen = find_prunable(summarize_runs(find_named(runs), metric=metric), keep_best=keep_best, failed=failed)
    kept: dict[Any, list[str]] = {path: [text] for path in chosen if (text := find_contents(path)) is not None}
    chosen = [path for path in chosen if path not in kept]
    while more := {path: reasons for path, reasons in find_dependents(chosen).items() if path not in kept}:
        kept |= more
        chosen = [path for path in chosen if path not in kept]
    return report_removal("runs prune", remove(chosen, dry_run=dry_run), dry_run=dry_run, kept=kept)
