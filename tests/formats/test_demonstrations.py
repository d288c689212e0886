"""robomimic's and LIBERO's HDF5 files, a group a demonstration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.formats.make import open_importer
from pipelines.lake.trajectory import Trajectory

h5py = pytest.importorskip("h5py")


def demonstrations(path: Path, *, following: bool, leave_out: tuple[str, ...] = ()) -> Path:
    """Eleven of 3 steps, in the order of the file 0, 1, 10, 2, ...; even ones end done."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = 33
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}})
        data.attrs["problem_info"] = json.dumps({"language_instruction": "lift the cube"})
        for number in range(11):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = 3
            states = number + np.arange(4)[:, None] / 10 + np.zeros((4, 2))
            demo["obs/object"] = states[:-1]
            demo["obs/robot/eef"] = 2 * states[:-1, :1]
            if following:
                demo["next_obs/object"] = states[1:]
                demo["next_obs/robot/eef"] = 2 * states[1:, :1]
            arrays = {"actions": states[:-1] / 20, "rewards": [0, 0, 1.0], "dones": [0, 0, number % 2 == 0]}
            for name in arrays.keys() - set(leave_out):
                demo[name] = np.asarray(arrays[name], np.float64)
            demo["states"] = np.zeros((3, 5))
        file["mask/train"] = np.array([b"demo_0", b"demo_10"])
    return path


def read(path: Path, **settings: Any) -> tuple[list[Trajectory], list[str]]:
    told: list[str] = []
    source = open_importer(
        SourceSettings(name=str(path), **settings),
        listener=lambda e: told.append(e.text) if isinstance(e, Notice) else None,
    )
    try:
        return [trajectory for batch in source.batches() for trajectory in batch], told
    finally:
        source.close()


def test_demonstrations_with_next_observations(tmp_path: Path) -> None:
    found, told = read(demonstrations(tmp_path / "lift.hdf5", following=True))
    assert [one.info.tags["demo"] for one in found] == [f"demo_{number}" for number in range(11)]
    assert told == [f"'{tmp_path / 'lift.hdf5'}': obs.object, obs.robot.eef, action: float64 is rounded to float32"]
    for number, one in enumerate(found):
        states = (number + np.arange(4)[:, None] / 10 + np.zeros((4, 2))).astype(np.float32)
        np.testing.assert_allclose(one.columns["obs.object"], states)
        np.testing.assert_allclose(one.columns["obs.robot.eef"], 2 * states[:, :1])
        np.testing.assert_allclose(one.columns["action"][1:], states[:-1] / 20, rtol=1e-6)
        assert one.columns["reward"].tolist() == [0, 0, 0, 1]
        assert one.columns["terminated"].tolist() == [0, 0, 0, number % 2 == 0]
        assert one.columns["truncated"].tolist() == [0, 0, 0, number % 2]
        info = one.info
        assert (info.env, info.task, info.goal_text, info.source) == ("Lift", "lift", "lift the cube", "robomimic")
        assert info.tags["episode"] == str(number)
        assert info.tags.get("mask") == ("train" if number in (0, 10) else None)


def test_without_next_observations_a_truncated_one_loses_its_last_step(tmp_path: Path) -> None:
    found, _ = read(demonstrations(tmp_path / "lift.hdf5", following=False))
    assert [one.length for one in found[:2]] == [3, 2]
    np.testing.assert_allclose(found[0].columns["obs.object"][:, 0], [0, 0.1, 0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(found[1].columns["obs.object"][:, 0], [1, 1.1, 1.2], rtol=1e-6)
    assert found[0].info.tags["final_observation"] == "repeated"
    assert found[1].info.tags["final_observation"] == "last step dropped"


def test_rewards_and_dones_may_be_missing_and_columns_chosen(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "lift.hdf5", following=True, leave_out=("rewards", "dones"))
    found, told = read(path, columns={"obs": "obs/robot/eef"})
    assert [name for name in found[0].columns if name.startswith("obs")] == ["obs"]
    assert not found[0].columns["reward"].any()
    assert not found[0].columns["terminated"].any()
    assert told[:2] == [
        f"'{path}' has no 'rewards': rewards are 0",
        f"'{path}' has no 'dones': trajectories end truncated",
    ]


def test_columns_of_an_observation_may_be_taken(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "lift.hdf5", following=True)
    whole, _ = read(path, columns={"obs": "obs/object"})
    part, _ = read(path, columns={"obs.a": "obs/object[0:1]", "obs.b": "obs/object[1:]"})
    for one, other in zip(whole, part, strict=True):
        np.testing.assert_array_equal(one.columns["obs"][:, :1], other.columns["obs.a"])
        np.testing.assert_array_equal(one.columns["obs"][:, 1:], other.columns["obs.b"])


@pytest.mark.parametrize(
    ("name", "values", "error", "words"),
    [
        ("data/demo_3/actions", np.zeros((2, 2)), IntegrityError, r"lift.hdf5': 'data/demo_3' has arrays of different"),
        ("data/demo_3/actions", np.zeros((3, 5)), InputMissing, "'action' has 5 float64 values a step in trajectory 3"),
        ("data/demo_3/obs/object", np.full((3, 2), np.nan), IntegrityError, "is not finite.*trajectory 3"),
        ("data/demo_3/obs/object", None, InputMissing, r"lift.hdf5': 'obs/object' is missing"),
        ("data/demo_0/obs", None, InputMissing, "'data/demo_0' lacks 'obs'; extract observations"),
        ("data/demo_3/rewards", np.zeros((3, 2)), InputMissing, "'demo_3' has 2 rewards a step"),
        ("data/demo_3/rewards", None, InputMissing, r"lift.hdf5': 'rewards' is missing"),
        ("data/demo_3/dones", None, InputMissing, r"lift.hdf5': 'dones' is missing"),
    ],
)
def test_what_is_malformed_is_one_line(
    tmp_path: Path, name: str, values: np.ndarray | None, error: type[AmagoError], words: str
) -> None:
    path = demonstrations(tmp_path / "lift.hdf5", following=False)
    with h5py.File(path, "r+") as file:
        del file[name]
        if values is not None:
            file[name] = values
    with pytest.raises(error, match=words):
        read(path)


def test_a_demonstration_that_claims_terabytes_is_refused(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "lift.hdf5", following=False)
    with h5py.File(path, "r+") as file:
        del file["data/demo_1/obs/object"]
        file["data/demo_1/obs"].create_dataset("object", (3, 1 << 40), "f8", chunks=(1, 1 << 10))
    with pytest.raises(IntegrityError, match=r"'data/demo_1' has .* bytes, more than"):
        read(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[1]", b"\xff"])
def test_attributes_that_are_not_json_are_passed_over(tmp_path: Path, text: str | bytes) -> None:
    path = demonstrations(tmp_path / "lift.hdf5", following=True)
    with h5py.File(path, "r+", libver="latest") as file:
        file["data"].attrs["problem_info"] = text[:60_000]
        del file["data"].attrs["env_args"]
    found, _ = read(path)
    assert (found[0].info.goal_text, found[0].info.env) == ("", "lift")
