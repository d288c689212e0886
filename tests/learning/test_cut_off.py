"""Episodes that were truncated inside a window: no loss and no target reaches across the place where they end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipelines.data.batch import Batch
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning.batch import TensorBatch
from pipelines.learning.objectives import n_step_targets, trace_targets

SPACES = Spaces(observation={"obs": Box(shape=(1,))}, action=Discrete(n=2))
GAMMA = torch.tensor([0.9, 0.5])


def window(steps: int, *, cut: int | None, warm_up: int = 0) -> TensorBatch:
    """A single window of `steps` steps, of which number `cut` ends a truncated episode."""
    rng = np.random.default_rng(0)
    columns = {
        "obs": rng.normal(size=(1, steps + 1, 1)).astype("f4"),
        "action": rng.integers(2, size=(1, steps + 1)).astype("i4"),
        "reward": rng.normal(size=(1, steps + 1)).astype("f4"),
        "terminated": np.zeros((1, steps + 1), dtype="u1"),
    }
    cut_off = None if cut is None else np.arange(steps)[None] == cut
    given = Batch(columns, np.array([steps + 1]), np.array([0]), cut_off=cut_off, warm_up=np.array([warm_up]))
    return TensorBatch.from_numpy(given, SPACES)


def test_a_cut_off_step_is_seen_and_does_not_count() -> None:
    batch = window(5, cut=2, warm_up=1)
    assert batch.mask.tolist() == [[True, True, False, True, True]]
    assert batch.loss_mask.tolist() == [[False, True, False, True, True]]
    assert batch.valid_rows.all()
    assert batch.lengths == (6,)
    assert batch.valid.step_N.tolist() == [0, 1, 3, 4]
    assert batch.counted.next_row_N.tolist() == [2, 4, 5]
    assert window(5, cut=None).mask.all()


@pytest.mark.parametrize("kind", ["one-step", "n-step", "trace"])
def test_targets_are_those_of_two_windows(kind: str) -> None:
    """The part before the cut ends where the last step with a known result leads; the part after it is unchanged."""
    steps, cut = 7, 3
    batch, draw = window(steps, cut=cut), torch.Generator().manual_seed(0)
    value, taken, trace = (torch.rand(1, steps, 2, generator=draw) for _ in range(3))
    reward, over = batch.reward[:, 1:], batch.terminated

    def targets(place: slice, mask: torch.Tensor) -> torch.Tensor:
        given = reward[:, place], over[:, place], value[:, place]
        if kind == "trace":
            return trace_targets(*given, taken[:, place], trace[:, place], GAMMA, mask)
        return n_step_targets(*given, GAMMA, mask, n=1 if kind == "one-step" else 3)

    whole = targets(slice(None), batch.mask)
    for part in (slice(0, cut), slice(cut + 1, steps)):
        alone = targets(part, torch.ones(1, part.stop - part.start, dtype=torch.bool))
        torch.testing.assert_close(whole[:, part], alone)
