"""Act with the newest checkpoint of a run that is being trained, in this process or another, on any host."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from pipelines.config.run_directory import RunDirectory
from pipelines.envs.env import Env
from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Listener, Notice
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.policies import Acting, random_policy, trained


class CheckpointFollower:
    """Source of policies from a run's checkpoints: `first` returns the current one; `newer`, called between steps,
    returns a replacement whenever the checkpoint has changed (a lower number too, after a fresh start).

    Before the first checkpoint, uniformly random (legal, by the column `action_mask`) actions are taken; otherwise a
    trainer that waits for experience would wait forever. A checkpoint that disappears while it is read is retried at
    the next check.
    """

    def __init__(
        self,
        run: Path,
        env: Env,
        *,
        seed: int,
        greedy: bool,
        seconds: float,
        listener: Listener,
        action_mask: str = "",
    ) -> None:
        self._run, self._env, self._seed, self._greedy = RunDirectory(run), env, seed, greedy
        self._action_mask = action_mask
        self._seconds, self._listener = seconds, listener
        self._loaded: tuple[int, int] | None = None
        self._refused: tuple[int, int] | None = None
        self._policy: AgentPolicy | None = None
        self._due = 0.0

    def first(self) -> Acting:
        """Return the current policy. InputMissing if the run was trained for other spaces."""
        acting = self.newer()
        if acting is not None:
            return acting
        self._listener(Notice(text=f"run '{self._run.path}' has no checkpoint yet: acting at random until it has one"))
        return random_policy(self._env.spec.spaces, seed=self._seed, action_mask=self._action_mask)

    def newer(self) -> Acting | None:
        """Return the newest checkpoint's policy if it differs from the last one returned; None also if no check
        is due."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + self._seconds
        newest = self._newest()
        if newest is None or newest == self._loaded:
            return None
        try:
            checkpoint = checkpoints.load(self._run.checkpoints, str(newest[0]))
        except (InputMissing, IntegrityError) as error:
            if newest == self._newest() and newest != self._refused:  # unless it was removed in the meantime
                self._refused = newest
                self._listener(Notice(text=f"{error}; acting goes on without it", level="warning"))
            return None
        acting = trained(checkpoint, self._env, policy_id=self._run.identity, seed=self._seed, greedy=self._greedy)
        assert isinstance(acting.policy, AgentPolicy)
        if self._policy is not None:
            acting.policy.load_state_dict(self._policy.state_dict())  # its random stream continues
        self._policy, self._loaded = acting.policy, newest
        self._listener(Notice(text=f"acting with checkpoint {checkpoint.update}", level="debug"))
        return replace(acting, run=self._run.path)

    def _newest(self) -> tuple[int, int] | None:
        """Return update and time of the newest checkpoint."""
        known = checkpoints.numbers(self._run.checkpoints)
        if not known:
            return None
        try:
            return known[-1], os.stat(self._run.checkpoints / f"{known[-1]:06d}" / "checkpoint.json").st_mtime_ns
        except OSError:
            return None
