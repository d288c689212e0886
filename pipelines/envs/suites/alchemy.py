"""Symbolic Alchemy (Wang et al., NeurIPS 2021 Datasets and Benchmarks; the level with perceptual mapping, rotation
and bottlenecks).

A stone is a corner of the cube {-1, 1}^3: vertex 4 a + 2 b + c for the bits of its three coordinates, or `_GONE`. A
potion pushes along one axis in one direction: 2 axis + (direction + 1) / 2, or `EMPTY`. A graph says which edges
of the cube can be walked: for each axis i and each other axis j, nothing or the value that coordinate j must have; of
all such rules those are kept that leave the corners connected. A chemistry is a graph, the signs and the rotation with
which stones are shown, and the order and signs of the axes with which potions are shown. A potion is used up whether or
not it moves the stone; what is gone cannot be used, and trying to uses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar

import numpy as np
from pydantic import Field

from pipelines.envs.drawing import AMBER, GOLD, GREEN, GREY, INK, PALE, PAPER, PINK, RED, SLATE, TEAL, Canvas
from pipelines.envs.draws import Draws, mix, unit
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.native import NativeEnv
from pipelines.envs.scenes import WIDTH
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.lake.spaces import Box, Discrete, Spaces

_GONE, EMPTY = 8, 6
VERTICES = np.array(list(product((-1, 1), repeat=3)))
_BEST = 7
SIGNS = VERTICES
ORDERS = np.array(list(permutations(range(3))))
ROTATIONS = np.array(
    [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[1, 1, 0], [-1, 1, 0], [0, 0, 1]],
        [[1, 0, -1], [0, 1, 0], [1, 0, 1]],
        [[1, 0, 0], [0, 1, 1], [0, -1, 1]],
    ],
    dtype=np.float64,
)
_OFF_DIAGONAL = [(i, j) for i in range(3) for j in range(3) if i != j]
_CANDIDATES = 8  # chemistries drawn at a time and episode when some are held out


def _list_graphs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the graphs that leave the corners connected: rules (3, 3), 0 for none; moves (9, 7), the vertex that each
    potion makes of each, where `_GONE` and `EMPTY` change nothing; and the fewest potions (9,) from each vertex to the
    best, 99 where there is no way.
    """
    rules, moves, steps = [], [], []
    for values in product((0, -1, 1), repeat=6):
        rule = np.zeros((3, 3), dtype=np.int64)
        for (i, j), value in zip(_OFF_DIAGONAL, values, strict=True):
            rule[i, j] = value
        table = np.tile(np.arange(9)[:, None], (1, 7))
        can_leave = ((rule == 0) | (rule == VERTICES[:, None, :])).all(axis=2)  # a corner, along an axis
        for vertex, axis in np.argwhere(can_leave):
            up = VERTICES[vertex, axis] < 0
            table[vertex, 2 * axis + up] = vertex ^ (4 >> axis)
        distance = np.full(9, 99)
        distance[_BEST] = 0
        for _ in range(8):
            distance = np.minimum(distance, distance[table].min(axis=1) + 1)
        distance[_GONE] = 99
        if (distance[:_GONE] < 99).all():  # edges are walked both ways, so this is connectedness
            rules.append(rule)
            moves.append(table)
            steps.append(distance)
    order = np.argsort([np.count_nonzero(rule) for rule in rules], kind="stable")
    return np.array(rules)[order], np.array(moves)[order], np.array(steps)[order]


RULES, MOVES, _STEPS_TO_BEST = _list_graphs()
"""(109, 3, 3), (109, 9, 7) and (109, 9), by the number of constraints."""
_CONSTRAINTS = np.count_nonzero(RULES, axis=(1, 2))
_FIRST = np.searchsorted(_CONSTRAINTS, np.arange(5))
_NUM_POTION_MAPS = len(ORDERS) * len(SIGNS)
SIZES = (len(RULES), len(SIGNS), len(ROTATIONS), _NUM_POTION_MAPS)  # a chemistry is an index of these
NUM_CHEMISTRIES = int(np.prod(SIZES))


def _encode_stones() -> np.ndarray:
    """Encode stones as observations show them: (8 signs, 4 rotations, 9, 5) float32."""
    looks = np.empty((len(SIGNS), len(ROTATIONS), 9, 5), dtype=np.float32)
    back = np.linalg.inv(ROTATIONS)
    looks[..., :_GONE, :3] = np.rint(np.einsum("rij,svj->srvi", back, SIGNS[:, None] * VERTICES))
    looks[..., :_GONE, 3] = VERTICES.sum(axis=1) / np.float32(3)
    looks[..., :_GONE, 4] = 0
    looks[..., _GONE, :] = (2, 2, 2, 2, 1)
    return looks


