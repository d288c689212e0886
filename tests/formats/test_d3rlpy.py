"""d3rlpy's replay buffers in HDF5: arrays of each trajectory, numbered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Box, Discrete
from pipelines.lake.trajectory import Trajectory

h5py = pytest.importorskip("h5py")

LENGTHS = (5, 4, 7, 12, 3, 3, 3, 3, 3, 3, 8)


def episodes(*, discrete: bool = False, tupled: bool = False) -> list[dict[str, Any]]:
    """Return trajectories as d3rlpy serialises them; those of an even length terminated."""
    rng = np.random.default_rng(0)
    found = []
    for length in LENGTHS:
        observations: Any = rng.normal(size=(length, 3)).astype(np.float32)
        if tupled:
            observations = [observations, rng.integers(0, 255, (length, 1, 4, 4)).astype(np.uint8)]
        actions = rng.integers(0, 3, (length, 1)) if discrete else rng.uniform(-1, 1, (length, 2)).astype(np.float32)
        rewards = rng.normal(size=(length, 1)).astype(np.float32)
        found.append(
            {"observations": observations, "actions": actions, "rewards": rewards, "terminated": length % 2 == 0}
        )
    return found


def dump(given: list[dict[str, Any]], path: Path) -> Path:
    """Write trajectories as `d3rlpy.dataset.io.dump` does."""
    with h5py.File(path, "w") as file:
        file["columns"] = list(given[0])
        file["num_episodes"] = len(given)
        for number, episode in enumerate(given):
            for name, values in episode.items():
                if isinstance(values, list):
                    for part, each in enumerate(values):
                        file[f"{name}_{number}_{part}"] = each
                else:
                    file[f"{name}_{number}"] = values
        file["version"] = "2.1"
    return path


def read(name: object, **settings: Any) -> tuple[Any, list[Trajectory]]:
    source = open_importer(SourceSettings(name=str(name), **settings))
    try:
        return source.spaces, [trajectory for batch in source.batches() for trajectory in batch]
    finally:
        source.close()


@pytest.mark.parametrize("kind", ["", "hdf5:", "d3rlpy:"])
@pytest.mark.parametrize("discrete", [False, True])
def test_every_step_is_read(tmp_path: Path, kind: str, discrete: bool) -> None:
    given = episodes(discrete=discrete)
    spaces, found = read(f"{kind}{dump(given, tmp_path / 'buffer.h5')}")
    assert isinstance(spaces.action, Discrete if discrete else Box)
    assert len(found) == len(given)
    for sent, got in zip(given, found, strict=True):
        # What a cut trajectory's last action led to is not in the file, so that step is dropped.
        steps = len(sent["rewards"]) - (not sent["terminated"])
        columns = got.columns
        np.testing.assert_array_equal(columns["obs"][:steps], sent["observations"][:steps])
        np.testing.assert_array_equal(columns["action"][1:].reshape(steps, -1), sent["actions"][:steps])
        np.testing.assert_array_equal(columns["reward"][1:], sent["rewards"][:steps, 0])
        assert bool(columns["terminated"][-1]) == sent["terminated"]
        assert got.info.source == "d3rlpy"


def test_tuples_of_observations_become_columns(tmp_path: Path) -> None:
    given = episodes(tupled=True)
    _, found = read(dump(given, tmp_path / "buffer.h5"))
    for sent, got in zip(given, found, strict=True):
        for part, values in enumerate(sent["observations"]):
            rows = len(values) - (not sent["terminated"])
            np.testing.assert_array_equal(got.columns[f"obs.{part}"][:rows], values[:rows])


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    spaces, _ = read(dump(episodes(tupled=True), tmp_path / "b.h5"), columns={"obs.state": "observations_0[0:2]"})
    assert {name: space.shape for name, space in spaces.observation.items()} == {"obs.state": (2,)}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda file: file.__delitem__("actions_3"), InputMissing, "'actions' is missing"),
        (lambda file: file.__delitem__("observations_3"), IntegrityError, "does not agree with the 10 trajectories"),
        (lambda file: file["num_episodes"].__setitem__((), 2**62), IntegrityError, "does not agree"),
        (lambda file: file["num_episodes"].__setitem__((), -1), IntegrityError, "does not agree"),
    ],
)
def test_incomplete_files_are_refused(tmp_path: Path, change: Any, error: type[Exception], words: str) -> None:
    path = dump(episodes(), tmp_path / "buffer.h5")
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(error, match=words):
        read(path)


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    given = episodes()
    given[3]["rewards"] = given[3]["rewards"][:-1]
    with pytest.raises(IntegrityError, match=r"trajectory 3.*arrays of different lengths.*rewards_3 11"):
        read(dump(given, tmp_path / "buffer.h5"))


def test_without_trajectories_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "buffer.h5", "w") as file:
        file["columns"], file["num_episodes"], file["version"] = ["observations"], 0, "2.1"
    with pytest.raises(InputMissing, match="has no trajectories"):
        read(tmp_path / "buffer.h5")
