"""Flat arrays under the names of other tools: OGBench, IQL, Stable-Baselines3, imitation, Gymnasium."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Discrete, MultiDiscrete, Space
from pipelines.lake.trajectory import Trajectory
from tests.formats.d4rl_data import write

STATES = np.arange(7, dtype=np.float32)[:, None] + np.array([0, 100], np.float32)  # two trajectories: 0..3, 4..6
ACTIONS = np.array([[0.1], [0.2], [0.3], [9.0], [0.5], [0.6], [9.0]], np.float32)  # 9: after the last state, of no step
ENDS = np.array([0, 0, 0, 1, 0, 0, 1], np.float32)


def save(path: Path, data: Mapping[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **data)
        return path
    return write(path, data)


def read(path: Path, **settings: Any) -> tuple[list[Trajectory], list[str]]:
    told: list[str] = []
    source = open_importer(
        SourceSettings(name=str(path), **settings),
        listener=lambda e: told.append(e.text) if isinstance(e, Notice) else None,
    )
    found = [trajectory for batch in source.batches() for trajectory in batch]
    assert source.dropped == 0
    source.close()
    return found, told


def column(trajectory: Trajectory, name: str) -> list[float]:
    return np.asarray(trajectory.columns[name], np.float64).reshape(trajectory.length + 1, -1)[:, 0].round(4).tolist()


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
@pytest.mark.parametrize("form", ["file", "compact", "regular"])
def test_ogbench_in_each_of_its_layouts(tmp_path: Path, form: str, suffix: str) -> None:
    data: dict[str, Any] = {"observations": STATES, "actions": ACTIONS, "terminals": ENDS, "qpos": STATES[:, :1]}
    if form == "compact":
        data |= {"terminals": np.array([0, 0, 1, 1, 0, 1, 1], np.float32), "valids": 1 - ENDS}
        data |= {"rewards": np.full(7, -1.0, np.float32), "masks": np.array([1, 1, 0, 0, 1, 1, 1], np.float32)}
    if form == "regular":
        steps = ENDS == 0
        following = np.roll(STATES, -1, axis=0)[steps]
        data = {"observations": STATES[steps], "actions": ACTIONS[steps], "next_observations": following}
        data["terminals"] = np.array([0, 0, 1, 0, 1], np.float32)
    (first, second), told = read(save(tmp_path / f"antmaze-large-navigate-v0.{suffix}", data))
    assert (column(first, "obs"), column(second, "obs")) == ([0, 1, 2, 3], [4, 5, 6])
    assert (column(first, "action")[1:], column(second, "action")[1:]) == ([0.1, 0.2, 0.3], [0.5, 0.6])
    assert column(first, "reward")[1:] == [-1 if form == "compact" else 0] * 3
    for trajectory in (first, second):
        assert (trajectory.columns["terminated"].any(), trajectory.columns["truncated"][-1]) == (False, 1)
        assert "final_observation" not in trajectory.info.tags
    assert any(("'valids'" if form == "compact" else "there are no rewards: they are 0") in text for text in told)


def transitions(**flags: Any) -> dict[str, Any]:
    """Three steps and two, with what each led to."""
    states = np.arange(5, dtype=np.float32)[:, None]
    following = np.array([1, 2, 20, 4, 40], np.float32)[:, None]
    rewards = np.arange(5, dtype=np.float32)
    data = {"observations": states, "actions": states / 10, "rewards": rewards, "next_observations": following}
    return data | {name: np.array(values) for name, values in flags.items()}


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
@pytest.mark.parametrize(
    ("flags", "terminated"),
    [
        ({"terminals": [0, 0, 1, 0, 0], "timeouts": [0, 0, 0, 0, 1]}, [1, 0]),
        ({"dones": [0, 0, 1, 0, 1], "timeouts": [0, 0, 0, 0, 1]}, [1, 0]),
        ({"dones": [[0], [0], [1], [0], [1]]}, [1, 1]),
        ({"masks": [1.0, 1, 0, 1, 1], "dones_float": [0.0, 0, 1, 0, 1]}, [1, 0]),
        ({"masks": [1.0, 1, 0, 1, 1], "terminals": [0.0, 0, 1, 0, 1]}, [1, 0]),
        ({"terminations": [0, 0, 1, 0, 0], "truncations": [0, 0, 0, 0, 1]}, [1, 0]),
        ({"terminated": [0, 0, 0, 0, 1], "truncated": [0, 0, 1, 0, 0]}, [0, 1]),
    ],
)
def test_transitions_with_the_flags_of_other_tools(
    tmp_path: Path, suffix: str, flags: dict[str, Any], terminated: list[int]
) -> None:
    found, told = read(save(tmp_path / f"x.{suffix}", transitions(**flags)))
    assert [column(trajectory, "obs") for trajectory in found] == [[0, 1, 2, 20], [3, 4, 40]]
    assert [column(trajectory, "reward")[1:] for trajectory in found] == [[0, 1, 2], [3, 4]]
    assert [int(trajectory.columns["terminated"][-1]) for trajectory in found] == terminated
    assert [int(trajectory.columns["truncated"][-1]) for trajectory in found] == [1 - over for over in terminated]
    assert any("'dones' are taken for terminations" in text for text in told) == (set(flags) == {"dones"})


def test_the_names_of_imitation(tmp_path: Path) -> None:
    data = transitions(dones=[0, 0, 1, 0, 1])
    renamed = {"obs": "observations", "acts": "actions", "next_obs": "next_observations", "dones": "dones"}
    path = save(tmp_path / "x.npz", {name: data[theirs] for name, theirs in renamed.items()})
    found, _ = read(path)
    assert [column(trajectory, "obs") for trajectory in found] == [[0, 1, 2, 20], [3, 4, 40]]
    assert not any(trajectory.columns["terminated"].any() for trajectory in found)


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
@pytest.mark.parametrize("count", [1, 3])
def test_environments_side_by_side_as_stable_baselines_keeps_them(tmp_path: Path, suffix: str, count: int) -> None:
    rows = 5
    states = np.arange(rows, dtype=np.float32)[:, None] + 100 * np.arange(count, dtype=np.float32)
    dones, timeouts = np.zeros((rows, count), np.float32), np.zeros((rows, count), np.float32)
    dones[1, 0], dones[3, -1], timeouts[3, -1] = 1, 1, 1
    data = {
        "observations": states[..., None],
        "next_observations": (states + 1)[..., None],
        "actions": np.repeat(states[..., None], 2, axis=2) / 1_000,
        "rewards": states,
        "dones": dones,
        "timeouts": timeouts,
    }
    found, _ = read(save(tmp_path / f"x.{suffix}", data))
    wanted = []
    for env in range(count):
        cuts = sorted({rows, *(np.flatnonzero(dones[:, env]) + 1).tolist()})
        for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
            over = bool(dones[end - 1, env] > timeouts[end - 1, env])
            wanted.append(([100.0 * env + at for at in range(start, end + 1)], over))
    assert [(column(one, "obs"), bool(one.columns["terminated"][-1])) for one in found] == wanted
    for one in found:
        assert column(one, "reward")[1:] == column(one, "obs")[:-1]
        np.testing.assert_allclose(one.columns["action"][1:, 1] * 1_000, one.columns["obs"][:-1, 0], rtol=1e-5)


def test_names_of_the_settings_come_first(tmp_path: Path) -> None:
    data = transitions(dones=[0, 0, 1, 0, 1], limits=[0, 0, 1, 0, 0], over=[0, 0, 0, 0, 1])
    found, told = read(save(tmp_path / "x.npz", data), columns={"terminated": "over", "truncated": "limits"})
    assert [int(trajectory.columns["terminated"][-1]) for trajectory in found] == [0, 1]
    assert not told


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"valids": np.ones(3)}, IntegrityError, "x.npz' has arrays of different lengths"),
        ({"terminals": np.zeros((7, 2))}, InputMissing, r"terminals has \(2,\) values a step, not one"),
        ({"masks": np.zeros((7, 2))}, InputMissing, r"masks has \(2,\) values a step, not one"),
        ({"rewards": np.zeros((7, 2))}, InputMissing, r"rewards has \(2,\) values a step, not one"),
        ({"rewards": np.zeros(())}, InputMissing, "rewards has no axis of steps"),
        ({"observations": np.array(["a"] * 7)}, InputMissing, "not numbers"),
    ],
)
def test_malformed_arrays_are_one_line(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    data = {"observations": STATES, "actions": ACTIONS.clip(-1, 1), "terminals": ENDS, **change}
    if "masks" in change:
        data["rewards"] = ENDS
    with pytest.raises(error, match=words):
        read(save(tmp_path / "x.npz", data))


@pytest.mark.parametrize(("value", "said"), [(0.1, True), (0.5, False)])
def test_float64_that_is_rounded_is_said_once(tmp_path: Path, value: float, said: bool) -> None:
    data = transitions(terminals=[0, 0, 1, 0, 1])
    data["actions"] = np.full((5, 1), value)
    data["rewards"] = np.full(5, value)
    told: list[str] = []
    path = save(tmp_path / "x.npz", data)
    source = open_importer(
        SourceSettings(name=str(path)), listener=lambda e: told.append(e.text) if isinstance(e, Notice) else None
    )
    for _ in range(2):
        assert sum(len(batch) for batch in source.batches()) == 2
    assert told == [f"'{path}': action, reward: float64 is rounded to float32"] * said


def test_whole_numbers_that_are_rounded_are_said(tmp_path: Path) -> None:
    data = transitions(terminals=[0, 0, 1, 0, 1])
    data["rewards"] = np.array([0, 2**24 + 1, 0, 0, 0])
    path = save(tmp_path / "x.npz", data)
    _, told = read(path)
    assert f"'{path}': reward: int64 is rounded to float32" in told


@pytest.mark.parametrize(
    ("actions", "settings", "space"),
    [
        (np.array([True, False, True, True, False]), {}, Discrete(n=2)),
        (np.ones((5, 3), bool), {}, MultiDiscrete(nvec=(2, 2, 2))),
        (np.array([0.0, 2.0, 1.0, 0.0, 0.0]), {"num_actions": 4}, Discrete(n=4)),
        (np.array([0, 2, 1, 0, 0]), {}, Discrete(n=3)),
    ],
)
def test_choices_are_whole_numbers_truth_values_or_as_many_as_the_settings_say(
    tmp_path: Path, actions: np.ndarray, settings: dict[str, Any], space: Space
) -> None:
    path = save(tmp_path / "x.npz", {**transitions(terminals=[0, 0, 1, 0, 1]), "actions": actions})
    source = open_importer(SourceSettings(name=str(path), **settings))
    assert source.spaces.action == space
    stored = np.concatenate([one.columns["action"][1:] for batch in source.batches() for one in batch])
    np.testing.assert_array_equal(stored.reshape(actions.shape), actions)


def test_arrays_that_no_file_of_its_size_can_hold_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file.create_dataset(name, (1 << 42,), "f4", chunks=(1 << 10,))
    with pytest.raises(IntegrityError, match=r"x.hdf5' claims 70,368,744,177,664 bytes of arrays, but has \d,\d+"):
        read(tmp_path / "x.hdf5", horizon=0)
