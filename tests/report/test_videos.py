from __future__ import annotations

import base64
from pathlib import Path

import pytest

from pipelines.report.episodes import show_videos
from pipelines.report.shown import number_runs
from pipelines.runs.stored import read_run
from tests.report.test_markup import Elements
from tests.runs.factory import make_run

MP4 = b"\x00\x00\x00\x18ftypisom" + bytes(20)


def elements(run: Path) -> list[tuple[str, dict[str, str | None]]]:
    found = show_videos(number_runs([read_run(run)], points=10)[0])
    return [] if found is None else [each for each in Elements(found).tags if each[0] in ("video", "img")]


def test_the_videos_of_the_newest_evaluation_are_in_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "maze")
    (run / "videos").mkdir()
    for name, content in {
        "000010-aa-0.mp4": MP4 + b"old",
        "000020-bb-0.mp4": MP4,
        "000020-bb-1.gif": b"GIF89a...",
        "notes.txt": b"x",
    }.items():
        (run / "videos" / name).write_bytes(content)
    (video, shown), (image, gif) = elements(run)
    assert (video, image) == ("video", "img")
    assert shown["src"] == f"data:video/mp4;base64,{base64.b64encode(MP4).decode()}"
    assert gif["alt"] == "Video of an episode: 000020-bb-1"


@pytest.mark.parametrize("content", [b"root:x:0:0", b"", MP4 + bytes(5 << 20), b"GIF89a"])
def test_a_file_that_is_not_a_video_of_a_reasonable_size_is_left_out(tmp_path: Path, content: bytes) -> None:
    run = make_run(tmp_path / "maze")
    (run / "videos").mkdir()
    (run / "videos" / "000020-bb-0.mp4").write_bytes(content)
    (run / "videos" / "000020-bb-1.mp4").mkdir()
    assert elements(run) == []


def test_a_run_without_videos_has_no_section(tmp_path: Path) -> None:
    assert elements(make_run(tmp_path / "maze")) == []
