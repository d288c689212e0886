"""MazeRunner for one actor, slow, from its rules sentence by sentence. `draw(counter)` gives the random number that the
fast environment used for that choice in growing a maze.
"""

from __future__ import annotations

from tests.envs.literal import Outcome


def grow(size, draw):
    """Rows of booleans, True at walls; `draw` is asked for a seed's row and column, then for each of its tries."""
    side = size if size % 2 else size + 1
    walls = [[row in (0, side - 1) or column in (0, side - 1) for column in range(side)] for row in range(side)]
    tries = int(0.75 * (5 * (side + side)))
    for seed in range(int(0.75 * ((side // 2) * (side // 2)))):
        first = seed * (2 + tries)
        row = 2 * int(draw(first) * (side // 2 + 1))
        column = 2 * int(draw(first + 1) * (side // 2 + 1))
        walls[row][column] = True
        for attempt in range(tries):
            ways = [(row, column - 2), (row, column + 2), (row - 2, column), (row + 2, column)]
            ways = [(r, c) for r, c in ways if 0 <= r < side and 0 <= c < side]
            r, c = ways[int(draw(first + 2 + attempt) * len(ways))]
            if not walls[r][c]:
                walls[r][c] = True
                walls[(row + r) // 2][(column + c) // 2] = True
                row, column = r, c
    for row in range(side - 5, side - 1):
        for column in range(1, side - 1):
            walls[row][column] = False
    for row in range(side - 4, side - 1):
        walls[row][side // 2 - 1] = walls[row][side // 2 + 1] = True
    return walls


class LiteralMazeRunner:
    def __init__(self, task, *, limit):
        parts = dict(part.split("=") for part in task.split()[1:])
        self.rows = task.split()[0].split("/")
        self.goals = [tuple(int(x) for x in place.split(",")) for place in parts["goals"].split(";")]
        self.meaning = [int(digit) for digit in parts.get("moves", "01234")]
        self.limit, self.size = limit, len(self.rows)
        self.place, self.time, self.visited = (self.size - 2, self.size // 2), 0, 0

    def free(self, change):
        count, (row, column) = 0, self.place
        while self.rows[row + change[0]][column + change[1]] == ".":
            count, row, column = count + 1, row + change[0], column + change[1]
        return count

    def observe(self):
        row, column = self.place
        around = [self.free(change) / self.size for change in ((0, -1), (-1, 0), (0, 1), (1, 0))]
        goals = [
            [-1.0, -1.0] if i < self.visited else [goal[0] / self.size, goal[1] / self.size]
            for i, goal in enumerate(self.goals)
        ]
        return {
            "obs.observation": [row / self.size, column / self.size, *around, self.time / self.limit],
            "obs.achieved": [[row / self.size, column / self.size]],
            "obs.goals": goals,
        }

    first = observe

    def step(self, action):
        self.time += 1
        rows, columns = [(0, -1), (-1, 0), (0, 1), (1, 0), (0, 0)][self.meaning[action]]
        if self.rows[self.place[0] + rows][self.place[1] + columns] == ".":
            self.place = (self.place[0] + rows, self.place[1] + columns)
        reward = 0.0
        if self.place == self.goals[self.visited]:
            reward, self.visited = 1.0, self.visited + 1
        success, late = self.visited == len(self.goals), self.time >= self.limit
        return Outcome(self.observe(), reward, success or late, late, False, success or late, success)
