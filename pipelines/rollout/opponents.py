"""Opponents by name: what `collect.opponents` and `evaluate.opponents` accept, and the policies that play for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.config.places import find_bundle, split_checkpoint
from pipelines.config.policy_files import list_checkpoints, load_record, locate_checkpoint
from pipelines.config.run_directory import RunDirectory
from pipelines.envs.env import Env, Opponent, Opponents, OpponentTurn
from pipelines.envs.seats import RANDOM
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.files.json import Form, read_object
from pipelines.lake.sql import tables
from pipelines.lake.sql.tables import RowTable
from pipelines.learning.acting import AgentPolicy
from pipelines.rollout.learners import is_learner
from pipelines.rollout.policies import Acting, Policy, load_policy

Groups = tuple[tuple[str, ...], ...]
_COLUMNS = {"update": "count", "time": "number", "elo": "number"}
_HINT = "give random, expert, RUN[@CHECKPOINT], BUNDLE, module:attr, or SQL: select update from checkpoints ..."


def is_sql(name: str) -> bool:
    """Whether `name` selects checkpoints.

    >>> is_sql("select update from checkpoints"), is_sql("random")
    (True, False)
    """
    return name.strip().partition(" ")[0].lower() in ("select", "from", "with")


def name_opponents(names: Sequence[str], run: Path | None, listener: Listener = silent) -> Groups:
    """List the policies that each of `names` stands for: one, or the checkpoints of `run` that its SQL selects, or
    random play where it selects none. A run's policy is named with its checkpoint.

    UsageError for a wrong name, InputMissing for a run without checkpoints.
    """
    groups: list[tuple[str, ...]] = []
    for name in names:
        if is_learner(name):
            raise UsageError(f"opponent '{name}': a learner learns by playing", hint=_HINT)
        if is_sql(name):
            if run is None:
                raise UsageError("SQL selects opponents among the checkpoints of a run, and there is none", hint=_HINT)
            updates = select_checkpoints(run, name, listener)
            groups.append(tuple(f"{run}@{update}" for update in updates) or (RANDOM,))
            continue
        path, which = split_checkpoint(name)
        if RunDirectory(path).exists():
            found = locate_checkpoint(RunDirectory(path).checkpoints, which or "latest")
            name = f"{path}@{int(found.name)}"
        groups.append((name,))
    return tuple(groups)


def select_checkpoints(run: Path, text: str, listener: Listener = silent) -> list[int]:
    """Return the updates of the checkpoints of `run` that a SELECT chooses, in its column `update`, from the table
    `checkpoints`: `update`, `time`, and `elo` in the newest tournament that each has played (null: none).

    UsageError for anything else, and for an update that is not there.
    """
    directory = RunDirectory(run)
    rated = read_ratings(run)
    rows: list[dict[str, Any]] = []
    for update in list_checkpoints(directory.checkpoints):
        record = read_object(directory.checkpoints / f"{update:06d}" / "checkpoint.json") or {}
        rows.append({"update": update, "time": record.get("time"), "elo": rated.get(update)})
    names, found = tables.query({"checkpoints": RowTable(columns=_COLUMNS, rows=rows)}, text, listener=listener)
    if "update" not in names:
        raise UsageError(
            f"SQL of opponents: the column 'update' is missing, there is {', '.join(names)}",
            hint="write e.g.: select update from checkpoints order by update desc limit 8",
        )
    place, known = names.index("update"), {row["update"] for row in rows}
    chosen = [row[place] for row in found]
    for update in chosen:
        if update not in known:
            raise UsageError(f"SQL of opponents: run '{run}' has no checkpoint {update}")
    return list(dict.fromkeys(chosen))


def identify_opponent(name: str) -> str:
    """Name a policy so that another one in its place has another name: of a run its identity and checkpoint, of a
    bundle its content."""
    path, which = split_checkpoint(name)
    if RunDirectory(path).exists():
        return f"{RunDirectory(path).identity}@{which}"
    bundle = find_bundle(name)
    return name if bundle is None else load_record(bundle)["checksum"]


class _Player(Form):
    policy_id: str = ""
    update: int | None = None
    elo: float | None = None


class _Ratings(Form):
    """What is relied on of a tournament's report."""

    time: float = 0.0
    players: list[_Player]


