"""Tables, NPZ folders and a user's own code as sources."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config.source import SourceSettings
from pipelines.errors import AmagoError, InputMissing, IntegrityError, StageFailed, UsageError
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.trajectory import Trajectory
from pipelines.sources import tables as module
from pipelines.sources.make import open_source

LENGTHS = [3, 1, 5, 2]
MAPPING = {
    "obs.where": "x, y",
    "obs.seen": "vector",
    "action": "force",
    "reward": "points",
    "terminated": "over",
    "truncated": "timeout",
    "episode": "run",
}


def steps(lengths: list[int]) -> dict[str, Any]:
    rng, count, ends = np.random.default_rng(0), sum(lengths), np.cumsum(lengths) - 1
    over, cut = np.zeros(count, bool), np.zeros(count, bool)
    over[ends[::2]], cut[ends[1::2]] = True, True
    return {
        "run": np.repeat([f"r{i}" for i in range(len(lengths))], lengths),
        "x": rng.standard_normal(count),
        "y": rng.standard_normal(count),
        "vector": rng.standard_normal((count, 3)).astype(np.float32),
        "force": rng.uniform(-1, 1, count),
        "points": rng.standard_normal(count),
        "over": over,
        "timeout": cut,
    }


def table(data: dict[str, Any]) -> pa.Table:
    return pa.table({name: pa.array(list(values) if values.ndim > 1 else values) for name, values in data.items()})


def read(name: str, **settings: Any) -> list[Trajectory]:
    source = open_source(SourceSettings(name=name, **settings))
    return [trajectory for batch in source.batches() for trajectory in batch]


def write_parts(folder: Path, form: str, whole: pa.Table) -> str:
    """Two files that divide an episode."""
    for number, part in enumerate((whole.slice(0, 6), whole.slice(6))):
        path = folder / f"part{number}.{form}"
        if form == "parquet":
            pq.write_table(part, path, row_group_size=2)
        else:
            with pa.ipc.new_file(str(path), part.schema) as writer:
                writer.write_table(part, max_chunksize=2)
    return f"{form}:{folder}/part*.{form}"


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("by", ["episode", "flags"])
def test_columns_are_mapped_and_episodes_found_across_files(
    tmp_path: Path, form: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    data = steps(LENGTHS)
    mapping = MAPPING if by == "episode" else {k: v for k, v in MAPPING.items() if k != "episode"}
    found = read(write_parts(tmp_path, form, table(data)), columns=mapping)
    # The second one times out in its only step, of which nothing is left; the fourth loses its last one.
    assert [trajectory.length for trajectory in found] == [3, 5, 1]
    for trajectory, (start, stop) in zip(found, [(0, 3), (4, 9), (9, 10)], strict=True):
        columns, rows = trajectory.columns, np.append(np.arange(start, stop), stop - 1 if stop < 10 else stop)
        np.testing.assert_array_equal(columns["obs.where"], np.stack([data["x"], data["y"]], 1)[rows].astype("f4"))
        np.testing.assert_array_equal(columns["obs.seen"], data["vector"][rows])
        np.testing.assert_array_equal(columns["action"][1:], data["force"][start:stop].astype("f4"))
        np.testing.assert_array_equal(columns["reward"][1:], data["points"][start:stop].astype("f4"))
        assert columns["terminated"][-1] == (stop < 10)
    assert [trajectory.info.tags["episode"] for trajectory in found] == ["0", "2", "3"]
    assert found[1].info.tags.get("id") == ("r2" if by == "episode" else None)


def test_next_observations_lose_nothing(tmp_path: Path) -> None:
    data = steps(LENGTHS)
    after = data["vector"] + 1
    whole = table({**data, "after": after})
    mapping = {k: v for k, v in MAPPING.items() if k != "obs.where"} | {"next_obs.seen": "after"}
    found = read(write_parts(tmp_path, "parquet", whole), columns=mapping)
    assert [trajectory.length for trajectory in found] == LENGTHS
    for trajectory, end in zip(found, np.cumsum(LENGTHS) - 1, strict=True):
        np.testing.assert_array_equal(trajectory.columns["obs.seen"][-1], after[end])


def test_rows_of_arrival_are_taken_as_they_are(tmp_path: Path) -> None:
    data = {
        "episode": np.array([7, 7, 7, 9, 9]),
        "obs": np.arange(10.0).reshape(5, 2),
        "action": np.array([0, 1, 2, 0, 1]),
        "reward": np.array([0.0, 1, 2, 0, 5]),
        "terminated": np.array([0, 0, 1, 0, 0]),
    }
    pq.write_table(table(data), tmp_path / "x.parquet")
    first, second = read(f"parquet:{tmp_path / 'x.parquet'}", layout="arrival")
    np.testing.assert_array_equal(first.columns["obs"], data["obs"][:3])
    assert first.columns["action"].tolist() == [0, 1, 2]
    assert second.columns["reward"].tolist() == [0, 5]
    assert (first.columns["terminated"][-1], second.columns["terminated"][-1]) == (1, 0)
    assert second.columns["truncated"][-1] == 1


def test_a_table_without_an_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST_ROWS", 3)
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    data = {**steps([11]), "over": np.zeros(11, bool), "timeout": np.zeros(11, bool)}
    found = read(write_parts(tmp_path, "parquet", table(data)), columns=MAPPING, longest=4)
    assert [trajectory.length for trajectory in found] == [4, 4, 2]
    np.testing.assert_array_equal(found[0].columns["obs.seen"], data["vector"][:5])
    np.testing.assert_array_equal(found[2].columns["obs.seen"], data["vector"][8:])


def _with(name: str, values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda data: {**data, name: values}


@pytest.mark.parametrize(
    ("change", "mapping", "error", "words"),
    [
        (_with("x", pa.array([1.0, None] + [1.0] * 9)), MAPPING, IntegrityError, "a value is missing"),
        (_with("points", np.append(np.inf, np.zeros(10))), MAPPING, IntegrityError, "'reward' is not finite"),
        (_with("force", np.full(11, 1.5)), MAPPING, InputMissing, "outside its bounds"),
        (_with("y", np.zeros(11)), {**MAPPING, "obs.z": "depth"}, InputMissing, "lacks 'depth'.*it has: run, x"),
        (_with("y", np.zeros(11)), {}, InputMissing, "lacks 'action', 'reward', 'obs', 'episode' or 'terminated'"),
        (_with("y", np.zeros(11)), {**MAPPING, "acton": "x"}, InputMissing, "no such column of ours: acton"),
    ],
)
def test_a_bad_table_is_refused(
    tmp_path: Path, change: Any, mapping: dict[str, str], error: type[AmagoError], words: str
) -> None:
    data = change(steps(LENGTHS))
    arrays = {n: v if isinstance(v, pa.Array) else pa.array(list(v) if v.ndim > 1 else v) for n, v in data.items()}
    pq.write_table(pa.table(arrays), tmp_path / "x.parquet")
    with pytest.raises(error, match=words):
        read(f"parquet:{tmp_path / 'x.parquet'}", columns=mapping)


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    name = write_parts(tmp_path, "parquet", table(steps(LENGTHS)))
    path = tmp_path / "part1.parquet"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(IntegrityError, match="damaged"):
        read(name, columns=MAPPING)
    with pytest.raises(InputMissing, match="no parquet file matches"):
        read("parquet:nothing/*.parquet")


def test_files_of_different_spaces_are_refused(tmp_path: Path) -> None:
    name = write_parts(tmp_path, "parquet", table(steps(LENGTHS)))
    wider = {**steps(LENGTHS), "points": np.array(["a"] * 11)}
    pq.write_table(table(wider), tmp_path / "part2.parquet")
    with pytest.raises(InputMissing, match=r"part2\.parquet' has other columns than .*points: string"):
        read(name, columns=MAPPING)
    for number, size in enumerate((2, 3)):
        file = {"_OBS_KEY_observation": np.zeros((3, size)), "actions": np.zeros((2, 1)), "rews": [0, 0]}
        np.savez(tmp_path / f"{number}.npz", **file, dones=[False, False])
    with pytest.raises(InputMissing, match="'obs' has 3 float64 values a step in trajectory 1, 2 expected"):
        read(f"npz:{tmp_path}")


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
    (batch,) = open_source(SourceSettings(name=f"npz:{tmp_path}"), spaces=spaces).batches()
    assert batch.columns["action"][1:].tolist() == actions.tolist()
    write_amago(tmp_path / "t.npz", actions * 2)
    with pytest.raises(InputMissing, match=r"an action is -2, outside its bounds.*these files hold actions in \[-1, 1\]"):
        list(open_source(SourceSettings(name=f"npz:{tmp_path}"), spaces=spaces).batches())


def test_amagos_one_hot_actions_are_recognised_and_said(tmp_path: Path) -> None:
    told: list[Any] = []
    for number, choices in enumerate(([1], [0, 2, 1])):
        write_amago(tmp_path / f"t{number}.npz", np.eye(3)[choices])
    source = open_source(SourceSettings(name=f"npz:{tmp_path}"), listener=told.append)
    assert source.spaces.action == Discrete(n=3)
    assert [event.text for event in told if "every action is one-hot, so it is read as one of 3" in event.text]
    (batch,) = source.batches()
    assert batch.columns["action"].tolist() == [0, 1, 0, 0, 2, 1]
    write_amago(tmp_path / "t2.npz", np.array([[0.5, 0, 0]]))  # then they are three numbers
    assert open_source(SourceSettings(name=f"npz:{tmp_path}")).spaces.action.shape == (3,)
    with pytest.raises(InputMissing, match=r"t2\.npz': the action of step 0 is not one-hot"):
        read(f"npz:{tmp_path}", num_actions=3)


def few() -> Iterator[dict[str, Any]]:
    for number in range(3):
        yield {
            "observations": {"a": np.full((number + 2, 2), number), "b": {"c": np.arange(number + 2.0)}},
            "actions": np.zeros((number + 1, 1)),
            "rewards": [1.0] * (number + 1),
            "terminated": number == 1,
            "task": f"t{number}",
            "seed": number,
            "success": number == 2,
            "tags": {"by": "hand"},
        }


ONCE = few()


def endless() -> Iterator[dict[str, Any]]:
    return itertools.cycle(few())


def failing() -> Iterator[dict[str, Any]]:
    yield from few()
    raise ValueError("out of ideas")


def uneven() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "rewards": [1.0, 2.0]}


def mixed() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "observations": {"a": np.zeros((2, 5)), "b": {"c": np.zeros(2)}}}


def words() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "actions": [["left"]]}


def ragged() -> Iterator[dict[str, Any]]:
    yield from few()
    yield {**next(few()), "observations": {"a": [[1], [2, 3]], "b": {"c": [0, 1]}}}


def nothing() -> list[Any]:
    return []


HERE = "tests.sources.test_files"


@pytest.mark.parametrize("name", ["few", "ONCE"])
def test_own_code(name: str) -> None:
    found = read(f"{HERE}:{name}")
    assert [trajectory.length for trajectory in found] == [1, 2, 3]
    assert found[1].columns["obs.a"].tolist() == [[1, 1]] * 3
    assert found[2].columns["obs.b.c"].tolist() == [0, 1, 2, 3]
    info = found[2].info
    assert (info.task, info.seed, info.success, info.tags) == ("t2", 2, True, {"by": "hand", "episode": "2"})
    assert [int(trajectory.columns["terminated"][-1]) for trajectory in found] == [0, 1, 0]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (f"{HERE}:failing", StageFailed, "raised ValueError: out of ideas"),
        (f"{HERE}:uneven", InputMissing, "trajectory 3 has 2 rewards, 1 actions and 2 observations"),
        (f"{HERE}:mixed", InputMissing, "'obs.a' has 5 float64 values a step in trajectory 3, 2 expected"),
        (f"{HERE}:words", InputMissing, "'action' has 1 <U4 values a step"),
        (f"{HERE}:ragged", InputMissing, "trajectory 3 holds no arrays"),
        (f"{HERE}:nothing", InputMissing, "gives no trajectories"),
        (f"{HERE}:HERE", InputMissing, "trajectory 0 lacks observations"),
        (f"{HERE}:missing", InputMissing, "has no 'missing'"),
        ("hopper", UsageError, "is no source.*d4rl"),
    ],
)
def test_own_code_that_is_wrong(name: str, error: type[AmagoError], words: str) -> None:
    with pytest.raises(error, match=words):
        read(name)


def test_own_code_fits_an_environment() -> None:
    wanted = Spaces(observation={"obs.a": Box(shape=(2,)), "obs.b.c": Box(shape=())}, action=Discrete(n=2))
    source = open_source(SourceSettings(name=f"{HERE}:few"), spaces=wanted)
    (batch,) = source.batches()
    assert batch.columns["action"].dtype == np.int32
