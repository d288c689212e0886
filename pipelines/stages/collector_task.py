"""One of several collectors, from its own side: a task that collects as its driver orders (see `collectors`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config.settings import LakeSettings, Settings
from pipelines.envs.env import Env, EnvSpec
from pipelines.files.locks import exclusive
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.collector import Collector
from pipelines.rollout.policies import Acting, load_policy
from pipelines.stages.collector import make_collector
from pipelines.stages.tasks import Channel
from pipelines.training.learner import use_threads


@dataclass(frozen=True, kw_only=True)
class RunName:
    """A run's directory and identity, on a host that may not have the directory."""

    path: Path
    identity: str


@dataclass(frozen=True, kw_only=True)
class CollectOrder:
    """What a collector is to do: collect until it has stored `target` steps, by a policy and greedily or not. `name`
    and `run` are final."""

    target: int
    name: str
    run: RunName | None
    policy: tuple[str, bool] | None


@dataclass(frozen=True, kw_only=True)
class ReadyCollector:
    """What a collector reports once its environments have started."""

    spec: EnvSpec
    before: int


@dataclass(frozen=True, kw_only=True)
class CollectorTask:
    """One of several collectors, as a task. It posts "ready" once, and "collected" with its metrics after each order.

    `policy`: which one acts first, and whether greedily; None: as the settings say. `before`: steps that it has stored;
    None: to be counted. `together`: steps that all collectors have stored.
    """

    settings: Settings
    place: Path | str
    name: str
    number: int
    behaviour: Mapping[str, Any] | None
    policy: tuple[str, bool] | None
    before: int | None
    together: int
    in_run: bool
    lock: Path

    def __call__(self, channel: Channel) -> None:
        """Play until the driver has no more orders."""
        with exclusive(self.lock, what=f"collector '{self.name}' is at work"):
            use_threads(self.settings.train.threads)
            _Player(self).play(channel)


class _Player:
    """The collector of a task, and what changes from order to order."""

    def __init__(self, task: CollectorTask) -> None:
        self._task = task
        self._policy = task.policy
        self._acting: AgentPolicy | None = None
        self.path, self.identity = Path(), ""  # of the run

    def play(self, channel: Channel) -> None:
        task = self._task
        collector = make_collector(
            task.settings.model_copy(update={"lake": LakeSettings(compact=False)}),  # the driver maintains the lake
            task.place,
            name=task.name,
            run=self if task.in_run else None,
            behaviour=task.behaviour,
            policy=None if task.policy is None else self._load,
            number=task.number,
            before=task.before,
            together=task.together,
            listener=channel.listen,
        )
        with collector:
            channel.post("ready", ReadyCollector(spec=collector.env.spec, before=collector.before))
            while (order := channel.receive()) is not None:
                self._obey(order, collector)
                metrics = collector.collect(order.target, channel.listen)
                collector.sink.seal()
                channel.post("collected", metrics)

    def _obey(self, order: CollectOrder, collector: Collector) -> None:
        collector.sink.name = order.name
        if order.run is not None:
            self.path, self.identity = order.run.path, order.run.identity
        if order.policy != self._policy:
            self._policy = order.policy
            collector.act_by(self._load(collector.env, collector.policy_seed))

    def _load(self, env: Env, seed: int) -> Acting:
        assert self._policy is not None
        name, greedy = self._policy
        acting = load_policy(name, env, seed=seed, greedy=greedy, action_mask=self._task.settings.agent.action_mask)
        if isinstance(acting.policy, AgentPolicy):
            if self._acting is not None:
                acting.policy.load_state_dict(self._acting.state_dict())  # its random stream continues
            self._acting = acting.policy
        return acting
