"""`amago export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import CHECKPOINT, Common, Sets, stage

if TYPE_CHECKING:
    from pipelines.config.settings import ExportSettings


@stage
def export(
    common: Common,
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|LAKE|BUNDLE",
            help="A run or a bundle, for its policy; a run or a lake, for its trajectories.",
            autocompletion=completion.lakes,
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Directory to write to, or hf://ORG/NAME for a policy; default: RUN/export, or RUN/dataset.",
        ),
        Sets("export.to"),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="bundle, onnx, torch, aoti, page (repeatable): the policy; parquet, npz, hdf5, minari: trajectories.",
        ),
        Sets("export.format"),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Export only trajectories that match this predicate."),
        Sets("export.where"),
    ] = None,
    checkpoint: Annotated[str | None, CHECKPOINT, Sets("export.checkpoint")] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="TYPE", help="Weights of the form onnx: float32, float16 or int8."),
        Sets("export.weights"),
    ] = None,
    card: Annotated[
        bool | None,
        typer.Option("--card", help="Also write a model card, for the Hugging Face Hub."),
        Sets("export.card"),
    ] = None,
) -> Any:
    """Export a policy bundle that acts without the lake or the run, or trajectories for other tools.

    --format onnx adds the policy, memory included, as one graph for ONNX runtimes, with a policy.py that needs numpy
    and onnxruntime alone and a policy.mjs for Node and browsers; --format torch one for torch.export; --format aoti one
    that is compiled for this machine by torch and its C++ compiler. All are proved on recorded steps and by an
    evaluation: exit 4 if they do not act as the policy does. --format page adds page.html, in which a policy of frozen
    lakes plays them, without a server. A bundle is exported with other forms, too.
    --card adds README.md and pictures, with which `hf upload` takes the directory as it is.

    Trajectories are exported complete, with their relabelled versions: parquet writes the steps and a table of
    trajectories, npz one file per trajectory, hdf5 flat arrays in D4RL's layout, minari a Minari dataset. Repeating
    the command writes what is missing.

    Example: amago export runs/quickstart --format parquet --where success
    """
    from amago_cli.configuration import Request, preview
    from pipelines.config.changes import refuse_unused
    from pipelines.config.places import find_bundle, is_run
    from pipelines.config.policy_files import locate_checkpoint
    from pipelines.config.run_directory import RunDirectory
    from pipelines.errors import UsageError
    from pipelines.stages.early_checks import choose_folder

    run = Path(source)
    request = Request(common, common.named)
    refuse_unused("export", request.keys)
    packed = None if is_run(run) else find_bundle(source)
    if packed is not None:
        from pipelines.stages import early_checks

        common.concerns()
        settings = request.settings(early_checks.read_bundle_document(packed))
        _refuse_unused(settings.export, request.keys)
        place = early_checks.locate_bundle(settings.export, packed)
        if common.dry_run:
            return preview(common, settings, writes={"bundle": place})
        with common.listening() as listener:
            from pipelines.stages import export as exporting

            return exporting.of_bundle(settings, directory=packed, listener=listener)
    settings = request.settings(RunDirectory(run).load_document())
    wanted = settings.export
    _refuse_unused(wanted, request.keys)
    if wanted.of_policy:
        from pipelines.lake.store import Lake

        common.concerns(run=run)
        directory = RunDirectory.open(run) if is_run(run) or Lake.find(source) is None else None
        if directory is None:
            raise UsageError(f"'{source}' is a lake and has no policy", hint="give a run, or --format parquet or npz")
        if common.dry_run:
            return preview(common, settings, writes={"bundle": wanted.to or run / "export"})
        locate_checkpoint(directory.checkpoints, wanted.checkpoint)  # before torch is imported
    else:
        from pipelines.formats.make import find_exporter
        from pipelines.lake.store import Lake

        find_exporter(wanted.format[0])
        lake = Lake(source)
        common.concerns(lake=lake.name)
        place = Path(wanted.to or choose_folder(lake))
        if common.dry_run:
            return preview(common, settings, writes={"dataset": place})
    with common.listening() as listener:
        from pipelines.stages import export as engine

        if wanted.of_policy:
            return engine.run(settings, run=run, listener=listener)
        return engine.dataset(settings.export, lake=source, listener=listener)


def _refuse_unused(wanted: ExportSettings, keys: Sequence[str]) -> None:
    """Raise UsageError for settings of a policy where trajectories are exported, and the reverse."""
    from pipelines.errors import UsageError

    of_data = {"export.where", "export.author", "export.description"}
    of_policies = {f"export.{name}" for name in type(wanted).model_fields} - of_data - {"export.to", "export.format"}
    given = [key for key in keys if key in (of_data if wanted.of_policy else of_policies)]
    if given:
        what, other = ("trajectories", "parquet or npz") if wanted.of_policy else ("a policy", "bundle or onnx")
        raise UsageError(f"{', '.join(given)}: only for {what}", hint=f"give --format {other}")
