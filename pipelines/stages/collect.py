"""collect: roll out a policy and store its trajectories in a lake.

Progress is counted from the lake itself, so repeating the command resumes where it stopped, even after a kill. Each
collector counts its own steps: its name is derived from the environment, the policy and the exploration. Episodes still
in progress when the stage ends are stored as truncated and tagged `unfinished`, so no collected step is lost, and
learning bootstraps from the last observation. A kill -9 loses only incomplete trajectories.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from pipelines.config.exploration import ExplorationSettings
from pipelines.config.run_directory import RunDirectory, process
from pipelines.config.settings import CollectSettings, Settings
from pipelines.envs.env import ActorsFailed, Env
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.events import Listener, Notice, silent
from pipelines.files.locks import exclusive
from pipelines.lake import collectors
from pipelines.lake.schema import Schema
from pipelines.lake.sql.catalog import query
from pipelines.lake.storage import connect
from pipelines.lake.store import Lake
from pipelines.lake.tombstones import expired_steps
from pipelines.rollout.collector import Collector, LakeSink
from pipelines.rollout.follower import CheckpointFollower
from pipelines.rollout.policies import Acting, load_policy
from pipelines.runs.progress import recording
from pipelines.stages.environment import FEW, STEPS, make_env, with_actors, workers
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
) -> Result:
    """Collect until this collector has `collect.steps` steps in the lake; with `add`, collect that many additional
    steps."""
    directory = RunDirectory(run) if run is not None else None
    where = lake if lake is not None else (directory or RunDirectory(".")).lake
    replaced = fresh and directory is not None and lake is None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            stack.enter_context(directory.lock("collect"))
        wanted = settings.collect
        settings = with_actors(settings, directory.load_document() if directory and not fresh else None)
        if directory is not None:
            directory.refuse_changes("collect", settings, fresh=fresh)
            name = collector_name(settings, directory)
        else:
            name = collector_name(settings)
            busy = f"lake '{where}' is being filled with '{name}'"
            stack.enter_context(exclusive(connect(where).local / f".{quote(name, safe='')}.lock", what=busy))
        if fresh and not replaced:
            name = f"{name}-{time.time_ns():x}"  # a lake that others may use is appended to, never cleared
        use_threads(settings.train.threads)
        collector = stack.enter_context(
            make_collector(
                settings,
                where,
                name=name,
                run=directory,
                replace=replaced,
                behaviour=behaviour(settings),
                listener=listener,
            )
        )
        spec, steps = collector.env.spec, settings.collect.steps
        assert isinstance(steps, int)
        if "auto" in (wanted.steps, wanted.actors):
            explain_size(steps, collector.env.num_envs, spec.horizon, listener)
        if add:
            steps += collector.before
            settings = settings.model_copy(update={"collect": settings.collect.model_copy(update={"steps": steps})})
        if directory is not None:  # check all inputs before anything is written
            directory.record("collect", settings, fresh=fresh)
            if not fresh or replaced:  # another stage of a new run may have set it in the meantime
                collector.sink.name = collector_name(settings, directory)

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
            tell = listener if directory is None else stack.enter_context(recording(directory.path, listener))
            metrics = collector.collect(steps, tell)
        except ActorsFailed as error:
            collector.finish()
            error.result = result("failed", collector.metrics())
            raise
    comment(metrics, spec.horizon, listener)
    if metrics["steps"] and collector.exploration is None:
        comment_exploration(settings, listener)
    return result("done" if metrics["steps"] else "skipped", metrics)


def make_collector(
    settings: Settings,
    place: Path | str,
    *,
    name: str,
    run: RunDirectory | None = None,
    replace: bool = False,
    behaviour: Mapping[str, Any] | None = None,
    policy: Callable[[Env, int], Acting] | None = None,
    listener: Listener = silent,
) -> Collector:
    """Return the collector `name` for the lake at `place`, which is not opened before the first collect.

    `policy` makes the first policy from the environment and a seed (None: the one in the settings). `behaviour`
    describes how it acts, for the collector's record; None in a chain, which explores on its schedule unless
    `collect.explore` is false.
    """
    wanted = settings.collect
    existing = None if replace else Lake.find(place)
    before = stored_steps(existing, name) if existing else 0
    env_seed, policy_seed, exploration_seed = seeds(settings.seed, before, count=3)
    actors = wanted.actors
    assert isinstance(actors, int)
    processes = workers(settings, actors=actors)
    env = make_env(settings, actors=actors, seed=env_seed, workers=processes, listener=listener)
    with contextlib.ExitStack() as stack:
        stack.callback(env.close)
        spec, action_mask = env.spec, settings.agent.action_mask
        schema = Schema(spec.spaces)
        if existing:
            existing.require_schema(schema)
        exploration = None
        if wanted.explore is True or (behaviour is None and wanted.explore == "auto"):
            legal = LegalActions(action_mask, spec.spaces) if action_mask else None
            exploration = Exploration(
                settings.exploration,
                spec.spaces.action,
                actors,
                horizon=spec.horizon,
                seed=exploration_seed,
                legal=legal,
            )
            exploration.steps = before // actors
        follower = None
        if policy is not None:
            acting = policy(env, policy_seed)
        elif wanted.follow:
            follower = _follower(wanted, env, seed=policy_seed, action_mask=action_mask, listener=listener)
            acting = follower.first()
        else:
            acting = load_policy(wanted.policy, env, seed=policy_seed, greedy=wanted.greedy, action_mask=action_mask)
        sink = LakeSink(
            place,
            schema,
            name=name,
            record=lambda: {
                "run": None if run is None else collectors.place(run.path) | {"id": run.identity},
                "env": settings.env.model_dump(mode="json"),
                "seed": settings.seed,
                "process": process(),
                "horizon": spec.horizon,
                "behaviour": behaviour,
            },
            limits=settings.lake,
            seal_seconds=wanted.seal_seconds,
            replace=replace,
        )
        collector = Collector(
            env,
            acting,
            sink,
            exploration=exploration,
            follower=follower,
            action_mask=action_mask,
            on_env_error=wanted.on_env_error,
            seed=settings.seed,
            policy_seed=policy_seed,
            before=before,
            workers=processes,
        )
        stack.pop_all()
    return collector


def _follower(
    wanted: CollectSettings, env: Env, *, seed: int, action_mask: str, listener: Listener
) -> CheckpointFollower:
    if wanted.policy != "auto":
        raise UsageError(
            f"both collect.policy = '{wanted.policy}' and collect.follow = '{wanted.follow}' are to act",
            hint="give --policy or --follow",
        )
    return CheckpointFollower(
        Path(wanted.follow),
        env,
        seed=seed,
        greedy=wanted.greedy,
        seconds=wanted.reload_seconds,
        listener=listener,
        action_mask=action_mask,
    )


def seeds(seed: int, position: int, *, count: int) -> list[int]:
    """Return independent seeds for all random draws of a process; `position` keeps a resumed one from repeating
    itself."""
    return [int(s) for s in np.random.SeedSequence([seed, position]).generate_state(count) >> 1]


def collector_name(settings: Settings, directory: RunDirectory | None = None) -> str:
    """Return the name under which steps are stored and counted, which differs for each environment, policy and
    exploration. A run has a single environment, so its random collector and its chain's collector have fixed names."""
    how = behaviour(settings)
    if directory is None:
        digest = collectors.digest({"env": settings.env.model_dump(mode="json"), **how})
        return f"{settings.env.name}-{settings.seed}-{digest}"
    plain = how == behaviour(Settings())
    return directory.identity if plain else f"{directory.identity}-{collectors.digest(how)}"


