"""AMAGO's NPZ files as a source."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.trajectory import Trajectory


def read(name: str, **settings: Any) -> list[Trajectory]:
    source = open_importer(SourceSettings(name=name, **settings))
    return [trajectory for batch in source.batches() for trajectory in batch]


def test_npz_of_amago(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(2):
        count = 4 + number
        actions = np.eye(3, dtype=np.float32)[rng.integers(0, 3, count)]
        resets = np.zeros((count + 1, 1), np.float32)
        resets[[0, 2]] = 1
        np.savez(
            tmp_path / f"t{number}.npz",
            _OBS_KEY_observation=np.arange((count + 1) * 2, dtype=np.float32).reshape(-1, 2),
            actions=actions,
            rews=np.arange(count, dtype=np.float32)[:, None],
            dones=(np.arange(count) == (count - 1 if number else -1))[:, None],
            time_idxs=np.arange(count + 1),
            goals=np.zeros((count + 1, 0)),
            rl2s=np.concatenate([resets, np.zeros((count + 1, 5), np.float32)], axis=1),
        )
    first, second = read(f"npz:{tmp_path}", num_actions=3)
    with np.load(tmp_path / "t0.npz") as file:
        assert first.columns["action"][1:].tolist() == file["actions"].argmax(1).tolist()
        np.testing.assert_array_equal(first.columns["obs"], file["_OBS_KEY_observation"])
    assert first.columns["reward"].tolist() == [0, 0, 1, 2, 3]
    assert first.columns["reset"].tolist() == [0, 0, 1, 0, 0]
    assert (first.columns["terminated"][-1], first.columns["truncated"][-1]) == (0, 1)
    assert (second.columns["terminated"][-1], second.columns["truncated"][-1]) == (1, 0)
    (tmp_path / "t1.npz").write_bytes((tmp_path / "t1.npz").read_bytes()[:300])
    with pytest.raises(IntegrityError, match=r"t1\.npz' is damaged"):
        read(f"npz:{tmp_path}", num_actions=3)
    np.savez(tmp_path / "t1.npz", _OBS_KEY_other=np.zeros((3, 2)), actions=np.zeros((2, 3)), rews=[0, 0], dones=[0, 0])
    with pytest.raises(
        InputMissing, match=r"other observations than the files before it: lacks obs; has also obs\.other"
    ):
        read(f"npz:{tmp_path}", num_actions=3)


def write_amago(path: Path, actions: np.ndarray) -> None:
    """One trajectory as AMAGO writes it."""
    count = len(actions)
    np.savez(
        path,
        _OBS_KEY_observation=np.arange((count + 1) * 3, dtype=np.float32).reshape(-1, 3),
        actions=actions.astype(np.float32),
        rews=np.ones((count, 1), np.float32),
        dones=np.zeros((count, 1), bool),
        time_idxs=np.arange(count + 1)[:, None],
        rl2s=np.zeros((count + 1, 1 + actions.shape[1]), np.float32),
    )


PENDULUM = Spaces(observation={"obs": Box(shape=(3,))}, action=Box(shape=(1,), low=(-2.0,), high=(2.0,)))


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (0.0, 7.5)])
def test_amagos_actions_are_within_one_whatever_the_bounds_of_the_environment(
    tmp_path: Path, bounds: tuple[float, float]
) -> None:
    actions = np.array([[-1.0], [0.25], [1.0]])
    write_amago(tmp_path / "t.npz", actions)
    low, high = ((bound,) for bound in bounds)
    spaces = Spaces(observation=PENDULUM.observation, action=Box(shape=(1,), low=low, high=high))
    (batch,) = open_importer(SourceSettings(name=f"npz:{tmp_path}"), spaces=spaces).batches()
    assert batch.columns["action"][1:].tolist() == actions.tolist()
    write_amago(tmp_path / "t.npz", actions * 2)
    with pytest.raises(InputMissing, match=r"an action is -2, outside.*these files hold actions in \[-1, 1\]"):
        list(open_importer(SourceSettings(name=f"npz:{tmp_path}"), spaces=spaces).batches())


def test_amagos_one_hot_actions_are_recognised_and_said(tmp_path: Path) -> None:
    told: list[Any] = []
    for number, choices in enumerate(([1], [0, 2, 1])):
        write_amago(tmp_path / f"t{number}.npz", np.eye(3)[choices])
    source = open_importer(SourceSettings(name=f"npz:{tmp_path}"), listener=told.append)
    assert source.spaces.action == Discrete(n=3)
    assert [event.text for event in told if "every action is one-hot, so it is read as one of 3" in event.text]
    (batch,) = source.batches()
    assert batch.columns["action"].tolist() == [0, 1, 0, 0, 2, 1]
    write_amago(tmp_path / "t2.npz", np.array([[0.5, 0, 0]]))  # then they are three numbers
    assert open_importer(SourceSettings(name=f"npz:{tmp_path}")).spaces.action.shape == (3,)
    with pytest.raises(InputMissing, match=r"t2\.npz': the action of step 0 is not one-hot"):
        read(f"npz:{tmp_path}", num_actions=3)


def test_a_buffer_of_amago_has_environments_and_times_in_its_file_names(tmp_path: Path) -> None:
    folder = tmp_path / "gridworlds" / "buffer"
    names = {"fifo/Maze9x9_0123abcd_1700000000.25": 3, "fifo/TMaze-10_89ab0123_1700000001.5": 4, "protected/by-hand": 5}
    for name, count in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_amago(folder / f"{name}.npz", np.linspace(-1, 1, count)[:, None])
    source = open_importer(SourceSettings(name=f"npz:{folder}"))
    infos = [trajectory.info for batch in source.batches() for trajectory in batch]
    assert (source.label, source.env) == ("gridworlds", "Maze9x9")
    assert [(info.env, info.task) for info in infos] == [
        ("Maze9x9", "Maze9x9"),
        ("TMaze-10", "TMaze-10"),
        ("gridworlds", "gridworlds"),
    ]
    assert [info.t_end for info in infos[:2]] == [1700000000.25, 1700000001.5]
    [named] = {trajectory.info.task for trajectory in read(f"npz:{folder}", task="all")}
    assert named == "all"


def test_pickled_trajectories_of_amago_are_named(tmp_path: Path) -> None:
    (tmp_path / "Maze_0123abcd_1700000000.25.traj").write_bytes(b"\x80")
    with pytest.raises(InputMissing, match=r"has no \.npz files; AMAGO's \.traj files are pickles"):
        read(f"npz:{tmp_path}")


def test_the_script_for_pickled_trajectories_makes_files_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in docs/migrating.md, with the one function of AMAGO that it calls: what it returns freezes to arrays."""
    rng = np.random.default_rng(0)
    episodes = {"Maze_0123abcd_1700000000.25": 4, "TMaze-10_89ab0123_1700000001.5": 7}
    frozen = {}
    for number, (name, count) in enumerate(episodes.items()):
        actions = np.eye(3, dtype=np.float32)[rng.integers(0, 3, count)]
        rewards = rng.normal(size=(count, 1)).astype(np.float32)
        frozen[f"{name}.traj"] = {
            "rl2s": np.vstack([np.zeros((1, 4), np.float32), np.hstack([rewards, actions])]),
            "time_idxs": np.arange(count + 1)[:, None],
            "rews": rewards,
            "dones": np.arange(count)[:, None] == (count - 1 if number else -1),
            "actions": actions,
            "_OBS_KEY_observation": rng.normal(size=(count + 1, 2)),
        }
        place = tmp_path / "buffer" / ("protected" if number else "fifo")
        place.mkdir(parents=True)
        (place / f"{name}.traj").write_bytes(b"\x80")
    loading = ModuleType("amago.loading")
    loading.load_traj_from_disk = lambda path: SimpleNamespace(  # type: ignore[attr-defined]
        freeze=lambda: SimpleNamespace(to_dict=lambda: frozen[Path(path).name])
    )
    monkeypatch.setitem(sys.modules, "amago", ModuleType("amago"))
    monkeypatch.setitem(sys.modules, "amago.loading", loading)
    monkeypatch.setattr(sys, "argv", ["convert.py", str(tmp_path)])
    page = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
    [script] = re.findall(r"```python\n# convert\.py\n(.*?)```", page, re.DOTALL)
    exec(script, {})

    found = {trajectory.info.env: trajectory for trajectory in read(f"npz:{tmp_path / 'buffer'}")}
    assert {name.partition("_")[0] for name in episodes} == set(found)
    for name, arrays in frozen.items():
        got = found[name.partition("_")[0]]
        assert got.info.t_end == float(name.removesuffix(".traj").rpartition("_")[2])
        np.testing.assert_array_equal(got.columns["action"][1:], arrays["actions"].argmax(1))
        np.testing.assert_array_equal(got.columns["reward"][1:], arrays["rews"][:, 0])
        np.testing.assert_array_equal(got.columns["obs"], arrays["_OBS_KEY_observation"].astype(np.float32))
        assert got.columns["terminated"].tolist() == [0, *arrays["dones"][:, 0]]
        assert got.columns["truncated"][-1] == (not arrays["dones"][-1, 0])


