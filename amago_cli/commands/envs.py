"""`amago envs`."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Annotated, Any

import typer

from amago_cli import completion
from amago_cli.options import Common, reader


@reader
def envs(
    common: Common,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="ENV",
            help="An environment to describe, with its parameters.",
            autocompletion=completion.environments,
        ),
    ] = None,
) -> Any:
    """List the environments, or describe one: spaces, horizon, termination, train-test split, parameters.

    In a pipe the list is limited to names, extras and descriptions; --output json has everything.

    Example: amago envs meta-frozen-lake
    """
    from dataclasses import asdict

    from pipelines.envs.make import catalogue
    from pipelines.envs.suites.catalogue import brief
    from pipelines.stages.result import Result, Table

    if name is not None:
        return _describe(name)
    entries = catalogue()
    columns = ("name", "extra", "observation", "action", "horizon", "train-test split", "about")
    rows = []
    for each in entries:
        extra = "" if each.extra is None else each.extra if each.installed else f"{each.extra} (missing)"
        spaces = (brief(each.observation), brief(each.action))
        rows.append((each.name, extra, *spaces, each.horizon, brief(each.split), each.about))
    return Result(
        command="envs",
        metrics={"environments": [{**asdict(entry), "installed": entry.installed} for entry in entries]},
        tables=(Table(title="environments", columns=columns, rows=rows, in_a_pipe=("name", "extra", "about")),),
    )


def _describe(name: str) -> Any:
    from pipelines.envs.make import is_users, make, parameters, requirement, resolve
    from pipelines.envs.workers import WorkerEnv
    from pipelines.lake.spaces import space_to_json
    from pipelines.stages.result import Result, Table

    listed = [
        (f"env.{each.name}", "(required)" if each.required else each.default, each.about) for each in parameters(name)
    ]
    table = Table(title="parameters", columns=("key", "default", "meaning"), rows=listed)
    if any(default == "(required)" for _, default, _ in listed):
        return Result(
            command="envs", metrics={"name": name, "parameters": dict(row[:2] for row in listed)}, tables=(table,)
        )
    # An environment of the user's own may end the process that makes it, so another process does.
    make_env: Any = partial(WorkerEnv, workers=1) if is_users(name) else make
    with contextlib.closing(make_env(name, num_envs=1, seed=0)) as env:
        spec = env.spec
    _, entry = resolve(name)
    extra, _ = requirement(name)
    spaces = {**spec.spaces.observation, "action": spec.spaces.action}
    described = {column: space_to_json(space) for column, space in spaces.items()}
    metrics = {
        "name": spec.name,
        "suite": entry.suite,
        "extra": extra,
        "about": spec.about or entry.about,
        "observation": entry.observation,
        "action": entry.action,
        "reward": entry.reward or None,
        "termination": entry.termination,
        "hidden": entry.hidden or None,
        "split": spec.split or entry.split,
        "protocol": entry.protocol or None,
        "horizon": spec.horizon,
        "num_attempts": spec.num_attempts,
        "has_success": spec.has_success,
        "random_return": spec.random_return,
        "optimal_return": spec.optimal_return,
        "random_success": spec.random_success,
        "optimal_success": spec.optimal_success,
    }
    rows = []
    for column, fields in described.items():
        shown = {key: value for key, value in fields.items() if key not in ("kind", "low", "high")}
        rows.append((column, fields["kind"], ", ".join(f"{key} {value}" for key, value in shown.items())))
    return Result(
        command="envs",
        metrics={
            **metrics,
            "spaces": described,
            "parameters": {key: default for key, default, _ in listed},
        },
        tables=(
            Table(title="spaces", columns=("column", "kind", "size"), rows=rows),
            table,
        ),
    )
