"""Collectors: rollouts whose finished episodes are stored in a lake, and the steps that they have stored."""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from pipelines.config.settings import LakeSettings
from pipelines.envs.env import ActorsFailed, EnvFailure, EnvSpec, Opponents
from pipelines.envs.legal import LegalActions
from pipelines.events import Event, Listener, Notice, Progress, silent
from pipelines.lake import collectors
from pipelines.lake.log import read_log
from pipelines.lake.maintenance.files import count_live_steps
from pipelines.lake.maintenance.retention_thread import RetentionThread
from pipelines.lake.storage import is_remote
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories
from pipelines.lake.writer import Writer, writer_label
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.learners import QLearning, replay_histories
from pipelines.rollout.opponents import OpponentLoader, PolicyOpponent
from pipelines.rollout.plan import CollectionPlan, MakePolicy, make_labeller
from pipelines.rollout.policies import Acting
from pipelines.rollout.rollout import Recording, Rollout

_MOST_UNSTORED = 0.25  # of a chain's steps so far, in running episodes at the end of a stage

Begin = Callable[[EnvSpec], str]
"""Called with the environment's spec once all inputs are checked, before anything is written; returns the final name
of the collector."""


class AnyCollector(Protocol):
    """One collector, or several that share its work; environments and unfinished episodes stay alive between calls of
    `collect`."""

    @property
    def before(self) -> int:
        """The steps that earlier processes have stored."""

    @property
    def steps(self) -> int:
        """The environment steps so far, including those of earlier processes."""

    def collect(self, target: int, listener: Listener, *, policy: MakePolicy | None = None) -> dict[str, Any]:
        """Collect until `steps` reaches `target`, with another policy if one is given; return the metrics of this
        call."""

    def metrics(self) -> dict[str, Any]:
        """Summarise the last call of `collect`, even if it failed."""

    def seal(self) -> None:
        """Make everything stored so far visible to readers."""

    def finish(self) -> None:
        """Store unfinished episodes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LakeSink:
    """Writer of one collector's trajectories into the lake of its plan, which the first call of `open` creates unless
    it is `existing`, and keeps within its limits until the last segment is written. `name`, which is written into every
    trajectory, and `run` may be changed until the lake is open.
    """

    def __init__(self, plan: CollectionPlan, spec: EnvSpec, *, existing: Lake | None = None) -> None:
        self.name, self.run, self.notices = plan.name, plan.run, queue.SimpleQueue[Event]()
        self._plan, self._spec, self._schema, self._existing = plan, spec, plan.make_schema(spec.spaces), existing
        if existing is not None:
            existing.require_schema(self._schema, to_write=True)
        self._retention = contextlib.ExitStack()
        self._opened: tuple[Lake, Writer] | None = None
        self._entry: Mapping[str, Any] = {}  # the collector's record
        self._policies: set[str] = set()

    def __enter__(self) -> LakeSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is None:
            return
        try:
            self._opened[1].__exit__(kind, error, trace)
        except BaseException as failed:  # retention ends with what the writer raised, which goes on
            self._retention.__exit__(type(failed), failed, failed.__traceback__)
            raise
        self._retention.__exit__(kind, error, trace)  # after an interruption, it leaves the rest to others

    @property
    def is_open(self) -> bool:
        """Whether anything may have been written."""
        return self._opened is not None

    def open(self) -> tuple[Lake, Writer]:
        """Create or open the lake and register the collector, at the first call; return the lake and its writer."""
        if self._opened is None:
            plan, settings = self._plan, self._plan.settings
            lake = self._existing or open_lake(plan)
            lake.require_schema(self._schema, to_write=True)
            self._entry = collectors.register(lake, self.name, **plan.describe(self.run, self._spec.horizon))
            writer = lake.writer(self._schema, name=self.name, seal_seconds=settings.collect.seal_seconds)
            self._opened = lake, writer
            self._retention.enter_context(keep_within(lake, settings.lake, self.notices.put))
        return self._opened

    def append(self, trajectories: Trajectories) -> None:
        """Store finished episodes."""
        self.open()[1].append_many(trajectories)

    def add_policy(self, acting: Acting) -> None:
        """Record where a policy came from, once per policy."""
        lake, _ = self.open()
        if acting.policy_id not in self._policies:
            self._policies.add(acting.policy_id)
            source = None if acting.run is None else collectors.place(acting.run)
            self._entry = collectors.add_policy(lake, self._entry, acting.policy_id, source)

    def add_opponents(self, opponents: Opponents) -> None:
        """Record who plays the other seats, and where they came from, once per opponent."""
        lake, _ = self.open()
        for each in opponents.members:
            run = each.acting.run if isinstance(each, PolicyOpponent) else None
            source = None if run is None else collectors.place(run)
            self._entry = collectors.add_policy(lake, self._entry, each.name, source, among="opponents")

    def seal(self) -> None:
        """Make everything stored so far visible to readers."""
        if self._opened is not None:
            self._opened[1].seal()


def open_lake(plan: CollectionPlan) -> Lake:
    """Open or create the lake of a plan, or replace it."""
    if plan.replace:
        shutil.rmtree(plan.place, ignore_errors=True)
    return Lake.open_or_create(plan.place)


def keep_within(lake: Lake, limits: LakeSettings, listener: Listener) -> contextlib.AbstractContextManager[object]:
    """Keep `lake` within `limits` until the end of the context; `listener` is called by another thread."""
    if not (limits.max_steps or limits.max_bytes or limits.compact):
        return contextlib.nullcontext()
    return RetentionThread(
        lake,
        max_steps=limits.max_steps,
        max_bytes=limits.max_bytes,
        grace_seconds=limits.grace_seconds,
        merge=limits.compact,
        listener=listener,
    )


class Collector:
    """A rollout in this process that fills a lake.

    All actors start their first episodes in the constructor, so that a broken environment is found before anything is
    written; `begin` is called at the first `collect`.
    """

    def __init__(self, plan: CollectionPlan, *, begin: Begin | None = None, listener: Listener = silent) -> None:
        self._plan, self._begin, self._unfinished = plan, begin, 0
        self._played_against = Opponents(groups=())
        existing, self.before = None if plan.replace else Lake.find(plan.place), plan.before or 0
        # Counting may take a query of the lake's index, so several collectors are given what their driver has counted.
        if plan.before is None and existing is not None:
            self.before = count_stored_steps(existing, plan.name)
        seeds = plan.draw_seeds(self.before)
        self.policy_seed, self.workers = seeds.policy, plan.count_workers()
        self.env = plan.make_env(seed=seeds.env, workers=self.workers, listener=listener)
        with contextlib.ExitStack() as stack:
            stack.callback(self.env.close)
            spec = self.env.spec
            self.sink = LakeSink(plan, spec, existing=existing)
            self.exploration = plan.make_exploration(spec, seed=seeds.exploration, before=self.before)
            self._acting, self._follower = plan.make_policy(self.env, seed=seeds.policy, listener=listener)
            self._opponents = OpponentLoader(self.env, seed=seeds.policy, action_mask=plan.settings.agent.action_mask)
            self._seat_opponents(listener)
            self._cutting = plan.choose_cutting(spec.horizon)
            self._restrict_exploration()
            self.rollout = Rollout(
                self.env,
                self._acting.policy,
                exploration=self.exploration,
                recording=Recording(
                    sink=self.sink.append,
                    seed=plan.settings.seed,
                    keep_unfinished=True,
                    histories=bool(plan.settings.collect.tasks),
                    cutting=self._cutting,
                    labeller=make_labeller(plan.settings, self.env, seed=seeds.policy),
                    logp=plan.settings.collect.logp,
                ),
                on_failure=self._report_failure,
                on_env_error=plan.settings.collect.on_env_error,
            )
            self._name_policy()
            if existing is not None and self.before and plan.settings.collect.tasks:
                self.rollout.continue_histories(
                    replay_histories(existing, plan.name, self._acting.policy, self.env.num_envs)
                )
            self.rollout.begin()
            stack.pop_all()  # from here on, `__exit__` closes the environments

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or getattr(error, "exit_code", 1) >= 128 or isinstance(error, ActorsFailed):
                self.finish()
        finally:
            self.env.close()
            self.sink.__exit__(kind, error, trace)

    def _seat_opponents(self, listener: Listener) -> None:
        """Have the opponents that the settings name now play in episodes that begin from now on."""
        if groups := self._plan.name_opponents(listener):
            opponents = self._opponents.load(groups)
            self.env.play_against(opponents)
            self._played_against = opponents

    def _restrict_exploration(self) -> None:
        """Restrict exploration to the action mask that the settings name, or else the policy's."""
        if self.exploration is not None:
            column = self._plan.settings.agent.action_mask or self._acting.action_mask
            self.exploration.legal = LegalActions(column, self.env.spec.spaces) if column else None

    def _report_failure(self, failure: EnvFailure) -> None:
        """Queue a notice for the next progress event."""
        self.sink.notices.put(Notice(text=f"{failure.message}; a new episode begins", level="warning"))
        if failure.trace:
            self.sink.notices.put(Notice(text=failure.trace.rstrip(), level="debug"))

    def act_by(self, acting: Acting) -> None:
        """Replace the policy; its memory is rebuilt from the episodes in progress."""
        self.rollout.settle()  # steps in progress belong to the old policy
        self._acting = acting
        self._restrict_exploration()
        self.rollout.policy = acting.policy
        if isinstance(acting.policy, AgentPolicy):
            acting.policy.rebuild(self.rollout.prefixes(), self.rollout.time)
        self._name_policy()
        if self.sink.is_open:
            self.sink.add_policy(acting)

    def _name_policy(self) -> None:
        self.rollout.policy_id, self.rollout.policy_version = self._acting.policy_id, self._acting.version

    def _follow(self) -> None:
        """Switch to a newer checkpoint if there is one."""
        newer = self._follower.newer() if self._follower is not None else None
        if newer is not None:
            self.act_by(newer)

    def seal(self) -> None:
        self.sink.seal()

    def finish(self) -> None:
        if self.sink.is_open:
            self._unfinished = self.rollout.finish()

    @property
    def steps(self) -> int:
        return self.before + self.rollout.total_steps

    def collect(self, target: int, listener: Listener, *, policy: MakePolicy | None = None) -> dict[str, Any]:
        if policy is not None:
            self.act_by(policy(self.env, self.policy_seed))
        if self._begin is not None:
            self.sink.name, self._begin = self._begin(self.env.spec), None
        is_first = not self.sink.is_open
        _, writer = self.sink.open()
        self.sink.add_policy(self._acting)
        if not is_first:
            self._seat_opponents(listener)
        self.sink.add_opponents(self._played_against)
        self.rollout.collector = self.sink.name
        already = self.steps
        if is_first:
            self._report_cores(listener)

        def relay(event: Event) -> None:
            if isinstance(event, Progress):
                event = replace(event, done=min(already + event.done, target), total=target)
            while not self.sink.notices.empty():
                listener(self.sink.notices.get())
            writer.poll()  # what was stored may be due long before the next episode ends
            listener(event)

        between = self._follow if self._follower is not None else None
        self.rollout.run(steps=max(target - already, 0), listener=relay, between=between)
        self._cut()
        writer.poll()
        learner = self._acting.policy
        if isinstance(learner, QLearning) and (problem := learner.find_problem()):
            listener(Notice(stage="collect", text=problem, level="warning"))
        return self.metrics()

    def _cut(self) -> None:
        """Store running pieces at the end of a call, as `cutting` says."""
        cutting, rollout = self._cutting, self.rollout
        if not cutting.context:
            return
        if cutting.steps:
            rollout.cut(min(cutting.context, cutting.steps))
        if rollout.unstored_steps > _MOST_UNSTORED * self.steps:
            rollout.cut()

    def _report_cores(self, listener: Listener) -> None:
        """Report where environments are stepped, and how many threads the networks use."""
        count = torch.get_num_threads()
        where = f"{self.workers} worker process{'es' * (self.workers != 1)}" if self.workers else "this process"
        text = f"{self.env.num_envs} actors in {where}; networks use {count} thread{'s' * (count != 1)}"
        listener(Notice(stage="collect", text=text))

    def metrics(self) -> dict[str, Any]:
        stats, in_flight = self.rollout.stats(), self.rollout.unfinished_steps
        metrics: dict[str, Any] = {
            "steps": stats.steps,
            "steps_total": self.steps,
            "trajectories": stats.trajectories,
            "return_mean": stats.return_mean,
            "success_mean": stats.success_mean,
            "unfinished": self.rollout.unfinished or self._unfinished,
            "unfinished_steps": in_flight,
            "in_flight_share": in_flight / self.steps if self.steps else math.nan,
            "collector": self.sink.name,
            "policy": self.rollout.policy_id,
            "epsilon": round(stats.epsilon, 9),  # avoid rounding errors when all rates are equal
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
        return {"return_mean": None, **known}  # no mean without finished episodes


def count_stored_steps(lake: Lake, collector: str) -> int:
    """Count the steps that `collector` has stored in the lake, including expired ones, those in logs of crashed
    writers, and those of the numbered collectors that played its shares."""
    return sum(count_by_collector(lake, collector).values())


def count_by_collector(lake: Lake, collector: str) -> dict[str, int]:
    """Count the steps of `collector`, if it has stored any, and of its numbered collectors NAME.0, NAME.1, ..."""
    lake.salvage()
    while True:
        expired = _family(read_log(lake.storage).steps, collector)
        stored = _family(_live_by_collector(lake, collector), collector)
        if _family(read_log(lake.storage).steps, collector) == expired:  # otherwise some moved from one to the other
            return {name: int(stored.get(name, 0)) + expired.get(name, 0) for name in {*stored, *expired}}


def _live_by_collector(lake: Lake, collector: str) -> Mapping[str, int]:
    """Count the live steps of collectors whose names begin so: on a disk by the index; in an object store, where the
    index would fetch the footers of all collectors, by the segments of these."""
    if is_remote(lake.name):
        return count_live_steps(lake, writer_label(collector))
    from pipelines.lake.sql.catalog import query  # imports duckdb, which starts threads: see `ForkServer`

    quoted = collector.replace("'", "''")
    mine = f"(collector = '{quoted}' or starts_with(collector, '{quoted}.')) and base_uid is null"
    _, rows = query(lake, f"select collector, sum(length) from trajectories where {mine} group by collector")
    return dict(rows)


def add_number(collector: str, number: int) -> str:
    """Name one of several collectors that share the work of `collector`."""
    return f"{collector}.{number}"


def _family(steps: Mapping[str, int], collector: str) -> dict[str, int]:
    own, prefix = collector, f"{collector}."
    return {
        name: count
        for name, count in steps.items()
        if name == own or (name.startswith(prefix) and name[len(prefix) :].isdecimal())
    }
