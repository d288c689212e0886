"""Tasks and variants: which settings a run of the benchmark has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipelines.config.load import TAGS, assign, fold, merge, parse_assignment, read_toml, resolve
from pipelines.config.recipes import find
from pipelines.config.settings import Settings
from pipelines.errors import UsageError
from pipelines.rollout.environment import find_env_model

CURVE_SEED = 2_000_003  # tasks of the evaluations that draw the learning curve
CURVE_POINTS, CURVE_EPISODES = 12, 100
DEFAULT = "default"
Overrides = Mapping[str, Any]  # dotted settings key -> value


class Task(BaseModel):
    """A row of tasks.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    profile: str = ""
    score: str
    range: tuple[float, float]
    cpu_seconds: float
    set: dict[str, Any] = {}


def load_tasks() -> dict[str, Task]:
    """Read every task, by name."""
    table = read_toml(Path(__file__).with_name("tasks.toml"))
    return {name: Task.model_validate(row) for name, row in table.items()}


def parse_seeds(text: str) -> list[int]:
    """Parse seeds and ranges of them.

    >>> parse_seeds("0-2,7")
    [0, 1, 2, 7]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds:
        raise ValueError(f"no seeds in '{text}'")
    return list(dict.fromkeys(seeds))


def load_variants(path: Path) -> dict[str, Overrides]:
    """Read named sets of overrides from TOML; keys may be dotted, quoted or tables."""
    return {name: flat(table) for name, table in read_toml(path).items()}


def flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{where}{key}.") if isinstance(value, Mapping) else {f"{where}{key}": value}
    return found


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` assignments."""
    return {".".join(path): value for path, value in map(parse_assignment, texts)}


def describe(overrides: Overrides) -> str:
    """Name a variant by its overrides."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in sorted(overrides.items())) or DEFAULT


def settings_of(task: Task, overrides: Overrides, *, seed: int, points: int = CURVE_POINTS) -> Settings:
    """Resolve the settings of one run.

    Of the recipe's evaluations only those that choose the best checkpoint stay, on training tasks. Evaluations on
    held-out tasks that draw the curve are added, the last one after the last epoch.
    """
    document = merge(find(task.recipe)[1], {"profile": task.profile} if task.profile else {})
    document = merge(fold(document, source=task.recipe), task.set)
    tagged_first = sorted(overrides.items(), key=lambda item: not _is_tag(item[0].split(".")))
    fixed = {"seed": seed, "collect.workers": 0, "train.threads": 1}
    for key, value in [*tagged_first, *fixed.items()]:
        assign(document, key.split("."), value)
    document["stages"] = [
        entry | ({"split": "train"} if entry["stage"] == "evaluate" else {})
        for entry in document["stages"]
        if entry["stage"] != "evaluate" or entry.get("mark_best")
    ]
    if not any(entry.get("mark_best") for entry in document["stages"]):
        raise UsageError(f"recipe '{task.recipe}' chooses no best checkpoint")
    if points:
        every = max(1, document["epochs"] // points)
        curve = {"stage": "evaluate", "seed": CURVE_SEED, "episodes": CURVE_EPISODES, "actors": CURVE_EPISODES}
        document["stages"].append({**curve, "every": every, "start_epoch": (document["epochs"] - 1) % every})
    return resolve(document, env_model=find_env_model, source=task.recipe)


def _is_tag(path: Sequence[str]) -> bool:
    return TAGS.get(tuple(path[:-1]), ("",))[0] == path[-1]
