"""Environments to act in: number of actors, and worker processes."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from pipelines.config.host import count_cores
from pipelines.config.settings import CollectSettings, EnvSettings, EvaluateSettings
from pipelines.envs.env import Env, EpisodeCounter, Trial
from pipelines.envs.make import Split, find_settings_model, is_users, make, require_trust
from pipelines.envs.suites.catalogue import ENTRIES
from pipelines.envs.workers import WorkerEnv
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError
from pipelines.events import Listener, silent
from pipelines.lake import collectors
from pipelines.lake.store import Lake

STEPS = 10_000  # per collect; more if two episodes can be longer
FEW, MANY = 16, 128  # actors
MOST = 256  # actors of environments stepped by workers
_EPISODES = 4  # minimum per actor in a run, with more than FEW actors
_LEAST_EPISODES = 2  # minimum per actor outside a chain
_BATCH_SECONDS = 1e-3  # step of all actors; the rollout loop itself takes about 0.1 ms of it
_WORTH_SECONDS = 2e-3  # a shorter step of all actors is not distributed over workers
_SHARE_SECONDS = 1e-3  # minimum share of it per worker
_QUICK_SECONDS = 30e-6  # a step of one actor that takes no longer than transferring its result
_DRAWS = 100  # of as many episodes as tasks are wanted, before giving up
_MESSAGE_SECONDS = 30e-3  # work that justifies a message to a worker, which polls every 1 ms


def find_env_model(name: str) -> type[BaseModel]:
    """Return the model of the parameters of environment `name`. UsageError if there is no such environment."""
    return find_settings_model(name)


def make_env(
    env: EnvSettings,
    *,
    actors: int,
    seed: int,
    split: Split = "train",
    workers: int = 0,
    timeout_seconds: float = 0.0,
    drawn: bool = False,
    offset: int = 0,
    total: int = 0,
    attempts: int = 1,
    listener: Listener = silent,
) -> Env:
    """Make an environment as one batch of `actors`, stepped in `workers` processes with a time limit, or to be `drawn`
    in this one; `offset` and `total`, if they are a slice of more, as in `EpisodeCounter`; `attempts`: how often each
    episode is played. UsageError if `env` does not name one."""
    if not env.name:
        raise UsageError("no environment is named", hint="give --env NAME; amago envs lists them")
    name, params = env.name, env.params
    if workers:
        require_trust(name, params)
        return WorkerEnv(
            name,
            num_envs=actors,
            workers=workers,
            seed=seed,
            split=split,
            params=params,
            timeout_seconds=timeout_seconds,
            offset=offset,
            total=total,
            attempts=attempts,
            listener=listener,
        )
    made = make(name, num_envs=actors, seed=seed, split=split, params=params, drawn=drawn, attempts=attempts)
    if total:
        made.episodes = EpisodeCounter(num_envs=actors, total=total, offset=offset)
    return made


def make_recorded_env(lake: Lake, facts: Mapping[str, Any], *, actors: int, drawn: bool = False) -> Env | None:
    """Make the built-in environment in which a trajectory with these `facts`, a row of the table `trajectories`, was
    recorded; None for any other, or if its collector's record is missing. No other is made: names and parameters come
    from the lake, which may be somebody else's.
    """
    name = facts["env"]
    record = collectors.read(lake, facts["collector"]) if facts["collector"] else None
    settings = dict((record or {}).get("env") or {})
    if settings.pop("name", None) != name or not any(e.name == name and e.extra is None for e in ENTRIES):
        return None
    try:
        return make(name, num_envs=actors, seed=0, params=settings, drawn=drawn)
    except (AmagoError, ValueError):
        return None


def make_evaluation_env(
    env: EnvSettings, wanted: EvaluateSettings, *, actors: int, tasks: Sequence[str] = (), **more: Any
) -> Env:
    """Make the environment of an evaluation, as `make_env`: it plays `tasks` in turn, or each kind of task alike."""
    made = make_env(env, actors=actors, seed=wanted.seed, split=wanted.task_split, attempts=wanted.attempts, **more)
    try:
        if tasks:
            made.play_only(tasks)
        else:
            made.play_evenly()
    except BaseException:
        made.close()
        raise
    return made


def _candidate(env: EnvSettings, timeout_seconds: float, listener: Listener) -> Env:
    """Make a single actor of the environment, to inspect its spec and time its steps; a user-defined environment runs
    in a separate process that it may crash."""
    workers = int(is_users(env.name or ""))
    return make_env(env, actors=1, seed=0, workers=workers, timeout_seconds=timeout_seconds, listener=listener)


def with_actors(
    collect: CollectSettings,
    env: EnvSettings,
    stored: Mapping[str, Any] | None = None,
    *,
    collects: Sequence[int] = (),
    trial: Callable[[Env, float], Trial | None] = lambda env, longest: env.try_out(longest),
    listener: Listener = silent,
) -> CollectSettings:
    """Replace "auto" by numbers in the steps and actors of `collect`; a resumed run reuses the numbers that it has
    `stored`. `collects`: the step targets of a chain's collects.

    More actors speed up the policy when all of them step as one batch, and reduce the number of messages when workers
    step fast environments. `auto` chooses as many as help while each actor still plays a few episodes. Outside a chain
    each actor finishes at least two episodes, with fewer actors and more steps if necessary.
    """
    begun = (stored or {}).get("collect", {})
    steps, actors = (
        next((value for value in (getattr(collect, name), begun.get(name)) if isinstance(value, int)), None)
        for name in ("steps", "actors")
    )
    if collect.tasks:
        tasks = collect.tasks
        named = draw_tasks(tasks, env, collect, listener) if isinstance(tasks, int) else read_tasks(tasks)
        collect = collect.model_copy(update={"tasks": named})
        actors = len(named) * collect.copies
        if collect.actors not in ("auto", actors):
            raise UsageError(
                f"{len(named)} tasks x {collect.copies} copies need {actors} actors, not {collect.actors}",
                hint="leave out --actors; a run keeps its number of actors, so other tasks need another --run",
            )
    if collects and steps is None:
        steps = STEPS
    if steps is None or actors is None:
        count = collect.collectors
        with contextlib.closing(_candidate(env, collect.env_timeout_seconds, listener)) as tried:
            steps = steps or max(STEPS, _LEAST_EPISODES * count * (tried.spec.horizon or 0))
            shares = [each // count for each in (*collects, steps)]
            actors = actors or _enough_actors(collect, tried, shares[:-1], shares[-1], trial)
    return collect.model_copy(update={"steps": steps, "actors": actors})


def read_tasks(named: Sequence[str]) -> tuple[str, ...]:
    """Read the tasks that `collect.tasks` names: themselves, or a JSON file with a list of names, or of objects with
    the key `task`, as `amago lake sql --output json` prints them. InputMissing if there is no such file, UsageError if
    it has no such list or a task is named twice."""
    tasks, what = tuple(named), "collect.tasks"
    if len(tasks) == 1 and tasks[0].endswith(".json"):
        what = f"'{tasks[0]}'"
        try:
            listed = json.loads(Path(tasks[0]).read_text())
        except OSError as error:
            raise InputMissing(
                f"the tasks in {what} cannot be read: {error.strerror}", hint="give collect.tasks names, or FILE.json"
            ) from error
        except ValueError as error:
            raise UsageError(f"{what} is not JSON: {error}", hint='write a list of tasks, e.g. ["goal=0,1"]') from error
        rows = listed if isinstance(listed, list) else []
        found = [each.get("task") if isinstance(each, dict) else each for each in rows]
        names = [each for each in found if isinstance(each, str)]
        if not names or len(names) < len(found):
            raise UsageError(f"{what} has no list of tasks", hint='write their names, e.g. ["goal=0,1", "goal=2,0"]')
        tasks = tuple(names)
    if twice := [task for task, count in Counter(tasks).items() if count > 1]:
        raise UsageError(f"{what} names '{twice[0]}' {tasks.count(twice[0])} times", hint="set collect.copies instead")
    return tasks


def draw_tasks(count: int, env: EnvSettings, collect: CollectSettings, listener: Listener) -> tuple[str, ...]:
    """Draw `count` different tasks as the environment's episodes do, in a fixed order that no run's seed changes.
    UsageError if so many are not found in a hundred times as many episodes."""
    actors, found = min(count, MANY), dict[str, None]()
    workers, patience = int(is_users(env.name or "")), collect.env_timeout_seconds
    made = make_env(env, actors=actors, seed=0, workers=workers, timeout_seconds=patience, listener=listener)
    with contextlib.closing(made):
        for _ in range(_DRAWS * -(-count // actors)):
            made.reset()
            found.update(dict.fromkeys(made.tasks(np.arange(actors))))
            if len(found) >= count:
                return tuple(found)[:count]
    raise UsageError(
        f"environment '{env.name}' drew {len(found)} different tasks, fewer than collect.tasks = {count}",
        hint=f"give a number of at most {len(found)}, or names",
    )


def collect_steps(collect: CollectSettings) -> int:
    """Count the steps of a collect in a chain."""
    return STEPS if collect.steps == "auto" else collect.steps


def _enough_actors(
    collect: CollectSettings, env: Env, collects: Sequence[int], steps: int, trial: Callable[[Env, float], Trial | None]
) -> int:
    """Choose a number of actors at which each finishes an episode in the first of `collects`, so that there is data to
    learn from, and several in total; outside a chain, two within `steps`.

    The estimate of an episode's length is that of random play if the first policy is random, otherwise the time limit.
    """
    alone, wanted, cores = env.steps_one_by_one, collect.workers, _cores(collect)
    share = min(collects[0], sum(collects) / _EPISODES) if collects else steps / _EPISODES
    seen = None
    if alone and (wanted != 0 or not collects) and not collect.env_timeout_seconds:
        seen = trial(env, share / (2 * FEW) if collects else steps / _LEAST_EPISODES)
    if seen and seen.death and wanted == 0:
        raise StageFailed(
            f"environment '{env.spec.name}' cannot be stepped in this process, which it ends: {seen.death}",
            hint="give --workers 1",
        )
    seconds = seen.seconds if seen else 0.0
    length: float | None = env.spec.horizon
    if seen and seen.length and collect.policy in ("auto", "random") and not collect.follow:
        length = seen.length
    if length is None:
        return FEW
    few, most = FEW, int(min(MOST if alone else MANY, share / length))
    if not collects:
        if (each := int(steps / (_LEAST_EPISODES * length))) < FEW:
            return max(each, 1)
        # Enough that the rollout loop costs little compared with the environment steps.
        while 2 * few <= most and 0 < seconds * few < _BATCH_SECONDS:
            few *= 2
    if alone:
        return choose_actors(seconds, most=most, workers=wanted, cores=cores, few=few)
    return max(few, 1 << max(most, 1).bit_length() - 1)


def choose_actors(
    seconds: float, *, most: int, workers: int | Literal["auto"], cores: int, few: int | None = None
) -> int:
    """Choose the number of actors, up to `most`, for environments whose steps take `seconds`: enough to make a message
    to a worker worthwhile, or `few` (`FEW`) if workers would not pay off either way."""

    def messages(actors: int) -> int:
        """Count the messages that a step of all actors takes (see `WorkerEnv`)."""
        count = share_out(seconds * actors, actors=actors, cores=cores) if workers == "auto" else min(workers, actors)
        return count if count >= max(cores, 2) else 2 * count

    actors = FEW
    while 2 * actors <= most and seconds * actors < _MESSAGE_SECONDS * (messages(actors) or 1):
        actors *= 2
    worth = 0.0
    if workers == "auto":  # a step in a trial costs more than one in a batch
        worth = max(2 * _WORTH_SECONDS, _QUICK_SECONDS * actors)
    return actors if messages(actors) and seconds * actors > worth else few or FEW


def workers(
    env: EnvSettings,
    collect: CollectSettings,
    *,
    actors: int,
    together: int | None = None,
    listener: Listener = silent,
) -> int:
    """Choose the number of processes that step `actors` environments, for one of `together` processes (None: of the
    collectors) that share the cores: as configured, otherwise based on measured step time. Environments with a time
    limit get one process per core, because a step here could not be interrupted. UsageError if a limit cannot be
    enforced."""
    require_limit(collect)
    wanted, limit = collect.workers, collect.env_timeout_seconds
    if wanted != "auto":
        return wanted
    cores = _cores(collect, together)
    if limit:
        return min(cores, actors)
    if (cores < 2 or actors < 2) and not is_users(env.name or ""):
        return 0
    with contextlib.closing(_candidate(env, limit, listener)) as tried:
        if tried.spec.seats:  # opponents act in this process
            return 0
        seen = tried.try_out()
    if seen and seen.death:  # reported by the workers
        return min(cores, actors)
    return share_out(seen.seconds * actors, actors=actors, cores=cores) if seen else 0


def require_limit(collect: CollectSettings) -> None:
    """Raise UsageError if the time limit of a step cannot be enforced."""
    if collect.workers == 0 and collect.env_timeout_seconds:
        raise UsageError(
            "environments in this process (collect.workers = 0) have no time limit (collect.env_timeout_seconds)",
            hint="give --workers 1 or more, or no --env-timeout",
        )


def _cores(collect: CollectSettings, together: int | None = None) -> int:
    """Count the cores for the environments of one of several processes."""
    return max(count_cores() // ((together or collect.collectors) if collect.engine == "local" else 1), 1)


def share_out(seconds: float, *, actors: int, cores: int) -> int:
    """Choose the number of processes for environments that take `seconds` to step all actors sequentially."""
    return min(cores, actors, int(seconds / _SHARE_SECONDS)) if seconds >= _WORTH_SECONDS and cores > 1 else 0
