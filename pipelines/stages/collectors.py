"""The collectors of a stage: one in this process, or several that fill one lake, each in a process of its own.

The driver of several shares out the steps.
Each plays the whole collect loop under its own name, NAME.0, NAME.1, ..., with its own seeds. One whose process dies is
started again: it counts what it has stored and plays the rest of its share. The driver asks the lake's index once what
all of them have stored, keeps the lake within its limits, and joins their progress and figures.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipelines.envs.env import Env, EnvSpec
from pipelines.errors import Locked, StageFailed
from pipelines.events import Event, Listener, Notice, Progress, Waiting, silent
from pipelines.files.locks import hold_exclusively
from pipelines.lake.storage import connect
from pipelines.lake.store import Lake
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.collector import (
    AnyCollector,
    Begin,
    Collector,
    add_number,
    count_by_collector,
    keep_within,
    open_lake,
)
from pipelines.rollout.plan import CollectionPlan, MakePolicy, RunName
from pipelines.rollout.policies import Acting
from pipelines.stages.engines import POLL_SECONDS, make_engine, make_restart_notice
from pipelines.stages.tasks import Channel, Engine, RunningTask
from pipelines.training.learner import use_threads

_SHORTAGE_SECONDS = 5.0  # before collectors that have not started are reported
_SUMS = (
    "steps", "trajectories", "unfinished", "unfinished_steps", "env_errors", "episodes_dropped", "actors", "workers",
)  # fmt: skip
_BY_EPISODES, _BY_STEPS = ("return_mean", "success_mean"), ("epsilon", "policy_share", "env_share", "epsilon_progress")


def make_collectors(
    plan: CollectionPlan, *, begin: Begin | None = None, ends: bool = False, listener: Listener = silent
) -> AnyCollector:
    """Make the collectors of a stage: as many as `collect.collectors`. `ends`: `collect` is called once."""
    if plan.settings.collect.collectors > 1:
        return CollectorGroup(plan, begin=begin, ends=ends, listener=listener)
    return Collector(plan, begin=begin, listener=listener)


@dataclass(frozen=True, kw_only=True)
class CollectOrder:
    """Order to collect until `target` steps are stored, by `policy` (None: as before). `name` and `run` are final."""

    target: int
    name: str
    run: RunName | None
    policy: MakePolicy | None


@dataclass(frozen=True, kw_only=True)
class ReadyCollector:
    """The report of a collector whose environments have started."""

    spec: EnvSpec
    before: int


@dataclass(frozen=True, kw_only=True)
class CollectorTask:
    """One of several collectors, as a task. It posts "ready" once, and "collected" with its metrics after each
    order."""

    plan: CollectionPlan
    lock: Path

    def __call__(self, channel: Channel) -> None:
        """Play until the driver has no more orders."""
        plan = self.plan
        with hold_exclusively(self.lock, what=f"collector '{plan.name}' is at work"):
            use_threads(plan.settings.train.threads)
            policy = None if plan.policy is None else _ContinuedPolicy(plan.policy)
            with Collector(replace(plan, policy=policy), listener=channel.listen) as collector:
                channel.post("ready", ReadyCollector(spec=collector.env.spec, before=collector.before))
                while (order := channel.receive()) is not None:
                    collector.sink.name, collector.sink.run = order.name, order.run or collector.sink.run
                    changed = None  # loading a checkpoint takes seconds: an unchanged policy acts on
                    if policy is not None and order.policy is not None and order.policy != policy.make:
                        policy.make, changed = order.policy, policy
                    metrics = collector.collect(order.target, channel.listen, policy=changed)
                    collector.seal()
                    channel.post("collected", metrics)


class _ContinuedPolicy:
    """Policies, each of which goes on with the random stream of the one before."""

    def __init__(self, make: MakePolicy) -> None:
        self.make = make
        self._before: AgentPolicy | None = None

    def __call__(self, env: Env, seed: int) -> Acting:
        acting = self.make(env, seed)
        if isinstance(acting.policy, AgentPolicy):
            if self._before is not None:
                acting.policy.load_state_dict(self._before.state_dict())
            self._before = acting.policy
        return acting


@dataclass(kw_only=True)
class _Member:
    """A collector from its driver's side. `stored`: steps in the lake, as far as known."""

    number: int
    name: str
    before: int
    stored: int = 0
    target: int = 0
    task: RunningTask | None = None
    order: CollectOrder | None = None
    is_ready: bool = False
    is_busy: bool = False
    knows_stored: bool = True
    deaths: int = 0
    restarts: int = 0
    lost: int = 0
    progress: Progress | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Steps so far, including those not yet stored."""
        return max(self.stored, 0 if self.progress is None else self.progress.done)

    def describe(self) -> dict[str, Any]:
        task, figures = self.task, self.metrics
        return {
            "name": self.name,
            "host": None if task is None else task.host,
            "pid": None if task is None else task.pid,
            "steps": self.stored - self.before,
            "steps_total": self.stored,
            "restarts": self.restarts,
            "lost_steps": self.lost,
            "steps_per_second": figures.get("steps_per_second"),
        }


class CollectorGroup:
    """The collectors of a stage, `collect.collectors` in number, from their driver's side.

    `begin` is called once the first collector's environments have started, and before anything is written. `ends`:
    `collect` is called once.
    """

    def __init__(
        self,
        plan: CollectionPlan,
        *,
        begin: Begin | None = None,
        ends: bool = False,
        engine: Engine | None = None,
        listener: Listener = silent,
    ) -> None:
        self._plan, self._name, self._policy = plan, plan.name, plan.policy
        self._begin, self._ends = begin, ends
        collect = plan.settings.collect
        self._stack, self._maintenance = contextlib.ExitStack(), contextlib.ExitStack()
        self._engine = engine or make_engine(collect, collect.collectors)
        self._locks = plan.run.path if plan.run is not None else connect(plan.place).local
        self._await_earlier(listener)
        existing = None if plan.replace else Lake.find(plan.place)
        stored = count_by_collector(existing, plan.name) if existing else {}
        names = [add_number(plan.name, number) for number in range(collect.collectors)]
        self._members = [
            _Member(number=number, name=each, before=stored.get(each, 0), stored=stored.get(each, 0))
            for number, each in enumerate(names)
        ]
        self._others = sum(stored.values()) - sum(each.before for each in self._members)
        self.before = sum(stored.values())
        self._has_begun = False
        self._notices: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._said: set[str] = set()
        self._seconds = 0.0

    def __enter__(self) -> CollectorGroup:
        self._stack.enter_context(self._maintenance)  # until the last segment is written
        self._stack.enter_context(self._engine)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def steps(self) -> int:
        """The steps stored so far, including those of earlier commands."""
        return self._others + sum(each.stored for each in self._members)

    def collect(self, target: int, listener: Listener, *, policy: MakePolicy | None = None) -> dict[str, Any]:
        """Collect until all together have `target` steps, and return the metrics of this call. A `policy` is sent to
        the processes. CollectorFailed, with the others' steps stored, if one cannot go on."""
        began = time.monotonic()
        self._policy = policy or self._policy
        first = [each.stored for each in self._members]
        shares = level(first, target - self._others)
        for member, share in zip(self._members, shares, strict=True):
            member.metrics, member.progress, member.restarts, member.lost = {}, None, 0, 0
            member.before, member.target = member.stored, share
            if share > member.stored:
                member.is_busy = True
                member.order = self._make_order(member)
                if member.task is None or member.task.ended:
                    self._start(member)
                elif member.is_ready:
                    member.task.send(member.order)
        try:
            while any(member.is_busy for member in self._members):
                self._engine.wait(POLL_SECONDS)
                for member in self._members:
                    self._take(member, listener)
                self._report(listener, target, began)
        finally:
            self._seconds = time.monotonic() - began
        return self.metrics()

    def seal(self) -> None:
        """Do nothing: each collector has sealed what it stored for an order."""

    def finish(self) -> None:
        """Have all collectors store what they have, and end them."""
        self._stack.close()

    @property
    def _run_name(self) -> RunName | None:
        run = self._plan.run
        return None if run is None else RunName(path=run.path, identity=run.identity)

    def _make_order(self, member: _Member) -> CollectOrder:
        return CollectOrder(target=member.target, name=member.name, run=self._run_name, policy=self._policy)

    def _await_earlier(self, listener: Listener) -> None:
        """Wait until collectors of an earlier driver, which was killed, have stored what they have."""
        for number in range(self._plan.settings.collect.collectors):
            while True:
                try:
                    with hold_exclusively(self._lock(number), what="a collector is at work"):
                        break
                except Locked as error:
                    listener(Waiting(what=f"an earlier command: {error.message}"))
                    time.sleep(POLL_SECONDS)

    def _lock(self, number: int) -> Path:
        name = f"collector-{number}" if self._plan.run is not None else quote(add_number(self._name, number), safe="")
        return self._locks.absolute() / f".{name}.lock"

    def _start(self, member: _Member) -> None:
        assert member.order is not None
        plan = self._plan.share(
            member.number,
            name=member.name,
            run=self._run_name,
            policy=member.order.policy,
            before=member.stored if member.knows_stored else None,
            together=self.steps,
        )
        member.is_ready = False
        member.task = self._engine.start(CollectorTask(plan=plan, lock=self._lock(member.number)))

    def _take(self, member: _Member, listener: Listener) -> None:
        """Act on what a collector has posted, and on its end."""
        if member.task is None:
            return
        for kind, body in member.task.messages():
            if kind == "event":
                self._relay(body, member, listener)
            elif kind == "ready":
                self._on_ready(member, body)
            elif kind == "collected":
                ends = self._report_shortage(listener) or self._ends  # it makes room for another
                member.metrics, member.knows_stored, member.is_busy = body, False, ends
                member.stored = body["steps_total"]
                if ends:
                    member.task.stop()  # it stores unfinished episodes
            elif kind == "done":
                member.is_busy = False
            elif kind == "error":
                error = body.unpack()
                if not isinstance(error, StageFailed):  # an error of inputs that all have in common
                    raise error
                raise CollectorFailed(
                    f"collector {member.number}: {error.message}", hint=error.hint
                ) from error.__cause__
        if member.task.ended and member.is_busy:
            self._restart(member, listener)

    def _on_ready(self, member: _Member, ready: ReadyCollector) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._prepare(ready.spec)
        if not member.knows_stored:
            if ready.before > member.stored:
                member.deaths = 0
            member.lost += max(member.done - ready.before, 0)
            member.stored, member.progress, member.knows_stored = ready.before, None, True
        member.is_ready = True
        if member.is_busy and member.task is not None:
            member.task.send(member.order)

    def _prepare(self, spec: EnvSpec) -> None:
        """Create the lake, or open it, and keep it within its limits from now on."""
        if self._begin is not None:
            self._name = self._begin(spec)
        for member in self._members:
            member.name = add_number(self._name, member.number)
            if member.order is not None:
                member.order = self._make_order(member)
        lake = open_lake(self._plan)
        lake.require_schema(self._plan.make_schema(spec.spaces), to_write=True)
        self._maintenance.enter_context(keep_within(lake, self._plan.settings.lake, self._notices.put))

    def _relay(self, event: Event, member: _Member, listener: Listener) -> None:
        if isinstance(event, Progress):
            member.progress = event
        elif isinstance(event, Notice) and event.text not in self._said:
            self._said.add(event.text)
            listener(event)

    def _restart(self, member: _Member, listener: Listener) -> None:
        """Start a collector again whose process has ended by itself. StageFailed after too many times in a row."""
        assert member.task is not None
        member.deaths += 1
        most = self._plan.settings.collect.restarts
        times = f", {member.deaths} times in a row without having stored a step" if most else ""
        try:
            listener(
                make_restart_notice(member.task, f"collector {member.number}", again=member.deaths <= most, times=times)
            )
        except StageFailed as error:
            raise CollectorFailed(error.message, hint=error.hint) from None
        member.restarts += 1
        member.knows_stored = False
        self._start(member)

    def _report_shortage(self, listener: Listener) -> bool:
        """Report, once for each number of them, that collectors wait for room. Return whether any does."""
        waiting = sum(each.is_busy and not each.is_ready for each in self._members)
        if not waiting or not (why := self._engine.shortage()):
            return False
        count = len(self._members)
        text = f"{count - waiting} of {count} collectors, {why}"
        if text not in self._said:
            self._said.add(text)
            listener(Notice(stage="collect", text=text))
        return True

    def _report(self, listener: Listener, target: int, since: float) -> None:
        """Report the progress of all, or which collectors have not started yet."""
        while not self._notices.empty():
            listener(self._notices.get())
        if time.monotonic() - since > _SHORTAGE_SECONDS:
            self._report_shortage(listener)
        known = [each.progress for each in self._members if each.progress is not None]
        if not known:
            listener(Waiting(what="collectors to start"))
            return
        names = dict.fromkeys(name for each in known for name in each.metrics)
        figures = {name: [each.metrics[name] for each in known if name in each.metrics] for name in names}
        done = min(self._others + sum(each.done for each in self._members), target)
        means = {name: sum(values) / len(values) for name, values in figures.items()}
        listener(Progress(stage="collect", done=done, total=target, unit="steps", metrics=means))

    def metrics(self) -> dict[str, Any]:
        """Join the metrics of the last call of `collect`; figures of processes that died are not in the means."""
        found = [each.metrics for each in self._members if each.metrics]
        joined: dict[str, Any] = {"return_mean": None}
        joined |= {name: sum(each[name] for each in found) for name in _SUMS}
        joined["steps"] = sum(each.stored - each.before for each in self._members)
        joined |= _average(found, _BY_EPISODES, "trajectories") | _average(found, _BY_STEPS, "steps")
        if self.steps:
            joined["in_flight_share"] = joined["unfinished_steps"] / self.steps
        return joined | {
            "steps_total": self.steps,
            "collector": self._name,
            "policy": found[0]["policy"] if found else "",
            "steps_per_second": math.fsum(each["steps_per_second"] for each in found),
            "seconds": self._seconds,
            "collectors": [each.describe() for each in self._members],
            "restarts": sum(each.restarts for each in self._members),
            "lost_steps": sum(each.lost for each in self._members),
        }


