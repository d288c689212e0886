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

from pipelines.config.exploration import ExplorationSettings
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import CollectSettings, Settings
from pipelines.envs.env import ActorsFailed, EnvSpec
from pipelines.errors import UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.lake import collectors
from pipelines.rollout.collector import Collector
from pipelines.runs.progress import recording
from pipelines.stages.collector import behaviour_of, make_collector, name_in_lake, name_in_run
from pipelines.stages.collectors import CollectorFailed, CollectorGroup
from pipelines.stages.environment import FEW, STEPS, with_actors
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
    with contextlib.ExitStack() as stack:
        if directory is not None:
            stack.enter_context(directory.lock("collect"))
        wanted = settings.collect
        sized = with_actors(wanted, settings.env, directory.load_document() if directory and not fresh else None)
        settings = settings.model_copy(update={"collect": sized})
        behaviour = behaviour_of(wanted, settings.exploration, settings.agent.action_mask)
        if directory is not None:
            directory.refuse_changes("collect", settings, fresh=fresh)
            name = name_in_run(behaviour, directory)
        else:
            name = name_in_lake(behaviour, settings.env, settings.seed)
            stack.enter_context(collectors.filling(where, name))
        if fresh and not replaced:
            name = f"{name}-{time.time_ns():x}"  # a lake that others may use is appended to, never cleared
        named: dict[str, Any] = {"name": name, "behaviour": behaviour, "listener": listener}
        start = _Start(settings, wanted, directory, fresh=fresh, replaced=replaced, recipe=recipe, **named)
        use_threads(settings.train.threads)
        making: dict[str, Any] = {"run": directory, "replace": replaced, **named}
        collector: Collector | CollectorGroup
        if wanted.collectors > 1:
            collector = CollectorGroup(settings, where, begin=start, ends=True, **making)
        else:
            collector = make_collector(settings, where, **making)
        stack.enter_context(collector)
        start.extend(collector.before if add else 0)
        if isinstance(collector, Collector):
            collector.sink.name = start(collector.env.spec)

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
            listen = listener if directory is None else stack.enter_context(recording(directory.path, listener))
            metrics = collector.collect(start.target, listen)
        except (ActorsFailed, CollectorFailed) as error:
            collector.finish()
            error.result = result("failed", collector.metrics())
            raise
    comment(metrics, start.horizon, listener)
    ignored = settings.exploration != ExplorationSettings() and "epsilon_progress" not in metrics
    if metrics["steps"] and ignored and behaviour["policy"] != "random":
        listener(Notice(text="the policy acted as it is (epsilon 0); --explore applies the schedule of [exploration]"))
    return result("done" if metrics["steps"] else "skipped", metrics)


class _Start:
    """The start of a collect, called with the environment's spec once all inputs are checked: records the run, and
    returns the final name of its collector."""

    def __init__(
        self,
        settings: Settings,
        wanted: CollectSettings,
        directory: RunDirectory | None,
        *,
        name: str,
        behaviour: Mapping[str, Any],
        fresh: bool,
        replaced: bool,
        recipe: Mapping[str, Any] | None,
        listener: Listener,
    ) -> None:
        self._settings, self._wanted, self._directory, self._name = settings, wanted, directory, name
        self._behaviour, self._fresh, self._replaced, self._listener = behaviour, fresh, replaced, listener
        self._asked, self._recipe = self.target, recipe
        self.horizon: int | None = None

    def __call__(self, spec: EnvSpec) -> str:
        self.horizon = spec.horizon
        collect = self._settings.collect
        assert isinstance(collect.actors, int)
        if "auto" in (self._wanted.steps, self._wanted.actors):
            explain_size(self._asked, collect.actors * collect.collectors, spec.horizon, self._listener)
        if self._directory is None:
            return self._name
        self._directory.record("collect", self._settings, fresh=self._fresh, recipe=self._recipe)
        if self._fresh and not self._replaced:
            return self._name
        return name_in_run(self._behaviour, self._directory)  # another stage of a new run may have set its identity

    @property
    def target(self) -> int:
        """The number of steps to collect in all."""
        assert isinstance(self._settings.collect.steps, int)
        return self._settings.collect.steps

    def extend(self, steps: int) -> None:
        """Add steps to the target."""
        more = self._settings.collect.model_copy(update={"steps": self.target + steps})
        self._settings = self._settings.model_copy(update={"collect": more})


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
