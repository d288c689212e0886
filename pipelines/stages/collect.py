"""collect: roll out a policy and write what happened into a lake.

Steps are counted from the lake itself, so the same command repeated goes on where it stopped, after a kill too.
Each collector counts its own: the environment, the policy and the exploration are part of its name.
Rollouts unfinished when the stage ends are stored as truncated, tagged `unfinished`: nothing paid for is lost, and
learning bootstraps through the cut. A kill -9 loses only what was not yet a whole trajectory.
"""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np

from pipelines.config.cores import threads
from pipelines.config.run_directory import RunDirectory, process
from pipelines.config.settings import Settings
from pipelines.envs.env import ActorsFailed, EnvFailure
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.events import Event, Listener, Notice, Progress, silent
from pipelines.files.locks import exclusive
from pipelines.lake import collectors
from pipelines.lake.maintenance.cap import RetentionThread
from pipelines.lake.schema import Schema
from pipelines.lake.storage import connect
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories
from pipelines.lake.writer import Writer
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.actor import Rollout
from pipelines.stages.collect_notices import comment, comment_exploration, explain_size
from pipelines.stages.environment import make_env, with_actors, workers
from pipelines.stages.following import Following
from pipelines.stages.identity import behaviour, collector_name, stored_steps
from pipelines.stages.policies import Acting, load_policy
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
    """Collect until this collector has `collect.steps` steps in the lake; `add`: collect that many more than it has."""
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
            name = f"{name}-{time.time_ns():x}"  # a lake that may be others' is added to, never emptied
        collector = stack.enter_context(
            Collector(
                settings,
                where,
                name=name,
                run=directory,
                replaced=replaced,
                behaviour=behaviour(settings),
                listener=listener,
            )
        )
        use_threads(settings.train.threads)
        acting = collector.first_policy(listener)
        collector.begin(acting)
        steps = settings.collect.steps
        assert isinstance(steps, int)
        if "auto" in (wanted.steps, wanted.actors):
            explain_size(steps, collector.env.num_envs, collector.env.spec.horizon, listener)
        if add:
            steps += collector.before
            settings = settings.model_copy(update={"collect": settings.collect.model_copy(update={"steps": steps})})
        if directory is not None:  # nothing is written before everything asked for is there
            directory.record("collect", settings, fresh=fresh)
            if not fresh or replaced:  # another stage of a new run may have named it meanwhile
                collector.name = collector_name(settings, directory)
        collector.act_by(acting)

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
            metrics = collector.collect(steps, listener)
        except ActorsFailed as error:
            collector.finish()
            error.result = result("failed", collector.metrics())
            raise
    comment(metrics, collector.env.spec.horizon, listener)
    if metrics["steps"] and collector.exploration is None:
        comment_exploration(settings, listener)
    return result("done" if metrics["steps"] else "skipped", metrics)


