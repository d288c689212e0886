"""Act with the newest checkpoint of a run that is being trained, in this process or another, on any host."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pipelines.config.policy_files import list_checkpoints
from pipelines.config.run_directory import RunDirectory
from pipelines.envs.env import Env
from pipelines.errors import InputMissing, IntegrityError, StageFailed
from pipelines.events import Listener, Notice
from pipelines.lake.storage import is_remote
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning import published
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.checkpoint import Checkpoint
from pipelines.learning.published import PublishedPolicy
from pipelines.rollout.policies import Acting, make_random_policy, trained

SECONDS, _FAR_SECONDS = 2.0, 10.0  # between two checks; far: in an object store, where each is a request


class _PolicySource(Protocol):
    """Where the checkpoints that act come from."""

    @property
    def seconds(self) -> float:
        """The usual interval between checks."""

    @property
    def run(self) -> Path | None:
        """The run's directory; None if only its policies are known."""

    @property
    def identity(self) -> str:
        """The name of the policy in lakes."""

    def newest(self) -> Hashable | None:
        """Identify the newest checkpoint; None if there is none. OSError if it cannot be read."""

    def load(self, newest: Any) -> Checkpoint:
        """Load that checkpoint. InputMissing if it is gone, IntegrityError if it is damaged."""


class RunSource:
    """The checkpoints of a run's directory."""

    seconds = SECONDS

    def __init__(self, run: Path) -> None:
        self._run = RunDirectory(run)

    def __str__(self) -> str:
        return f"run '{self._run.path}'"

    @property
    def run(self) -> Path:
        return self._run.path

    @property
    def identity(self) -> str:
        return self._run.identity

    def newest(self) -> tuple[int, int] | None:
        """Read update and time of the newest checkpoint."""
        known = list_checkpoints(self._run.checkpoints)
        if not known:
            return None
        try:
            return known[-1], os.stat(self._run.checkpoints / f"{known[-1]:06d}" / "checkpoint.json").st_mtime_ns
        except OSError:
            return None

    def load(self, newest: tuple[int, int]) -> Checkpoint:
        return checkpoints.load(self._run.checkpoints, str(newest[0]))


class _LakeSource:
    """The policies that a run publishes in a lake: LAKE, or LAKE/RUN. Neither must exist yet."""

    run = None

    def __init__(self, place: str) -> None:
        self._place, self._run = place, ""
        self._lake: Lake | None = None
        self.seconds = _FAR_SECONDS if is_remote(place) else SECONDS

    def __str__(self) -> str:
        return f"'{self._place}'"

    @property
    def identity(self) -> str:
        return self._run

    def newest(self) -> PublishedPolicy | None:
        if self._lake is None:
            found = published.find_published_lake(self._place)
            lake = None if found is None else Lake.find(found[0])
            if found is None or lake is None:
                return None
            self._lake, self._run = lake, found[1]
        policy = published.find_newest(self._lake, self._run)
        if policy is not None:
            self._run = policy.run
        return policy

    def load(self, newest: PublishedPolicy) -> Checkpoint:
        assert self._lake is not None
        return published.load(self._lake, newest)


def find_policy_source(place: str) -> _PolicySource:
    """Find the source at a run's directory, or at a lake where policies are published."""
    if is_remote(place) or published.find_published_lake(place) is not None:
        return _LakeSource(place)
    return RunSource(Path(place))


class CheckpointFollower:
    """Policies from a source of checkpoints: `first` returns the current one; `newer`, called between steps, returns a
    replacement whenever the checkpoint has changed (a lower number too, after a fresh start).

    Before the first checkpoint, uniformly random (legal, by the column `action_mask`) actions are taken; otherwise a
    trainer that waits for experience would wait forever. A checkpoint that disappears while it is read is retried at
    the next check, and so is an object store that cannot be reached. `seconds`: between checks (None: as usual).
    """

    def __init__(
        self,
        source: _PolicySource,
        env: Env,
        *,
        seed: int,
        greedy: bool,
        seconds: float | None = None,
        listener: Listener,
        action_mask: str = "",
    ) -> None:
        self._source, self._env, self._seed, self._greedy = source, env, seed, greedy
        self._action_mask = action_mask
        self._seconds, self._listener = source.seconds if seconds is None else seconds, listener
        self._loaded: Hashable | None = None
        self._refused: Hashable | None = None
        self._policy: AgentPolicy | None = None
        self._problem = ""
        self._due = 0.0

    def first(self) -> Acting:
        """Load the current policy. InputMissing if the run was trained for other spaces."""
        acting = self.newer()
        if acting is not None:
            return acting
        self._listener(Notice(text=f"{self._source} has no checkpoint yet: acting at random until it has one"))
        return make_random_policy(self._env.spec.spaces, seed=self._seed, action_mask=self._action_mask)

    def newer(self) -> Acting | None:
        """Load the newest checkpoint's policy if it differs from the last one returned; None also if no check
        is due."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + self._seconds
        newest = self._newest()
        if newest is None or newest == self._loaded:
            return None
        try:
            checkpoint = self._source.load(newest)
        except (InputMissing, IntegrityError) as error:
            if newest == self._newest() and newest != self._refused:  # unless it was removed in the meantime
                self._refused = newest
                self._listener(Notice(text=f"{error}; acting goes on without it", level="warning"))
            return None
        except OSError as error:
            self._report(str(error))
            return None
        seed, greedy = self._seed, self._greedy
        acting = trained(
            checkpoint, self._env, policy_id=self._source.identity, seed=seed, greedy=greedy, explores=True
        )
        assert isinstance(acting.policy, AgentPolicy)
        if self._policy is not None:
            acting.policy.load_state_dict(self._policy.state_dict())  # its random stream continues
        self._policy, self._loaded = acting.policy, newest
        self._listener(Notice(text=f"acting with checkpoint {checkpoint.update}", level="debug"))
        return replace(acting, run=self._source.run)

    def _newest(self) -> Hashable | None:
        try:
            newest = self._source.newest()
        except (OSError, IntegrityError, StageFailed) as error:
            self._report(str(error))
            return None
        self._problem = ""
        return newest

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._listener(Notice(text=f"{problem}; acting goes on with what is here", level="warning"))
