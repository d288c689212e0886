"""Tic-tac-toe and connect four: the first seat with a line of marks wins.

They are PettingZoo's `tictactoe_v3` and `connect_four_v3` with the same observations, actions and seats, so a policy
that has learnt one plays the other; but all games move at once in NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pipelines.envs.scenes import LetterScene
from pipelines.envs.seats import Game, SeatedEnv, SeatSettings
from pipelines.lake.spaces import Box, Discrete, Spaces

_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
_LETTERS = ".XO"


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """`rows` x `columns` cells; `length` marks in a line win. With `drops`, an action is a column, and the mark falls
    to its lowest free cell; otherwise it is a cell."""

    rows: int
    columns: int
    length: int
    drops: bool
    seats: tuple[str, str]
    about: str

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    @property
    def choices(self) -> int:
        return self.columns if self.drops else self.cells

    def list_lines(self) -> np.ndarray:
        """List the cells (L, length) of all lines that win."""
        lines = []
        for row in range(self.rows):
            for column in range(self.columns):
                for down, right in _DIRECTIONS:
                    ends = row + down * (self.length - 1), column + right * (self.length - 1)
                    if ends[0] < self.rows and 0 <= ends[1] < self.columns:
                        line = [(row + down * i) * self.columns + column + right * i for i in range(self.length)]
                        lines.append(line)
        return np.array(lines)


_RULES = {
    "tic-tac-toe": _Rules(
        rows=3, columns=3, length=3, drops=False, seats=("player_1", "player_2"), about="three in a row on 3x3 cells"
    ),
    "connect-four": _Rules(
        rows=6, columns=7, length=4, drops=True, seats=("player_0", "player_1"), about="four in a row on 6x7 cells"
    ),
}


class LineGame(Game):
    """N games. State: `board` (N, cells) int8, 0 where a cell is free, else 1 + the seat whose mark it has.

    An illegal move ends the game and costs the seat that made it 1; the other seat earns nothing.
    """

    mask = "obs.action_mask"

    def __init__(self, rules: _Rules, num_games: int) -> None:
        self.rules, self.seats, self.about = rules, rules.seats, rules.about
        self.has_expert = not rules.drops  # the other game has too many positions
        self.horizon = (rules.cells + 1) // 2
        observation = {  # in the order of gymnasium, which sorts the keys of a Dict
            "obs.action_mask": Box(shape=(rules.choices,), dtype="int32"),
            "obs.observation": Box(shape=(rules.rows, rules.columns, 2), dtype="int32"),
        }
        self.spaces = Spaces(observation=observation, action=Discrete(n=rules.choices))
        super().__init__(num_games)
        self.board = np.zeros((num_games, rules.cells), dtype=np.int8)
        self._lines = rules.list_lines()

    def begin(self, games: np.ndarray, seeds: np.ndarray) -> None:
        for state in (self.board, self.turn, self.terminated):
            state[games] = 0

    def _find_legal(self, games: np.ndarray) -> np.ndarray:
        """Find the choices (m, A) bool whose cell is free."""
        return self.board[games, : self.rules.choices] == 0  # the top row, or every cell

    def observe(self, games: np.ndarray, seats: np.ndarray) -> dict[str, np.ndarray]:
        board, own = self.board[games], (seats + 1)[:, None]
        planes = np.stack([board == own, board == 3 - own], axis=-1).astype(np.int32)
        moves = (self.turn[games] == seats) & ~self.terminated[games, 0]
        return {
            "obs.observation": planes.reshape(-1, self.rules.rows, self.rules.columns, 2),
            "obs.action_mask": (self._find_legal(games) & moves[:, None]).astype(np.int32),
        }

    def move(self, games: np.ndarray, actions: np.ndarray) -> np.ndarray:
        rules, seats, each = self.rules, self.turn[games], np.arange(len(games))
        legal = (actions >= 0) & (actions < rules.choices)
        actions = np.where(legal, actions, 0)
        legal &= self._find_legal(games)[each, actions]
        cells = actions
        if rules.drops:
            free = (self.board[games].reshape(-1, rules.rows, rules.columns) == 0).sum(axis=1)[each, actions]
            cells = (free - 1) * rules.columns + actions
        self.board[games[legal], cells[legal]] = seats[legal] + 1
        marks = self.board[games] == (seats + 1)[:, None]
        won = legal & marks[:, self._lines].all(axis=2).any(axis=1)
        full = self.board[games].all(axis=1)
        self.terminated[games] = (won | full | ~legal)[:, None]
        self.turn[games] = 1 - seats
        rewards = np.zeros((len(games), 2), dtype=np.float32)
        rewards[each, seats] = won.astype(np.float32) - ~legal
        rewards[each, 1 - seats] = -won.astype(np.float32)
        return rewards

    def find_best(self, games: np.ndarray) -> np.ndarray:
        """Find the moves with which perfect play wins soonest, or else draws, or else loses latest; any legal one where
        the game is over."""
        best = self._find_legal(games)
        for row, game in enumerate(games.tolist()):
            if not self.terminated[game, 0]:
                values = _value_moves(self.board[game].tobytes(), int(self.turn[game]) + 1)
                best[row] = [value == max(v for v in values if v is not None) for value in values]
        return best

    def render(self, mode: str, game: int) -> Any:
        letters = np.array(list(_LETTERS))[self.board[game]].reshape(self.rules.rows, self.rules.columns)
        scene = LetterScene(rows=["".join(row) for row in letters.tolist()])
        return scene.text() if mode == "ansi" else scene.picture()


_TIC_TAC_TOE_LINES = _RULES["tic-tac-toe"].list_lines().tolist()


@cache
def _value_moves(board: bytes, mark: int) -> tuple[int | None, ...]:
    """Value every move of `mark` in a position of tic-tac-toe by minimax: None if it is illegal, 0 if it draws, else
    higher the sooner it wins or the later it loses. There are 5,478 positions, so all of them are remembered."""
    values: list[int | None] = []
    for cell, taken in enumerate(board):
        if taken:
            values.append(None)
            continue
        after = board[:cell] + bytes([mark]) + board[cell + 1 :]
        if any(all(after[place] == mark for place in line) for line in _TIC_TAC_TOE_LINES):
            values.append(len(board))
        elif all(after):
            values.append(0)
        else:
            reply = max(value for value in _value_moves(after, 3 - mark) if value is not None)
            values.append(-reply + (reply > 0) - (reply < 0))
    return tuple(values)


class BoardGame(SeatedEnv):
    """Makes the board games by name."""

    Settings = SeatSettings

    def __init__(self, name: str, settings: SeatSettings, *, num_envs: int, seed: int, split: str) -> None:
        game = LineGame(_RULES[name], num_envs)
        super().__init__(name, game, settings, num_envs=num_envs, seed=seed, split=split)
