"""LeRobot's datasets, v2.1 (an episode a file) and v3.0 (several)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import AmagoError, InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.formats.make import find_kind_and_place, open_importer
from pipelines.lake.trajectory import Trajectory

LENGTHS = (3, 2, 4)


def frames(number: int, *, done: bool) -> pa.Table:
    steps = np.arange(LENGTHS[number])
    columns: dict[str, Any] = {
        "observation.state": pa.array([[number + at / 10, -at] for at in steps], pa.list_(pa.float32(), 2)),
        "observation.environment_state": pa.array([[float(at)] for at in steps], pa.list_(pa.float32())),
        "action": pa.array([[30.0 * number, -float(at)] for at in steps], pa.list_(pa.float32())),
        "timestamp": pa.array(steps / 10, pa.float32()),
        "frame_index": steps,
        "episode_index": np.full(len(steps), number),
        "index": steps + sum(LENGTHS[:number]),
        "task_index": np.zeros(len(steps), np.int64),
    }
    if done:
        columns["next.reward"] = pa.array(steps + 1.0, pa.float32())
        columns["next.done"] = steps == steps[-1]
    return pa.table(columns)


def dataset(folder: Path, version: str, *, done: bool = True) -> Path:
    tables = [frames(number, done=done) for number in range(len(LENGTHS))]
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "observation.environment_state": {"dtype": "float32", "shape": [1], "names": None},
        "observation.images.top": {"dtype": "video", "shape": [96, 96, 3], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
    }
    chunk, meta = folder / "data" / "chunk-000", folder / "meta"
    chunk.mkdir(parents=True)
    meta.mkdir()
    about = {"codebase_version": version, "robot_type": "so100", "total_episodes": 3, "fps": 10, "features": features}
    (meta / "info.json").write_text(json.dumps(about))
    episodes = [{"episode_index": n, "tasks": [f"task {n}"], "length": LENGTHS[n]} for n in range(3)]
    if version == "v3.0":
        pq.write_table(pa.concat_tables(tables[:2]), chunk / "file-000.parquet")
        pq.write_table(tables[2], chunk / "file-001.parquet")
        (meta / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(episodes), meta / "episodes" / "chunk-000" / "file-000.parquet")
        (meta / "stats.json").write_text(json.dumps({"action": {"min": [0.0, -3.0], "max": [60.0, 0.0]}}))
    else:
        for number, table in enumerate(tables):
            pq.write_table(table, chunk / f"episode_{number:06d}.parquet")
        (meta / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
        stats = [{"min": [30.0 * n, 1.0 - LENGTHS[n]], "max": [30.0 * n, 0.0]} for n in range(3)]
        lines = [json.dumps({"episode_index": n, "stats": {"action": one}}) for n, one in enumerate(stats)]
        (meta / "episodes_stats.jsonl").write_text("\n".join(lines))
    return folder


def read(place: Path, **settings: Any) -> tuple[list[Trajectory], list[str]]:
    told: list[str] = []
    source = open_importer(
        SourceSettings(name=str(place), **settings),
        listener=lambda e: told.append(e.text) if isinstance(e, Notice) else None,
    )
    found = [trajectory for batch in source.batches() for trajectory in batch]
    source.close()
    return found, told


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_become_trajectories(tmp_path: Path, version: str) -> None:
    place = dataset(tmp_path / "set", version)
    assert find_kind_and_place(str(place))[0] == "lerobot"
    found, told = read(place)
    assert [one.length for one in found] == list(LENGTHS)
    for number, one in enumerate(found):
        steps = np.arange(LENGTHS[number])
        last = np.append(steps, steps[-1])  # what follows the last frame is in no file
        wanted = np.stack([number + last / 10, -last], axis=1).astype(np.float32)
        np.testing.assert_array_equal(one.columns["obs.state"], wanted)
        np.testing.assert_array_equal(one.columns["obs.environment_state"][:, 0], last)
        assert one.columns["reward"].tolist() == [0, *(steps + 1.0)]
        assert one.columns["terminated"].tolist() == [0] * len(steps) + [1]
        scaled = np.stack([np.full(len(steps), number - 1.0), 1 - steps / 1.5], axis=1)  # of [0, 60] and [-3, 0]
        np.testing.assert_allclose(one.columns["action"][1:], scaled, atol=1e-6)
        info = one.info
        assert (info.env, info.task, info.goal_text, info.source) == ("so100", "set", f"task {number}", "lerobot")
        assert (info.tags["episode"], info.tags["id"]) == (str(number), str(number))
    assert any("left out: observation.images.top" in text for text in told)
    assert any("scaled by their least and greatest" in text for text in told)


def test_without_rewards_and_dones_episodes_end_truncated(tmp_path: Path) -> None:
    found, told = read(dataset(tmp_path / "set", "v3.0", done=False), columns={"obs": "observation.state"})
    assert [one.length for one in found] == [length - 1 for length in LENGTHS]
    for number, one in enumerate(found):
        assert one.columns["obs"][:, 1].tolist() == [-float(at) for at in range(LENGTHS[number])]
        assert not one.columns["reward"].any()
        assert (one.columns["terminated"][-1], one.columns["truncated"][-1]) == (0, 1)
    assert any("has no 'next.reward': rewards are 0" in text for text in told)
    assert any("has no 'next.done': episodes end truncated" in text for text in told)


def test_frames_that_are_not_here_and_versions_that_are_not_known_are_told(tmp_path: Path) -> None:
    place = dataset(tmp_path / "set", "v3.0")
    about = json.loads((place / "meta/info.json").read_text())
    (place / "meta/info.json").write_text(
        json.dumps(about | {"total_frames": sum(LENGTHS), "codebase_version": "v9.0"})
    )
    _, told = read(place)
    assert any("version 'v9.0' is not known" in text for text in told)
    assert not any("frames are here" in text for text in told)
    (place / "data/chunk-000/file-001.parquet").unlink()
    found, told = read(place)
    assert len(found) == 2
    assert any(f"{sum(LENGTHS[:2])} frames are here, and 'meta/info.json' says {sum(LENGTHS)}" in each for each in told)


@pytest.mark.parametrize("low", ['"a"', "[0.0]", "[0.0, null]", "0.5"])
def test_statistics_of_actions_that_are_no_bounds_are_told(tmp_path: Path, low: str) -> None:
    place = dataset(tmp_path / "set", "v3.0")
    (place / "meta/stats.json").write_text(f'{{"action": {{"min": {low}, "max": [60.0, 0.0]}}}}')
    told: list[str] = []
    source = open_importer(
        SourceSettings(name=str(place)), listener=lambda e: told.append(e.text) if isinstance(e, Notice) else None
    )
    with pytest.raises(InputMissing, match="outside its bounds"):
        list(source.batches())
    source.close()
    assert any("the statistics of 'action' are not" in text for text in told)


def test_bounds_that_are_given_come_first(tmp_path: Path) -> None:
    place = dataset(tmp_path / "set", "v3.0")
    found, _ = read(place, action_low=-100.0, action_high=100.0)
    assert found[2].columns["action"][1:, 0].tolist() == pytest.approx([0.6] * 4)


@pytest.mark.parametrize(
    ("file", "content", "error", "words"),
    [
        ("meta/info.json", "{", IntegrityError, r"meta/info.json' is damaged"),
        ("meta/info.json", "[" * 200_000, IntegrityError, r"meta/info.json' is damaged"),
        ("meta/info.json", "[]", IntegrityError, "is not a JSON object"),
        ("meta/info.json", "{}", IntegrityError, "does not list its features"),
        (
            "meta/info.json",
            '{"features": {"observation.image": {"dtype": "video"}}}',
            InputMissing,
            "observes no numbers",
        ),
        ("meta/episodes.jsonl", "{}\nx", IntegrityError, r"episodes.jsonl' is damaged"),
        ("meta/episodes_stats.jsonl", "3", IntegrityError, r"episodes_stats.jsonl' is damaged"),
        ("data/chunk-000/episode_000001.parquet", "PAR1", IntegrityError, r"episode_000001.parquet' is damaged"),
        ("meta/episodes/chunk-000/file-000.parquet", "PAR1", IntegrityError, r"file-000.parquet' is damaged"),
    ],
)
def test_what_is_malformed_is_one_line(
    tmp_path: Path, file: str, content: str, error: type[AmagoError], words: str
) -> None:
    place = dataset(tmp_path / "set", "v3.0" if "chunk-000/file" in file else "v2.1")
    (place / file).write_text(content)
    with pytest.raises(error, match=words):
        read(place)


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    place = dataset(tmp_path / "set", "v2.1")
    for path in place.glob("data/*/*"):
        path.unlink()
    with pytest.raises(InputMissing, match=r"set' has no data/\*/\*\.parquet; fetch all of the dataset"):
        read(place)
    with pytest.raises(InputMissing, match="give the folder of a LeRobot dataset"):
        open_importer(SourceSettings(name=f"lerobot:{tmp_path}"))


def test_links_as_the_hub_keeps_them_are_followed(tmp_path: Path) -> None:
    place = dataset(tmp_path / "set", "v3.0")
    for path in [place / "meta" / "info.json", *place.glob("data/*/*")]:
        path.symlink_to(path.rename(tmp_path / f"blob-{path.name}"))
    assert [one.length for one in read(place)[0]] == list(LENGTHS)


@pytest.mark.parametrize("ids", [["a"] * 4, [0.5] * 4])
def test_episodes_numbered_otherwise_have_no_task(tmp_path: Path, ids: list[Any]) -> None:
    place = dataset(tmp_path / "set", "v3.0")
    path = place / "data" / "chunk-000" / "file-001.parquet"
    table = pq.read_table(path)
    at = table.column_names.index("episode_index")
    for other in place.glob("data/*/file-000.parquet"):
        other.unlink()
    pq.write_table(table.set_column(at, "episode_index", pa.array(ids)), path)
    found, _ = read(place)
    assert [(one.length, one.info.goal_text) for one in found] == [(4, "")]
