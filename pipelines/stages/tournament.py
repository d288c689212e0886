"""tournament: every two players of a game meet in all seats, and are rated by their outcomes.

The players are a run's checkpoint or a bundle, and those that `evaluate.opponents` names. In each game of a pairing,
the first player has one seat and the second all others; the first has every seat equally often. A run keeps its
tournaments in `RUN/tournaments`, files named after players and settings; repeating a tournament reads its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import EvaluateSettings, Settings
from pipelines.envs.draws import Draws
from pipelines.envs.env import Env, Observation, Opponent, Opponents, OpponentTurn
from pipelines.envs.seats import MOST_NOISE
from pipelines.errors import UsageError
from pipelines.evaluation import elo, gate
from pipelines.evaluation.runner import play_episodes
from pipelines.events import Event, Listener, Progress, silent
from pipelines.files.atomic import write_atomically
from pipelines.files.json import read_object
from pipelines.files.malformed import MALFORMED
from pipelines.rollout.environment import make_evaluation_env
from pipelines.rollout.opponents import OpponentLoader, PolicyOpponent, identify_opponent, name_opponents
from pipelines.stages.evaluation_tables import require_gate
from pipelines.stages.result import Result, Table
from pipelines.training.learner import use_threads

_STAGE = "tournament"
_UNUSED = ("attempts", "evaluators", "memory", "tasks", "temperature", "video")
_MOST_ROWS = 40  # pairings in a table


@dataclass(frozen=True)
class _Seated:
    """A player as the policy of all actors of `env`: its draws follow from episode and time, like an opponent's."""

    player: Opponent
    env: Env
    draws: Draws

    def act(
        self, observation: Observation, prev_action: np.ndarray, prev_reward: np.ndarray, time: np.ndarray
    ) -> np.ndarray:
        episodes, first = self.env.episodes.current[:, None], time[:, None] * MOST_NOISE
        given = np.arange(self.env.num_envs), observation, prev_action, prev_reward, time
        return self.player.act(
            OpponentTurn(0, *given, lambda count: self.draws.uniform(episodes, 0, first + np.arange(count)))
        )


def run(
    settings: Settings,
    *,
    source: str,
    directory: RunDirectory | None,
    to: Path | None = None,
    listener: Listener = silent,
) -> Result:
    """Play the tournament of the policy `source` against `evaluate.opponents`, or read the stored one.

    `directory`: the run that `source` belongs to, among whose checkpoints SQL selects, and which keeps the result;
    without one it is written to `to`, if that is given. UsageError for a single player, a game of one seat, or settings
    that a tournament does not have; RequirementNotMet carries the result.
    """
    started, wanted = time.monotonic(), settings.evaluate
    usual = EvaluateSettings()
    if ignored := [f"evaluate.{name}" for name in _UNUSED if getattr(wanted, name) != getattr(usual, name)]:
        raise UsageError(f"a tournament does not use {', '.join(ignored)}", hint="leave it out")
    if getattr(settings.env, "seat", None):
        raise UsageError("in a tournament every player has every seat equally often", hint="leave out env.seat")
    use_threads(settings.train.threads)
    run = None if directory is None else directory.path
    names = [name for group in name_opponents([source, *wanted.opponents], run, listener) for name in group]
    players: dict[str, str] = {}
    for name in names:  # a player may be named in two ways
        players.setdefault(identify_opponent(name), name)
    names = list(players.values())
    if len(names) < 2:
        raise UsageError("a tournament needs two players or more", hint="name others with --opponents")
    figures: dict[str, Any] = {"elo": 0.0, "elo_ci95": [0.0, 0.0], "score": 0.0, "games": 0}
    gate.refuse_unknown(wanted.require, {**figures, "players": [{**figures, **_count(np.zeros(1))}] * len(names)})
    folder = to if directory is None else directory.tournaments
    path = None if folder is None else folder / f"{_identify(settings, names)}.json"
    report = None if path is None else _read_stored(path)
    is_known = report is not None
    if report is None:
        report = play(settings, names, listener)
        if path is not None:
            write_atomically(path, json.dumps(report, indent=1))
    result = Result(
        command="evaluate",
        status="skipped" if is_known else "done",
        run=run,
        metrics={
            **{name: report["players"][0][name] for name in figures},
            **{name: report[name] for name in ("greedy", "method", "players", "pairings")},
        },
        outputs=[] if path is None else [path],
        tables=_tabulate(report),
        seconds=time.monotonic() - started,
    )
    return require_gate(result, wanted.require)


