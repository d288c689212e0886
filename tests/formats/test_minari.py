"""Minari's layouts, made here by hand and, where it is installed, by minari itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Spaces
from pipelines.lake.trajectory import Trajectory
from tests.envs.spaces import convert_spaces

h5py = pytest.importorskip("h5py")

OBSERVATION = {
    "type": "Dict",
    "subspaces": {
        "goal": {"type": "Box", "dtype": "float64", "shape": [2], "low": [0, 0], "high": [1, 1]},
        "inner": {"type": "Dict", "subspaces": {"kind": {"type": "Discrete", "dtype": "int64", "start": 2, "n": 5}}},
        "bits": {"type": "MultiBinary", "n": 3},
    },
}
ACTION = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-2.0, 0.0], "high": [2.0, 4.0]}


def episodes(lengths: list[int]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "observations": {
                "goal": rng.random((length + 1, 2)),
                "inner": {"kind": rng.integers(2, 7, length + 1)},
                "bits": rng.integers(0, 2, (length + 1, 3)).astype(np.int8),
            },
            "actions": rng.uniform([-2, 0], [2, 4], (length, 2)).astype(np.float32),
            "rewards": rng.standard_normal(length),
            "terminations": np.arange(length) == (length - 1 if number % 2 == 0 else -1),
            "truncations": np.arange(length) == (length - 1 if number % 2 else -1),
            "infos": {"success": np.arange(length + 1) == (2 if number == 0 else -1)},
        }
        for number, length in enumerate(lengths)
    ]


def dataset(folder: Path, form: str, lengths: list[int], **more: Any) -> Path:
    """A dataset as minari lays it out."""
    data = folder / "data"
    data.mkdir(parents=True)
    made = episodes(lengths)
    if form == "hdf5":
        with h5py.File(data / "main_data.hdf5", "w") as file:
            for number, episode in enumerate(made):
                group = file.create_group(f"episode_{number}")
                group.attrs.update({"id": number, "seed": 100 + number, "total_steps": len(episode["rewards"])})
                _put(group, episode)
    else:
        for number, episode in enumerate(made):
            (data / str(number)).mkdir()
            table = pa.table(_arrow(episode))
            if form == "arrow":
                with pa.ipc.new_file(str(data / str(number) / "part-0.arrow"), table.schema) as writer:
                    writer.write_table(table)
            else:
                pq.write_table(table, data / str(number) / "part-0.parquet")
            about = {"id": number, "seed": 100 + number, "total_steps": len(episode["rewards"])}
            (data / str(number) / "metadata.json").write_text(json.dumps(about))
    metadata = {
        "total_episodes": len(lengths),
        "total_steps": sum(lengths),
        "data_format": form,
        "observation_space": json.dumps(OBSERVATION),
        "action_space": json.dumps(ACTION),
        "env_spec": json.dumps({"id": "Fetch-v9"}),
        "dataset_id": "ns/fetch-v0",
        "author": ["b", "a"],
        "minari_version": "0.5.3",
        **more,
    }
    (data / "metadata.json").write_text(json.dumps(metadata))
    return folder


def _put(group: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _put(group.create_group(name), value)
        else:
            group.create_dataset(name, data=value)


def _arrow(episode: dict[str, Any]) -> dict[str, pa.Array]:
    seen, pad = episode["observations"], np.zeros((1, 2), np.float32)
    fixed = lambda array: pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])  # noqa: E731
    observed = pa.StructArray.from_arrays(
        [
            fixed(seen["goal"]),
            pa.StructArray.from_arrays([pa.array(seen["inner"]["kind"])], ["kind"]),
            fixed(seen["bits"]),
        ],
        ["goal", "inner", "bits"],
    )
    padded = {name: pa.array(np.append(episode[name], episode[name].dtype.type(0))) for name in _SERIES}
    infos = pa.StructArray.from_arrays([pa.array(episode["infos"]["success"])], ["success"])
    return {"observations": observed, "actions": fixed(np.concatenate([episode["actions"], pad])), **padded} | {
        "infos": infos
    }


_SERIES = ("rewards", "terminations", "truncations")


def read(place: Path | str, **settings: Any) -> tuple[Spaces, list[Trajectory]]:
    source = open_importer(SourceSettings(name=f"minari:{place}", **settings))
    try:
        return source.spaces, [trajectory for batch in source.batches() for trajectory in batch]
    finally:
        source.close()


@pytest.mark.parametrize("form", ["hdf5", "arrow", "parquet"])
def test_every_value_seed_and_success(tmp_path: Path, form: str) -> None:
    found_spaces, found = read(dataset(tmp_path / "x-v0", form, [4, 1, 6]))
    theirs = spaces.Dict(
        {
            "goal": spaces.Box(0, 1, (2,), np.float64),
            "inner": spaces.Dict({"kind": spaces.Discrete(5, start=2)}),
            "bits": spaces.MultiBinary(3),
        }
    )
    action = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 4.0], np.float32))
    wanted_spaces = convert_spaces(theirs, action, name="x")
    assert dict(found_spaces.observation) == dict(wanted_spaces.observation)
    assert found_spaces.action == wanted_spaces.action
    assert len(found) == 3
    for number, (trajectory, wanted) in enumerate(zip(found, episodes([4, 1, 6]), strict=True)):
        columns, seen = trajectory.columns, wanted["observations"]
        np.testing.assert_array_equal(columns["obs.goal"], seen["goal"].astype(np.float32))
        np.testing.assert_array_equal(columns["obs.inner.kind"], seen["inner"]["kind"] - 2)
        np.testing.assert_array_equal(columns["obs.bits"], seen["bits"])
        np.testing.assert_allclose(columns["action"][1:], (wanted["actions"] - [0, 2]) / 2, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(columns["reward"][1:], wanted["rewards"].astype(np.float32))
        assert (columns["terminated"][-1], columns["truncated"][-1]) == (number % 2 == 0, number % 2)
        info = trajectory.info
        assert (info.env, info.seed, info.success) == ("gym:Fetch-v9", 100 + number, number == 0)
        assert (info.tags["dataset_id"], info.tags["author"]) == ("ns/fetch-v0", "a, b")
        assert info.tags["episode"] == str(number)


def test_spaces_are_those_that_the_environment_would_have(tmp_path: Path) -> None:
    serialization = pytest.importorskip("minari.serialization")
    observation = spaces.Dict(
        {
            "text": spaces.Text(7),
            "pair": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Box(0, 255, (40, 40, 3), np.uint8)]),
            "many": spaces.MultiDiscrete([[2, 3], [4, 5]]),
            "flags": spaces.Box(0, 1, (3,), np.bool_),
            "whole": spaces.Box(-5, 5, (2,), np.int16),
        }
    )
    for action in (spaces.Discrete(4, start=1), spaces.MultiDiscrete([3, 4]), spaces.Box(-np.inf, np.inf, (2,))):
        folder = dataset(
            tmp_path / f"{action.__class__.__name__}-v0",
            "hdf5",
            [2],
            observation_space=serialization.serialize_space(observation),
            action_space=serialization.serialize_space(action),
        )
        source = open_importer(SourceSettings(name=f"minari:{folder}"))
        assert source.spaces == convert_spaces(observation, action, name="x")


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_what_minari_collects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, env: str) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    collector = minari.DataCollector(gymnasium.make(env, max_episode_steps=30), data_format=form)
    for seed in range(3):
        collector.reset(seed=seed)
        collector.action_space.seed(seed)
        over = False
        while not over:
            _, _, terminated, truncated, _ = collector.step(collector.action_space.sample())
            over = terminated or truncated
    made = collector.create_dataset("ns/mine-v0")
    collector.close()
    _, found = read("ns/mine-v0")
    for trajectory, episode in zip(found, made.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(trajectory.columns["obs"], episode.observations)
        actions = episode.actions / 2 if env.startswith("Pendulum") else episode.actions
        np.testing.assert_allclose(trajectory.columns["action"][1:], actions, rtol=1e-6)
        np.testing.assert_array_equal(trajectory.columns["reward"][1:], episode.rewards.astype(np.float32))
        assert trajectory.columns["terminated"][-1] == episode.terminations[-1]
        assert trajectory.info.env == f"gym:{env}"
    assert [trajectory.info.seed for trajectory in found] == [0, 1, 2]


def test_what_is_damaged_or_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "none"))
    with pytest.raises(InputMissing, match="no Minari dataset 'no such thing'"):
        read("no such thing")
    folder = dataset(tmp_path / "a-v0", "hdf5", [4, 4])
    path = folder / "data" / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(IntegrityError, match="damaged"):
        read(folder)
    folder = dataset(tmp_path / "b-v0", "arrow", [4, 4])
    part = folder / "data" / "1" / "part-0.arrow"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(IntegrityError, match="damaged"):
        read(folder)
    folder = dataset(tmp_path / "c-v0", "hdf5", [4, 4], total_episodes=3)
    with pytest.raises(InputMissing, match="'episode_2' is missing"):
        read(folder)
    folder = dataset(tmp_path / "d-v0", "hdf5", [4], action_space="{not json")
    with pytest.raises(IntegrityError, match="action_space is damaged"):
        read(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputMissing, match="not a Minari dataset"):
        read(tmp_path / "empty")


def test_lengths_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "a-v0", "hdf5", [4, 4])
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        values = file["episode_1/actions"][:-1]
        del file["episode_1/actions"]
        file["episode_1"].create_dataset("actions", data=values)
    with pytest.raises(IntegrityError, match="episode 1 has 4 rewards, 3 actions and 5 observations"):
        read(folder)


def test_episodes_of_different_spaces_are_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "a-v0", "hdf5", [4, 4])
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1/observations/goal"]
        file["episode_1/observations"].create_dataset("goal", data=np.zeros((5, 3)))
    with pytest.raises(InputMissing, match=r"'obs\.goal' has 3 float64 values a step in trajectory 1, 2 expected"):
        read(folder)


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
def test_pictures_that_are_jpeg(tmp_path: Path, form: str) -> None:
    pytest.importorskip("PIL")
    minari = pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    pictures = np.full((4, 40, 40, 3), 77, np.uint8)
    buffer = EpisodeBuffer(
        observations=pictures, actions=np.array([0, 1, 1]), rewards=[0.0, 1.0, 2.0],
        terminations=[False, False, True], truncations=[False] * 3,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
        minari.create_dataset_from_buffers(
            "ns/pictures-v0", [buffer], data_format=form, action_space=spaces.Discrete(2),
            observation_space=spaces.Box(0, 255, (40, 40, 3), np.uint8),
        )  # fmt: skip
        _, (found,) = read("ns/pictures-v0")
    assert np.abs(found.columns["obs"].astype(int) - 77).max() <= 1


def numbers(row: int, length: int) -> np.ndarray:
    return np.arange(3 * (length + 1), dtype=np.float64).reshape(-1, 3) + 100 * row


def with_infos(folder: Path, form: str, lengths: list[int]) -> Path:
    """A dataset whose episodes have numeric infos, nested ones too, and a text."""
    place = dataset(folder, form, lengths)
    for number, length in enumerate(lengths):
        qpos, count = numbers(number, length), np.arange(length + 1)
        if form == "hdf5":
            with h5py.File(place / "data" / "main_data.hdf5", "a") as file:
                file[f"episode_{number}/infos/qpos"] = qpos
                file[f"episode_{number}/infos/deep/count"] = count
                file[f"episode_{number}/infos/word"] = ["x"] * (length + 1)
            continue
        path = place / "data" / str(number) / "part-0.parquet"
        table = pq.read_table(path)
        fields = [
            pa.array(qpos.tolist(), pa.list_(pa.float64(), 3)),
            pa.StructArray.from_arrays([pa.array(count)], ["count"]),
            pa.array(["x"] * (length + 1)),
            table["infos"].combine_chunks().field("success"),
        ]
        infos = pa.StructArray.from_arrays(fields, ["qpos", "deep", "word", "success"])
        pq.write_table(table.set_column(table.column_names.index("infos"), "infos", infos), path)
    return place


@pytest.mark.parametrize("form", ["hdf5", "parquet"])
def test_numeric_infos_become_observations_when_asked_for(tmp_path: Path, form: str) -> None:
    place = with_infos(tmp_path / "theirs-v0", form, [4, 2])
    spaces, found = read(place, columns={"obs.qpos": "infos/qpos", "obs.count": "infos/deep/count"})
    assert spaces.observation["obs.qpos"].shape == (3,)
    for number, one in enumerate(found):
        np.testing.assert_array_equal(one.columns["obs.qpos"], numbers(number, one.length))
        assert one.columns["obs.count"].tolist() == list(range(one.length + 1))
    told: list[str] = []
    settings = SourceSettings(name=f"minari:{place}", columns={"obs.qpos": "infos/qpos"})
    open_importer(settings, listener=lambda event: told.append(getattr(event, "text", ""))).close()
    assert any("infos left out: deep/count (source.columns" in text for text in told)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"obs.x": "infos/word"}, "its numeric infos: deep/count, qpos, success"),
        ({"obs.x": "observations/goal"}, "only adds infos"),
        ({"action": "infos/qpos"}, "only adds infos"),
        ({"obs.goal": "infos/qpos"}, "there is a 'obs.goal' already"),
    ],
)
def test_infos_that_cannot_be_taken_are_refused(tmp_path: Path, columns: dict[str, str], words: str) -> None:
    place = with_infos(tmp_path / "theirs-v0", "hdf5", [4])
    with pytest.raises(InputMissing) as caught:
        read(place, columns=columns)
    assert words in f"{caught.value.message} {caught.value.hint}"
