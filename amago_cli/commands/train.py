"""`amago train`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, Fresh, FromLake, Init, Ranks, RunOption, Seed, Sets, Size, Track, stage
from amago_cli.quantities import parse_count, parse_positive


@stage
def train(
    common: Common,
    from_lake: FromLake = None,
    run: RunOption = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", parser=parse_count, help="Total gradient updates, e.g. 20k."),
        Sets("train.steps"),
    ] = None,
    add: Annotated[
        int | None,
        typer.Option("--add", metavar="N", parser=parse_positive, help="N more updates, each time the command runs."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent", metavar="NAME", help="Agent: actor-critic, multi-task, behaviour-cloning, or module:attr."
        ),
        Sets("agent.kind"),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            metavar="NAME",
            help="Sequence encoder: transformer, gru, mingru, mamba, feedforward, identity, or module:attr.",
        ),
        Sets("agent.sequence.kind"),
    ] = None,
    size: Size = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Train only on trajectories that match this predicate."),
        Sets("train.where"),
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option("--weight", metavar="SQL", help="Sampling weight of a trajectory, an expression."),
        Sets("train.weight"),
    ] = None,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--no-follow",
            help="Keep training on new data as collectors write it; wait if the lake is still empty.",
        ),
        Sets("train.follow"),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="RUN@CHECKPOINT",
            help="Train a new run on exactly the trajectories that this checkpoint was trained on.",
            autocompletion=completion.runs_at_checkpoints,
        ),
        Sets("train.like"),
    ] = None,
    init: Init = None,
    track: Track = None,
    ranks: Ranks = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Train an agent on windows sampled from one or more lakes.

    The run is the one that the lake belongs to, otherwise runs/train, unless --run gives another. Repeating the command
    resumes from the newest checkpoint; a larger --steps trains longer, and --add N by N updates more each time. --where
    and --weight are SQL over the table trajectories: see amago lake sql.

    Several lakes are mixed by weights, LAKE:WEIGHT, which may be annealed over train.anneal_steps updates:
    LAKE:0.8..0.2. Without --from-lake, the lakes are those of train.lakes.

    --init begins a new run, which --run names, with the weights of another policy: a warm start. The new run has the
    network of that policy unless options give another; init.parts and init.strict take a part of its weights.

    --like begins a new run, which --run names, on the trajectories that a checkpoint of another run was trained on,
    whatever was added to its lakes since. Other settings are those of that run unless options give others. It is
    refused where some of these trajectories have expired. --from-lake then only says where a lake is now.

    Example: amago train --from-lake runs/gym-CartPole-v1 --steps 1000

    Example: amago train --init runs/a@best --from-lake runs/b --run runs/c

    Example: amago train --like runs/a@1000 --run runs/b --set train.learning_rate=3e-4

    Example: amago train --from-lake runs/a:0.8 --from-lake runs/b:0.2 --run runs/c --where "success or length > 20"
    """
    from amago_cli.configuration import Request, describe_device, exclude, load_stored, preview, read_plan
    from amago_cli.ranks import plan_launch
    from pipelines.config.changes import refuse_unused
    from pipelines.config.run_directory import RunDirectory
    from pipelines.errors import UsageError
    from pipelines.lake.store import Lake
    from pipelines.stages.library import choose_lakes, choose_training_run, load_training_base

    exclude({"--steps": steps, "--add": add})
    run, source = choose_training_run(from_lake or (), run)
    request = Request(common, common.named | {"train.steps": steps if add is None else add})
    like = dict(request.assignments).get(("train", "like"))
    exclude({"--like": like, "--where": dict(request.assignments).get(("train", "where"))})
    base = load_training_base(run, source, like)
    stored_agent = base.get("agent")
    agent_table = stored_agent if isinstance(stored_agent, dict) else {}  # a damaged one is reported with all problems
    is_other = dict(request.assignments).get(("agent", "kind"), agent_table.get("kind")) != agent_table.get("kind")
    if is_other and read_plan(run if load_stored(run) else source) is not None:
        # The trace was chosen for another agent, whose critic has a value for each action.
        base = base | {"agent": {key: value for key, value in agent_table.items() if key != "trace"}}
    if from_lake and "train.lakes" in request.keys:
        raise UsageError("--from-lake and train.lakes exclude each other", hint="give one of them")
    if load_stored(run):
        refuse_unused("train", request.keys)
    settings = request.settings(base)
    lakes = choose_lakes(from_lake or (), run, settings.train)
    common.concerns(run=run, lake=", ".join(str(place) for place, _, _ in lakes))
    if not settings.train.follow:
        for place, _, _ in lakes:
            Lake(place)  # InputMissing if there is none
    if common.dry_run:
        settings = request.fit(run, base)
        RunDirectory(run).refuse_changes("train", settings, fresh=fresh, undecided=True)
        places = {"run": run, "checkpoints": run / "checkpoints"}
        does = f"train {add:,} updates more" if add else f"train up to update {settings.train.steps:,}"
        return preview(common, settings, writes=places, does=f"{does}, {describe_device(settings.train)}")
    if (launch := plan_launch(common.invocation, settings.train)) is not None:
        return launch
    with common.listening() as listener:
        settings = request.fit(run, base, listener=listener)
        RunDirectory(run).refuse_changes("train", settings, fresh=fresh, undecided=True)  # before torch is imported
        from pipelines.stages import train as engine

        return engine.run(settings, run=run, lakes=lakes, listener=listener, fresh=fresh, add=add is not None)
