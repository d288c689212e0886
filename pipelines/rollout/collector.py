"""Collector: a rollout whose finished episodes are stored in a lake."""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pipelines.config.settings import LakeSettings
from pipelines.envs.env import ActorsFailed, Env, EnvFailure
from pipelines.envs.exploration import Exploration
from pipelines.envs.legal import LegalActions
from pipelines.events import Event, Listener, Notice, Progress
from pipelines.lake import collectors
from pipelines.lake.maintenance.retention_thread import RetentionThread
from pipelines.lake.schema import Schema
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import Trajectories
from pipelines.lake.writer import Writer
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.follower import CheckpointFollower
from pipelines.rollout.policies import Acting
from pipelines.rollout.rollout import OnError, Rollout

_MOST_UNSTORED = 0.25  # of a chain's steps so far, in running episodes at the end of a stage


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How running episodes are stored in pieces: every `steps` steps (0: not while they run), and if `context` > 0, at
    the end of each call of `collect`. `kept`: steps of a cut episode that a new policy's memory is rebuilt from.

    At the end of a call, pieces of at least `context` steps are cut where episodes are cut anyway. If more than a
    quarter of all steps so far would then still be in running episodes, all of them are cut, so that even the first
    epoch of long episodes has something to train on. Otherwise they are left alone: a window does not see what was
    before its piece.
    """

    steps: int = 0
    context: int = 0
    kept: int = 0


class LakeSink:
    """Writer of one collector's trajectories into the lake at `place`, which the first call of `open` creates unless
    it is `existing`.

    `record` returns what the lake stores about the collector (see `lake.collectors.register`), and is called then. With
    `replace`, an existing lake is removed first. `limits` are enforced until the last segment is written. `name` is
    written into every trajectory and may be changed until the lake is open.
    """

    def __init__(
        self,
        place: Path | str,
        schema: Schema,
        *,
        name: str,
        record: Callable[[], Mapping[str, Any]],
        limits: LakeSettings,
        seal_seconds: float,
        replace: bool = False,
        existing: Lake | None = None,
    ) -> None:
        self.name, self.notices = name, queue.SimpleQueue[Event]()
        self._place, self._schema, self._record, self._replace = place, schema, record, replace
        self._limits, self._seal_seconds, self._existing = limits, seal_seconds, existing
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
        """Return whether anything may have been written."""
        return self._opened is not None

    def open(self) -> tuple[Lake, Writer]:
        """Return the lake and its writer; the first call creates or opens the lake and registers the collector."""
        if self._opened is None:
            if self._replace:
                shutil.rmtree(self._place, ignore_errors=True)
            lake = self._existing or Lake.open_or_create(self._place)
            lake.require_schema(self._schema)
            self._entry = collectors.register(lake, self.name, **self._record())
            self._opened = lake, lake.writer(self._schema, name=self.name, seal_seconds=self._seal_seconds)
            self._retention.enter_context(maintenance(lake, self._limits, self.notices.put))
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

    def seal(self) -> None:
        """Make everything stored so far visible to readers."""
        if self._opened is not None:
            self._opened[1].seal()


def maintenance(lake: Lake, limits: LakeSettings, listener: Listener) -> contextlib.AbstractContextManager[object]:
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
    """A rollout that fills a lake; environments and unfinished episodes stay alive between calls of `collect`.

    All actors start their first episodes in the constructor, so that a broken environment is found before anything is
    written. `before`: steps stored by earlier processes of the same collector. A `follower` replaces the policy between
    steps. `action_mask`: the observation column that masks exploration; "": the policy's own. `workers`: number of
    processes that step `env`. `cutting`: how running episodes are stored (None: whole episodes only).
    """

    def __init__(
        self,
        env: Env,
        acting: Acting,
        sink: LakeSink,
        *,
        exploration: Exploration | None = None,
        follower: CheckpointFollower | None = None,
        action_mask: str = "",
        on_env_error: OnError = "stop",
        seed: int = 0,
        policy_seed: int = 0,
        before: int = 0,
        workers: int = 0,
        cutting: Cutting | None = None,
    ) -> None:
        self._cutting = cutting or Cutting()
        self.env, self.sink, self.exploration, self.workers = env, sink, exploration, workers
        self.policy_seed, self.before = policy_seed, before
        self._acting, self._follower, self._action_mask = acting, follower, action_mask
        self._unfinished = 0
        self._reported_cores = False
        self._restrict_exploration(acting)
        self.rollout = Rollout(
            env,
            acting.policy,
            exploration=exploration,
            sink=sink.append,
            on_failure=self._report_failure,
            on_env_error=on_env_error,
            seed=seed,
            policy_id=acting.policy_id,
            policy_version=acting.version,
            collector=sink.name,
            keep_unfinished=True,
            chunk_steps=self._cutting.steps,
            kept_steps=self._cutting.kept,
        )
        self.rollout.begin()

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

    def _restrict_exploration(self, acting: Acting) -> None:
        """Restrict exploration to the action mask that the settings name, or else the policy's."""
        if self.exploration is not None:
            column = self._action_mask or acting.action_mask
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
        self._restrict_exploration(acting)
        self.rollout.policy = acting.policy
        if isinstance(acting.policy, AgentPolicy):
            acting.policy.rebuild(self.rollout.prefixes(), self.rollout.time)
        self.rollout.policy_id, self.rollout.policy_version = acting.policy_id, acting.version
        if self.sink.is_open:
            self.sink.add_policy(acting)

    def _follow(self) -> None:
        """Switch to a newer checkpoint if there is one."""
        newer = self._follower.newer() if self._follower is not None else None
        if newer is not None:
            self.act_by(newer)

    def finish(self) -> None:
        """Store unfinished episodes."""
        if self.sink.is_open:
            self._unfinished = self.rollout.finish()

    @property
    def steps(self) -> int:
        """Return the environment steps so far, including earlier processes."""
        return self.before + self.rollout.total_steps

    def collect(self, target: int, listener: Listener) -> dict[str, Any]:
        """Collect until `steps` reaches `target`, and return the metrics of this call."""
        _, writer = self.sink.open()
        self.sink.add_policy(self._acting)
        self.rollout.collector = self.sink.name
        already = self.steps
        self._report_cores(listener)

        def relay(event: Event) -> None:
            if isinstance(event, Progress):
                event = replace(event, done=min(already + event.done, target), total=target)
            while not self.sink.notices.empty():
                listener(self.sink.notices.get())
            listener(event)

        between = self._follow if self._follower is not None else None
        self.rollout.run(steps=max(target - already, 0), listener=relay, between=between)
        self._cut()
        writer.poll()
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
        """Report once where environments are stepped, and how many threads the networks use."""
        if not self._reported_cores:
            self._reported_cores, count = True, torch.get_num_threads()
            where = f"{self.workers} worker process{'es' * (self.workers != 1)}" if self.workers else "this process"
            text = f"{self.env.num_envs} actors in {where}; networks use {count} thread{'s' * (count != 1)}"
            listener(Notice(stage="collect", text=text))

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last call of `collect`, even if it failed."""
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