def _encode_potions() -> np.ndarray:
    """Encode potions as observations show them: (48, 7, 2) float32, by order of axes * 8 + signs."""
    looks = np.empty((len(ORDERS), len(SIGNS), 7, 2), dtype=np.float32)
    for order, axes in enumerate(ORDERS):
        for sign, signs in enumerate(SIGNS):
            for shown, axis in enumerate(axes):
                for up in range(2):
                    colour = 2 * shown + (up if signs[axis] > 0 else 1 - up)
                    looks[order, sign, 2 * axis + up] = colour / 3 - 1, 0
    looks[..., EMPTY, :] = 1
    return looks.reshape(_NUM_POTION_MAPS, 7, 2)


STONE_LOOKS, _POTION_LOOKS = _encode_stones(), _encode_potions()


def is_held_out(chemistry: np.ndarray, fraction: float) -> np.ndarray:
    """Whether chemistries belong to the held-out part of size `fraction`. Does not depend on any seed."""
    return unit(mix(mix(chemistry.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))) < fraction


def draw_chemistries(draws: Draws, stream: int, episodes: np.ndarray, *, holdout: float, test: bool) -> np.ndarray:
    """Draw the chemistries of `episodes` (m,), of one side of the split: the number of constraints is uniform over 0 ..
    3, then the graph among those with as many, and all else is uniform.
    """
    chosen = np.full(len(episodes), -1)
    pending = np.arange(len(episodes))
    first = 0
    while len(pending):
        number = first + np.arange(_CANDIDATES)[:, None]
        u = draws.uniform(episodes[pending, None, None], stream, number * 5 + np.arange(5))
        constraints = (u[..., 0] * 4).astype(np.int64)
        low, high = _FIRST[constraints], _FIRST[constraints + 1]
        graph = low + (u[..., 1] * (high - low)).astype(np.int64)
        rest = [(u[..., 2 + i] * size).astype(np.int64) for i, size in enumerate(SIZES[1:])]
        candidates = np.ravel_multi_index((graph, *rest), SIZES)
        good = is_held_out(candidates, holdout) == test if holdout else np.ones(candidates.shape, dtype=bool)
        found = good.any(axis=1)
        chosen[pending[found]] = candidates[found, good.argmax(axis=1)[found]]
        pending = pending[~found]
        first += _CANDIDATES
    return chosen


def name_chemistry(chemistry: int) -> str:
    """Name a chemistry, e.g. `graph=../+./.- stones=+-+ turn=2 potions=201+-+`: rules of each axis about the two others
    in their order, signs, number of the rotation, latent axes in the order of their colours and their signs.
    """
    graph, signs, turn, potion_map = np.unravel_index(chemistry, SIZES)
    return f"graph={_GRAPHS[graph]} stones={_SIGNS[signs]} turn={turn} potions={_POTION_MAPS[potion_map]}"


def find_chemistry(name: str) -> int:
    """Find the chemistry that `name_chemistry` calls so. ValueError where there is none."""
    given = dict(part.split("=", 1) for part in name.split(" "))
    spelled = (
        ("graph", _GRAPHS),
        ("stones", _SIGNS),
        ("turn", [str(turn) for turn in range(len(ROTATIONS))]),
        ("potions", _POTION_MAPS),
    )
    return int(np.ravel_multi_index([names.index(given.get(key, "")) for key, names in spelled], SIZES))


_GRAPHS = ["/".join("".join(".+-"[rules[i, j]] for j in range(3) if j != i) for i in range(3)) for rules in RULES]
_SIGNS = ["".join("-+"[value > 0] for value in signs) for signs in SIGNS.tolist()]
_POTION_MAPS = ["".join(map(str, order)) + signs for order in ORDERS.tolist() for signs in _SIGNS]


_NUM_STONES, _NUM_POTIONS = 3, 12
NUM_ACTIONS = 1 + _NUM_STONES * (1 + _NUM_POTIONS)
_PAID = np.append(VERTICES.sum(axis=1) + 12 * (VERTICES > 0).all(axis=1), 0).astype(np.float32)  # by vertex; GONE: 0
_CHEMISTRY, STONES, POTIONS = range(3)  # purposes of random draws