def _identify(settings: Settings, names: Sequence[str]) -> str:
    """Hash everything that determines the outcome."""
    content = {
        "env": settings.env.model_dump(mode="json"),
        "evaluate": settings.evaluate.model_dump(mode="json", include={"episodes", "greedy", "seed", "split"}),
        "players": [identify_opponent(name) for name in names],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def play(settings: Settings, names: Sequence[str], listener: Listener = silent) -> dict[str, Any]:
    """Play all pairings, and return the report as plain data."""
    wanted = settings.evaluate
    greedy = wanted.acts_greedily(by_default=False)
    outcomes: dict[tuple[int, int], np.ndarray] = {}
    pairings: list[dict[str, Any]] = []
    with contextlib.closing(
        make_evaluation_env(settings.env, wanted, actors=min(wanted.actors, wanted.episodes))
    ) as env:
        loader = OpponentLoader(env, seed=wanted.seed, greedy=greedy, action_mask=env.spec.action_mask)
        players = [player for (player,) in loader.load(tuple((name,) for name in names)).groups]
        seats = env.spec.seats
        games = -(-wanted.episodes // len(seats)) * len(seats)
        draws = Draws(wanted.seed, wanted.task_split, _STAGE)
        pairs = list(combinations(range(len(players)), 2))
        for number, (i, j) in enumerate(pairs):

            def relay(event: Event, before: int = number * games) -> None:
                if isinstance(event, Progress):
                    event = replace(event, done=before + event.done, total=games * len(pairs), unit="games")
                listener(event)

            env.episodes.start_at(0)
            env.play_against(Opponents(groups=((players[j],),)))
            policy = _Seated(players[i], env, draws)
            episodes = play_episodes(env, policy, episodes=games, listener=relay, stage=_STAGE)
            outcomes[i, j] = np.array([episode.outcome for episode in episodes])
            for seat in seats:
                scored = outcomes[i, j][[episode.task == f"seat={seat}" for episode in episodes]]
                pairings.append({"player": players[i].name, "seat": seat, "against": players[j].name, **_count(scored)})
    ratings = elo.rate(len(players), outcomes, seed=wanted.seed)
    listed = []
    for place, player in enumerate(players):
        scored = np.concatenate([of if place == i else 1 - of for (i, j), of in outcomes.items() if place in (i, j)])
        acting = player.acting if isinstance(player, PolicyOpponent) else None
        listed.append(
            {
                "player": player.name,
                "policy_id": player.name if acting is None else acting.policy_id,
                "update": None if acting is None or acting.version < 0 else acting.version,
                "elo": round(float(ratings.elo[place]), 1) + 0.0,  # without the sign of -0.0
                "elo_ci95": [round(float(end[place]), 1) for end in (ratings.low, ratings.high)],
                "score": float(scored.mean()),
                **_count(scored),
            }
        )
    return {
        "time": time.time(),
        "env": settings.env.model_dump(mode="json"),
        "settings": wanted.model_dump(mode="json"),
        "greedy": greedy,
        "method": elo.METHOD,
        "players": listed,
        "pairings": pairings,
    }


def _count(scored: np.ndarray) -> dict[str, int]:
    """Count games, wins, draws and losses of outcomes."""
    counts = {name: int((scored == value).sum()) for name, value in (("wins", 1.0), ("draws", 0.5), ("losses", 0.0))}
    return {"games": len(scored), **counts}


def _read_stored(path: Path) -> dict[str, Any] | None:
    """Read the report of a tournament; None if it is missing or damaged."""
    report = read_object(path)
    if report is None:
        return None
    try:
        _tabulate(report)
        for name in ("greedy", "method"):
            report[name]
    except MALFORMED:
        return None
    return report


def _tabulate(report: Mapping[str, Any]) -> list[Table]:
    """Make a table of the players, the strongest first, and one of the pairings, unless they are many."""
    counts = ("games", "wins", "draws", "losses")
    players = sorted(report["players"], key=lambda player: -player["elo"])
    rows = [
        [player["player"], player["elo"], *player["elo_ci95"], player["score"], *(player[name] for name in counts)]
        for player in players
    ]
    way = "greedy" if report["greedy"] else "sampled"
    title = f"{report['env']['name']}, tournament of {len(rows)} players, {way} play"
    tables = [Table(title=title, columns=["player", "Elo", "95% low", "95% high", "score", *counts], rows=rows)]
    pairings = [[each[name] for name in ("player", "seat", "against", *counts)] for each in report["pairings"]]
    if len(pairings) <= _MOST_ROWS:
        tables.append(Table(title="by pairing and seat", columns=["player", "seat", "against", *counts], rows=pairings))
    return tables
