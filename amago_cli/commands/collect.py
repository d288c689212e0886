"""`amago collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, Environment, EnvTimeout, Fresh, RunOption, Seed, Sets, stage
from amago_cli.quantities import count

_EACH_TIME = ("policy", "follow", "explore")


@stage
def collect(
    common: Common,
    env: Environment = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="SOURCE", help="Take data in: a file or folder, d4rl:NAME, minari:ID, or module:attr."
        ),
        Sets("source.name"),
    ] = None,
    run: RunOption = None,
    lake: Annotated[
        str | None,
        typer.Option(
            "--lake",
            metavar="LAKE",
            help="Write into this lake instead of the run's own: a directory, or s3://bucket/prefix.",
            autocompletion=completion.lakes,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="N", parser=count, help="Environment steps in all, over all actors, e.g. 20000 or 1e6."
        ),
        Sets("collect.steps"),
    ] = None,
    add: Annotated[
        int | None,
        typer.Option("--add", metavar="N", parser=count, help="Collect N more steps than there are, each time."),
    ] = None,
    actors: Annotated[
        str | None,
        typer.Option("--actors", metavar="N", help="Environments stepped as one batch, or auto."),
        Sets("collect.actors"),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="N", help="Processes that step them (0: this one), or auto."),
        Sets("collect.workers"),
    ] = None,
    on_env_error: Annotated[
        str | None,
        typer.Option("--on-env-error", metavar="HOW", help="When an environment breaks: stop, or restart it."),
        Sets("collect.on_env_error"),
    ] = None,
    env_timeout: EnvTimeout = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="random, RUN[@CHECKPOINT], or module:attr.",
            autocompletion=completion.policies,
        ),
        Sets("collect.policy"),
    ] = None,
    follow: Annotated[
        Path | None,
        typer.Option(
            "--follow",
            metavar="RUN",
            help="Act with RUN's newest checkpoint, and newer ones as they come.",
            autocompletion=completion.runs,
        ),
        Sets("collect.follow"),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option("--epsilon", metavar="E", help="Explore at a constant rate, in place of a schedule."),
    ] = None,
    explore: Annotated[
        bool | None,
        typer.Option("--explore/--no-explore", help="Explore by the schedule of [exploration]."),
        Sets("collect.explore"),
    ] = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Roll out a policy in an environment, or take in data from elsewhere, into a lake.

    The run's directory is runs/ENV unless --run or --lake names another place. Repeating the command goes on
    where it stopped; with a larger --steps it collects more, and with --add each time, as from cron. Another policy,
    exploration or, in a lake of its own, environment is another collector, which counts its own steps.

    A policy acts as it is: without exploration, unless --epsilon or --explore is given.

    With --follow a run that is being trained acts, in this process or on another machine: at random until it has a
    checkpoint, then always with the newest. The trainer's side is `amago train --follow`.

    With --from SOURCE trajectories are read from files or by own code: hdf5:, npz:, parquet: or arrow: and a file, a
    folder or a pattern (the kind may be left out where the name shows it), d4rl:NAME, minari:DIR (or an id),
    lerobot:DIR, or module:attr. Then --env says whose spaces they are to fit, and --steps at how many to stop.

    Example: amago collect --env gym:CartPole-v1 --steps 20000
    """
    from amago_cli.configuration import Request, exclude, file_safe, preview, stored
    from pipelines.config.lakes import located
    from pipelines.errors import UsageError

    exclude({"--steps": steps, "--add": add})
    exclude({"--epsilon": epsilon, "--no-explore": explore is False or None})
    named = common.named | {
        "collect.steps": steps if add is None else add,
        "collect.actors": _count(actors),
        "collect.workers": _count(workers),
        "collect.explore": True if epsilon is not None else explore,
        "exploration": _constant(epsilon),
    }
    if source is not None:
        named["source.steps"] = named.pop("collect.steps")
        _refuse_acting(
            {
                "--actors": actors,
                "--workers": workers,
                "--on-env-error": on_env_error,
                "--env-timeout": env_timeout,
                "--policy": policy,
                "--follow": follow,
                "--epsilon": epsilon,
                "--explore": explore,
                "--add": add,
            }
        )
    request = Request(common, named)
    keys = [path for path, _ in request.assignments]
    if ("collect", "explore") not in keys and any(path[0] == "exploration" for path in keys):
        request.assignments.append((("collect", "explore"), True))
    if run is None and lake is None:
        name = request.environment() if source is None else _label(source)
        if not name:
            raise UsageError("no environment is named", hint="give --env; `amago envs` lists them, or --from")
        run = Path("runs") / file_safe(name)
    settings = request.settings(_without_behaviour(stored(run)))
    place = lake if lake is not None else settings.source.lake if settings.source.name else ""
    where = located(place, run or Path())
    common.concerns(run=run, lake=where)
    if common.dry_run:
        return preview(common, settings, writes={"lake": where} | ({"run": run} if run else {}))
    with common.listening() as listener:
        if settings.source.name:
            from pipelines.stages import ingest

            return ingest.run(settings, run=run, lake=where if place else None, listener=listener, fresh=fresh)
        from pipelines.stages import collect as engine

        return engine.run(settings, run=run, lake=lake, listener=listener, fresh=fresh, add=add is not None)


def _without_behaviour(document: dict[str, Any]) -> dict[str, Any]:
    """Return a run's configuration without its last policy: each call names its own."""
    table = {key: value for key, value in document.get("collect", {}).items() if key not in _EACH_TIME}
    return {**document, "collect": table}


def _label(source: str) -> str:
    """`d4rl:data/hopper-v2.hdf5` -> "hopper-v2"."""
    kind, _, place = source.rpartition(":")
    path = Path(place)
    return (path.parent.name if "*" in path.name else path.stem) or kind


def _refuse_acting(given: dict[str, Any]) -> None:
    """UsageError for options that say how to act, where nobody acts."""
    from pipelines.errors import UsageError

    chosen = [name for name, value in given.items() if value is not None]
    if chosen:
        raise UsageError(f"{', '.join(chosen)} and --from exclude each other", hint="what is taken in was acted before")


def _count(text: str | None) -> int | str | None:
    """Return a number where it is one; settings refuse what is neither that nor "auto"."""
    try:
        return None if text is None else count(text)
    except typer.BadParameter:
        return text


def _constant(epsilon: float | None) -> dict[str, Any] | None:
    if epsilon is None:
        return None
    return {"kind": "plain", "start": epsilon, "end": epsilon, "randomize": False}
