"""Updates whose gradient is not finite: skipped without a trace, counted; too many of them in a row end training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.data.batch import Batch
from pipelines.errors import StageFailed
from pipelines.learning import checkpoint as checkpoints
from pipelines.training.learner import Learner
from tests.stages.recipes import tiny
from tests.tiers import crossed
from tests.training.test_learner import SPACES, batch

CASES: dict[str, dict[str, Any]] = {
    "actor-critic": {},
    "hl-gauss": {"kind": "multi-task"},
    "two-hot": {"kind": "multi-task", "critic": {"labels": "two-hot"}},
    "two-hot maximised": {"critic": {"kind": "two-hot"}},
}
SPECTRAL = (".left", ".right")  # estimates of the weights alone: an update that is skipped refines them too


def learner(agent: dict[str, Any] | None = None, **train: Any) -> Learner:
    settings = tiny(train={"ema_decay": 0.9} | train, agent=agent or {})
    return Learner(SPACES, settings.agent, settings.train, seed=3)


def good(seed: int = 0) -> Batch:
    return batch(np.random.default_rng(seed))


def bad(value: float, column: str = "reward") -> Batch:
    windows = good()
    windows.columns[column][0, 1] = value
    return windows


def state(trained: Learner) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "agent": {n: v for n, v in trained.agent.state_dict().items() if not n.endswith(SPECTRAL)},
            "average": trained.average,
            "optimizer": trained.optimizer.state_dict()["state"],
        }
    )


@pytest.mark.parametrize(("case", "value"), crossed([*CASES], [np.nan, np.inf, -np.inf]))
def test_an_update_that_is_not_finite_leaves_weights_targets_average_and_optimiser_alone(
    case: str, value: float
) -> None:
    trained = learner(CASES[case])
    trained.step(lambda size: good())
    before, popart = state(trained), trained.agent.popart
    assert popart is not None
    assert trained.step(lambda size: bad(value)) == {}
    after = state(trained)
    for name in ("timestep.norm.mean", "timestep.norm.square", "timestep.norm.updates"):  # move by finite tokens
        assert torch.isfinite(after["agent"].pop(name)).all(), name
        before["agent"].pop(name)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert (trained.update, trained.skipped_updates) == (2, 1)
    assert all(torch.isfinite(value) for value in trained.step(lambda size: good(1)).values())
    assert trained.skipped_updates == 1


def test_a_broken_observation_is_skipped_too_and_does_not_stay_in_the_input_statistics() -> None:
    """Infinity would: it is clamped before the network, so the gradient may be finite."""
    for value in (np.nan, np.inf):
        trained = learner()
        trained.step(lambda size, value=value: bad(value, "obs"))
        assert all(torch.isfinite(buffer).all() for buffer in trained.agent.buffers())


def test_input_statistics_are_those_of_the_finite_tokens() -> None:
    trained, windows = learner(agent={"timestep": {"symlog": False}}), bad(np.nan, "obs")
    trained.step(lambda size: windows)
    rows = [(b, t) for b, length in enumerate(windows.lengths) for t in range(length) if (b, t) != (0, 1)]
    expected = np.mean([windows.columns["obs"][row] for row in rows], 0)
    norm = trained.agent.timestep.norm
    assert norm is not None
    np.testing.assert_allclose(norm.mean[:3], expected, rtol=1e-4, atol=1e-6)


def test_too_many_in_a_row_end_training_and_finite_ones_between_them_do_not_count() -> None:
    trained = learner(max_skipped=3)
    for _ in range(3):
        trained.step(lambda size: bad(np.nan))
        trained.step(lambda size: bad(np.nan))
        trained.step(lambda size: good())
    trained.step(lambda size: bad(np.nan))
    trained.step(lambda size: bad(np.nan))
    with pytest.raises(StageFailed, match="not finite in 3 updates in a row, up to update 12"):
        trained.step(lambda size: bad(np.nan))
    assert trained.skipped_updates == 9
    assert sum("was skipped" in notice for notice in trained.notices) == 1


def test_counts_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    trained = learner(max_skipped=3)
    trained.step(lambda size: bad(np.nan))
    trained.step(lambda size: bad(np.nan))
    trained.save(tmp_path, {"env": {}})
    again = learner(max_skipped=3)
    again.restore(checkpoints.load(tmp_path))
    assert (again.skipped_updates, again.skipped_in_a_row) == (2, 2)
    with pytest.raises(StageFailed):
        again.step(lambda size: bad(np.nan))


def test_a_skipped_batch_gives_no_td_errors() -> None:
    trained, windows, heard = learner(), bad(np.nan), []
    for data in (windows, good()):
        weighed = Batch(columns=data.columns, lengths=data.lengths, start=data.start, importance=np.ones(4))
        trained.step(lambda size, weighed=weighed: weighed, lambda *found: heard.append(found[-1]))
    assert len(heard) == 1
    assert np.isfinite(heard[0]).all()
