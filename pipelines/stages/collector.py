"""A collector of a stage: its environment, policy, exploration and seeds, its name, and the steps it has stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipelines.config import bundle_record
from pipelines.config.exploration import ExplorationSettings
from pipelines.config.places import bundle_directory
from pipelines.config.run_directory import RunDirectory, process
from pipelines.config.settings import CollectSettings, EnvSettings, Settings
from pipelines.envs.env import Env
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.lake import collectors
from pipelines.lake.log import count_expired_steps
from pipelines.lake.maintenance.files import live_steps
from pipelines.lake.schema import Schema
from pipelines.lake.sql.catalog import query
from pipelines.lake.storage import is_remote
from pipelines.lake.store import Lake
from pipelines.lake.writer import writer_label
from pipelines.rollout.collector import Collector, Cutting, LakeSink
from pipelines.rollout.follower import CheckpointFollower, policy_source
from pipelines.rollout.policies import Acting, load_policy
from pipelines.stages.environment import make_env, workers

_CONTEXTS = 8  # in a piece, and kept of an episode for a new policy's memory


class KnownRun(Protocol):
    """A run's directory and identity."""

    @property
    def path(self) -> Path: ...

    @property
    def identity(self) -> str: ...


def make_collector(
    settings: Settings,
    place: Path | str,
    *,
    name: str,
    run: KnownRun | None = None,
    replace: bool = False,
    behaviour: Mapping[str, Any] | None = None,
    policy: Callable[[Env, int], Acting] | None = None,
    number: int | None = None,
    before: int | None = None,
    together: int = 0,
    listener: Listener = silent,
) -> Collector:
    """Return the collector `name` for the lake at `place`, which is not opened before the first collect.

    `number`: which of `collect.collectors` it is, if there are several; `before`: the steps it has stored, if they have
    been counted; `together`: those that all have stored. Exploration is annealed over the steps of all.
    `policy` makes the first policy from the environment and a seed (None: the one in the settings). `behaviour`
    describes how it acts, for the collector's record; None in a chain, which explores on its schedule unless
    `collect.explore` is false.
    """
    wanted = settings.collect
    existing = None if replace or before is not None else Lake.find(place)
    if before is None:
        before = stored_steps(existing, name) if existing else 0
    env_seed, policy_seed, exploration_seed = seeds(settings.seed, before, count=3, number=number)
    actors = wanted.actors
    assert isinstance(actors, int)
    processes = workers(settings.env, wanted, actors=actors)
    env = make_env(
        settings.env,
        actors=actors,
        seed=env_seed,
        workers=processes,
        timeout_seconds=wanted.env_timeout_seconds,
        listener=listener,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(env.close)
        spec, action_mask = env.spec, settings.agent.action_mask
        schema = Schema(spec.spaces)
        if existing:
            existing.require_schema(schema)
        exploration = None
        if wanted.explore is True or (behaviour is None and wanted.explore == "auto"):
            legal = LegalActions(action_mask, spec.spaces) if action_mask else None
            count = 1 if number is None else wanted.collectors
            schedule = {"steps": max(settings.exploration.steps // count, 1)}
            exploration = Exploration(
                settings.exploration.model_copy(update=schedule),
                spec.spaces.action,
                actors,
                horizon=spec.horizon,
                seed=exploration_seed,
                legal=legal,
            )
            exploration.steps = max(before, together // count) // actors
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
            existing=existing,
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
            cutting=choose_cutting(settings, spec.horizon, in_chain=behaviour is None),
        )
        stack.pop_all()
    return collector


def choose_cutting(settings: Settings, horizon: int | None, *, in_chain: bool) -> Cutting:
    """Return how a collector stores episodes of at most `horizon` steps (None: unknown) in pieces."""
    context, steps = settings.train.context_length_for(horizon), settings.collect.chunk_steps
    if steps == 0:
        return Cutting()
    if steps == "auto":
        steps = _CONTEXTS * context
        steps = 0 if horizon is not None and horizon <= steps else steps
    return Cutting(steps=steps, kept=_CONTEXTS * context, context=context if in_chain else 0)


def _follower(
    wanted: CollectSettings, env: Env, *, seed: int, action_mask: str, listener: Listener
) -> CheckpointFollower:
    if wanted.policy != "auto":
        raise UsageError(
            f"both collect.policy = '{wanted.policy}' and collect.follow = '{wanted.follow}' are to act",
            hint="give --policy or --follow",
        )
    return CheckpointFollower(
        policy_source(wanted.follow),
        env,
        seed=seed,
        greedy=wanted.greedy,
        seconds=None if wanted.reload_seconds == "auto" else wanted.reload_seconds,
        listener=listener,
        action_mask=action_mask,
    )


def seeds(seed: int, position: int, *, count: int, number: int | None = None) -> list[int]:
    """Return independent seeds for all random draws of a process; `position` keeps a resumed one from repeating
    itself, and `number` several collectors from repeating each other."""
    words = [seed, position] if number is None else [seed, position, 1 + number]  # zeros at the end have no effect
    return [int(s) for s in np.random.SeedSequence(words).generate_state(count) >> 1]


def name_in_lake(behaviour: Mapping[str, Any], env: EnvSettings, seed: int) -> str:
    """Return the name under which steps are stored and counted in a lake that is not a run's, which differs for each
    environment, policy and exploration."""
    digest = collectors.digest({"env": env.model_dump(mode="json"), **behaviour})
    return f"{env.name}-{seed}-{digest}"


def name_in_run(behaviour: Mapping[str, Any], directory: RunDirectory) -> str:
    """Return the name under which steps of a run are stored and counted. A run has a single environment, so its random
    collector and its chain's collector have fixed names."""
    plain = behaviour == behaviour_of(CollectSettings(), ExplorationSettings())
    return directory.identity if plain else f"{directory.identity}-{collectors.digest(behaviour)}"


def behaviour_of(wanted: CollectSettings, exploration: ExplorationSettings, action_mask: str = "") -> dict[str, Any]:
    """Describe how a collector outside a chain chooses its actions, as plain data."""
    path, at, checkpoint = wanted.policy.partition("@")
    policy = wanted.policy
    if RunDirectory(path).exists():
        policy = f"{Path(path).resolve()}{at}{checkpoint}"
    elif (directory := bundle_directory(policy)) is not None:
        policy = f"bundle:{bundle_record.identify(directory)}"  # so that it may be moved
    return {
        "policy": "" if wanted.follow else "random" if policy == "auto" else policy,
        "follow": wanted.follow
        if is_remote(wanted.follow) or not wanted.follow
        else str(Path(wanted.follow).resolve()),
        "greedy": wanted.greedy,
        "exploration": exploration.model_dump(mode="json") if wanted.explore is True else None,
        "action_mask": action_mask,
    }


def stored_steps(lake: Lake, collector: str) -> int:
    """Count the steps that `collector` has stored in the lake, including expired ones, those in logs of crashed
    writers, and those of the numbered collectors that played its shares."""
    return sum(stored_by_collector(lake, collector).values())


def stored_by_collector(lake: Lake, collector: str) -> dict[str, int]:
    """Return the steps stored by `collector`, if any, and by each of its numbered collectors: NAME.0, NAME.1, ..."""
    lake.salvage()
    while True:
        expired = _family(count_expired_steps(lake.storage), collector)
        stored = _family(_live_by_collector(lake, collector), collector)
        if (
            _family(count_expired_steps(lake.storage), collector) == expired
        ):  # otherwise some moved from one to the other
            return {name: int(stored.get(name, 0)) + expired.get(name, 0) for name in {*stored, *expired}}


def _live_by_collector(lake: Lake, collector: str) -> Mapping[str, int]:
    """Count the live steps of collectors whose names begin so: on a disk by the index; in an object store, where the
    index would fetch the footers of all collectors, by the segments of these."""
    if is_remote(lake.name):
        return live_steps(lake, writer_label(collector))
    quoted = collector.replace("'", "''")
    mine = f"(collector = '{quoted}' or starts_with(collector, '{quoted}.')) and base_uid is null"
    _, rows = query(lake, f"select collector, sum(length) from trajectories where {mine} group by collector")
    return dict(rows)


def numbered(collector: str, number: int) -> str:
    """Return the name of one of several collectors that share the work of `collector`."""
    return f"{collector}.{number}"


def _family(steps: Mapping[str, int], collector: str) -> dict[str, int]:
    own, prefix = collector, f"{collector}."
    return {
        name: count
        for name, count in steps.items()
        if name == own or (name.startswith(prefix) and name[len(prefix) :].isdecimal())
    }
