"""Crafter's instructions: goals of three words, in order, and what of them was achieved in a step.

A goal is an achievement (`collect wood`, `make stone pickaxe`, `wake up`) or a place (`travel 30 45`: be in the square
of 5 by 5 metres with that corner). Goals are shown as numbers of words, 0 for none: `goals` (k, 3), a finished goal
becomes zeros where it stands; `achieved` (3, 3) names all that this very step achieved: the square where the agent is,
and up to two achievements. So columns alone show whether other goals would have been reached, and when (`GOAL_RULE`).
"""

from __future__ import annotations

import numpy as np

from pipelines.envs.goals import GoalSequenceRule, is_same

WORDS_PER_GOAL, ACHIEVED_GOALS, BLOCK, WORLD = 3, 3, 5, 64
CORNERS = tuple(str(metre) for metre in range(0, WORLD, BLOCK))
_TRAVEL = "travel"
# All achievements of the game, as it spells them.
_SPELLED = """
    collect_coal collect_diamond collect_drink collect_iron collect_sapling collect_stone collect_wood
    defeat_skeleton defeat_zombie eat_cow eat_plant make_iron_pickaxe make_iron_sword make_stone_pickaxe
    make_stone_sword make_wood_pickaxe make_wood_sword place_furnace place_plant place_stone place_table wake_up
"""
ACHIEVEMENTS = tuple(_SPELLED.split())
_ACHIEVEMENT_WORDS = sorted({word for name in ACHIEVEMENTS for word in name.split("_")})
WORDS = ("", *_ACHIEVEMENT_WORDS, _TRAVEL, *CORNERS)
NUMBER = {word: number for number, word in enumerate(WORDS)}
NONE = (0,) * WORDS_PER_GOAL

Goal = tuple[int, ...]


GOAL_RULE = GoalSequenceRule(reached=is_same, done=0.0)


def parse_goal(text: str) -> Goal:
    """Return the numbers of a goal's words. ValueError if it is not a goal."""
    words = text.replace("_", " ").split()
    place = len(words) == 3 and words[0] == _TRAVEL and words[1] in CORNERS and words[2] in CORNERS
    if not place and "_".join(words) not in ACHIEVEMENTS:
        raise ValueError(f"'{text}' is not a goal")
    return tuple(NUMBER[word] for word in words) + (0,) * (WORDS_PER_GOAL - len(words))


def spell(numbers: Goal) -> str:
    """Write a goal in words."""
    return " ".join(WORDS[number] for number in numbers if number)


def find_square(position: np.ndarray) -> Goal:
    """Find the square that `position` (2,), in metres, is in."""
    x, y = (str(int(metre) // BLOCK * BLOCK) for metre in position)
    return parse_goal(f"{_TRAVEL} {x} {y}")


def draw_goals(rng: np.random.Generator, *, least: int, most: int, travel: float) -> tuple[Goal, ...]:
    """Draw from `least` to `most` goals, each a place with chance `travel`, else one of the achievements."""
    goals = []
    for _ in range(rng.integers(least, most + 1)):
        if rng.random() < travel:
            goals.append(find_square(rng.integers(WORLD, size=2)))
        else:
            goals.append(parse_goal(ACHIEVEMENTS[rng.integers(len(ACHIEVEMENTS))]))
    return tuple(goals)


def as_rows(goals: tuple[Goal, ...], count: int) -> np.ndarray:
    """Write the goals as (count, 3) uint8, a row each, then zeros."""
    numbers = np.zeros((count, WORDS_PER_GOAL), dtype=np.uint8)
    numbers[: len(goals)] = np.reshape(goals, (-1, WORDS_PER_GOAL))
    return numbers


class GoalProgress:
    """Goals to be reached in order, one a step at most."""

    def __init__(self, goals: tuple[Goal, ...]) -> None:
        self.goals, self.finished = goals, 0

    @property
    def is_done(self) -> bool:
        return self.finished == len(self.goals)

    @property
    def shown(self) -> tuple[Goal, ...]:
        """The goals, with zeros in the place of those that are finished."""
        return (NONE,) * self.finished + self.goals[self.finished :]

    def advance(self, achieved: tuple[Goal, ...]) -> bool:
        """Finish the goal whose turn it is if it is among the `achieved`; return whether it was."""
        if self.is_done or self.goals[self.finished] not in achieved:
            return False
        self.finished += 1
        return True
