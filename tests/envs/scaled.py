"""A gymnasium environment that pays in another unit."""

import gymnasium


def scaled(id: str, factor: float) -> gymnasium.Env:
    """The environment called `id`, each reward times `factor`."""
    return gymnasium.wrappers.TransformReward(gymnasium.make(id), lambda reward: float(reward) * factor)
