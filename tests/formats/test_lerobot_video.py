"""Videos and pictures of LeRobot's datasets, written without loss, come back value by value."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import AmagoError, InputMissing, IntegrityError
from tests.formats.test_lerobot import LENGTHS, dataset, read

av = pytest.importorskip("av")

FPS, KEY = 10, "observation.images.top"
ASKED = {"obs.state": "observation.state", "obs.top": KEY}


def shots(number: int, height: int = 32) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (LENGTHS[number], height, 48, 3), dtype=np.uint8)


def write(path: Path, frames: np.ndarray) -> None:
    """An MP4 file whose frames are decoded as they were given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=FPS, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def with_videos(folder: Path, version: str) -> Path:
    """Version 2: a file an episode; version 3: the first two episodes in one file, the last in another."""
    place = dataset(folder, version)
    if version == "v2.1":
        for number in range(len(LENGTHS)):
            write(place / f"videos/chunk-000/{KEY}/episode_{number:06d}.mp4", shots(number))
        return place
    write(place / f"videos/{KEY}/chunk-000/file-000.mp4", np.concatenate([shots(0), shots(1)]))
    write(place / f"videos/{KEY}/chunk-000/file-001.mp4", shots(2))
    path = place / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    where = {"chunk_index": [0, 0, 0], "file_index": [0, 0, 1], "from_timestamp": [0.0, LENGTHS[0] / FPS, 0.0]}
    table = pq.read_table(path)
    for name, values in where.items():
        table = table.append_column(f"videos/{KEY}/{name}", pa.array(values))
    pq.write_table(table, path)
    return place


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_are_an_observation_when_asked_for(tmp_path: Path, version: str) -> None:
    place = with_videos(tmp_path / "set", version)
    plain, _ = read(place, columns={"obs.state": "observation.state"})
    found, told = read(place, columns=ASKED)
    for number, one in enumerate(found):
        frames = shots(number)
        np.testing.assert_array_equal(one.columns["obs.top"], np.concatenate([frames, frames[-1:]]))
        np.testing.assert_array_equal(one.columns["obs.state"], plain[number].columns["obs.state"])
        np.testing.assert_array_equal(one.columns["action"], plain[number].columns["action"])
    assert not any(KEY in text for text in told)


def test_frames_may_be_all_that_is_observed(tmp_path: Path) -> None:
    found, _ = read(with_videos(tmp_path / "set", "v2.1"), columns={"obs": KEY})
    assert [list(one.columns["obs"].shape) for one in found] == [[length + 1, 32, 48, 3] for length in LENGTHS]


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_pieces_of_a_block_have_the_same_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    place = with_videos(tmp_path / "set", version)
    whole, _ = read(place, columns=ASKED)
    monkeypatch.setattr("pipelines.formats.lerobot.BATCH_BYTES", 1)
    one_by_one, _ = read(place, columns=ASKED)
    for one, other in zip(whole, one_by_one, strict=True):
        np.testing.assert_array_equal(one.columns["obs.top"], other.columns["obs.top"])


def test_without_being_asked_for_they_are_left_out(tmp_path: Path) -> None:
    found, told = read(with_videos(tmp_path / "set", "v3.0"))
    assert all("obs.images.top" not in one.columns for one in found)
    assert any(f'left out: {KEY} (source.columns takes videos and images: {{"obs.NAME" = "{KEY}"}})' in t for t in told)


def test_pictures_in_the_table_are_an_observation(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    place = dataset(tmp_path / "set", "v2.1")
    about = json.loads((place / "meta" / "info.json").read_text())
    about["features"][KEY]["dtype"] = "image"
    (place / "meta" / "info.json").write_text(json.dumps(about))
    for number, path in enumerate(sorted(place.glob("data/*/*.parquet"))):
        cells: list[dict[str, Any]] = []
        for frame in shots(number):
            sink = io.BytesIO()
            pillow.fromarray(frame).save(sink, "PNG")
            cells.append({"bytes": sink.getvalue(), "path": "x.png"})
        pq.write_table(pq.read_table(path).append_column(KEY, pa.array(cells)), path)
    found, _ = read(place, columns=ASKED)
    for number, one in enumerate(found):
        np.testing.assert_array_equal(one.columns["obs.top"][:-1], shots(number))


def _cut(place: Path) -> None:
    path = place / f"videos/chunk-000/{KEY}/episode_000001.mp4"
    path.write_bytes(path.read_bytes()[:-400])


def _short(place: Path) -> None:
    write(place / f"videos/chunk-000/{KEY}/episode_000002.mp4", shots(2)[:2])


def _larger(place: Path) -> None:
    write(place / f"videos/chunk-000/{KEY}/episode_000001.mp4", shots(1, height=64))


def _gone(place: Path) -> None:
    (place / f"videos/chunk-000/{KEY}/episode_000001.mp4").unlink()


def _playlist(place: Path) -> None:
    path = place / f"videos/chunk-000/{KEY}/episode_000000.mp4"
    other = path.rename(place / "other.mp4")
    path.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n")


def _rate(place: Path) -> None:
    about = json.loads((place / "meta" / "info.json").read_text())
    (place / "meta" / "info.json").write_text(json.dumps({**about, "fps": 0}))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_cut, IntegrityError, "episode_000001.mp4' is damaged"),
        (_short, IntegrityError, "episode_000002.mp4' ends before the frame at 0.200 s"),
        (_larger, InputMissing, "are of different sizes"),
        (_gone, InputMissing, "no file '.*episode_000001.mp4'"),
        (_playlist, IntegrityError, "episode_000000.mp4' is damaged"),
        (_rate, InputMissing, "'fps' is 0, not a number above 0"),
    ],
)
def test_a_video_that_does_not_fit_is_one_line(
    tmp_path: Path, change: Any, error: type[AmagoError], words: str
) -> None:
    place = with_videos(tmp_path / "set", "v2.1")
    change(place)
    with pytest.raises(error, match=words) as caught:
        read(place, columns=ASKED)
    assert "\n" not in str(caught.value)