def behaviour(settings: Settings) -> dict[str, Any]:
    """Describe how a collector outside a chain chooses its actions, as plain data."""
    wanted = settings.collect
    path, at, checkpoint = wanted.policy.partition("@")
    policy = f"{Path(path).resolve()}{at}{checkpoint}" if RunDirectory(path).exists() else wanted.policy
    return {
        "policy": "" if wanted.follow else "random" if policy == "auto" else policy,
        "follow": str(Path(wanted.follow).resolve()) if wanted.follow else "",
        "greedy": wanted.greedy,
        "exploration": settings.exploration.model_dump(mode="json") if wanted.explore is True else None,
        "action_mask": settings.agent.action_mask,
    }


def stored_steps(lake: Lake, collector: str) -> int:
    """Count the steps that `collector` has stored in the lake, including expired ones and those in logs of crashed
    writers."""
    lake.salvage()
    quoted = collector.replace("'", "''")
    where = f"collector = '{quoted}' and base_uid is null"
    while True:
        expired = expired_steps(lake.storage)[collector]
        _, rows = query(lake, f"select coalesce(sum(length), 0) from trajectories where {where}")
        if expired_steps(lake.storage)[collector] == expired:  # otherwise some steps moved from one count to the other
            return int(rows[0][0]) + expired


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


def comment_exploration(settings: Settings, listener: Listener) -> None:
    """Say that exploration was off although the settings configure a schedule."""
    if settings.exploration != ExplorationSettings() and behaviour(settings)["policy"] != "random":
        listener(Notice(text="the policy acted as it is (epsilon 0); --explore applies the schedule of [exploration]"))
