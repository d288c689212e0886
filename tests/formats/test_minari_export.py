"""A dataset of Minari that was taken in and goes out again says what it said."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from pipelines.config.settings import Settings
from pipelines.lake.reading import trajectories
from pipelines.lake.store import Lake
from pipelines.stages import collect, export, ingest
from tests.formats.test_minari import OBSERVATION, dataset, numbers, with_infos
from tests.stages.recipes import tiny

h5py = pytest.importorskip("h5py")
TEXT = {"type": "Text", "max_length": 12, "min_length": 0, "charset": "abcdefgilnortu "}
MISSIONS = ["", "go left", "turn around"]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Three episodes, each with a text beside its other observations."""
    space = {"type": "Dict", "subspaces": {**OBSERVATION["subspaces"], "mission": TEXT}}
    more = {"observation_space": json.dumps(space), "description": "made by hand", "algorithm_name": "PPO"}
    folder = dataset(tmp_path / "theirs-v0", "hdf5", [4, 1, 6], **more)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        for number, mission in enumerate(MISSIONS):
            group = file[f"episode_{number}/observations"]
            group.create_dataset("mission", data=[mission] * len(group["goal"]), dtype=h5py.string_dtype())
    return folder


def source(folder: Path) -> Settings:
    return Settings.model_validate({"source": {"name": f"minari:{folder}"}})


def test_bounds_texts_seeds_and_what_is_said_come_out_again(tmp_path: Path, theirs: Path) -> None:
    ingest.run(source(theirs), lake=tmp_path / "lake")
    export.dataset(tiny(export={"to": str(tmp_path / "ours-v0"), "format": "minari"}).export, lake=tmp_path / "lake")
    before, after = (json.loads((at / "data" / "metadata.json").read_text()) for at in (theirs, tmp_path / "ours-v0"))
    for name in ("observation_space", "env_spec", "description", "algorithm_name", "total_steps"):
        assert after[name] == before[name]
    assert after["author"] == ["a", "b"]
    with (
        h5py.File(theirs / "data" / "main_data.hdf5") as one,
        h5py.File(tmp_path / "ours-v0" / "data" / "main_data.hdf5") as other,
    ):
        for number in range(3):
            told, found = (file[f"episode_{number}"] for file in (one, other))
            texts, wanted = (group["observations/mission"].asstr()[()].tolist() for group in (found, told))
            assert texts == wanted
            assert (found.attrs["seed"], found.attrs["total_steps"]) == (told.attrs["seed"], told.attrs["total_steps"])
            assert found["observations/goal"].dtype == np.float64
            np.testing.assert_allclose(found["observations/goal"], told["observations/goal"], rtol=1e-6)
            assert found["infos/success"][()].any() == told["infos/success"][()].any()


@pytest.mark.system
def test_an_episode_has_the_seed_of_its_reset(tmp_path: Path) -> None:
    env = {"name": "gym:CartPole-v1"}
    collect.run(tiny(env=env, collect={"steps": 120, "actors": 2, "workers": 1}), lake=tmp_path / "lake")
    export.dataset(tiny(export={"to": str(tmp_path / "x-v0"), "format": "minari"}).export, lake=tmp_path / "lake")
    with h5py.File(tmp_path / "x-v0" / "data" / "main_data.hdf5") as file:
        for group in file.values():
            observation, _ = gymnasium.make("CartPole-v1").reset(seed=int(group.attrs["seed"]))
            np.testing.assert_array_equal(group["observations"][0], observation)
    metadata = json.loads((tmp_path / "x-v0" / "data" / "metadata.json").read_text())
    assert json.loads(metadata["env_spec"])["id"] == "CartPole-v1"
    assert json.loads(metadata["observation_space"])["high"][0] == pytest.approx(4.8)
    assert metadata["description"].endswith("episodes of gym:CartPole-v1, exported by amago")


@pytest.mark.system
def test_it_comes_in_again_as_it_was(tmp_path: Path, theirs: Path) -> None:
    place, found = theirs, []
    for number in range(2):
        lake, out = tmp_path / f"lake{number}", tmp_path / f"out{number}-v0"
        ingest.run(source(place), lake=lake)
        found.append([dict(each.columns) for each in trajectories(Lake(lake))])
        export.dataset(tiny(export={"to": str(out), "format": "minari"}).export, lake=lake)
        place = out
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_infos_that_came_in_go_out_as_infos(tmp_path: Path) -> None:
    place = with_infos(tmp_path / "theirs-v0", "hdf5", [4, 2])
    taken = {"source": {"name": f"minari:{place}", "columns": {"obs.qpos": "infos/qpos"}}}
    ingest.run(Settings.model_validate(taken), lake=tmp_path / "lake")
    export.dataset(tiny(export={"to": str(tmp_path / "ours-v0"), "format": "minari"}).export, lake=tmp_path / "lake")
    before, after = (json.loads((at / "data" / "metadata.json").read_text()) for at in (place, tmp_path / "ours-v0"))
    assert after["observation_space"] == before["observation_space"]
    with h5py.File(tmp_path / "ours-v0" / "data" / "main_data.hdf5") as file:
        for number, length in enumerate((4, 2)):
            np.testing.assert_array_equal(file[f"episode_{number}/infos/qpos"], numbers(number, length))
            assert "qpos" not in file[f"episode_{number}/observations"]
    ingest.run(source(tmp_path / "ours-v0"), lake=tmp_path / "again")
    one, other = ([dict(each.columns) for each in trajectories(Lake(tmp_path / n))] for n in ("lake", "again"))
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])
