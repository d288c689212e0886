"""The unit of the rewards does not matter: the same settings learn the same weights, whatever it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config import recipes
from pipelines.config.load import merge, resolve
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.rollout.environment import find_env_model
from pipelines.training.learner import Learner
from tests.learning.factories import windows

UPDATES = 5
LENGTHS = (9, 4, 7, 2, 9, 9, 5, 3)
SPACES = {
    "cartpole": Spaces(observation={"obs": Box(shape=(4,))}, action=Discrete(n=2)),
    "pendulum": Spaces(observation={"obs": Box(shape=(3,))}, action=Box(shape=(1,), low=(-2.0,), high=(2.0,))),
}


def learned(recipe: str, factor: float) -> dict[str, torch.Tensor]:
    """Train on a few batches, whose rewards are multiplied by `factor`; return the parameters by name."""
    # Previous rewards are an input, and standardized like all inputs, as they are by default.
    changes = {"agent": {"timestep": {"normalize": True}}, "train": {"batch_size": len(LENGTHS)}}
    settings = resolve(merge(recipes.find(recipe)[1], changes), env_model=find_env_model)
    learner = Learner(SPACES[recipe], settings.agent, settings.train, seed=0)
    for update in range(UPDATES):

        def draw(count: int, update: int = update) -> Any:
            batch = windows(SPACES[recipe], lengths=LENGTHS[:count], rows=max(LENGTHS), seed=update)
            batch.columns["reward"] *= np.float32(factor)
            return batch

        learner.step(draw)
    return dict(learner.agent.named_parameters())


# Products with powers of two are exact, so nothing may differ by a single bit. The factors leave spreads of rewards
# above `RunningNorm.least_sigma`, and of returns below `popart.max_sigma`.
@pytest.mark.parametrize("factor", [2.0**-6, 2.0**14])
@pytest.mark.parametrize("recipe", SPACES)
def test_weights_do_not_depend_on_the_unit_of_rewards(recipe: str, factor: float) -> None:
    before, found = learned(recipe, 1.0), learned(recipe, factor)
    assert [name for name, values in before.items() if not torch.equal(values, found[name])] == []


def test_weights_depend_on_the_rewards() -> None:
    before, found = learned("cartpole", 1.0), learned("cartpole", -1.0)
    assert any(not torch.equal(values, found[name]) for name, values in before.items() if "actor" in name)
