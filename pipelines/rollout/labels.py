"""Labels of recorded episodes: what a policy would have done at every step, as if it had watched them being collected.

A policy sees what the collector's `label` policy sees: the recorded observation, and the action and reward that led to
it, with its memory over the whole episode. An expert also sees the hidden state, so the environment plays the recorded
actions again; its labels count only if it shows exactly what was recorded. The final policy of a learning history is
that of a learner which learns again from all of it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.config.settings import LearnerSettings
from pipelines.envs.env import Env, EnvSpec, EpisodeCounter
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake import collectors
from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.schema import ACTION, LABEL, REWARD, TERMINATED
from pipelines.lake.spaces import Box, Spaces
from pipelines.lake.sql.catalog import query
from pipelines.relabelers.base import Context, Relabeler
from pipelines.relabelers.paths import Paths
from pipelines.rollout.environment import make_recorded_env
from pipelines.rollout.learners import HistoryLearner, find_actor, is_learner, make_learner, replay_histories
from pipelines.rollout.policies import load_policy

_ACTORS = 128  # episodes that are labelled at once
_HINT = "give expert, final, RUN[@CHECKPOINT], BUNDLE or module:attr"


def make_labels(name: str, context: Context, *, reader: Reader) -> Relabeler:
    """Make the relabeler that adds the labels of the policy `name` to trajectories of `reader`.

    UsageError for a policy that cannot label, InputMissing if there is none of that name, or one of other spaces.
    """
    spaces = context.schema.spaces
    if name == "expert":
        return ExpertLabels(spaces, reader)
    if name == "final":
        return FinalLabels(spaces, reader)
    if is_learner(name) or name in ("", "auto", "random"):
        raise UsageError(f"label:{name}: '{name}' cannot be imitated", hint=_HINT)
    return PolicyLabels(name, spaces, context.env)


@dataclass(frozen=True, kw_only=True)
class _RecordedActors:
    """Actors whose episodes are recorded: what a policy is made for in place of an environment."""

    spec: EnvSpec
    num_envs: int
    episodes: EpisodeCounter


class PolicyLabels:
    """Labels of a policy that acts on observations. Versions are named by the policy and its number of updates, so that
    a run that has been trained further labels again.
    """

    changes = (LABEL,)

    def __init__(self, name: str, spaces: Spaces, env: str) -> None:
        actors = _RecordedActors(
            spec=EnvSpec(name=env, spaces=spaces), num_envs=_ACTORS, episodes=EpisodeCounter(num_envs=_ACTORS)
        )
        acting = load_policy(name, actors, seed=0, greedy=True)
        self._policy, self._spaces, self._name = acting.policy, spaces, name
        self.method = f"label:{acting.policy_id}" + (f"@{acting.version}" if acting.version >= 0 else "")
        self.reads = (*spaces.observation, ACTION, REWARD)

    def relabel(self, paths: Paths) -> Paths:
        """Add the labels, of all rows but the last of each episode."""
        labels = _make_empty(paths, self._spaces)
        order = np.argsort(paths.rows, kind="stable")  # episodes of equal length wait for no other
        for start in range(0, len(order), _ACTORS):
            self._label(paths, order[start : start + _ACTORS], labels)
        return paths.with_columns({LABEL: labels})

    def _label(self, paths: Paths, chosen: np.ndarray, labels: np.ndarray) -> None:
        """Write the labels of the episodes `chosen` (m,), one for each actor; the rest repeat the first of them."""
        actions, first = paths.rows[chosen] - 1, paths.first[chosen]
        who = np.append(np.arange(len(chosen)), np.zeros(_ACTORS - len(chosen), dtype=np.int64))
        for t in range(int(actions.max())):
            goes_on = t < actions
            time = np.where(goes_on, t, 0)  # an actor whose episode is over begins it again, and is not heard
            row = first + time
            given = {name: paths.columns[name][row[who]] for name in self.reads}
            seen = {name: given[name].astype(space.dtype) for name, space in self._spaces.observation.items()}
            found = np.asarray(self._policy.act(seen, given[ACTION], given[REWARD], time[who]))
            if found.shape != given[ACTION].shape:
                raise StageFailed(
                    f"label:{self._name} gave actions of shape {found.shape}, {given[ACTION].shape} expected"
                )
            labels[row[goes_on]] = _fit(found[: len(chosen)][goes_on], self._spaces)


class ExpertLabels:
    """Labels of the expert of the environment in which an episode was recorded, which plays it again."""

    changes = (LABEL,)

    def __init__(self, spaces: Spaces, reader: Reader) -> None:
        self._spaces, self._reader = spaces, reader
        self.reads = (*spaces.observation, ACTION, REWARD, TERMINATED)

    def relabel(self, paths: Paths) -> Paths:
        """Add the labels, of all rows but the last of each episode. InputMissing for an episode that its environment
        does not play again.
        """
        labels = _make_empty(paths, self._spaces)
        facts = [self._reader.row(uid) for uid in hex_uids(paths.uids)]
        same: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for place in np.argsort(paths.rows, kind="stable").tolist():
            same[facts[place]["env"], facts[place]["collector"]].append(place)
        for places in same.values():
            for start in range(0, len(places), _ACTORS):
                chosen = np.array(places[start : start + _ACTORS])
                self._label(paths, chosen, [facts[place] for place in chosen.tolist()], labels)
        return paths.with_columns({LABEL: labels})

    def _label(self, paths: Paths, chosen: np.ndarray, facts: list[Mapping[str, Any]], labels: np.ndarray) -> None:
        with contextlib.ExitStack() as stack:
            env = make_recorded_env(self._reader.lake, facts[0], actors=len(chosen))
            if env is not None:
                stack.callback(env.close)
            if env is None or not env.has_expert or env.spec.spaces != self._spaces:
                what = f"'{facts[0]['env']}', as it was recorded, is not a built-in environment with an expert"
                raise _refuse(paths, chosen[0], what)
            self._play(env, paths, chosen, [each["task"] for each in facts], labels)

    def _play(self, env: Env, paths: Paths, chosen: np.ndarray, tasks: list[str], labels: np.ndarray) -> None:
        """Play the episodes `chosen` (m,) again, an actor each, and write what the expert would have done."""
        actions, first = paths.rows[chosen] - 1, paths.first[chosen]
        try:
            env.play_only(tasks)
        except InputMissing as error:
            raise _refuse(paths, chosen[0], error.message) from error
        shown: dict[str, np.ndarray] = env.reset()
        self._require_same(paths, chosen, first, shown, actions >= 0, t=0)
        for t in range(int(actions.max())):
            goes_on = t < actions
            expert = env.expert()
            assert expert is not None
            labels[(first + t)[goes_on]] = _fit(expert[goes_on], self._spaces)
            # An actor whose episode is over plays on with some action, and is not looked at.
            next_row = first + np.where(goes_on, t + 1, 1)
            result = env.step(paths.columns[ACTION][next_row])
            over = result.terminated | result.truncated
            shown = {**result.observation, REWARD: result.reward, TERMINATED: result.terminated}
            self._require_same(paths, chosen, next_row, shown, goes_on, t=t + 1)
            if (early := np.flatnonzero(over & (t + 1 < actions))).size:
                raise _refuse(paths, chosen[early[0]], f"played again, its episode ends after {t + 1} steps")
            if over.any():
                env.reset(over)

    @staticmethod
    def _require_same(
        paths: Paths,
        chosen: np.ndarray,
        rows: np.ndarray,
        shown: Mapping[str, np.ndarray],
        counts: np.ndarray,
        *,
        t: int,
    ) -> None:
        """Raise InputMissing unless the environment has `shown` what was recorded in `rows` (m,), where it `counts`."""
        for name, values in shown.items():
            recorded = paths.columns[name][rows]
            differs = (recorded != values).reshape(len(rows), -1).any(axis=1)
            wrong = np.flatnonzero(counts & differs)
            if len(wrong):
                raise _refuse(paths, chosen[wrong[0]], f"played again, it has another '{name}' at step {t}")


class FinalLabels:
    """Labels of the final policy of each learning history, as in XLand-100B (Nikulin et al. 2024, arXiv
    2406.08973): what the learner, having learned from all of the history, takes for best at every step of it.

    Versions are named by the number of stored episodes of histories, so that histories which have gone on are labelled
    again.
    """

    changes = (LABEL,)

    def __init__(self, spaces: Spaces, reader: Reader) -> None:
        self._spaces, self._reader = spaces, reader
        self._learners: dict[str, HistoryLearner] = {}
        text = """select collector, history, max(history_index) + 1 from trajectories
            where history is not null and base_uid is null group by all"""
        found = query(reader.lake, text)[1]
        self._histories = [(collector, history) for collector, history, _ in found]
        self.method = f"label:final@{sum(episodes for *_, episodes in found)}"
        self.reads = (*spaces.observation, ACTION)

    def relabel(self, paths: Paths) -> Paths:
        """Add the labels, of all rows but the last of each episode. InputMissing for an episode that no learner played;
        StageFailed if other episodes of its history have expired."""
        labels = _make_empty(paths, self._spaces)
        for place, uid in enumerate(hex_uids(paths.uids)):
            facts = self._reader.row(uid)
            collector, history = facts["collector"], facts["history"]
            if history is None or (learner := self._find_learner(collector)) is None:
                raise InputMissing(
                    f"label:final: trajectory {uid} is not of a history whose learner is recorded in this lake",
                    hint="label histories that amago collect --policy learner:NAME stored, with --where",
                )
            rows = slice(paths.first[place], paths.first[place] + paths.rows[place] - 1)
            seen = {name: paths.columns[name][rows].astype(s.dtype) for name, s in self._spaces.observation.items()}
            labels[rows] = learner.choose_best(find_actor(history, collector), seen)
        return paths.with_columns({LABEL: labels})

    def _find_learner(self, collector: str) -> HistoryLearner | None:
        """Make the learners of a collector, one for each actor, and let them learn again; None if it had none."""
        if collector not in self._learners:
            lake = self._reader.lake
            record = collectors.read(lake, collector) or {}
            name = next(filter(is_learner, record.get("policies", {})), None)
            if name is None or record.get("learner") is None:
                return None
            try:
                settings = LearnerSettings.model_validate(record["learner"])
                actors = {find_actor(history, collector) for at, history in self._histories if at == collector}
            except ValueError:  # a record or a name that is not ours
                return None
            if actors != set(range(len(actors))):  # a foreign lake has no more learners than it has histories
                raise InputMissing(
                    f"label:final: lake '{lake.name}' lacks histories of '{collector}'",
                    hint="label them in the lake that they were collected in",
                )
            learner = make_learner(name, self._spaces, settings, num_actors=len(actors), seed=record["seed"] or 0)
            replay_histories(lake, collector, learner, len(actors))
            self._learners[collector] = learner
        return self._learners[collector]


def _make_empty(paths: Paths, spaces: Spaces) -> np.ndarray:
    """Make labels of all rows, zeros: the last row of an episode keeps them, as no action follows it."""
    return np.zeros((int(paths.rows.sum()), *spaces.action.shape), dtype=spaces.action.dtype)


def _fit(actions: np.ndarray, spaces: Spaces) -> np.ndarray:
    """Move actions into their bounds, as those of a policy that acts are."""
    return np.clip(actions, -1.0, 1.0) if isinstance(spaces.action, Box) else actions


def _refuse(paths: Paths, place: int, why: str) -> InputMissing:
    return InputMissing(
        f"label:expert: trajectory {hex_uids(paths.uids[place : place + 1])[0]}: {why}",
        hint="an expert labels what its environment plays again exactly; or collect with --label expert",
    )
