"""A sampler with a generator of its own, for tests that draw many batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.data.batch import Batch
from pipelines.data.sampler import WindowSampler
from pipelines.data.view import View


class SeededSampler(WindowSampler):
    """`WindowSampler` that draws by `rng`."""

    def __init__(self, view: View, *, seed: int, **settings: Any) -> None:
        super().__init__(view, **settings)
        self.rng = np.random.default_rng(seed)

    def sample(self, batch_size: int) -> Batch:
        return super().sample(batch_size, self.rng)

    def draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return super().draw(batch_size, self.rng)

    def continue_from(self, other: SeededSampler) -> None:
        """Draw the numbers that `other` would draw next."""
        self.rng.bit_generator.state = other.rng.bit_generator.state