class CollectorFailed(StageFailed):
    """One of several collectors cannot go on; the others have stored what they have."""


def level(stored: Sequence[int], target: int) -> list[int]:
    """Share out targets that sum to `target`, as equal as possible; nobody's is less than what it has `stored`.

    >>> level([0, 0, 0], 10), level([7, 0, 0], 10), level([9, 9], 10)
    ([4, 3, 3], [7, 2, 1], [9, 9])
    """
    missing, found = max(target - sum(stored), 0), list(stored)
    order = sorted(range(len(found)), key=lambda i: (found[i], i))
    count = 0
    while missing and count < len(order):  # raise the lowest to the next one's level
        count += 1
        lowest = found[order[0]]
        room = (found[order[count]] - lowest) * count if count < len(order) else missing
        step = min(missing, room)
        each, rest = divmod(step, count)
        for place, i in enumerate(sorted(order[:count])):
            found[i] += each + (place < rest)
        missing -= step
    return found


def _average(found: Sequence[Mapping[str, Any]], names: Sequence[str], weight: str) -> dict[str, float]:
    means = {}
    for name in names:
        values = [(each[name], each[weight]) for each in found if each.get(name) is not None and each[weight]]
        if values:
            means[name] = math.fsum(v * w for v, w in values) / sum(w for _, w in values)
    return means