def ours(rows: int, **changes: Any) -> dict[str, np.ndarray]:
    """The arrays of a file as we export it, with a trajectory that ends in its last row."""
    columns = {
        "obs": np.zeros((rows, 2), np.float32),
        "action": np.zeros((rows, 1), np.float32),
        "reward": np.zeros(rows, np.float32),
        "terminated": np.arange(rows) == rows - 1,
        "truncated": np.zeros(rows, np.uint8),
        "reset": np.zeros(rows, np.uint8),
    }
    return columns | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"obs": np.zeros((4, 2), np.float32)}, "columns of different lengths: action 6, obs 4, reset 6"),
        ({"terminated": np.ones(5, np.uint8)}, "different lengths"),
        ({"truncated": np.array([0, 0, 1, 0, 0, 0])}, "ends before its last row"),
        ({"reset": np.array([0, 300, 0, 0, 0, 0])}, "'reset' is not 0 or 1, at step 1 of trajectory 0"),
    ],
)
def test_a_file_of_ours_that_does_not_agree_with_itself_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], words: str
) -> None:
    """Rows that one file lacks and another has too many of would move observations between trajectories."""
    np.savez(tmp_path / "a.npz", **ours(6, **changes))
    np.savez(tmp_path / "b.npz", **ours(6, obs=np.ones((8, 2), np.float32)) if "obs" in changes else ours(6))
    if not words:
        assert [one.length for one in read(f"npz:{tmp_path}")] == [5, 5]
        return
    with pytest.raises(IntegrityError, match=words):
        read(f"npz:{tmp_path}")
