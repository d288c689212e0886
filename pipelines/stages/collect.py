"""collect: roll out a policy and store its trajectories in a lake.

Progress is counted from the lake itself, so repeating the command resumes where it stopped, even after a kill. Each
collector counts its own steps: its name is derived from the environment, the policy and the exploration. Episodes still
in progress when the stage ends are stored as truncated and tagged `unfinished`, so no collected step is lost, and
learning bootstraps from the last observation. A kill -9 loses only incomplete trajectories.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import ExplorationSettings, Settings
from pipelines.envs.env import ActorsFailed, EnvSpec
from pipelines.errors import UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.lake import collectors
from pipelines.lake.store import Lake
from pipelines.rollout.environment import FEW, STEPS, with_actors
from pipelines.rollout.plan import CollectionPlan, describe_behaviour, name_in_run
from pipelines.runs.progress import record_progress
from pipelines.stages.collectors import CollectorFailed, make_collectors
from pipelines.stages.result import Result
from pipelines.training.learner import use_threads


def run(
    settings: Settings,
    *,
    run: Path | None = None,
    lake: Path | str | None = None,
    listener: Listener = silent,
    fresh: bool = False,
    add: bool = False,
    recipe: Mapping[str, Any] | None = None,
) -> Result:
    """Collect until there are `collect.steps` steps of this collector, or of all that share its work, in the lake; with
    `add`, collect that many additional steps.

    `recipe` is recorded in a new run: what its settings were chosen from (`make_recipe.choose_by_hand`).
    """
    if not settings.env.name:
        raise UsageError("no environment is named", hint="give --env NAME; amago envs lists them")
    directory = RunDirectory(run) if run is not None else None
    where = lake if lake is not None else (directory or RunDirectory(".")).lake
    replaced = fresh and directory is not None and lake is None
    horizon: int | None = None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            stack.enter_context(directory.lock("collect"))
        wanted = settings.collect
        stored = directory.load_document() if directory and not fresh else None
        sized = with_actors(wanted, settings.env, stored, listener=listener)
        settings = settings.model_copy(update={"collect": sized})
        behaviour = describe_behaviour(settings)
        if directory is not None:
            directory.refuse_changes("collect", settings, fresh=fresh)
            name = name_in_run(behaviour, directory)
        else:
            # Another name for each environment, policy and exploration.
            digest = collectors.digest({"env": settings.env.model_dump(mode="json"), **behaviour})
            name = f"{settings.env.name}-{settings.seed}-{digest}"
            stack.enter_context(collectors.hold_name(where, name))
        if fresh and not replaced:
            name = f"{name}-{time.time_ns():x}"  # a lake that others may use is appended to, never cleared

        def begin(spec: EnvSpec) -> str:
            """Record the run, and return the final name of its collector."""
            nonlocal horizon
            horizon = spec.horizon
            assert isinstance(sized.steps, int)
            assert isinstance(sized.actors, int)
            if "auto" in (wanted.steps, wanted.actors):
                explain_size(sized.steps, sized.actors * sized.collectors, horizon, listener)
            if directory is None:
                return name
            extended = settings.model_copy(update={"collect": sized.model_copy(update={"steps": target})})
            directory.record("collect", extended, fresh=fresh, recipe=recipe)
            if fresh and not replaced:
                return name
            return name_in_run(behaviour, directory)  # another stage of a new run may have set its identity

        use_threads(settings.train.threads)
        plan = CollectionPlan(
            settings=settings, place=where, name=name, run=directory, behaviour=behaviour, replace=replaced
        )
        filled = None if replaced else Lake.find(where)
        if filled is not None:
            collectors.warn_of_repetition(filled, name, plan.describe(directory, None), listener)
        collector = stack.enter_context(make_collectors(plan, begin=begin, ends=True, listener=listener))
        assert isinstance(sized.steps, int)
        target = sized.steps + (collector.before if add else 0)

        def result(status: str, metrics: dict[str, Any]) -> Result:
            return Result(
                command="collect",
                status=status,
                run=run,
                lake=where,
                metrics=metrics,
                outputs=[where],
                seconds=metrics["seconds"],
            )

        try:
            listen = listener if directory is None else stack.enter_context(record_progress(directory.path, listener))
            metrics = collector.collect(target, listen)
        except (ActorsFailed, CollectorFailed) as error:
            collector.finish()
            error.result = result("failed", collector.metrics())
            raise
    comment(metrics, horizon, listener)
    ignored = settings.exploration != ExplorationSettings() and "epsilon_progress" not in metrics
    if metrics["steps"] and ignored and behaviour["policy"] != "random":
        listener(Notice(text="the policy acted as it is (epsilon 0); --explore applies the schedule of [exploration]"))
    return result("done" if metrics["steps"] else "skipped", metrics)


def explain_size(steps: int, actors: int, horizon: int | None, listener: Listener) -> None:
    """Explain a reduced number of actors or an increased number of steps."""
    if horizon and (actors < FEW or steps > STEPS):
        text = f"{steps:,} steps of {actors} actor{'s' * (actors != 1)}: an episode may take {horizon:,}"
        listener(Notice(stage="collect", text=text))


def comment(metrics: Mapping[str, Any], horizon: int | None, listener: Listener) -> None:
    """Say which episodes the means in `metrics` leave out, and how to collect more if there was nothing to do."""
    ended, unfinished, steps = metrics["trajectories"], metrics["unfinished"], metrics["steps"]
    if not steps:
        text = f"collector '{metrics['collector']}' has {metrics['steps_total']:,} steps already"
        listener(Notice(text=f"{text}; --add N collects N more"))
    elif not ended:
        longest = f", an episode takes up to {horizon:,}" if horizon else ""
        each = f"{steps // metrics['actors']:,} steps of each of {metrics['actors']} actors"
        hint = "there is no return: give more --steps, or fewer --actors"
        listener(Notice(text=f"no episode ended in {each}{longest}; {hint}", level="warning"))
    elif unfinished > ended:
        text = f"means are over the {ended:,} episodes that ended; {unfinished:,} longer ones were cut off at the end"
        listener(Notice(text=text, level="warning"))
