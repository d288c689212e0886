from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.formats.flat import episodes
from pipelines.formats.flat import reader as module
from pipelines.formats.flat.datasets import name_environment
from pipelines.formats.make import open_importer
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.trajectory import Trajectory
from tests.formats.d4rl_data import Literal, flat, literal, without, write

FAMILIES = {
    "mujoco v2": {
        **flat([5, 1, 7, 3]),
        "infos/qpos": np.zeros((16, 3)),
        "infos/action_log_probs": np.zeros(16),
        "metadata/algorithm": np.bytes_("SAC"),
        "metadata/iteration": np.int64(3),
        "metadata/policy/fc0/weight": np.zeros((4, 4)),
    },
    "replay, float64": flat([5, 1, 7, 3], dtype="float64"),
    "mujoco v0, without next observations": without(flat([4, 6, 2, 1]), "next_observations"),
    "adroit, two-dimensional rewards": without(flat([4, 6]), "next_observations")
    | {"rewards": np.arange(10, dtype=np.float32)[:, None], "infos/qpos": np.zeros((10, 2))},
    "kitchen, float terminals, no timeouts": without(flat([4, 6, 3], terminal={0: True, 1: True, 2: True}), "timeouts")
    | {"terminals": flat([4, 6, 3], terminal={0: True, 1: True, 2: True})["terminals"].astype(np.float32)},
    "antmaze, last episode unfinished": without(flat([4, 6, 5]), "next_observations")
    | {"terminals": np.arange(15) == 3, "timeouts": np.arange(15) == 9, "infos/goal": np.zeros((15, 2))},
    "last episode unfinished, next observations": flat([4, 6])
    | {"terminals": np.zeros(10, bool), "timeouts": np.arange(10) == 3},
}


def read(path: Path, **settings: object) -> list[Trajectory]:
    source = open_importer(SourceSettings(name=f"d4rl:{path}", **settings))
    try:
        return [trajectory for batch in source.batches() for trajectory in batch]
    finally:
        source.close()