def read_ratings(run: Path) -> dict[int, float]:
    """Read the Elo of the checkpoints of `run` in the newest tournament that each has played."""
    rated: dict[int, float] = {}
    directory = RunDirectory(run)
    if not directory.exists():
        return rated
    identity = directory.identity
    read = (read_object(path, _Ratings) for path in directory.tournaments.glob("*.json"))
    reports = [_Ratings.model_validate(report) for report in read if report is not None]
    for report in sorted(reports, key=lambda report: report.time):
        for player in report.players:
            if player.policy_id == identity and player.update is not None and player.elo is not None:
                rated[player.update] = player.elo
    return rated


class PolicyOpponent:
    """A policy of `Policy`'s interface in the seats of an opponent: one for each place after the agent's."""

    def __init__(self, name: str, env: Env, *, seed: int, greedy: bool, action_mask: str) -> None:
        self._load = partial(load_policy, name, env, seed=seed, greedy=greedy, action_mask=action_mask)
        self._policies: dict[int, Policy] = {}
        self.acting = self._make(1)
        self.name = self.acting.policy_id
        if self.acting.version >= 0:
            self.name += f"@{self.acting.version}"

    def _make(self, place: int) -> Acting:
        acting = self._load()
        self._policies[place] = acting.policy
        return acting

    def act(self, turn: OpponentTurn) -> np.ndarray:
        policy = self._policies.get(turn.place) or self._make(turn.place).policy
        given = turn.observation, turn.prev_action, turn.prev_reward, turn.time
        if isinstance(policy, AgentPolicy):
            return policy.act_for(turn.actors, *given, noise=turn.noise)
        if hasattr(policy, "act_for"):
            return np.asarray(policy.act_for(turn.actors, *given))
        return np.asarray(policy.act(*given))


class OpponentLoader:
    """Loads opponents for the actors of `env`, those that it has loaded before only once."""

    def __init__(self, env: Env, *, seed: int, greedy: bool = False, action_mask: str = "") -> None:
        self._env, self._seed, self._greedy, self._action_mask = env, seed, greedy, action_mask
        self._known: dict[str, Opponent] = {}

    def load(self, groups: Groups) -> Opponents:
        """Load the opponents of these names. UsageError if the environment has a single seat or no such expert,
        InputMissing for a policy that does not exist or has learnt other spaces."""
        if not self._env.spec.seats:
            self._env.play_against(Opponents(groups=()))  # raises
        self._known = {name: self._find(name) for group in groups for name in group}
        return Opponents(groups=tuple(tuple(self._known[name] for name in group) for group in groups))

    def _find(self, name: str) -> Opponent:
        if name in self._known:
            return self._known[name]
        found = self._env.make_rule_opponent(name)
        if found is not None:
            return found
        if name in ("expert", RANDOM):
            raise UsageError(f"environment '{self._env.spec.name}' has no {name} for its other seats", hint=_HINT)
        if name in ("", "auto"):
            raise UsageError(f"'{name}' is not an opponent", hint=_HINT)
        return PolicyOpponent(name, self._env, seed=self._seed, greedy=self._greedy, action_mask=self._action_mask)


def refuse_workers(env: Env, workers: int) -> None:
    """Raise UsageError if a game of several seats is played in worker processes, where no opponent can act."""
    if env.spec.seats and workers:
        raise UsageError(
            f"the games of '{env.spec.name}' are played in this process, with their opponents",
            hint="leave out --workers and --env-timeout; --collectors N uses more cores",
        )
