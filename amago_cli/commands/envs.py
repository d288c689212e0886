"""`amago envs`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from amago_cli.options import Common, reader


@reader
def envs(
    common: Common,
    name: Annotated[
        str | None, typer.Argument(metavar="ENV", help="An environment to describe, with its parameters.")
    ] = None,
) -> Any:
    """List the environments, or describe one: spaces, horizon, attempts, parameters.

    Example: amago envs meta-frozen-lake
    """
    from pipelines.envs.make import catalogue
    from pipelines.stages.result import Result, Table

    if name is not None:
        return _describe(name)
    entries = catalogue()
    rows = [(entry.name, entry.suite, entry.about, _availability(entry)) for entry in entries]
    fields = [
        {"name": e.name, "suite": e.suite, "about": e.about, "extra": e.extra, "installed": e.installed}
        for e in entries
    ]
    table = Table(title="environments", columns=("name", "suite", "about", "available"), rows=rows)
    return Result(command="envs", metrics={"environments": fields}, tables=(table,))


def _availability(entry: Any) -> str:
    return "yes" if entry.installed else f'pip install "amago[{entry.extra}]"'


def _describe(name: str) -> Any:
    from pipelines.envs.make import make, settings_model
    from pipelines.lake.spaces import space_to_json
    from pipelines.stages.result import Result, Table

    model = settings_model(name)
    env = make(name, num_envs=1, seed=0)
    try:
        spec = env.spec
    finally:
        env.close()
    spaces = {**spec.spaces.observation, "action": spec.spaces.action}
    described = {column: space_to_json(space) for column, space in spaces.items()}
    parameters = [
        (f"env.{key}", _default(field), (field.description or "").replace("\n", " "))
        for key, field in model.model_fields.items()
    ]
    metrics = {
        "name": spec.name,
        "about": spec.about,
        "horizon": spec.horizon,
        "num_attempts": spec.num_attempts,
        "has_success": spec.has_success,
        "random_return": spec.random_return,
        "optimal_return": spec.optimal_return,
        "random_success": spec.random_success,
        "optimal_success": spec.optimal_success,
    }
    rows = [(column, fields["kind"], _bounds(fields)) for column, fields in described.items()]
    return Result(
        command="envs",
        metrics={
            **metrics,
            "spaces": described,
            "parameters": {key: default for key, default, _ in parameters},
        },
        tables=(
            Table(title="spaces", columns=("column", "kind", "what"), rows=rows),
            Table(title="parameters", columns=("key", "default", "meaning"), rows=parameters),
        ),
    )


def _default(field: Any) -> Any:
    return "(required)" if field.is_required() else field.get_default(call_default_factory=True)


def _bounds(fields: dict[str, Any]) -> str:
    shown = {key: value for key, value in fields.items() if key not in ("kind", "low", "high")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
