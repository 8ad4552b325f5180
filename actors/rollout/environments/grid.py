"""Grid world: walk from S to G around walls. The seed draws the map; G is always reachable.

S.#.      actions: up, down, left, right
..#G      a wall or the edge leaves you where you are
....
"""

import random
from collections import deque

from actors.rollout.environment import Outcome
from schemas import Task

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
Cell = tuple[int, int]


class Grid:
    """A walk from S to G on a random map. A task with "map" in its meta uses that map, rows separated by "/".

    rows: Number of rows. columns: Number of columns. walls: Share of the cells that are walls, 0 to 1. steps: Maximum moves;
    then the episode is truncated. goal: Reward for reaching G. step_cost: Cost of a step, subtracted from its reward.

    Example: Grid(rows=5, columns=5, walls=0.2)
    """

    def __init__(
        self,
        *,
        rows: int = 5,
        columns: int = 5,
        walls: float = 0.2,
        steps: int = 20,
        goal: float = 1.0,
        step_cost: float = 0.0,
    ) -> None:
        if rows < 1 or columns < 1 or rows * columns < 2 or not 0.0 <= walls < 1.0 or steps < 1:
            raise ValueError(f"got {rows} × {columns}, walls {walls}, steps {steps}; expected two cells and one step")
        self._rows, self._columns, self._walls, self._steps = rows, columns, walls, steps
        self._goal_reward, self._step_cost = goal, step_cost
        self._cells: list[str] = []
        self._at: Cell = (0, 0)
        self._left = steps

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        """Show the map. Raises ValueError for a map without one S and one G."""
        drawn = task.meta.get("map")
        if isinstance(drawn, str):
            self._cells = drawn.split("/")
            text = "".join(self._cells)
            if text.count("S") != 1 or text.count("G") != 1 or len({len(row) for row in self._cells}) != 1:
                raise ValueError(f"map: got {drawn!r}, expected rows of equal length with one S and one G")
        else:
            self._cells = draw_map(self._rows, self._columns, self._walls, random.Random(seed))
        self._at = _find(self._cells, "S")
        self._left = self._steps
        return Outcome(observation=self._picture())

    async def step(self, action: str) -> Outcome:
        self._left -= 1
        move = MOVES.get(action.strip().lower())
        notice = ""
        if move is None:
            notice = f"expected one of {', '.join(MOVES)}\n"
        else:
            row, column = self._at[0] + move[0], self._at[1] + move[1]
            inside = 0 <= row < len(self._cells) and 0 <= column < len(self._cells[0])
            if inside and self._cells[row][column] != "#":
                self._at = (row, column)
        if self._at == _find(self._cells, "G"):
            return Outcome(reward=self._goal_reward - self._step_cost, end="terminal")
        reward = -self._step_cost if self._step_cost else None
        return Outcome(observation=notice + self._picture(), reward=reward, end=None if self._left else "truncated")

    def _picture(self) -> str:
        rows = [row.replace("S", ".") for row in self._cells]
        row, column = self._at
        rows[row] = rows[row][:column] + "@" + rows[row][column + 1 :]
        return "\n".join(rows)


def draw_map(rows: int, columns: int, walls: float, random: random.Random) -> list[str]:
    """A map with S and G in cells of their own and a way between them; walls in its way are taken out one by one."""
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    start, goal = random.sample(cells, 2)
    free = [cell for cell in cells if cell not in (start, goal)]
    blocked = random.sample(free, int(walls * len(free)))
    while not reachable(start, goal, set(blocked), rows, columns):
        blocked.pop()
    marks = {start: "S", goal: "G"} | dict.fromkeys(blocked, "#")
    return ["".join(marks.get((row, column), ".") for column in range(columns)) for row in range(rows)]


def reachable(start: Cell, goal: Cell, blocked: set[Cell], rows: int, columns: int) -> bool:
    """True if moves lead from start to goal."""
    seen, waiting = {start}, deque([start])
    while waiting:
        row, column = waiting.popleft()
        if (row, column) == goal:
            return True
        for down, right in MOVES.values():
            cell = (row + down, column + right)
            if 0 <= cell[0] < rows and 0 <= cell[1] < columns and cell not in seen and cell not in blocked:
                seen.add(cell)
                waiting.append(cell)
    return False


def _find(cells: list[str], mark: str) -> Cell:
    return next((index, row.index(mark)) for index, row in enumerate(cells) if mark in row)
