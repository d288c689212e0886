"""Figures of a stored trajectory are those that the agent has of a window of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.data.batch import Batch
from pipelines.errors import InputMissing, UsageError
from pipelines.evaluation.values import FIGURES, Values
from pipelines.lake import reading
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.batch import TensorBatch
from pipelines.learning.checkpoint import load_agent
from pipelines.learning.diagnostics import inspect
from pipelines.stages import collect, train
from tests.stages.recipes import tiny
from tests.tiers import some


def trained(home: Path, **tables: object) -> Path:
    settings = tiny(collect={"actors": 2, "steps": 20}, **tables)
    collect.run(settings, run=home)
    train.run(settings, run=home, lakes=[(home / "lake", 1.0)])
    return home


def judged(home: Path, start: int, stop: int) -> dict[str, np.ndarray]:
    """What the agent itself says of the steps [start, stop) of the first trajectory, seen as one window."""
    agent = load_agent(checkpoints.load(home / "checkpoints"))
    columns = next(reading.trajectories(Lake(home))).columns
    cut = {name: column[None, start : stop + 1] for name, column in columns.items()}
    batch = Batch(columns=cut, lengths=np.array([stop + 1 - start]), start=np.array([start]))
    return inspect(agent, TensorBatch.from_numpy(batch, agent.spaces))


def found(home: Path) -> dict[str, np.ndarray]:
    lake, values = Lake(home), Values(str(home))
    trajectory = next(reading.trajectories(lake))
    return values(trajectory, lake.only_schema())


@pytest.mark.system
def test_a_trajectory_within_the_window_is_one_window(tmp_path: Path) -> None:
    home = trained(tmp_path / "run", train={"context_length": 5})
    expected, figures = judged(home, 0, 5), found(home)
    assert set(figures) == set(FIGURES)
    for name, figure in figures.items():
        assert figure.shape == (5, 2)
        np.testing.assert_allclose(figure, expected[name][0], atol=1e-6, err_msg=name)


@pytest.mark.system
@pytest.mark.parametrize("window", some([1, 2, 3, 4], 0, 2))
def test_without_memory_windows_make_no_difference(tmp_path: Path, window: int) -> None:
    agent = {"sequence": {"kind": "feedforward", "d_model": 8, "num_layers": 1, "d_ff": 8}}
    home = trained(tmp_path / "run", agent=agent, train={"context_length": window})
    expected, figures = judged(home, 0, 5), found(home)
    for name in set(FIGURES) - {"target"}:  # of critics drawn at random, by others in another batch
        np.testing.assert_allclose(figures[name], expected[name][0], atol=1e-5, err_msg=name)


@pytest.mark.system
def test_later_steps_are_judged_from_the_latter_half_of_a_window(tmp_path: Path) -> None:
    home = trained(tmp_path / "run", train={"context_length": 4})  # of five steps: the windows [0, 4) and [2, 5)
    first, second, figures = judged(home, 0, 4), judged(home, 2, 5), found(home)
    np.testing.assert_allclose(figures["q"][:4], first["q"][0], atol=1e-6)
    np.testing.assert_allclose(figures["q"][4], second["q"][0, 2], atol=1e-6)


@pytest.mark.system
def test_who_cannot_judge_is_named(tmp_path: Path) -> None:
    clone = trained(tmp_path / "clone", agent={"kind": "behaviour-cloning"})
    with pytest.raises(UsageError, match="a behaviour-cloning agent has no critics"):
        Values(str(clone))
    other = trained(tmp_path / "other", env={"name": "gym:CartPole-v1"})
    lake = Lake(other)
    values = Values(str(trained(tmp_path / "run")))
    with pytest.raises(InputMissing, match=r"trained for other spaces: obs: .* trained on, .* in the lake"):
        values(next(reading.trajectories(lake)), lake.only_schema())
    with pytest.raises(InputMissing, match="no run at"):
        Values(str(tmp_path / "none"))


@pytest.mark.system
def test_a_part_of_a_trajectory_is_at_its_place_in_time(tmp_path: Path) -> None:
    home = trained(tmp_path / "run", train={"context_length": 9})
    lake, values = Lake(home), Values(str(home))
    trajectory = next(reading.trajectories(lake))
    part = replace(trajectory, columns={name: column[2:] for name, column in trajectory.columns.items()})
    expected, figures = judged(home, 2, 5), values(part, lake.only_schema(), offset=2)
    for name in set(FIGURES) - {"target"}:
        np.testing.assert_allclose(figures[name], expected[name][0], atol=1e-5, err_msg=name)
