"""The Bayes-optimal figures of `meta-frozen-lake`, by dynamic programming over what an agent can know."""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import pytest

from pipelines.envs.suites.frozen_lake import BAYES_OPTIMAL, MOVES
from pipelines.envs.suites.grid import transitions
from pipelines.envs.suites.lake_maps import list_maps


def solve(size: int, steps: int, attempts: int) -> list[float]:
    """Success by attempt of the policy with most successes in all.

    What is known is a pair of bit sets, (cells seen to be ice, cells seen to be holes); maps weigh as in the prior.
    """
    holes, weight = list_maps(size)
    codes = holes @ (1 << np.arange(size * size))
    moves = transitions(size, MOVES).T.tolist()
    goal = size * size - 1
    sys.setrecursionlimit(10_000)

    @cache
    def mass(ice: int, water: int) -> float:
        return float(weight[(codes & ice == 0) & (codes & water == water)].sum())

    def outcomes(ice, water, cell):
        """(chance, ice, water, fell) of stepping onto `cell`."""
        bit = 1 << cell
        if cell == goal or ice & bit:
            return [(1.0, ice, water, False)]
        if water & bit:
            return [(1.0, ice, water, True)]
        safe = mass(ice | bit, water) / mass(ice, water)
        found = [(safe, ice | bit, water, False), (1 - safe, ice, water | bit, True)]
        return [outcome for outcome in found if outcome[0] > 1e-12]

    @cache
    def best(left: int, ice: int, water: int, cell: int, clock: int) -> tuple[float, int]:
        """Most successes still to come, and the cell to go to; `left` attempts, this one included."""
        choices = []
        for target in dict.fromkeys(moves[cell]):
            value = 0.0
            for chance, more_ice, more_water, fell in outcomes(ice, water, target):
                value += chance * following(left, more_ice, more_water, target, clock + 1, fell)
            choices.append((value, target))
        return max(choices)

    def following(left, ice, water, cell, clock, fell):
        arrived = cell == goal and not fell
        if arrived or fell or clock == steps:
            return arrived + (best(left - 1, ice, water, 0, 0)[0] if left > 1 else 0.0)
        return best(left, ice, water, cell, clock)[0]

    success = np.zeros(attempts)
    state = {(attempts, 1, 0, 0, 0): 1.0}
    while state:
        reached: dict[tuple[int, ...], float] = {}
        for (left, ice, water, cell, clock), chance in state.items():
            target = best(left, ice, water, cell, clock)[1]
            for part, more_ice, more_water, fell in outcomes(ice, water, target):
                p = chance * part
                if target == goal or fell or clock + 1 == steps:
                    success[attempts - left] += p * (target == goal)
                    key = (left - 1, more_ice, more_water, 0, 0)
                else:
                    key = (left, more_ice, more_water, target, clock + 1)
                if key[0]:
                    reached[key] = reached.get(key, 0.0) + p
        state = reached
    return success.tolist()


def test_three_by_three():
    assert solve(3, 9, 5) == pytest.approx(BAYES_OPTIMAL[3, 9, 5], abs=0.005)
