"""`amago lake`: list, describe, query, check and maintain lakes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from amago_cli import completion
from amago_cli.options import Common, DryRun, LakeArgument, querier, reader
from amago_cli.quantities import parse_positive, parse_seconds, parse_size
from amago_cli.render import escaping

if TYPE_CHECKING:
    from pipelines.lake.maintenance.verify import RepairResult, VerifyReport
    from pipelines.report.lineage_tree import Node
    from pipelines.stages.result import Result, Table


@reader
def ls(
    common: Common,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory that contains lakes, or a lake.")] = "runs",
) -> Any:
    """List the lakes in and below a directory.

    Example: amago lake ls runs
    """
    from pipelines.errors import AmagoError, InputMissing
    from pipelines.lake.sql.catalog import summary
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    in_store = "://" in path
    if not in_store and not Path(path).is_dir():
        raise InputMissing(f"no directory '{path}'", hint="`amago collect` creates runs, each with a lake, in runs/")
    columns = ("lake", "trajectories", "episodes", "steps", "overlays", "segments", "bytes", "environments")
    lakes: list[dict[str, Any]] = []
    rows = []
    for place in [path] if in_store else map(str, find_lakes(Path(path))):
        try:
            lake = Lake(place)
            lakes.append({"lake": lake.name, **summary(lake)})
            last = ", ".join(lakes[-1]["environments"])
        except AmagoError as error:  # a damaged lake must not hide the others
            if in_store:
                raise
            lakes.append({"lake": place, "environments": [], "error": str(error)})
            last = f"error: {error}"
        rows.append((*(lakes[-1].get(name) for name in columns[:-1]), last))
    return Result(
        command="lake ls",
        metrics={"lakes": lakes},
        tables=(Table(title=path, columns=columns, rows=rows),),
    )


def find_lakes(root: Path) -> Iterator[Path]:
    """Yield every lake in `root` or below it, in order. A lake is not searched for others."""
    if (root / "lake.json").is_file():
        yield root
        return
    for child in sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()):
        if not child.name.startswith("."):
            yield from find_lakes(child)


_SHOWN = 20  # rows of a table; JSON has more


@reader
def info(common: Common, lake: LakeArgument) -> Any:
    """Describe a lake: tasks, sources, collectors, policy versions, bytes per step, expiry, protection.

    A warning names collectors that have played identical episodes.

    Example: amago lake info runs/gym-CartPole-v1
    """
    from pipelines.lake.sql.describing import describe, find_duplicates
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        opened.salvage(listener=listener)
        found = describe(opened, listener=listener)
        for each in find_duplicates([opened]):
            listener(each.as_notice())
    return Result(command="lake info", lake=opened.name, metrics=found, tables=_tabulate_info(found))


def _tabulate_info(found: Mapping[str, Any]) -> Sequence[Table]:
    from pipelines.events import duration
    from pipelines.stages.result import Table

    def ago(seconds: float | None) -> str | None:
        return None if seconds is None else f"{duration(seconds)} ago"

    def table(title: str, name: str, columns: Mapping[str, str | Callable[[Any], Any]]) -> Table | None:
        rows = [row for row in found[name] if row.get("segments") != 0]
        if not rows:
            return None
        if len(rows) > _SHOWN:
            title = f"{title} (the {_SHOWN} with the most trajectories)"
        cells = [[of(row) if callable(of) else row[of] for of in columns.values()] for row in rows[:_SHOWN]]
        return Table(title=title, columns=list(columns), rows=cells)

    tables = (
        table(
            f"tasks: {found['task_count']:,}",
            "tasks",
            {
                **{name: name for name in ("env", "task", "trajectories", "episodes", "steps")},
                "length": lambda row: (
                    f"{row['length_min']:,} .. {row['length_mean']:,.1f} .. {row['length_max']:,}"
                    if row["episodes"]
                    else None
                ),
                "return": "return_mean",
                "success": "success_mean",
            },
        ),
        table(
            "sources",
            "sources",
            {
                name: name
                for name in ("env", "source", "policy_id", "relabel_method", "trajectories", "episodes", "steps")
            }
            | {"return": "return_mean", "success": "success_mean"},
        ),
        table(
            "collectors",
            "collectors",
            {
                **{name: name for name in ("collector", "trajectories", "steps")},
                "last commit": lambda row: ago(row["seconds_since_commit"]),
                **{name: name for name in ("run", "host", "pid")},
            },
        ),
        table(
            "policies that acted",
            "policies",
            {
                **{name: name for name in ("policy_id", "trajectories", "versions")},
                "newest": "newest_version",
                "newest checkpoint": "newest_checkpoint",
                "updates behind": "lag",
            },
        ),
        table(
            "segments",
            "stored",
            {
                "schema": lambda row: row["schema"][:8],
                **{name: name for name in ("kind", "segments", "rows", "bytes")},
                "bytes a row": "bytes_per_step",
            },
        ),
        table("segments by size", "segment_sizes", {name: name for name in ("size", "segments", "bytes")}),
        table(
            "columns of a step",
            "columns",
            {
                "schema": lambda row: row["schema"][:8],
                **{name: name for name in ("column", "dtype")},
                "shape": lambda row: str(tuple(row["shape"])),
                "role": "role",
                "bytes": "bytes",
                "stored": "stored_bytes",
            },
        ),
        table(
            "protected",
            "protections",
            {
                "name": "name",
                "since": lambda row: time.strftime("%Y-%m-%d %H:%M", time.localtime(row["time"])),
                "segments": lambda row: row["segments"] or "all",
            },
        ),
    )
    return [each for each in tables if each is not None]


@querier
def sql(
    common: Common,
    lake: LakeArgument,
    query: Annotated[str, typer.Argument(metavar="SQL", help="A read-only query.")],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write the rows there, with --output arrow, parquet or csv."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit.")] = 60.0,
    memory: Annotated[int, typer.Option(metavar="MB", help="Memory limit.")] = 1024,
) -> Any:
    """Query a lake with SQL, read-only.

    Tables: trajectories, episodes, histories, segments, overlays, steps, lineage, collectors; for a run's lake also
    runs, checkpoints, metrics. Only the columns of `steps` that the query needs are read; wide ones (images) must be
    named explicitly.

    With --output arrow, parquet or csv, the rows are a file, for --to or a pipe. They are written while the query runs,
    and may be more than the memory holds. In CSV, lists, maps and structures are JSON.

    Example: amago lake sql runs/cartpole 'select policy_version, avg(return) from trajectories group by all'
    """
    from amago_cli.render.output import FileContent, Rows
    from amago_cli.render.progress import reporter
    from pipelines.errors import UsageError
    from pipelines.files.atomic import explain_errors, write_atomically
    from pipelines.lake.sql import catalog
    from pipelines.lake.sql.query import require_distinct
    from pipelines.lake.sql.sandbox import QueryLimits
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result

    form = common.output.value
    if to is not None and form in ("text", "json"):
        raise UsageError(f"--to writes columns, not --output {form}", hint="add --output parquet, arrow or csv")
    if to is None and form in ("arrow", "parquet") and common.has_terminal:
        raise UsageError(f"--output {form} is not for a terminal", hint="name a file with --to, or a pipe")
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    limits = QueryLimits(seconds=timeout, megabytes=memory, adjustable=True)
    with reporter(quiet=common.quiet, verbose=common.verbose) as show:  # Ctrl-C stops it at once
        opened.salvage(listener=show)
        if form in ("text", "json"):
            columns, rows = catalog.query(opened, query, limits=limits, listener=show)
            if form == "json":  # whose rows are objects
                require_distinct(columns)
            return Rows(columns=columns, rows=rows)
        from pipelines.lake.sql.columnar import write_file

        count = 0

        def write(file: BinaryIO) -> None:
            nonlocal count
            count = write_file(opened, query, file, form, limits=limits, listener=show)

        if to is not None:
            write_atomically(to, write)
        else:
            # The reader of a pipe gets the whole answer or, after an error, nothing, and a slow one does not use up the
            # time limit. This costs as many bytes on the disk.
            with explain_errors(f"write a temporary file in '{tempfile.gettempdir()}'"):
                file = tempfile.TemporaryFile()  # noqa: SIM115
                write(file)
            return FileContent(file=file)
    metrics = {"rows": count, "bytes": to.stat().st_size}
    seconds = common.invocation.seconds
    return Result(command="lake sql", lake=opened.name, metrics=metrics, outputs=[to], seconds=seconds)


@reader
def sample(
    common: Common,
    lake: LakeArgument,
    k: Annotated[int, typer.Option("-k", "--count", metavar="K", min=1, help="Number of trajectories.")] = 3,
    where: Annotated[
        str, typer.Option("--where", metavar="SQL", help="Only trajectories that match this predicate.")
    ] = "",
    weight: Annotated[
        str, typer.Option("--weight", metavar="SQL", help="Sample in proportion to this expression.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the draw.")] = 0,
    values: Annotated[
        str | None,
        typer.Option(
            "--values",
            metavar="RUN[@CHECKPOINT]",
            help="Add the critic values of this run's agent.",
            autocompletion=completion.runs_at_checkpoints,
        ),
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--images", metavar="DIR", help="Write image observations to DIR, one PNG each.")
    ] = None,
) -> Any:
    """Show randomly sampled trajectories of a lake: rewards, actions and observations, step by step. An episode that is
    stored in pieces is shown whole.

    Each line is a column of the steps, with its range at the right; in flags, r marks a soft reset, T a termination, t
    a truncation. Texts are shown as text, each with the step at which it starts; the last line names columns not shown.
    With --values: q, the value of the action taken; v, of the policy's actions; advantage, q - v; weight, of the action
    in behaviour cloning; disagreement, highest minus lowest critic. In reward units, for the acting discount;
    JSON has all discounts.

    Example: amago lake sample runs/x --where 'success'
    """
    from amago_cli.render.output import Document
    from amago_cli.render.sparkline import VALUES, portrait, tabulate_values
    from amago_cli.render.table import plain
    from amago_cli.streams import carries_unicode
    from pipelines.files.atomic import write_atomically
    from pipelines.lake import reading
    from pipelines.lake.store import Lake
    from pipelines.report.frames import as_frames, encode_png, is_image, make_sheet

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    width, unicode = shutil.get_terminal_size().columns, carries_unicode()
    texts: list[str] = []
    rows: list[Any] = []
    written: list[Path] = []
    critics = None
    if values is not None:
        from pipelines.evaluation.values import Values  # imports torch

        critics = Values(values, seed=seed)
    with common.listening() as listener:
        opened.salvage(listener=listener)
        for found in reading.sample(opened, k, where=where, weight=weight, seed=seed, whole=True, listener=listener):
            schema, columns = opened.schema(found.schema_id), found.trajectory.columns
            figures = critics(found.trajectory, schema) if critics is not None else None
            # Of the discounts (T, discounts), the last one is that of the policy that acts.
            lines = None if figures is None else {name: figures[name][:, -1] for name in VALUES}
            texts.append(portrait(found.trajectory, found.row, schema, width=width, unicode=unicode, figures=lines))
            rows.append(dict(found.row))
            if figures is not None and lines is not None:
                texts[-1] += "\n\n" + tabulate_values(columns, lines)
                taken = {name: columns[name][1:] for name in ("action", "reward")}
                rows[-1]["values"] = {name: plain(each) for name, each in {**taken, **figures}.items()}
            for column in schema.columns:
                if images is not None and column.role == "observation" and is_image(column.dtype, column.shape):
                    written.append(images / f"{found.row['uid']}-{column.name}.png")
                    write_atomically(written[-1], encode_png(make_sheet(as_frames(columns[column.name]))))
    texts += [f"wrote {path}" for path in written]
    if images is not None and not written:
        texts.append("none of the observations is an image")
    fields: dict[str, Any] = {"trajectories": rows, "outputs": written}
    if critics is not None:
        fields["values"] = {"run": critics.run, "update": critics.update, "discounts": critics.discounts}
    return Document(text="\n\n".join(texts), fields=fields)


@reader
def lineage(
    common: Common,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@CHECKPOINT]",
            help="A run, and latest, best or an update (default: latest).",
            autocompletion=completion.runs_at_checkpoints,
        ),
    ],
    trajectories: Annotated[
        bool, typer.Option("--trajectories", help="List the uids that the checkpoint could sample, one per line.")
    ] = False,
    lake: Annotated[
        list[str] | None,
        typer.Option("--lake", metavar="LAKE", help="Current place of a lake that was moved; repeatable."),
    ] = None,
    depth: Annotated[
        int, typer.Option("--depth", metavar="N", min=1, help="How many runs to follow back at most.")
    ] = 8,
) -> Any:
    """Show what a checkpoint was trained on, which collectors wrote it and which checkpoints acted, across runs.

    CHECKPOINT may be an update whose checkpoint was deleted. Trajectories that expired since are not counted; missing
    segments are listed, with the reason if known.

    Example: amago lake lineage runs/quickstart@500
    """
    from amago_cli.render.output import Document
    from amago_cli.streams import carries_unicode
    from pipelines.lake import lineage as engine
    from pipelines.report.lineage_tree import Node

    path, which = engine.split(run)
    common.concerns(run=path)
    with common.listening() as listener:
        if trajectories:
            uids = list(engine.trajectories(path, which, lakes=lake or (), listener=listener))
            return Document(text="\n".join(uids), fields={"trajectories": uids})
        found = engine.trace(path, which, lakes=lake or (), depth=depth, listener=listener)
    drawn = _draw_lineage(Node.of_checkpoint(found), unicode=carries_unicode())
    return Document(text=drawn, fields={"lineage": asdict(found)})


def _draw_lineage(node: Node, *, unicode: bool) -> str:
    """Draw the tree, one line per node; in ASCII without `unicode`."""
    branch, last, through = ("├─ ", "└─ ", "│  ") if unicode else ("|- ", "`- ", "|  ")

    def draw_below(children: Sequence[Node]) -> Iterator[str]:
        for place, child in enumerate(children, 1):
            is_last = place == len(children)
            yield (last if is_last else branch) + escaping.line(child.text)
            yield from (("   " if is_last else through) + line for line in draw_below(child.children))

    return "\n".join([escaping.line(node.text), *draw_below(node.children)])


@reader
def verify(
    common: Common,
    lake: LakeArgument,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Recover the intact trajectories of damaged segments; exit 4 if any are lost."),
    ] = False,
) -> Any:
    """Verify the checksums of every segment; exit 4 if one is corrupt. Unknown files are listed.

    A warning names collectors that have played identical episodes. The logs of collectors that were killed are sealed
    first. --repair writes the intact trajectories of a damaged segment to a new one, moves its file to quarantine/ and
    lists the trajectories that are lost. If the lake's log is damaged, it restarts the log with what can be read: what
    the rest removed is live again, as far as it is there.

    Example: amago lake verify runs/cartpole
    """
    from pipelines.errors import IntegrityError
    from pipelines.lake.maintenance import verify as engine
    from pipelines.lake.sql.describing import find_duplicates
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    repaired: RepairResult | None = None
    with common.listening() as listener:
        opened.salvage(listener=listener)
        checked = engine.verify(opened, listener)
        for each in find_duplicates([opened]):
            listener(each.as_notice())
        if repair:
            repaired = engine.repair(opened, checked, listener=listener)
    figures: dict[str, Any] = {}
    recovered: list[tuple[str, ...]] = []
    lost: list[tuple[str, ...]] = []
    if repaired is not None:
        figures = {
            "repaired": [{"segment": id, "into": into} for id, into in repaired.segments.items()],
            "lost": list(repaired.lost),
            "orphans": list(repaired.orphans),
            "unknown": list(repaired.unknown),
        }
        recovered = [(id, into or "nothing") for id, into in repaired.segments.items()]
        lost = [(uid,) for uid in (*repaired.lost, *repaired.orphans)]
    parts: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = (
        ("corrupt", ("segment", "why"), [(found.segment, found.reason) for found in checked.corrupt]),
        ("missing", ("segment", "trajectories"), list(checked.missing.items())),
        ("repaired", ("segment", "recovered into"), recovered),
        ("lost, or derived from a lost trajectory", ("uid",), lost),
        ("not of this lake", ("file",), [(path,) for path in checked.foreign]),
    )
    result = Result(
        command="lake verify",
        lake=opened.name,
        metrics={
            "segments_checked": checked.segments_checked,
            "trajectories": checked.trajectories,
            "corrupt": [str(segment) for segment in checked.corrupt],
            "missing": list(checked.missing),
            "damaged_logs": list(checked.logs),
            "foreign": list(checked.foreign),
            "damaged_log": list(checked.log),
            **figures,
        },
        tables=[Table(title=title, columns=columns, rows=rows) for title, columns, rows in parts if rows],
        seconds=common.invocation.seconds,
    )
    if problems := list(_describe_problems(checked, repaired, opened.name)):
        error = IntegrityError("; ".join(problems))
        error.result = result
        raise error
    return result


def _describe_problems(checked: VerifyReport, repaired: RepairResult | None, name: str) -> Iterator[str]:
    """Yield a sentence for each kind of damage that is left, and what to do about it."""
    from pipelines.lake.store import HEAL

    if repaired is None and checked.corrupt:
        corrupt = [str(segment) for segment in checked.corrupt]
        number = f"{len(corrupt)} corrupt segment{'s' if len(corrupt) > 1 else ''}"
        schemas = dict.fromkeys(segment.schema for segment in checked.corrupt if segment.schema)
        cure = f"{', '.join(schemas)}: {HEAL}" if schemas else "--repair recovers the intact trajectories"
        yield f"{number} in lake '{name}': {', '.join(corrupt)}; {cure}"
    if repaired is not None and repaired.lost:
        count = len(repaired.lost)
        yield f"{count} trajector{'ies are' if count > 1 else 'y is'} lost in lake '{name}'"
    if repaired is not None and repaired.unknown:
        yield f"the content of {', '.join(repaired.unknown)} is unknown"
    if checked.missing:
        count = sum(checked.missing.values())
        yield f"lake '{name}' lacks {', '.join(checked.missing)} ({count} trajectories): restore from a copy"
    if checked.logs:
        logs = ", ".join(checked.logs)
        yield (
            f"logged trajectories are lost: {logs} could not be read completely; remove the file to verify without it"
        )
    for text in checked.log if repaired is None else ():
        yield f"{text}; --repair restarts the log without it"


@reader
def reindex(common: Common, lake: LakeArgument) -> Any:
    """Rebuild the SQL index of a lake from its segments.

    Example: amago lake reindex runs/cartpole
    """
    from pipelines.lake.sql import catalog
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result

    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        opened.salvage(listener=listener)
        catalog.rebuild(opened, listener=listener)
        found = catalog.summary(opened, listener=listener)
    counts = {name: found[name] for name in ("trajectories", "steps", "overlays", "segments", "bytes")}
    return Result(command="lake reindex", lake=opened.name, metrics=counts, seconds=common.invocation.seconds)


@reader
def compact(
    common: Common,
    lake: LakeArgument,
    small: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=parse_size, help="Merge segments below this size. [default: half of --target]"
        ),
    ] = None,
    target: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Size of merged segments. Merging takes up to three times this memory and 0.1 KB a trajectory.",
        ),
    ] = "128MiB",  # type: ignore[assignment]
    settle: Annotated[
        float,
        typer.Option(
            metavar="AGE", parser=parse_seconds, help="Leave younger segments alone while a collector writes."
        ),
    ] = "30s",  # type: ignore[assignment]
    grace: Annotated[
        float, typer.Option(metavar="AGE", parser=parse_seconds, help="How long to keep files that were replaced.")
    ] = "600s",  # type: ignore[assignment]
    dry_run: DryRun = False,
) -> Any:
    """Merge small segments into large ones, and rewrite segments of which half has expired.

    Collectors and trainers can keep running: the trajectories stay the same, and a checkpoint can still draw what it
    drew before. Damaged segments are not touched. Replaced files are removed after a grace period, by this command or a
    later one. Collectors also compact the lakes that they write to (lake.compact).

    Example: amago lake compact runs/quickstart
    """
    from pipelines.lake.maintenance import compaction as engine
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    small = max(target // 2, 1) if small is None else small
    rules = engine.CompactionRules(small_bytes=small, target_bytes=target, settle_seconds=settle)
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        done = engine.compact(opened, rules, grace_seconds=grace, dry_run=dry_run, listener=listener)
    removed = {"removed": done.swept.segments, "waiting": done.swept.waiting} if done.swept else {}
    return Result(
        command="lake compact",
        status="done" if done.runs or (done.swept and done.swept.segments) else "skipped",
        lake=opened.name,
        metrics={
            "segments_before": done.segments[0],
            "segments_after": done.segments[1],
            "bytes_before": done.bytes[0],
            "bytes_after": done.bytes[1],
            "rewritten": sum(len(run) for run in done.runs),
            "trajectories": done.trajectories,
            **removed,
            "dry_run": dry_run,
        },
        tables=[
            Table(
                title="merged" if not dry_run else "to merge",
                columns=("segments", "first", "last"),
                rows=[(len(run), run[0], run[-1]) for run in done.runs],
            )
        ]
        if done.runs
        else [],
        seconds=common.invocation.seconds,
    )


@reader
def expire(
    common: Common,
    lake: LakeArgument,
    max_steps: Annotated[
        int | None,
        typer.Option("--max-steps", metavar="N", parser=parse_positive, help="Keep at most N steps, the newest."),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", metavar="SIZE", parser=parse_size, help="Keep at most SIZE, e.g. 10GB.")
    ] = None,
    max_trajectories: Annotated[
        int | None,
        typer.Option(
            "--max-trajectories", metavar="N", parser=parse_positive, help="Keep at most N trajectories, the newest."
        ),
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option(
            "--max-age", metavar="AGE", parser=parse_seconds, help="Expire trajectories older than AGE, e.g. 7d."
        ),
    ] = None,
    where: Annotated[
        str, typer.Option("--where", metavar="SQL", help="Count and expire only trajectories that match.")
    ] = "",
    grace: Annotated[
        float, typer.Option(metavar="AGE", parser=parse_seconds, help="How long to keep files of expired trajectories.")
    ] = "600s",  # type: ignore[assignment]
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Also delete the bytes of everything that has expired, without a grace period."),
    ] = False,
    dry_run: DryRun = False,
) -> Any:
    """Expire trajectories: the oldest until the rest fits a limit, those older than an age, or those that SQL selects.

    Limits count steps and trajectories without overlays, which expire with the trajectories that they derive from.
    --where alone expires everything that matches; with a limit, the limit applies to the matching trajectories. Expired
    trajectories are invisible at once. A file is removed after the grace period if all its trajectories have expired;
    `amago lake compact` reclaims the space of the others. --purge leaves nothing of them on the disk: it rewrites every
    segment that holds some, at once. Copies and exports of the lake, and backups of its store, keep theirs.

    A protected lake is refused; trajectories of protected snapshots are kept (see: amago lake protect --help).

    Example: amago lake expire runs/cartpole --max-steps 1000000 --dry-run
    """
    from pipelines.errors import StageFailed
    from pipelines.lake.maintenance import compaction
    from pipelines.lake.maintenance import retention as engine
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    limits = engine.RetentionLimits(
        max_steps=max_steps or 0,
        max_trajectories=max_trajectories or 0,
        max_bytes=max_bytes or 0,
        max_age=max_age or 0.0,
        where=where,
    )
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    with common.listening() as listener:
        done = engine.expire(opened, limits, grace_seconds=grace, dry_run=dry_run, listener=listener)
        purged = compaction.purge(opened, listener=listener) if purge and not dry_run else None
    if purged is not None and purged.waiting:
        raise StageFailed(
            f"{purged.waiting} segments of lake '{opened.name}' still hold bytes of expired trajectories",
            hint="a damaged one: amago lake verify --repair; a running collector's: repeat this once it has ended",
        )
    going = done.plan.going
    rows = [
        {
            "segment": part.file.id,
            "trajectories": part.trajectories,
            "of": int(part.file.alive.sum()),
            "steps": part.steps,
            "bytes": round(part.bytes),
            "overlay": part.file.is_overlay,
            "whole": part.is_whole,
        }
        for part in going
    ]
    return Result(
        command="lake expire",
        status="done" if going or (purged and purged.segments) else "skipped",
        lake=opened.name,
        metrics={
            "trajectories": sum(part.trajectories for part in going if not part.file.is_overlay),
            "overlays": sum(part.trajectories for part in going if part.file.is_overlay),
            "steps": sum(part.steps for part in going if not part.file.is_overlay),
            "bytes": round(sum(part.bytes for part in going)),
            "segments": sum(part.is_whole for part in going),
            "protected": done.plan.protected,
            **({"purged_segments": purged.segments, "purged_bytes": purged.bytes} if purged else {}),
            **{f"{name}_left": value for name, value in done.left.items()},
            "expired": rows,
            "dry_run": dry_run,
        },
        tables=[
            Table(
                title="would expire" if dry_run else "expired",
                columns=tuple(rows[0]),
                rows=[tuple(row.values()) for row in rows],
            )
        ]
        if rows
        else [],
        seconds=common.invocation.seconds,
    )


@reader
def protect(
    common: Common,
    lake: LakeArgument,
    snapshot: Annotated[
        str | None,
        typer.Option(
            "--snapshot",
            metavar="RUN[@CHECKPOINT]",
            help="Keep the trajectories that this checkpoint could sample.",
            autocompletion=completion.runs_at_checkpoints,
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="Keep everything, including future additions.")] = False,
    off: Annotated[
        str | None, typer.Option("--off", metavar="NAME", help="Remove a protection, by its name in the list.")
    ] = None,
) -> Any:
    """Protect a lake, or the trajectories of a checkpoint, from expiring; without an option, list protections.

    Neither `amago lake expire` nor a collector's limits touch what is protected. Compaction may move it; the checkpoint
    still samples the same, byte for byte.

    Example: amago lake protect runs/cartpole --snapshot runs/cartpole@best
    """

    from pipelines.config.run_directory import RunDirectory
    from pipelines.errors import InputMissing, UsageError
    from pipelines.lake import log as engine
    from pipelines.lake.lineage import read_snapshots, split
    from pipelines.lake.log import list_protections
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    if sum((snapshot is not None, whole, off is not None)) > 1:
        raise UsageError("--all, --snapshot and --off exclude each other", hint="give one of them")
    opened = Lake(lake)
    common.concerns(lake=opened.name)
    if whole:
        engine.protect(opened)
    elif off is not None:
        engine.unprotect(opened, off)
    elif snapshot is not None:
        path, which = split(snapshot)
        directory = RunDirectory(path)
        update, _, snapshots = read_snapshots(directory, which)
        ids = [id for found in snapshots if found["id"] == opened.id for id in found["segments"]]
        if not ids:
            raise InputMissing(
                f"checkpoint {update} of run '{path}' was not trained on lake '{opened.name}'",
                hint=f"see what it was trained on: amago lake lineage {path}@{update}",
            )
        engine.protect(opened, dict.fromkeys(ids), name=f"{directory.path.resolve().name}@{update}")
    found = list_protections(opened.storage)
    rows = [
        (kept.name, "everything" if kept.is_whole else f"the trajectories of {len(kept.segments)} segments")
        for kept in found
    ]
    return Result(
        command="lake protect",
        lake=opened.name,
        metrics={"protected": {protection.name: len(protection.segments) for protection in found}},
        tables=[Table(title="protected", columns=("name", "scope"), rows=rows or [("nothing", "")])],
        seconds=common.invocation.seconds if whole or off or snapshot else 0.0,
    )


Where = Annotated[str, typer.Option("--where", metavar="SQL", help="Copy only trajectories that match this predicate.")]


@reader
def copy(
    common: Common,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A lake, a run, or s3://bucket/prefix (gs://, az://).", autocompletion=completion.lakes
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Lake to add to; created if missing.")],
    where: Where = "",
) -> Any:
    """Copy the trajectories of a lake into another one, without duplicates.

    Segments are copied unchanged, under the same names, and verified before they count; if only some of their
    trajectories are selected or missing in DST, these are written to new segments. A relabelled trajectory whose base
    is not in DST is written out in full. Trajectories that expired in DST are not copied again. Repeating the command
    copies what is missing. Exit 4 if SRC is damaged: the intact rest is copied.

    Example: amago lake copy runs/a s3://bucket/lake --where success
    """
    return _copy(common, [source], target, where, "lake copy")


@reader
def merge(
    common: Common,
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC", help="Lakes or runs.", autocompletion=completion.lakes)
    ],
    into: Annotated[str, typer.Option("--into", metavar="DST", help="Lake to add to; created if missing.")],
    where: Where = "",
) -> Any:
    """Copy the trajectories of several lakes into one, as `amago lake copy` does; the sources are not changed.

    Example: amago lake merge runs/a runs/b --into lakes/all
    """
    return _copy(common, sources, into, where, "lake merge")


def _copy(common: Common, sources: Sequence[str], target: str, where: str, command: str) -> Result:
    from pipelines.errors import IntegrityError
    from pipelines.lake.maintenance import copying
    from pipelines.lake.sql.describing import find_duplicates
    from pipelines.lake.sql.selection import select
    from pipelines.lake.store import Lake
    from pipelines.stages.result import Result, Table

    opened = [Lake(source) for source in sources]
    for lake in opened:
        copying.refuse_nested(lake, target)
    if where.strip() and Lake.find(target) is None:
        for lake in opened:
            select(lake, where)  # a mistake in it must not leave an empty lake behind
    into = Lake.open_or_create(target)
    common.concerns(lake=into.name)
    with common.listening() as listener:
        done = [asdict(copying.copy(lake, into, where=where, listener=listener)) for lake in opened]
        if any(each["trajectories"] for each in done):
            for each in find_duplicates([into]):
                listener(each.as_notice())
    damaged = [id for each in done for id in each.pop("damaged")]
    total = {name: sum(each[name] for each in done) for name in done[0]}
    columns = ("trajectories", "steps", "segments", "rewritten", "present", "bytes")
    result = Result(
        command=command,
        status="done" if total["trajectories"] else "skipped",
        lake=into.name,
        metrics={**{name: total[name] for name in columns}, "damaged": damaged},
        tables=[
            Table(
                title="copied",
                columns=("from", *columns),
                rows=[(lake.name, *(each[name] for name in columns)) for lake, each in zip(opened, done, strict=True)],
            )
        ]
        if len(done) > 1
        else [],
        seconds=common.invocation.seconds,
    )
    if damaged:
        error = IntegrityError(
            f"damaged segments: {', '.join(damaged)}; what can be read of them is in '{into.name}'",
            hint="see amago lake verify on the source, and --repair there",
        )
        error.result = result
        raise error
    return result
