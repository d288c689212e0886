"""Datasets that LeRobot's own library wrote come in value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.test_lerobot import read

av = pytest.importorskip("av")
library = pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)

LENGTHS, FPS, KEY = (12, 5, 9), 10, "observation.images.top"
HEIGHT, WIDTH = 64, 96
ASKED = {"obs.state": "observation.state", "obs.count": "observation.count", "obs.top": KEY}


def shot(number: int, at: int) -> np.ndarray:
    """A smooth picture whose brightness tells the step, and whose channels tell the episode."""
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[..., number] = 40 + 16 * at
    picture[..., (number + 1) % 3] = np.linspace(0, 120, WIDTH, dtype=np.uint8)
    return picture


def frame(number: int, at: int) -> dict[str, Any]:
    rng = np.random.default_rng([number, at])
    return {
        "observation.state": rng.normal(size=3).astype(np.float32),
        "observation.count": np.array([100 * number + at], np.int64),
        "action": (5 * rng.normal(size=2)).astype(np.float32),
        "next.reward": np.array([at - 0.25], np.float32),
        "next.done": np.array([at == LENGTHS[number] - 1]),
    }


def written(root: Path, kind: str, **options: Any) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "observation.count": {"dtype": "int64", "shape": (1,), "names": None},
        KEY: {"dtype": kind, "shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["left", "right"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    made = library.LeRobotDataset.create(
        "someone/set", FPS, features, root=root, robot_type="so101", use_videos=kind == "video", **options
    )
    for number, length in enumerate(LENGTHS):
        for at in range(length):
            made.add_frame(frame(number, at) | {KEY: shot(number, at), "task": f"task {number % 2}"})
        made.save_episode()
    made.finalize()


def decoded(root: Path) -> np.ndarray:
    """All frames of the dataset's videos, one after the other."""
    found = []
    for path in sorted(root.glob("videos/**/*.mp4")):
        with av.open(str(path)) as container:
            found += [one.to_ndarray(format="rgb24") for one in container.decode(video=0)]
    return np.stack(found)


@pytest.mark.parametrize("codec", ["libsvtav1", "h264", None], ids=["av1", "h264", "pictures"])
def test_states_actions_and_frames_are_those_that_were_written(tmp_path: Path, codec: str | None) -> None:
    root = tmp_path / "set"
    written(root, "image" if codec is None else "video", **({} if codec is None else {"vcodec": codec}))
    found, _ = read(root, columns=ASKED)
    assert [one.length for one in found] == list(LENGTHS)
    rows = [[frame(number, at) for at in range(length)] for number, length in enumerate(LENGTHS)]
    actions = np.concatenate([[row["action"] for row in each] for each in rows])
    low, high = actions.min(axis=0), actions.max(axis=0)
    frames = None if codec is None else decoded(root)
    for number, (one, each) in enumerate(zip(found, rows, strict=True)):
        last = [*each, each[-1]]  # what follows the last frame is in no file
        np.testing.assert_array_equal(one.columns["obs.state"], [row["observation.state"] for row in last])
        np.testing.assert_array_equal(one.columns["obs.count"].ravel(), [row["observation.count"][0] for row in last])
        meant = low + (one.columns["action"][1:] + 1) / 2 * (high - low)
        np.testing.assert_allclose(meant, [row["action"] for row in each], atol=1e-5)
        assert one.columns["reward"].tolist() == [0, *(row["next.reward"][0] for row in each)]
        assert one.columns["terminated"].ravel().tolist() == [0] * LENGTHS[number] + [1]
        assert (one.info.env, one.info.goal_text) == ("so101", f"task {number % 2}")
        drawn = np.stack([shot(number, at) for at in range(LENGTHS[number])])
        shown = one.columns["obs.top"]
        np.testing.assert_array_equal(shown[-1], shown[-2])
        if frames is None:
            np.testing.assert_array_equal(shown[:-1], drawn)
        else:
            start = sum(LENGTHS[:number])
            np.testing.assert_array_equal(shown[:-1], frames[start : start + LENGTHS[number]])
            assert np.abs(shown[:-1].astype(int) - drawn).mean() < 6  # neighbouring steps are 16 apart in a channel
