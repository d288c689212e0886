"""`amago lake sample`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, LakeArgument, reader


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
