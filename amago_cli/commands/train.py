"""`amago train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amago_cli.options import Common, Fresh, FromLake, RunOption, Seed, stage


@stage
def train(
    common: Common,
    from_lake: FromLake = None,
    run: RunOption = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Gradient updates in all.")] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            metavar="NAME",
            help="Sequence encoder: transformer, gru, feedforward, identity, module:attr.",
        ),
    ] = None,
    seed: Seed = None,
    fresh: Fresh = False,
) -> Any:
    """Train an agent on windows drawn from a lake.

    The run is the one the lake belongs to, else runs/train, unless --run names another. Repeating the command
    resumes from the newest checkpoint; with a larger --steps it trains longer.

    Example: amago train --from-lake runs/gym-CartPole-v1 --steps 1000
    """
    from amago_cli.configuration import Request, is_run, preview, stored
    from amago_cli.lakes import locate, only

    source = only(from_lake)
    if run is None:
        run = source if is_run(source) else Path("runs") / "train"
    request = Request(common, {"train.steps": steps, "agent.sequence.kind": encoder, "seed": seed})
    settings = request.settings(stored(run) or stored(source))
    lake = locate(source)
    common.concerns(run=run, lake=lake)
    if common.dry_run:
        return preview(common, settings, writes={"run": run, "checkpoints": run / "checkpoints"})
    with common.listening() as listener:
        from pipelines.stages import train as engine

        return engine.run(settings, run=run, lakes=[(lake, 1.0)], listener=listener, fresh=fresh)
