"""Symbolic Alchemy for one actor, slow, from its rules sentence by sentence; knows nothing of the fast one's tables.

`draw(stream, counter)` gives the random number that the fast environment used for an item.
"""

from __future__ import annotations

import functools
import itertools

from tests.envs.literal import Outcome

ROTATIONS = [
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    [[1, 1, 0], [-1, 1, 0], [0, 0, 1]],
    [[1, 0, -1], [0, 1, 0], [1, 0, 1]],
    [[1, 0, 0], [0, 1, 1], [0, -1, 1]],
]
CORNERS = list(itertools.product((-1, 1), repeat=3))


def connected_rule_sets():
    """Every {(i, j): value} that leaves all corners connected, found by walking."""
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    found = []
    for values in itertools.product((None, -1, 1), repeat=6):
        rules = {pair: value for pair, value in zip(pairs, values, strict=True) if value is not None}
        reached, front = {CORNERS[0]}, [CORNERS[0]]
        while front:
            corner = front.pop()
            for axis in range(3):
                if may_move(rules, corner, axis):
                    other = tuple(-c if i == axis else c for i, c in enumerate(corner))
                    if other not in reached:
                        reached.add(other)
                        front.append(other)
        if len(reached) == 8:
            found.append(rules)
    return found


def may_move(rules, corner, axis):
    return all(corner[j] == value for (i, j), value in rules.items() if i == axis)


@functools.cache
def seen(stone, signs, turn):
    """The p for which rotation times p is the stone with its signs."""
    wanted = [v * s for v, s in zip(stone, signs, strict=True)]
    for p in itertools.product((-1, 0, 1), repeat=3):
        if [sum(r * x for r, x in zip(row, p, strict=True)) for row in ROTATIONS[turn]] == wanted:
            return p
    raise AssertionError("no such stone")


class LiteralAlchemy:
    def __init__(self, task, draw, streams, *, trials, trial_steps, end_trial):
        self.draw, self.streams = draw, streams
        self.trials, self.trial_steps, self.end_trial = trials, trial_steps, end_trial
        given = dict(part.split("=") for part in task.split())
        self.rules = {}
        for i, text in enumerate(given["graph"].split("/")):
            for j, sign in zip([j for j in range(3) if j != i], text, strict=True):
                if sign != ".":
                    self.rules[i, j] = 1 if sign == "+" else -1
        self.signs = tuple(1 if sign == "+" else -1 for sign in given["stones"])
        self.turn = int(given["turn"])
        self.latent_axis = [int(digit) for digit in given["potions"][:3]]
        self.potion_signs = [1 if sign == "+" else -1 for sign in given["potions"][3:]]
        self.trial = self.time = 0
        self.new_items()

    def new_items(self):
        kinds = [(axis, direction) for axis in range(3) for direction in (-1, 1)]
        self.stones = [CORNERS[int(self.draw(self.streams["stones"], self.trial * 3 + slot) * 8)] for slot in range(3)]
        self.potions = [
            kinds[int(self.draw(self.streams["potions"], self.trial * 12 + slot) * 6)] for slot in range(12)
        ]

    def observe(self):
        shown = []
        for stone in self.stones:
            shown += [2, 2, 2, 2, 1] if stone is None else [*seen(stone, self.signs, self.turn), sum(stone) / 3, 0]
        for potion in self.potions:
            if potion is None:
                shown += [1, 1]
            else:
                axis, direction = potion
                perceived = self.latent_axis.index(axis)
                colour = 2 * perceived + (direction * self.potion_signs[axis] + 1) // 2
                shown += [colour / 3 - 1, 0]
        return {"obs": shown}

    first = observe

    def step(self, action):
        reward, ended = 0.0, False
        if self.end_trial:
            ended = action == 0
            action -= 1
        if action > 0:
            slot, what = (action - 1) // 13, (action - 1) % 13
            stone = self.stones[slot]
            if stone is not None and what == 0:
                reward = sum(stone) + (12 if stone == (1, 1, 1) else 0)
                self.stones[slot] = None
            elif stone is not None and self.potions[what - 1] is not None:
                axis, direction = self.potions[what - 1]
                self.potions[what - 1] = None
                if stone[axis] == -direction and may_move(self.rules, stone, axis):
                    self.stones[slot] = tuple(direction if i == axis else c for i, c in enumerate(stone))
        self.time += 1
        over = ended or self.time == self.trial_steps
        if over:
            self.trial, self.time = self.trial + 1, 0
            if self.trial < self.trials:
                self.new_items()
        last = self.trial == self.trials
        return Outcome(self.observe(), reward, last, last, False, over, False)
