"""Games of several seats, as environments in which the agent plays one seat and opponents play the others.

A `Game` holds N games, in each of which one seat at a time is to move. A `SeatedEnv` has one actor for each: the seat
that the agent plays, drawn for every episode. A step is the agent's move and all moves of the others until the agent is
to move again, so that rollouts, lakes and training see an ordinary environment.

Shapes: N games, m of them, S seats, A choices.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.config.base import SettingsModel
from pipelines.envs.env import (
    ActorsFailed,
    EnvFailure,
    EnvSpec,
    EpisodeEnv,
    Noise,
    Opponent,
    Opponents,
    OpponentTurn,
    StepResult,
    unknown_task,
)
from pipelines.envs.exploration import random_actions
from pipelines.envs.legal import LegalActions
from pipelines.errors import UsageError
from pipelines.lake.spaces import Discrete, Spaces, zeros

RANDOM = "random"
MOST_NOISE = 1 << 20  # numbers of one move, so that moves of an episode do not share any
_SEAT, _GROUP, _MEMBER, _MOVES = 1, 2, 3, 4  # purposes of random draws
_RESTARTS, _OWN_RESTARTS = 100, 5  # of a game that ends before the agent's first move; with the opponent's own moves


class SeatSettings(SettingsModel):
    """Parameters of every game."""

    seat: str = ""
    """Seat that the agent plays; empty: drawn for every episode, and taken in turn in an evaluation."""


class Game(ABC):
    """N games of the same seats. Rewards and observations follow the system's conventions (`lake.spaces`).

    `mask`: the observation column that says which actions are legal ("": all are). `turn` (N,): the seat that is to
    move. `terminated`, `truncated` (N, S): seats whose game has ended. `failures`: games that broke in the last call,
    with what was raised; their other results are meaningless until they begin again.
    """

    seats: tuple[str, ...]
    spaces: Spaces
    mask: str = ""
    horizon: int | None = None
    about: str = ""
    has_expert: bool = False

    def __init__(self, num_games: int) -> None:
        shape = num_games, len(self.seats)
        self.turn = np.zeros(num_games, dtype=np.int64)
        self.terminated, self.truncated = np.zeros((2, *shape), dtype=bool)
        self.failures: dict[int, BaseException] = {}

    @abstractmethod
    def begin(self, games: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the `games` (m,), those in progress again, with `seeds` (m,)."""

    @abstractmethod
    def observe(self, games: np.ndarray, seats: np.ndarray) -> dict[str, np.ndarray]:
        """Return what `seats` (m,) of the `games` (m,) observe: columns (m, ...) that are not written again."""

    @abstractmethod
    def move(self, games: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Move the seats whose turn it is in the `games` (m,); return the rewards of all seats (m, S) float32."""

    def find_best(self, games: np.ndarray) -> np.ndarray:
        """Find which choices (m, A) bool are best for the seats to move; called only if the game `has_expert`."""
        raise NotImplementedError

    def render(self, mode: str, game: int) -> Any:
        """Draw a game, as `Env.render`."""
        return None

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Free what the games hold."""


class RandomOpponent:
    """Moves uniformly at random among what the game allows."""

    name = RANDOM

    def __init__(self, game: Game) -> None:
        self._space = game.spaces.action
        self._legal = LegalActions(game.mask, game.spaces) if game.mask else None

    def act(self, turn: OpponentTurn) -> np.ndarray:
        if isinstance(self._space, Discrete):
            if self._legal is None:
                return (turn.noise(1)[:, 0] * self._space.n).astype(self._space.dtype)
            return draw_choice(turn.observation[self._legal.column] > 0, turn.noise)
        rng = np.random.default_rng((turn.noise(1)[:, 0] * 2**53).astype(np.uint64))
        if self._legal is not None:
            return self._legal.draw(turn.observation, rng)
        return random_actions(self._space, len(turn.actors), rng)


class ExpertOpponent:
    """Plays one of the moves that are best, with access to the game itself."""

    name = "expert"

    def __init__(self, game: Game) -> None:
        self._game = game

    def act(self, turn: OpponentTurn) -> np.ndarray:
        return draw_choice(self._game.find_best(turn.actors), turn.noise)


def draw_choice(allowed: np.ndarray, noise: Noise) -> np.ndarray:
    """Draw one of the `allowed` choices (m, A) of each row, or any where none is: (m,) int32."""
    allowed = allowed | ~allowed.any(axis=1, keepdims=True)
    order = np.cumsum(allowed, axis=1)
    rank = (noise(1)[:, 0] * order[:, -1]).astype(np.int64)
    return (order > rank[:, None]).argmax(axis=1).astype(np.int32)


class SeatedEnv(EpisodeEnv):
    """One actor for each game of `game`: it plays one seat, `opponents` play the others.

    The agent's reward is the sum of what its seat earns from its move to its next one. Its episode ends when its seat's
    game does, or after `limit` moves. It succeeds if its return is above the mean of the other seats'. Seats and
    opponents follow from the number of the episode; until `play_against` is called, the opponents move at random.

    An episode has at least one step, so a game that ends before the agent has moved, as by an illegal first move of an
    opponent, begins again; after a few such beginnings the opponents open it at random.
    """

    def __init__(
        self,
        name: str,
        game: Game,
        settings: SeatSettings,
        *,
        num_envs: int,
        seed: int,
        split: str,
        limit: int | None = None,
    ) -> None:
        super().__init__(name, num_envs=num_envs, seed=seed, split=split)
        seats = game.seats
        if len(seats) < 2:
            raise UsageError(f"environment '{name}' has one seat: {seats[0] if seats else 'none'}")
        if settings.seat and settings.seat not in seats:
            raise UsageError(
                f"environment '{name}' has no seat '{settings.seat}'", hint=f"env.seat: {', '.join(seats)}"
            )
        self._game, self._name, self._limit = game, name, limit
        self._named: tuple[str, ...] = (settings.seat,) if settings.seat else ()
        self.spec = EnvSpec(
            name=name,
            spaces=game.spaces,
            horizon=limit or game.horizon,
            has_success=True,
            about=game.about,
            split="other draws of seats and opponents",
            seats=seats,
            action_mask=game.mask,
        )
        self._random = RandomOpponent(game)
        self._opponents = Opponents(groups=((self._random,),))
        self._met: list[Opponent] = [self._random] * num_envs
        self._seat = np.zeros(num_envs, dtype=np.int64)
        self._moves = np.zeros(num_envs, dtype=np.int64)  # of the opponents in the episode
        shape = num_envs, len(seats)
        self._owed, self._returns = np.zeros((2, *shape), dtype=np.float32)  # since a seat's last move, and in all
        self._time = np.zeros(shape, dtype=np.int64)  # moves of each seat
        self._action = zeros(game.spaces.action, shape)  # last move of each seat
        self._columns: dict[str, np.ndarray] = {}

    def play_against(self, opponents: Opponents) -> None:
        self._opponents = opponents

    def make_rule_opponent(self, name: str) -> Opponent | None:
        if name == RANDOM:
            return self._random
        return ExpertOpponent(self._game) if name == "expert" and self._game.has_expert else None

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        games, episodes = self._advance(mask)
        seats = self.spec.seats
        if self._named:
            named = np.array([seats.index(seat) for seat in self._named])
            self._seat[games] = named[episodes % len(named)]
        else:
            self._seat[games] = self._choose(episodes, _SEAT, len(seats))
        group = self.draws.uniform(episodes, _GROUP)
        member = self.draws.uniform(episodes, _MEMBER)
        for game, g, m in zip(games.tolist(), group.tolist(), member.tolist(), strict=True):
            members = self._opponents.groups[int(g * len(self._opponents.groups))]
            self._met[game] = members[int(m * len(members))]
        failed: dict[int, BaseException] = {}
        opening, seeds = games, self._draw_seeds(episodes)
        self._moves[games] = 0
        for attempt in range(_RESTARTS):
            for state in (self._owed, self._returns, self._time, self._action):
                state[opening] = 0
            self._game.begin(opening, seeds[np.isin(games, opening)])
            failed |= self._take_failures()
            self._play_others(opening, failed, at_random=attempt >= _OWN_RESTARTS)
            opening = opening[self._is_over(opening) & ~np.isin(opening, list(failed))]
            if not len(opening):
                break
        for game in opening.tolist():
            failed[game] = RuntimeError("the game ends before the agent's first move")
        if not self._columns:
            self._columns = {n: zeros(space, (self.num_envs,)) for n, space in self.spec.spaces.observation.items()}
        columns = self._observe(games, self._columns)
        if failed:
            raise self._fail("reset", failed, columns)
        return columns

    def step(self, actions: np.ndarray) -> StepResult:
        everyone, failed = np.arange(self.num_envs), dict[int, BaseException]()
        self._move(everyone, np.asarray(actions), failed)
        self._play_others(everyone, failed)
        mine = everyone, self._seat
        reward, self._owed[mine] = self._owed[mine], 0
        terminated = self._game.terminated[mine]
        over = terminated | self._game.truncated[mine]
        if self._limit is not None:
            over |= self._time[mine] >= self._limit
        result = StepResult(
            observation=self._observe(everyone, self._columns),
            reward=reward,
            terminated=terminated,
            truncated=over & ~terminated,
            reset=self._nobody,
            attempt_end=over,
            success=over & (self.outcomes(everyone) == 1),
        )
        if failed:
            raise self._fail("step", failed, result)
        return result

    def _is_over(self, games: np.ndarray) -> np.ndarray:
        mine = games, self._seat[games]
        return self._game.terminated[mine] | self._game.truncated[mine]

    def _move(self, games: np.ndarray, actions: np.ndarray, failed: dict[int, BaseException]) -> None:
        """Move the seats whose turn it is in `games`, and pay all seats what they earn by it."""
        movers = self._game.turn[games].copy()
        rewards = self._game.move(games, actions)
        failed |= self._take_failures()
        self._time[games, movers] += 1
        self._action[games, movers] = actions
        self._owed[games] += rewards
        self._returns[games] += rewards

    def _play_others(self, games: np.ndarray, failed: dict[int, BaseException], *, at_random: bool = False) -> None:
        """Have the opponents move in `games` until it is the agent's turn in all that are not over."""
        game, count = self._game, len(self.spec.seats)
        while True:
            games = games[(game.turn[games] != self._seat[games]) & ~self._is_over(games)]
            games = games[~np.isin(games, list(failed))] if failed else games
            if not len(games):
                return
            places = (game.turn[games] - self._seat[games]) % count
            crowds: dict[tuple[int, int], list[int]] = {}  # a policy acts for all of its games at once
            for number, place in zip(games.tolist(), places.tolist(), strict=True):
                crowds.setdefault((id(self._met[number]), place), []).append(number)
            for (_, place), crowd in crowds.items():
                rows = np.array(crowd)
                opponent = self._random if at_random else self._met[crowd[0]]
                seats = game.turn[rows].copy()
                mine = rows, seats
                reward, self._owed[mine] = self._owed[mine], 0
                seen, time = game.observe(rows, seats), self._time[mine]
                turn = OpponentTurn(place, rows, seen, self._action[mine], reward, time, self._noise(rows))
                action = opponent.act(turn)
                if action.shape != self._action[mine].shape:
                    raise UsageError(
                        f"opponent '{opponent.name}' gave actions of shape {action.shape}, "
                        f"environment '{self._name}' takes {self._action[mine].shape}"
                    )
                self._moves[rows] += 1
                self._move(rows, action, failed)

    def _noise(self, games: np.ndarray) -> Noise:
        episodes, first = self.episodes.chance[games][:, None], self._moves[games][:, None] * MOST_NOISE
        return lambda count: self.draws.uniform(episodes, _MOVES, first + np.arange(count))

    def _observe(self, games: np.ndarray, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the columns with what the agent observes in `games`."""
        found = {name: column.copy() for name, column in columns.items()}
        for name, values in self._game.observe(games, self._seat[games]).items():
            found[name][games] = values
        self._columns = found
        return found

    def _take_failures(self) -> dict[int, BaseException]:
        failures, self._game.failures = self._game.failures, {}
        return failures

    def _fail(self, where: str, failed: Mapping[int, BaseException], brought: Any) -> ActorsFailed:
        first = next(iter(failed.values()))
        error = ActorsFailed(
            [
                EnvFailure(
                    actors=(game,),
                    message=f"environment '{self._name}' failed in {where} (actor {self.episodes.offset + game}): "
                    f"{type(problem).__name__}: {problem}",
                    trace="".join(traceback.format_exception(problem)),
                )
                for game, problem in failed.items()
            ],
            brought,
        )
        error.__cause__ = first
        return error

    def outcomes(self, indices: np.ndarray) -> np.ndarray:
        seats, returns = self._seat[indices], self._returns[indices]
        own = returns[np.arange(len(indices)), seats]
        others = (returns.sum(axis=1) - own) / (returns.shape[1] - 1)
        return np.where(own > others, 1.0, np.where(own < others, 0.0, 0.5))

    def opponents(self, indices: np.ndarray) -> list[str]:
        return [self._met[index].name for index in indices.tolist()]

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [f"seat={self.spec.seats[seat]}" for seat in self._seat[indices].tolist()]

    def play_only(self, tasks: Sequence[str]) -> None:
        for task in tasks:
            if not (task.startswith("seat=") and task.removeprefix("seat=") in self.spec.seats):
                raise unknown_task(task, self._name)
        self._named = tuple(task.removeprefix("seat=") for task in tasks)

    def play_evenly(self) -> None:
        self._in_turn = True

    @property
    def has_expert(self) -> bool:
        return self._game.has_expert

    def expert(self) -> np.ndarray | None:
        """Return the first of the best moves; any, where the game is over."""
        if not self._game.has_expert:
            return None
        return self._game.find_best(np.arange(self.num_envs)).argmax(axis=1).astype(np.int32)

    def render(self, mode: str = "rgb_array", actor: int = 0) -> Any:
        return self._game.render(mode, actor)

    def close(self) -> None:
        self._game.close()
