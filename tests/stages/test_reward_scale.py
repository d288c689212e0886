"""The unit of the rewards does not matter: recipes learn alike, with the same settings, from rewards a million times
larger."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import recipes
from pipelines.config.load import merge, resolve
from pipelines.stages import run as chain
from pipelines.stages.environment import env_model

FACTORS = (1e-3, 1.0, 1e3)


def reached(home: Path, recipe: str, id: str, factor: float) -> float:
    """The mean return of the recipe's best checkpoint, in the environment's own unit."""
    changes = {
        "env": {"name": "tests.envs.scaled:scaled", "id": id, "factor": factor},
        # previous rewards are an input: standardized, as they are by default
        "agent": {"timestep": {"normalize": True}},
        "collect": {"workers": 0},
    }
    settings = resolve(merge(recipes.find(recipe)[1], changes), env_model=env_model)
    return float(chain.run(settings, run=home).metrics["return_mean"]) / factor


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "id", "random"), [("cartpole", "CartPole-v1", 20.0), ("pendulum", "Pendulum-v1", -1200.0)]
)
def test_rewards_a_million_times_larger_are_learned_from_alike(tmp_path: Path, recipe, id, random) -> None:
    returns = [reached(tmp_path / f"run{number}", recipe, id, factor) for number, factor in enumerate(FACTORS)]
    gained = [each - random for each in returns]
    assert min(gained) > 0.9 * max(gained), returns