class Collector:
    """A rollout that pours into a lake; environments and unfinished episodes live from one `collect` to the next.

    `name` is written into every trajectory: what it has stored counts towards the target of a later process. The
    lake is made when somebody is to act, and told who fills it; `replaced`: what is there is removed then. `behaviour`:
    how it acts, for its record; None for a chain, which explores by its schedule unless `collect.explore` is false.
    """

    def __init__(
        self,
        settings: Settings,
        lake: Path | str,
        *,
        name: str,
        run: RunDirectory | None = None,
        replaced: bool = False,
        behaviour: Mapping[str, Any] | None = None,
        listener: Listener = silent,
    ) -> None:
        self._settings, self._where, self.name, self._run, self._replaced = settings, lake, name, run, replaced
        existing = None if replaced else Lake.find(lake)
        self.before = stored_steps(existing, name) if existing else 0
        settings = with_actors(settings)
        actors = settings.collect.actors
        assert isinstance(actors, int)
        env_seed, self.policy_seed, exploration_seed = seeds(settings.seed, self.before, count=3)
        self.workers = workers(settings, actors=actors)
        self.env = make_env(settings, actors=actors, seed=env_seed, workers=self.workers, listener=listener)
        spec = self.env.spec
        if existing:
            existing.require_schema(Schema(spec.spaces))
        self._behaviour = behaviour
        self.exploration: Exploration | None = None
        if settings.collect.explore is True or (behaviour is None and settings.collect.explore == "auto"):
            self.exploration = Exploration(
                settings.exploration,
                spec.spaces.action,
                actors,
                horizon=spec.horizon,
                seed=exploration_seed,
                legal=self._legal(settings.agent.action_mask),
            )
            self.exploration.steps = self.before // actors
        self._unfinished = 0
        self.rollout: Rollout | None = None
        self.writer: Writer | None = None
        self._following: Following | None = None
        self._policies: set[str] = set()
        self._bounded = contextlib.ExitStack()
        self._reported_cores = False
        self._notices: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            kept = kind is None or getattr(error, "exit_code", 1) >= 128 or isinstance(error, ActorsFailed)
            if kept:
                self.finish()
        finally:
            self.env.close()
            if self.writer is not None:
                with self._bounded:  # until after the last segment
                    self.writer.__exit__(kind, error, trace)

    def first_policy(self, listener: Listener = silent) -> Acting:
        """Who acts first, by the settings. Errors as `load_policy`."""
        wanted = self._settings.collect
        if not wanted.follow:
            return load_policy(
                wanted.policy,
                self.env,
                seed=self.policy_seed,
                greedy=wanted.greedy,
                action_mask=self._settings.agent.action_mask,
            )
        if wanted.policy != "auto":
            raise UsageError(
                f"both collect.policy = '{wanted.policy}' and collect.follow = '{wanted.follow}' are to act",
                hint="give --policy or --follow",
            )
        self._following = Following(
            Path(wanted.follow),
            self.env,
            seed=self.policy_seed,
            greedy=wanted.greedy,
            seconds=wanted.reload_seconds,
            listener=listener,
            action_mask=self._settings.agent.action_mask,
        )
        return self._following.first()

    def _follow(self) -> None:
        """Act with a newer checkpoint if there is one."""
        acting = self._following.newer() if self._following is not None else None
        if acting is not None:
            self.act_by(acting)

    def begin(self, acting: Acting) -> None:
        """Begin everybody's first episode: what cannot begin is known before anything is written."""
        self._let_explore(acting)
        self.rollout = Rollout(
            self.env,
            acting.policy,
            exploration=self.exploration,
            sink=self._store,
            on_failure=self._tell_failure,
            on_env_error=self._settings.collect.on_env_error,
            seed=self._settings.seed,
            collector=self.name,
            keep_unfinished=True,
        )
        self.rollout.begin()

    def _let_explore(self, acting: Acting) -> None:
        """Exploration keeps to what is legal by the settings, or else by whoever acts."""
        if self.exploration is not None:
            self.exploration.legal = self._legal(self._settings.agent.action_mask or acting.action_mask)

    def _store(self, trajectories: Trajectories) -> None:
        assert self.writer is not None
        self.writer.append_many(trajectories)

    def _tell_failure(self, failure: EnvFailure) -> None:
        """At the next progress."""
        self._notices.put(Notice(text=f"{failure.message}; a new episode begins", level="warning"))
        if failure.trace:
            self._notices.put(Notice(text=failure.trace.rstrip(), level="debug"))

    def act_by(self, acting: Acting) -> None:
        """Let `acting` act from now on; its memory is rebuilt from the episodes in progress."""
        if self.rollout is None:
            self.begin(acting)
        assert self.rollout is not None
        self.rollout.settle()  # all of what has begun is for whoever has acted so far
        if self.writer is None:
            self._lake = self._open_lake()
            schema = Schema(self.env.spec.spaces)
            self.rollout.collector = self.name
            self.writer = self._lake.writer(schema, name=self.name, seal_seconds=self._settings.collect.seal_seconds)
            self._bound(self._lake)
        self._let_explore(acting)
        self.rollout.policy = acting.policy
        if isinstance(acting.policy, AgentPolicy):
            acting.policy.rebuild(self.rollout.prefixes())
        self.rollout.policy_id, self.rollout.policy_version = acting.policy_id, acting.version
        if acting.policy_id not in self._policies:
            self._policies.add(acting.policy_id)
            source = None if acting.run is None else collectors.place(acting.run)
            collectors.add_policy(self._lake, self.name, acting.policy_id, source)

    def _legal(self, column: str) -> LegalActions | None:
        return LegalActions(column, self.env.spec.spaces) if column else None

    def _open_lake(self) -> Lake:
        if self._replaced:
            shutil.rmtree(self._where, ignore_errors=True)
        lake = Lake.open_or_create(self._where)
        lake.require_schema(Schema(self.env.spec.spaces))
        collectors.register(
            lake,
            self.name,
            run=None if self._run is None else collectors.place(self._run.path) | {"id": self._run.identity},
            env=self._settings.env.model_dump(mode="json"),
            seed=self._settings.seed,
            process=process(),
            horizon=self.env.spec.horizon,
            behaviour=self._behaviour,
        )
        return lake

    def _bound(self, lake: Lake) -> None:
        """Keep the lake within the settings' bounds from now on; what is told of it waits for the next progress."""
        wanted = self._settings.lake
        if wanted.max_steps or wanted.max_bytes or wanted.compact:
            cap = RetentionThread(
                lake,
                max_steps=wanted.max_steps,
                max_bytes=wanted.max_bytes,
                grace_seconds=wanted.grace_seconds,
                merge=wanted.compact,
                listener=self._notices.put,
            )
            self._bounded.enter_context(cap)

    def finish(self) -> None:
        """Store what is unfinished."""
        if self.rollout is not None and self.writer is not None:
            self._unfinished = self.rollout.finish()

    def seal(self) -> None:
        """Let readers see everything that has ended so far."""
        if self.writer is not None:
            self.writer.seal()

    @property
    def steps(self) -> int:
        """Environment steps so far, those of earlier processes included."""
        return self.before + (self.rollout.total_steps if self.rollout else 0)

    def collect(self, target: int, listener: Listener = silent) -> dict[str, Any]:
        """Go on until `steps` reaches `target`; returns what this call did."""
        assert self.rollout is not None, "act_by comes first"
        assert self.writer is not None
        already = self.steps
        self._report_cores(listener)

        def tell(event: Event) -> None:
            if isinstance(event, Progress):
                event = replace(event, done=min(already + event.done, target), total=target)
            while not self._notices.empty():
                listener(self._notices.get())
            listener(event)

        between = self._follow if self._following is not None else None
        self.rollout.run(steps=max(target - already, 0), listener=tell, between=between)
        self.writer.poll()
        return self.metrics()

    def _report_cores(self, listener: Listener) -> None:
        """Report once where environments are stepped, and how many threads the networks use."""
        if not self._reported_cores:
            self._reported_cores, count = True, threads(self._settings.train.threads)
            where = f"{self.workers} worker process{'es' * (self.workers != 1)}" if self.workers else "this process"
            text = f"{self.env.num_envs} actors in {where}; networks use {count} thread{'s' * (count != 1)}"
            listener(Notice(stage="collect", text=text))

    def metrics(self) -> dict[str, Any]:
        """What the last call of `collect` did, or has done until it failed."""
        assert self.rollout is not None, "act_by comes first"
        stats = self.rollout.stats()
        metrics: dict[str, Any] = {
            "steps": stats.steps,
            "steps_total": self.steps,
            "trajectories": stats.trajectories,
            "return_mean": stats.return_mean,
            "success_mean": stats.success_mean,
            "unfinished": self.rollout.unfinished or self._unfinished,
            "collector": self.name,
            "policy": self.rollout.policy_id,
            "epsilon": stats.epsilon,
            "steps_per_second": stats.steps_per_second,
            "policy_share": stats.policy_seconds / stats.seconds if stats.steps else math.nan,
            "env_share": stats.env_seconds / stats.seconds if stats.steps else math.nan,
            "env_errors": stats.env_errors,
            "episodes_dropped": stats.episodes_dropped,
            "actors": self.env.num_envs,
            "workers": self.workers,
            "seconds": stats.seconds,
        }
        if self.exploration is not None:
            metrics["epsilon_progress"] = self.exploration.progress
        known = {key: value for key, value in metrics.items() if isinstance(value, str) or not math.isnan(value)}
        return {"return_mean": None, **known}  # no episode ended: no mean


def seeds(seed: int, position: int, *, count: int) -> list[int]:
    """Independent seeds for what a process draws; `position` keeps a resumed one from repeating itself."""
    return [int(s) for s in np.random.SeedSequence([seed, position]).generate_state(count) >> 1]