class _AlchemySettings(ProtocolSettings):
    """Parameters of `alchemy`."""

    PAPER: ClassVar = {"holdout": 0.0}

    trials: int = Field(10, ge=1)
    """Trials with one chemistry, in one episode."""
    trial_steps: int = Field(20, ge=1)
    """Steps of a trial."""
    end_trial: bool = False
    """An action more, number 0, that ends the trial; the others follow it."""
    holdout: float = Field(0.2, ge=0, lt=1)
    """Share of the 167,424 chemistries kept for `split = "test"`; 0: all of them on both sides."""


class Alchemy(NativeEnv):
    """N laboratories. State: `stones` (N, 3) and `potions` (N, 12) numbered as above, `chemistry`, `clock` (steps in
    the trial), `trial`.
    """

    Settings = _AlchemySettings

    def __init__(self, name: str, settings: _AlchemySettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        spec = EnvSpec(
            name=name,
            spaces=Spaces(
                observation={"obs": Box(shape=(5 * _NUM_STONES + 2 * _NUM_POTIONS,))},
                action=Discrete(n=NUM_ACTIONS + s.end_trial),
            ),
            horizon=s.trials * s.trial_steps,
            num_attempts=s.trials,
            about=f"{s.trials} trials of {s.trial_steps} steps with three stones, twelve potions, one hidden chemistry",
            split=f"{s.holdout:.0%} of the chemistries are held out" if s.holdout else "all chemistries on both sides",
        )
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        self.chemistry, self.graph, self.clock, self.trial = np.zeros((4, num_envs), dtype=np.int64)
        self.stones = np.zeros((num_envs, _NUM_STONES), dtype=np.int64)
        self.potions = np.zeros((num_envs, _NUM_POTIONS), dtype=np.int64)
        self._stone_looks = np.zeros((num_envs, 9, 5), dtype=np.float32)
        self._potion_looks = np.zeros((num_envs, 7, 2), dtype=np.float32)
        self._row = np.arange(num_envs)
        used = np.arange(NUM_ACTIONS) - 1
        ending = [-1] if settings.end_trial else []
        self._stone_of = np.append(ending, np.maximum(used, 0) // (1 + _NUM_POTIONS)).astype(np.int64).clip(0)
        self._slot_of = np.append(ending, np.where(used < 0, -1, used % (1 + _NUM_POTIONS))).astype(np.int64)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        drawn = draw_chemistries(self.draws, _CHEMISTRY, episodes, holdout=self.settings.holdout, test=self._test)
        self.clock[indices] = self.trial[indices] = 0
        self._set_chemistry(indices, drawn)
        self._restock(indices, episodes)

    def _set_chemistry(self, indices: np.ndarray, drawn: np.ndarray) -> None:
        self.chemistry[indices] = drawn
        self.graph[indices], signs, turn, potion_map = np.unravel_index(drawn, SIZES)
        self._stone_looks[indices] = STONE_LOOKS[signs, turn]
        self._potion_looks[indices] = _POTION_LOOKS[potion_map]

    def _restock(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        """Draw new items for the trials that the actors are in."""
        for items, stream, kinds in ((self.stones, STONES, _GONE), (self.potions, POTIONS, EMPTY)):
            count = items.shape[1]
            counter = self.trial[indices, None] * count + np.arange(count)
            items[indices] = self.draws.integers(episodes[:, None], stream, kinds, counter)

    def _assign(self, actor: int, task: str) -> None:
        self._set_chemistry(np.array([actor]), np.array([find_chemistry(task)]))

    def _observe(self) -> dict[str, np.ndarray]:
        row = self._row[:, None]
        seen = np.empty((self.num_envs, 5 * _NUM_STONES + 2 * _NUM_POTIONS), dtype=np.float32)
        seen[:, : 5 * _NUM_STONES] = self._stone_looks[row, self.stones].reshape(self.num_envs, -1)
        seen[:, 5 * _NUM_STONES :] = self._potion_looks[row, self.potions].reshape(self.num_envs, -1)
        return {"obs": seen}

    def step(self, actions: np.ndarray) -> StepResult:
        s = self.settings
        stone, slot = self._stone_of[actions], self._slot_of[actions]
        vertex = self.stones[self._row, stone]
        potion = np.where(slot > 0, self.potions[self._row, np.maximum(slot - 1, 0)], EMPTY)
        sold = (slot == 0) & (vertex != _GONE)
        reward = _PAID[vertex] * sold
        self.stones[self._row, stone] = np.where(sold, _GONE, MOVES[self.graph, vertex, potion])
        used = np.flatnonzero((vertex != _GONE) & (potion != EMPTY))
        self.potions[used, slot[used] - 1] = EMPTY
        self.clock += 1
        over = self.clock >= s.trial_steps
        if s.end_trial:
            over |= actions == 0
        self.trial += over
        self.clock[over] = 0
        last = self.trial >= s.trials
        renewed = np.flatnonzero(over & ~last)
        if len(renewed):
            self._restock(renewed, self.episodes.chance[renewed])
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=last,
            truncated=last,
            reset=self._nobody,
            attempt_end=over,
            success=self._nobody,
        )

    def _scene(self, actor: int) -> _Laboratory:
        looks = self._potion_looks[actor, self.potions[actor]]
        colors = [-1 if gone else round(3 * (float(shown) + 1)) for shown, gone in looks]
        return _Laboratory(stones=self.stones[actor].tolist(), potions=colors)

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [name_chemistry(number) for number in self.chemistry[indices].tolist()]

    def expert(self) -> np.ndarray:
        """Use a potion that brings a stone nearer to the best, while there is one; then the stones that pay."""
        graph = self.graph[:, None, None]
        after = MOVES[graph, self.stones[:, :, None], self.potions[:, None, :]]
        nearer = _STEPS_TO_BEST[graph, after] < _STEPS_TO_BEST[graph, self.stones[:, :, None]]
        pays = _PAID[self.stones] > 0
        choices = np.concatenate([nearer, pays[:, :, None]], axis=2)
        stone, slot = np.divmod(choices.reshape(self.num_envs, -1).argmax(axis=1), 1 + _NUM_POTIONS)
        slot = (slot + 1) % (1 + _NUM_POTIONS)
        action = np.where(choices.any(axis=(1, 2)), 1 + stone * (1 + _NUM_POTIONS) + slot, 0)
        return (action + self.settings.end_trial).astype(np.int32)


_COLORS = {"red": RED, "green": GREEN, "amber": AMBER, "gold": GOLD, "pink": PINK, "teal": TEAL}


@dataclass(frozen=True, kw_only=True)
class _Laboratory:
    """The scene of one laboratory: its stones by vertex, with what each would pay, and the colours of its potions (-1:
    used up).
    """

    stones: Sequence[int]
    potions: Sequence[int]

    def picture(self) -> np.ndarray:
        canvas, colors = Canvas(340, WIDTH), list(_COLORS.values())
        for place, vertex in enumerate(self.stones):
            x, y = WIDTH * (place + 0.5) / _NUM_STONES, 80
            if vertex == _GONE:
                canvas.ring(x, y, 50, 2, PALE)
                continue
            canvas.disc(x, y, 54, GREEN if vertex == _BEST else SLATE if _PAID[vertex] > 0 else GREY)
            canvas.disc(x, y, 46, PAPER)
            canvas.text(f"{_PAID[vertex]:+.0f}", x, y - 12, INK, scale=4, middle=True)
            for axis, up in enumerate(VERTICES[vertex] > 0):
                canvas.disc(x + 20 * (axis - 1), y + 24, 6, INK if up else PALE)
        canvas.rectangle(16, 158, WIDTH - 16, 160, PALE)
        for place, color in enumerate(self.potions):
            row, column = divmod(place, 6)
            x, y = WIDTH * (column + 0.5) / 6, 215 + 80 * row
            if color < 0:
                canvas.ring(x, y, 22, 2, PALE)
                continue
            canvas.rectangle(x - 8, y - 36, x + 8, y, GREY)
            canvas.disc(x, y, 24, GREY)
            canvas.disc(x, y, 20, colors[color])
        return canvas.pixels

    def text(self) -> str:
        names = list(_COLORS)
        stones = ["gone" if vertex == _GONE else f"{_PAID[vertex]:+.0f} [{_SIGNS[vertex]}]" for vertex in self.stones]
        potions = [names[color] if color >= 0 else "-" for color in self.potions]
        rows = ["  ".join(f"{name:<5}" for name in potions[start : start + 6]).rstrip() for start in (0, 6)]
        return "\n".join(["stones   " + "   ".join(stones), "potions  " + rows[0], "         " + rows[1]])