def assert_is(found: Trajectory, wanted: Literal) -> None:
    columns = found.columns
    np.testing.assert_array_equal(columns["obs"], np.array(wanted.observations, dtype=np.float32))
    np.testing.assert_array_equal(columns["action"][1:], np.array(wanted.actions, dtype=np.float32))
    np.testing.assert_array_equal(columns["reward"][1:], np.array(wanted.rewards, dtype=np.float32))
    assert not columns["action"][0].any()
    assert columns["reward"][0] == 0
    assert not columns["terminated"][:-1].any()
    assert not columns["truncated"][:-1].any()
    assert (bool(columns["terminated"][-1]), bool(columns["truncated"][-1])) == (
        wanted.terminated,
        not wanted.terminated,
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": True}], ids=["plain", "gzip"])
def test_every_value_of_every_family(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    found, wanted = read(write(tmp_path / "x.hdf5", FAMILIES[name], **options)), literal(FAMILIES[name])
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_is(one, other)


def test_small_blocks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = without(flat([5, 1, 7, 3, 30, 1, 2] * 5), "next_observations")
    path = write(tmp_path / "x.hdf5", data, compression="gzip", chunks=True)
    monkeypatch.setattr(module, "BATCH_BYTES", 400)
    found, wanted = read(path), literal(data)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_is(one, other)


@pytest.mark.parametrize("one_in", [1, 10**9], ids=["kept", "read again"])
@pytest.mark.parametrize("block", [400, 1 << 20])
def test_next_observations_of_ends_are_the_same_kept_or_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_in: int, block: int
) -> None:
    whole = flat([40, 1, 60, 33], terminal={0: True, 1: False, 2: False, 3: False})
    there = np.arange(134) != 70  # a trajectory is cut where this row is missing
    data = {name: values[there] for name, values in whole.items()}
    path = write(tmp_path / "x.hdf5", data, compression="gzip", chunks=True)
    monkeypatch.setattr(module, "BATCH_BYTES", block)
    monkeypatch.setattr(episodes, "_ENDS_KEPT", one_in)
    found = read(path)
    assert [one.length for one in found] == [40, 1, 29, 30, 33]
    for one, last in zip(found, [39, 40, 69, 100, 133], strict=True):
        np.testing.assert_array_equal(one.columns["obs"][-1], whole["next_observations"][last])
        first = last + 1 - one.length
        np.testing.assert_array_equal(one.columns["obs"][:-1], whole["observations"][first : last + 1])


def test_numbers_are_those_of_the_file_wherever_one_begins(tmp_path: Path) -> None:
    data = without(flat([3, 1, 4, 5]), "next_observations")  # the second one, a step that times out, is left out
    source = open_importer(SourceSettings(name=f"d4rl:{write(tmp_path / 'x.hdf5', data)}"))
    whole = [trajectory for batch in source.batches() for trajectory in batch]
    assert [trajectory.info.tags["episode"] for trajectory in whole] == ["0", "2", "3"]
    assert source.dropped == 1
    (later,) = [trajectory for batch in source.batches(3) for trajectory in batch]
    np.testing.assert_array_equal(later.columns["obs"], whole[2].columns["obs"])


def test_the_reward_of_a_terminal_is_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    data = without(flat([4, 3], terminal={0: True, 1: False}), "next_observations")
    path = write(tmp_path / "x.hdf5", data)
    kept, cut = read(path)
    assert (kept.length, cut.length) == (4, 2)
    assert (kept.info.tags["final_observation"], cut.info.tags["final_observation"]) == (
        "repeated",
        "last step dropped",
    )
    dropped, _ = read(path, missing_final="drop")
    assert dropped.length == 3
    assert (dropped.columns["terminated"][-1], dropped.columns["truncated"][-1]) == (0, 1)


def test_a_horizon_ends_episodes_that_nothing_else_ends(tmp_path: Path) -> None:
    data = without(flat([10], terminal={0: False}), "next_observations", "timeouts")
    found = read(write(tmp_path / "x.hdf5", data), horizon=4)
    wanted = literal({**data, "timeouts": np.isin(np.arange(10), [3, 7])})
    assert [trajectory.length for trajectory in found] == [3, 3, 1]
    for one, other in zip(found, wanted, strict=True):
        assert_is(one, other)


def test_a_stream_without_ends_is_cut_and_loses_nothing(tmp_path: Path) -> None:
    data = without(flat([10], terminal={0: False}), "next_observations", "timeouts")
    found = read(write(tmp_path / "x.hdf5", data), longest=4, horizon=0)
    assert [trajectory.length for trajectory in found] == [4, 4, 1]
    for start, trajectory in zip((0, 4, 8), found, strict=True):
        stop = start + trajectory.length
        np.testing.assert_array_equal(trajectory.columns["obs"], data["observations"][start : stop + 1])
        np.testing.assert_array_equal(trajectory.columns["action"][1:], data["actions"][start:stop])
        assert trajectory.columns["truncated"][-1] == 1


def told(path: Path, horizon: int | None = None, **settings: object) -> tuple[list[int], list[str]]:
    """The lengths of the trajectories, and what was said."""
    events: list[Notice] = []
    source = open_importer(SourceSettings(name=f"d4rl:{path}", **settings), horizon=horizon, listener=events.append)
    found = [trajectory.length for batch in source.batches() for trajectory in batch]
    source.close()
    return found, [event.text for event in events]


@pytest.mark.parametrize("timeouts", ["absent", "all zero"])
@pytest.mark.parametrize(
    ("label", "limit", "horizon"), [("halfcheetah_medium-v2", 1000, None), ("maze2d-umaze-v1", 300, None), ("x", 7, 7)]
)
def test_episodes_without_timeouts_end_at_the_time_limit(
    tmp_path: Path, timeouts: str, label: str, limit: int, horizon: int | None
) -> None:
    data = without(flat([limit] * 3, terminal=dict.fromkeys(range(3), False)), "next_observations", "timeouts")
    if timeouts == "all zero":
        data["timeouts"] = np.zeros(3 * limit, bool)
    path = write(tmp_path / f"{label}.hdf5", data)
    lengths, texts = told(path, horizon)
    assert lengths == [limit - 1] * 3  # what the last step led to is in no row
    assert any(f"cut after {limit:,} steps" in text for text in texts)


def test_without_timeouts_or_a_known_limit_the_horizon_is_asked_for(tmp_path: Path) -> None:
    data = without(flat([5, 5], terminal={0: False, 1: False}), "next_observations", "timeouts")
    path = write(tmp_path / "x.hdf5", data)
    with pytest.raises(InputMissing, match=r"no timeouts.*would be joined.*source\.horizon=STEPS"):
        read(path)
    assert told(path, horizon=0)[0] == [9]
    assert told(path, horizon=5)[0] == [4, 4]


def test_where_observations_do_not_follow_each_other_a_trajectory_is_cut(tmp_path: Path) -> None:
    whole = flat([6, 8], terminal={0: False, 1: False})
    left_out = np.ones(14, bool)
    left_out[[2, 9, 10]] = False
    data = without({name: values[left_out] for name, values in whole.items()}, "timeouts")
    path = write(tmp_path / "x.hdf5", data)
    lengths, texts = told(path)
    assert lengths == [2, 3, 3, 3]
    assert any("in 3 of 10 rows the next observation is not that of the next row" in text for text in texts)
    second = read(path)[1]
    np.testing.assert_array_equal(second.columns["obs"][:-1], whole["observations"][3:6])
    np.testing.assert_array_equal(second.columns["obs"][-1], whole["next_observations"][5])
    assert (second.columns["terminated"][-1], second.columns["truncated"][-1]) == (0, 1)


def test_a_shuffled_buffer_is_taken_as_transitions_of_one_step(tmp_path: Path) -> None:
    whole = flat([40, 60])
    order = np.random.default_rng(0).permutation(100)
    path = write(tmp_path / "x.hdf5", without({name: values[order] for name, values in whole.items()}, "timeouts"))
    lengths, texts = told(path)
    assert lengths == [1] * 100
    assert any("a buffer of transitions" in text for text in texts)
    found = read(path)
    for trajectory, row in zip(found, order, strict=True):
        wanted = [whole["observations"][row], whole["next_observations"][row]]
        np.testing.assert_array_equal(trajectory.columns["obs"], wanted)
        assert bool(trajectory.columns["terminated"][-1]) == whole["terminals"][row]


def test_rounding_between_an_observation_and_its_copy_is_no_cut(tmp_path: Path) -> None:
    data = flat([30], terminal={0: False})
    data["next_observations"] = data["next_observations"] * np.float32(1 + 1e-5)
    assert told(write(tmp_path / "x.hdf5", data)) == ([30], [])


def test_next_observations_that_are_but_the_next_rows_do_not_cross_a_time_limit(tmp_path: Path) -> None:
    data = without(flat([10, 10], terminal={0: False, 1: False}), "timeouts")
    data["next_observations"] = np.roll(data["observations"], -1, axis=0)
    found = read(write(tmp_path / "x.hdf5", data), horizon=10)
    assert [trajectory.length for trajectory in found] == [9, 10]
    np.testing.assert_array_equal(found[0].columns["obs"], data["observations"][:10])


def test_metadata_and_names_are_told(tmp_path: Path) -> None:
    (first, *_) = read(write(tmp_path / "hopper_medium-v2.hdf5", FAMILIES["mujoco v2"]))
    assert (first.info.env, first.info.task, first.info.source) == ("hopper", "hopper_medium-v2", "d4rl")
    assert first.info.tags == {"algorithm": "SAC", "iteration": "3", "episode": "0"}
    (first, *_) = read(tmp_path / "hopper_medium-v2.hdf5", task="medium")
    assert first.info.task == "medium"


def test_arrays_may_become_observations(tmp_path: Path) -> None:
    goals = np.repeat(np.arange(9, dtype=np.float32), 2).reshape(9, 2)
    path = write(tmp_path / "x.hdf5", {**flat([4, 5]), "infos/goal": goals})
    found = read(path, columns={"obs.goal": "infos/goal"})
    np.testing.assert_array_equal(found[1].columns["obs.goal"], goals[[4, 5, 6, 7, 8, 8]])


def test_whole_numbers_are_discrete_actions(tmp_path: Path) -> None:
    data = {**flat([4, 5]), "actions": np.array([0, 3, 1, 2, 0, 0, 1, 1, 2])}
    source = open_importer(SourceSettings(name=f"d4rl:{write(tmp_path / 'x.hdf5', data)}"))
    assert source.spaces.action == Discrete(n=4)
    (batch,) = source.batches()
    assert batch.columns["action"].tolist() == [0, 0, 3, 1, 2, 0, 0, 0, 1, 1, 2]


def test_actions_are_stored_within_one(tmp_path: Path) -> None:
    data = flat([4, 5])
    path = write(tmp_path / "x.hdf5", {**data, "actions": data["actions"] * 2 + 1})
    found = read(path, action_low=(-1.0, -1.0), action_high=3.0)
    np.testing.assert_allclose(found[0].columns["action"][1:], data["actions"][:4], rtol=1e-6, atol=1e-7)
    with pytest.raises(InputMissing, match=r"outside its bounds, at step \d of trajectory 0.*source\.action_low"):
        read(path)
    assert np.abs(read(path, clip_actions=True)[0].columns["action"]).max() == 1


def test_the_environment_decides_the_spaces(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5", flat([4, 5]))
    wanted = Spaces(observation={"obs": Box(shape=(4,))}, action=Box(shape=(2,), low=(-3.0,) * 2, high=(3.0,) * 2))
    source = open_importer(SourceSettings(name=f"d4rl:{path}"), spaces=wanted)
    assert source.spaces == wanted
    other = Spaces(observation={"obs": Box(shape=(5,))}, action=wanted.action)
    with pytest.raises(InputMissing, match="obs: 4 values in the source, 5 values of the environment"):
        open_importer(SourceSettings(name=f"d4rl:{path}"), spaces=other)


@pytest.mark.parametrize("column", ["observations", "next_observations", "actions", "rewards"])
def test_what_is_not_finite_is_refused_with_its_place(tmp_path: Path, column: str) -> None:
    data = flat([4, 5])
    data[column].reshape(9, -1)[8, 0] = np.nan
    with pytest.raises(IntegrityError, match=r"not finite, at step \d of trajectory 1"):
        read(write(tmp_path / "x.hdf5", data))


def test_a_file_that_is_cut_in_half_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5", flat([500, 500]), compression="gzip")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(IntegrityError, match="damaged"):
        read(path)
    path.write_bytes(b"no such format")
    with pytest.raises(IntegrityError, match="not an HDF5 file"):
        read(path)


def test_damaged_chunks_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5", flat([5000, 5000]), compression="gzip", chunks=True)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = bytes(4000)
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="damaged"):
        read(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5", without(flat([4]), "rewards", "terminals"))
    with pytest.raises(InputMissing, match=r"lacks 'rewards', 'terminals'.*it has: actions"):
        read(path)
    with pytest.raises(InputMissing, match="'infos/x' is missing"):
        read(write(tmp_path / "z.hdf5", flat([4])), columns={"obs.x": "infos/x"})
    with pytest.raises(InputMissing, match="no file"):
        read(tmp_path / "nothing.hdf5")
    uneven = {**flat([4]), "rewards": np.zeros(3)}
    with pytest.raises(IntegrityError, match=r"different lengths.*rewards 3"):
        read(write(tmp_path / "y.hdf5", uneven))


def test_names_of_datasets() -> None:
    assert [
        name_environment(name) for name in ("hopper_medium-v2", "halfcheetah-full-replay-v2", "pen-human-v1", "own")
    ] == [
        "hopper",
        "halfcheetah",
        "pen",
        "own",
    ]
    with pytest.raises(InputMissing, match="did you mean 'd4rl:hopper-medium-v2'"):
        open_importer(SourceSettings(name="d4rl:hopper-medum-v2"))


def test_what_has_no_next_value_is_repeated_and_said(tmp_path: Path) -> None:
    goals = np.arange(9, dtype=np.float32).reshape(9, 1)
    path = write(tmp_path / "x.hdf5", {**flat([4, 5], terminal={0: False, 1: True}), "infos/goal": goals})
    columns = {"obs.goal": "infos/goal"}
    lengths, texts = told(path, columns=columns)
    assert lengths == [4, 5]
    assert any("of obs.goal the value after an episode's last step is unknown" in text for text in texts)
    assert told(path, columns=columns, missing_final="drop") == ([3, 4], [])
    pieces = read(path, columns=columns, longest=2)  # where the next row goes on, it is known
    assert pieces[0].columns["obs.goal"].ravel().tolist() == [0, 1, 2]


def test_whole_numbers_beyond_int32_do_not_fit(tmp_path: Path) -> None:
    data = {name: values for name, values in flat([4]).items() if "observations" not in name}
    path = write(tmp_path / "x.hdf5", {**data, "observations": np.full((4, 2), 2**40)})
    with pytest.raises(InputMissing, match="'obs' cannot be stored as int32"):
        read(path)
