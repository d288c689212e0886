"""`amago collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import (
    OPPONENTS,
    Collectors,
    Common,
    Dataset,
    EngineOption,
    Environment,
    EnvTimeout,
    Fresh,
    RayOption,
    RunOption,
    Seed,
    Sets,
    stage,
)
from amago_cli.quantities import parse_count


@stage
def collect(
    common: Common,
    env: Environment = None,
    source: Dataset = None,
    run: RunOption = None,
    lake: Annotated[
        str | None,
        typer.Option(
            "--lake",
            metavar="LAKE",
            help="Write to this lake instead of the run's own: a directory, or s3://bucket/prefix (gs://, az://).",
            autocompletion=completion.lakes,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            parser=parse_count,
            help="Total environment steps over all actors, e.g. 20000 or 1e6.",
        ),
        Sets("collect.steps"),
    ] = None,
    add: Annotated[
        int | None,
        typer.Option(
            "--add", metavar="N", parser=parse_count, help="Collect N more steps, each time the command runs."
        ),
    ] = None,
    actors: Annotated[
        str | None,
        typer.Option("--actors", metavar="N", help="Environments stepped as one batch, or auto."),
        Sets("collect.actors"),
    ] = None,
    tasks: Annotated[
        Any,
        typer.Option(
            "--tasks",
            metavar="N|FILE|NAME",
            parser=lambda text: int(text) if text.isdecimal() else text,
            help="Tasks that actors hold, so that their episodes are histories: how many, a JSON file, or one name.",
        ),
        Sets("collect.tasks"),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option("--copies", metavar="N", help="Actors that hold each of the tasks."),
        Sets("collect.copies"),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="N", help="Processes that step the environments (0: this one), or auto."),
        Sets("collect.workers"),
    ] = None,
    collectors: Collectors = None,
    engine: EngineOption = None,
    ray: RayOption = None,
    on_env_error: Annotated[
        str | None,
        typer.Option(
            "--on-env-error", metavar="HOW", help="What to do when an environment fails: stop, or restart it."
        ),
        Sets("collect.on_env_error"),
    ] = None,
    env_timeout: EnvTimeout = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="random, learner:NAME, RUN[@CHECKPOINT], BUNDLE, or module:attr.",
            autocompletion=completion.policies,
        ),
        Sets("collect.policy"),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            metavar="POLICY",
            help="Store what this policy would do at every step as its label: expert, RUN[@CHECKPOINT], BUNDLE, or "
            "module:attr.",
            autocompletion=completion.policies,
        ),
        Sets("collect.label"),
    ] = None,
    opponents: Annotated[list[str] | None, OPPONENTS, Sets("collect.opponents")] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            "--follow",
            metavar="RUN|LAKE",
            help="Act with RUN's newest checkpoint, reloaded whenever there is a newer one.",
            autocompletion=completion.runs,
        ),
        Sets("collect.follow"),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option("--epsilon", metavar="E", help="Explore at a constant rate instead of a schedule."),
    ] = None,
    explore: Annotated[
        bool | None,
        typer.Option("--explore/--no-explore", help="Explore by the schedule of [exploration]."),
        Sets("collect.explore"),
    ] = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Collect trajectories into a lake, by running a policy or importing a dataset.

    A new run measures the environment first, at random, and chooses the settings of all of its stages for so many
    steps, as `amago run --env` does; --dry-run shows each with its reason. What you give is kept.

    The run's directory is runs/ENV unless --run or --lake gives another. Repeating the command resumes it; a larger
    --steps collects more, and --add collects more each time, e.g. from cron. A different policy, exploration or (with
    --lake) environment is a separate collector, which counts its own steps.

    A policy given by --policy or --follow acts without exploration unless --epsilon or --explore is given.

    --follow RUN acts with the newest checkpoint of a run that is being trained, in another process or on another
    machine; until there is one it acts at random. The trainer runs `amago train --follow`. Without a shared disk, give
    the lake: a training publishes its policy in a lake in an object store (`train.publish`).

    --opponents plays the other seats of a game, e.g. --opponents 'select update from checkpoints order by update desc
    limit 8' earlier versions of the agent; without it they are played at random.

    --collectors N plays in N processes, each with --actors of its own and its share of the steps; one that dies is
    started again. --engine ray plays them on a Ray cluster.

    --from SOURCE reads trajectories from files or from your own code: hdf5:, npz:, parquet: or arrow: followed by a
    file, a folder or a pattern (the prefix may be omitted if the file name shows the format), d4rl:NAME, minari:DIR or
    minari:ID, lerobot:DIR, or module:attr. Then --env gives the spaces that they must fit, and --steps when to stop.

    Example: amago collect --env gym:CartPole-v1 --steps 20000
    """
    from amago_cli.configuration import Request, exclude, load_stored, preview, read_plan, refuse_idle_engine
    from pipelines.config.changes import imports_source, list_acting_keys, refuse_unused
    from pipelines.config.places import locate_lake
    from pipelines.config.run_directory import RunDirectory
    from pipelines.config.settings import SourceSettings
    from pipelines.errors import UsageError
    from pipelines.events import Notice
    from pipelines.stages.library import label_source, name_default_run, without_behaviour

    def parse_number(text: str | None) -> int | str | None:
        try:
            return None if text is None else parse_count(text)
        except typer.BadParameter:
            return text  # the settings refuse anything but "auto"

    exclude({"--steps": steps, "--add": add})
    exclude({"--epsilon": epsilon, "--explore" if explore else "--no-explore": explore})
    named = common.named | {
        "collect.steps": add,
        "collect.actors": parse_number(actors),
        "collect.workers": parse_number(workers),
        "collect.explore": True if epsilon is not None else explore,
    }
    if epsilon is not None:
        named["exploration"] = {"kind": "plain", "start": epsilon, "end": epsilon, "randomize": False}
    acting = {
        "--actors": actors,
        "--workers": workers,
        "--collectors": collectors,
        "--engine": engine,
        "--ray": ray,
        "--on-env-error": on_env_error,
        "--env-timeout": env_timeout,
        "--tasks": tasks,
        "--copies": copies,
        "--policy": policy,
        "--label": label,
        "--opponents": opponents,
        "--follow": follow,
        "--epsilon": epsilon,
        "--explore": explore,
        "--add": add,
    }
    request = Request(common, named)
    if run is None and lake is None:
        name = request.environment() if source is None else label_source(source)
        if not name:
            raise UsageError("no environment given", hint="give --env (`amago envs` lists them) or --from")
        run = name_default_run(name)
    known = load_stored(run)
    base = without_behaviour(known)
    imports = imports_source(
        request.source_name(base),
        is_typed=any(key.partition(".")[0] == "source" for key in request.keys),
        acting=[option for option, value in acting.items() if value is not None] + list_acting_keys(request.set_keys),
    )
    if known or run is None:
        refuse_unused("collect", request.keys)
    if steps is not None:
        request = Request(common, named | {"source.steps" if imports else "collect.steps": steps})
    if "collect.explore" not in request.keys and any(key.startswith("exploration.") for key in request.keys):
        request.assignments.append((("collect", "explore"), True))
    settings = request.settings(base)
    if not imports:
        refuse_idle_engine(settings, request.keys, processes=settings.collect.collectors, option="--collectors")
        if fresh:  # the run's imported trajectories go, and with them its source
            settings = settings.model_copy(update={"source": SourceSettings()})
    place = lake if lake is not None else settings.source.lake if imports else ""
    where = locate_lake(place, run or Path())
    common.concerns(run=run, lake=where)
    if run is not None:
        RunDirectory(run).refuse_changes("collect", settings, fresh=fresh, undecided=True)
    with common.listening() as listener:
        chosen = None
        if run is not None:
            from pipelines.stages.make_recipe import choose_by_hand

            directory, given = RunDirectory(run), request.document()
            chosen = choose_by_hand(directory, given, request.settings, imports=imports, fresh=fresh, listener=listener)
        if chosen is not None:
            settings = chosen.settings
        if common.dry_run:
            does = f"import '{settings.source.name}'" if imports else f"play '{settings.env.name}'"
            plan = read_plan(run) if chosen is None else chosen.recipe["plan"]
            writes = {"lake": where} | ({"run": run} if run else {})
            return preview(common, settings, writes=writes, does=does, plan=plan)
        if chosen is not None:
            text = f"settings of all stages are chosen; each with its reason: amago collect --run {run} --dry-run"
            listener(Notice(text=text))
        recipe = None if chosen is None else chosen.recipe
        if imports:
            from pipelines.stages import ingest

            to = where if place else None
            return ingest.run(settings, run=run, lake=to, listener=listener, fresh=fresh, recipe=recipe)
        from pipelines.stages import collect as stages

        return stages.run(
            settings, run=run, lake=lake, listener=listener, fresh=fresh, add=add is not None, recipe=recipe
        )
