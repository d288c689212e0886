"""Dark Key-to-Door: find a key, then a door, in a room whose contents are not shown (or, `light`, are).

Start, key and door are cells drawn independently for the whole episode. Actions: 0 (0, -1), 1 (-1, 0), 2 (0,
+1), 3 (+1, 0) on (x, y), clipped at the walls, and 4 stay. The key pays 1 the first time in an attempt that a
step ends on its cell; ending a step on the door with the key pays 1 and ends the attempt. The
door is tried before the key is taken, so key and door on one cell need two steps. An attempt also ends at its
step limit. The step after an attempt's end is spent on going back to the start: its action is ignored, its
reward 0, the key is gone. All steps count towards the horizon, where the episode ends, terminated and
truncated alike; an attempt cut off there counts for nothing. Observation, float32 (4,): x / size, y / size,
has key, and steps in the attempt / attempt limit, unless `show_clock` is off; light adds the door's and the
key's x / size, y / size.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.native import NativeEnv
from pipelines.envs.scenes import GridScene, split_rows
from pipelines.envs.suites.grid import coordinates, distances, transitions
from pipelines.lake.spaces import Box, Discrete, Spaces

MOVES = ((0, -1), (-1, 0), (0, 1), (1, 0), (0, 0))
START, KEY, _DOOR, ORDER = range(4)  # purposes of random draws


class _DarkKeyDoorSettings(SettingsModel):
    """Parameters of `dark-key-door`."""

    size: int = Field(9, ge=1, le=256)
    """Cells along a side of the room."""
    light: bool = False
    """Show where door and key are."""
    show_clock: bool = True
    """Show the steps in the attempt. A learner with a table has to learn every cell for each of them."""
    attempt_steps: int = Field(50, ge=1)
    """Steps after which an attempt is over."""
    horizon: int = Field(500, ge=1)
    """Steps of an episode."""
    shuffle_actions: bool = False
    """Give the five actions another meaning in every task."""


def _count_numbers(settings: _DarkKeyDoorSettings) -> int:
    """Count the numbers of an observation."""
    return 3 + settings.show_clock + 4 * settings.light


class DarkKeyDoor(NativeEnv):
    """N rooms. State: `cell` (x * size + y), `has_key`, `clock` (steps in the attempt), `over`, `time`."""

    Settings = _DarkKeyDoorSettings

    def __init__(self, name: str, settings: _DarkKeyDoorSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        spec = EnvSpec(
            name=name,
            spaces=Spaces(observation={"obs": Box(shape=(_count_numbers(s),))}, action=Discrete(n=len(MOVES))),
            horizon=s.horizon,
            num_attempts=None,
            has_success=True,
            about=f"{'light' if s.light else 'dark'} {s.size}x{s.size} room, doors opened in {s.horizon} steps",
            split="separate random tasks, of one distribution",
        )
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        self._moves = transitions(settings.size, MOVES)
        self._coordinates = coordinates(settings.size)
        self.start, self.key, self.door, self.cell, self.clock, self.time = np.zeros((6, num_envs), dtype=np.int64)
        self.has_key, self.over = np.zeros((2, num_envs), dtype=bool)
        self.meaning = np.tile(np.arange(len(MOVES)), (num_envs, 1))
        self._row = np.arange(num_envs)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        cells = self.settings.size**2
        self.start[indices] = self.cell[indices] = self.draws.integers(episodes, START, cells)
        self.key[indices] = self.draws.integers(episodes, KEY, cells)
        self.door[indices] = self.draws.integers(episodes, _DOOR, cells)
        if self.settings.shuffle_actions:
            self.meaning[indices] = self.draws.permutations(episodes, ORDER, len(MOVES))
        for state in (self.clock, self.time, self.has_key, self.over):
            state[indices] = 0

    def _assign(self, actor: int, task: str) -> None:
        named = dict(part.split("=", 1) for part in task.split(" "))
        for what, cell in (("start", self.start), ("key", self.key), ("door", self.door)):
            x, y = map(int, named.get(what, "").split(","))
            if not (0 <= x < self.settings.size and 0 <= y < self.settings.size):
                raise ValueError(f"{what} is outside the room")
            cell[actor] = x * self.settings.size + y
        self.cell[actor] = self.start[actor]
        if self.settings.shuffle_actions:
            order = [int(digit) for digit in named.get("moves", "")]
            if sorted(order) != list(range(len(MOVES))):
                raise ValueError("moves are an order of all of them")
            self.meaning[actor] = order

    def _observe(self) -> dict[str, np.ndarray]:
        s = self.settings
        observation = np.empty((self.num_envs, _count_numbers(s)), dtype=np.float32)
        observation[:, :2] = self._coordinates.take(self.cell, axis=0)
        observation[:, 2] = self.has_key
        if s.show_clock:
            observation[:, 3] = self.clock / s.attempt_steps
        if s.light:
            observation[:, -4:-2] = self._coordinates.take(self.door, axis=0)
            observation[:, -2:] = self._coordinates.take(self.key, axis=0)
        return {"obs": observation}

    def step(self, actions: np.ndarray) -> StepResult:
        s = self.settings
        self.time += 1
        going_back, acting = self.over, ~self.over
        if s.shuffle_actions:
            actions = self.meaning[self._row, actions]
        self.cell = np.where(going_back, self.start, self._moves[actions, self.cell])
        opened = acting & self.has_key & (self.cell == self.door)
        taken = acting & ~self.has_key & (self.cell == self.key)
        self.has_key = (self.has_key & acting) | taken
        self.clock = np.where(acting, self.clock + 1, 0)
        self.over = opened | (self.clock >= s.attempt_steps)
        last = self.time >= s.horizon
        return StepResult(
            observation=self._observe(),
            reward=(opened | taken).astype(np.float32),
            terminated=last,
            truncated=last,
            reset=going_back,
            attempt_end=self.over,
            success=opened,
        )

    def _scene(self, actor: int) -> GridScene:
        size, has_key = self.settings.size, bool(self.has_key[actor])
        cells = np.full(size**2, ".")
        cells[self.start[actor]] = "S"
        cells[self.door[actor]] = "D"
        if not has_key:
            cells[self.key[actor]] = "K"
        row, column = divmod(int(self.cell[actor]), size)
        carries, note = ("small_key", "has the key") if has_key else ("", "")
        return GridScene(rows=split_rows(cells, size), agent=(row, column), carries=carries, note=note)

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Cells as x,y; the order of the moves where it is shuffled."""
        size, names = self.settings.size, []
        for i in indices:
            cells = (divmod(int(cell[i]), size) for cell in (self.start, self.key, self.door))
            name = " ".join(f"{what}={x},{y}" for what, (x, y) in zip(("start", "key", "door"), cells, strict=True))
            order = "".join(map(str, self.meaning[i])) if self.settings.shuffle_actions else ""
            names.append(f"{name} moves={order}" if order else name)
        return names

    def expert(self) -> np.ndarray:
        """A shortest way to the key, then to the door, by one who knows where they are."""
        target = np.where(self.has_key, self.door, self.key)
        steps = distances(np.zeros((self.num_envs, self.settings.size**2), dtype=bool), target, self._moves)
        wanted = steps[self._row, self._moves[:, self.cell]].argmin(axis=0)
        return (self.meaning == wanted[:, None]).argmax(axis=1).astype(np.int32)
