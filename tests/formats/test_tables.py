"""Tables as sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.formats.make import open_importer
from pipelines.formats.tables import files as module
from pipelines.lake.trajectory import Trajectory

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
    source = open_importer(SourceSettings(name=name, **settings))
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
    after = np.roll(data["vector"], -1, axis=0)
    after[np.cumsum(LENGTHS) - 1] += 1
    whole = table({**data, "after": after})
    mapping = {k: v for k, v in MAPPING.items() if k != "obs.where"} | {"next_obs.seen": "after"}
    found = read(write_parts(tmp_path, "parquet", whole), columns=mapping)
    assert [trajectory.length for trajectory in found] == LENGTHS
    for trajectory, end in zip(found, np.cumsum(LENGTHS) - 1, strict=True):
        np.testing.assert_array_equal(trajectory.columns["obs.seen"][-1], after[end])


FOLLOWED = {name: theirs for name, theirs in MAPPING.items() if name not in ("obs.where", "episode")} | {
    "next_obs.seen": "after"
}


def followed(lengths: list[int]) -> dict[str, Any]:
    """Steps with what each led to; no two observations are alike."""
    data = steps(lengths)
    after = np.roll(data["vector"], -1, axis=0)
    after[np.cumsum(lengths) - 1] += 1
    return {**data, "after": after}


@pytest.mark.parametrize("block_rows", [3, 1000])
def test_a_table_with_gaps_is_cut_where_observations_do_not_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(module, "_FEWEST_ROWS", block_rows)
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    left = np.ones(20, bool)
    left[[4, 12]] = False
    data = {name: values[left] for name, values in followed([11, 9]).items()}
    pq.write_table(table(data), tmp_path / "x.parquet")
    events: list[Any] = []
    source = open_importer(
        SourceSettings(name=f"parquet:{tmp_path / 'x.parquet'}", columns=FOLLOWED), listener=events.append
    )
    found = [trajectory for batch in source.batches() for trajectory in batch]
    assert [trajectory.length for trajectory in found] == [4, 6, 1, 7]
    np.testing.assert_array_equal(found[0].columns["obs.seen"][-1], data["after"][3])
    assert (found[0].columns["terminated"][-1], found[0].columns["truncated"][-1]) == (0, 1)
    assert [event.text for event in events if "in 2 of 16 rows the next observation is not" in event.text]


def test_a_shuffled_table_is_taken_as_transitions_of_one_step(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(20)
    data = {name: values[order] for name, values in followed([11, 9]).items()}
    pq.write_table(table(data), tmp_path / "x.parquet")
    found = read(f"parquet:{tmp_path / 'x.parquet'}", columns=FOLLOWED)
    assert [trajectory.length for trajectory in found] == [1] * 20
    for trajectory, seen, after in zip(found, data["vector"], data["after"], strict=True):
        np.testing.assert_array_equal(trajectory.columns["obs.seen"], [seen, after])


@pytest.mark.parametrize("block_rows", [3, 1000])
def test_interleaved_episodes_are_refused_unless_they_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(module, "_FEWEST_ROWS", block_rows)
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    data = steps([4, 4])
    order = np.arange(8).reshape(2, 4).T.reshape(-1)  # of two environments in turn
    path = tmp_path / "x.parquet"
    pq.write_table(table({name: values[order] for name, values in data.items()}), path)
    with pytest.raises(InputMissing, match=r"rows of episode r0 are not together: it goes on at 2; sort the rows by"):
        read(f"parquet:{path}", columns=MAPPING)
    without_ids = read(f"parquet:{path}", columns={**MAPPING, "episode": ""})  # at the user's will
    assert [trajectory.length for trajectory in without_ids] == [7]
    data["run"][4:] = "r0"  # the same id for another episode, of which a flag tells
    pq.write_table(table(data), path)
    assert [trajectory.length for trajectory in read(f"parquet:{path}", columns=MAPPING)] == [4, 3]
    again = {name: np.concatenate([values[:4], values[4:], values[:4]]) for name, values in steps([4, 4]).items()}
    pq.write_table(table(again), path)
    assert [trajectory.length for trajectory in read(f"parquet:{path}", columns=MAPPING)] == [4, 3, 4]


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
        (_with("y", np.zeros(11)), {**MAPPING, "acton": "x"}, InputMissing, "unknown names: acton"),
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


@pytest.mark.parametrize("ids", [[0.0] * 6 + [float("nan")] * 5, ["a"] * 6 + [None] * 5])
def test_rows_of_no_episode_are_refused(tmp_path: Path, ids: list[Any]) -> None:
    data = {"obs": np.zeros(11), "action": np.zeros(11), "reward": np.zeros(11), "episode": pa.array(ids)}
    pq.write_table(pa.table(data), tmp_path / "x.parquet")
    with pytest.raises(IntegrityError, match=r"x\.parquet': 'episode' is missing at row 6"):
        read(f"parquet:{tmp_path / 'x.parquet'}")


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


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 6)])
def test_columns_of_a_vector_become_observations(tmp_path: Path, kind: pa.DataType) -> None:
    vectors = np.arange(30, dtype=np.float32).reshape(5, 6)
    ends = np.arange(5) == 4
    rows = {"v": pa.array(vectors.tolist(), kind), "action": np.zeros(5), "reward": np.zeros(5), "terminated": ends}
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    (found,) = read(f"parquet:{tmp_path}/x.parquet", columns={"obs.at": "v[0:2]", "obs.goal": "v[4:]", "obs": "v"})
    np.testing.assert_array_equal(found.columns["obs.at"][:-1], vectors[:, :2])
    np.testing.assert_array_equal(found.columns["obs.goal"][:-1], vectors[:, 4:])
    np.testing.assert_array_equal(found.columns["obs"][:-1], vectors)
    for text in ("v[4:9]", "v[2:2]", "reward[0:1]"):
        with pytest.raises(InputMissing, match="there is no") as caught:
            read(f"parquet:{tmp_path}/x.parquet", columns={"obs": text})
        assert caught.value.hint == "NAME[START:STOP], from 0"
