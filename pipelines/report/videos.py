"""Videos of evaluation episodes, embedded in a page."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

from pipelines.files.malformed import read_limited
from pipelines.report.markup import Markup, element, joined
from pipelines.report.shown import ShownRun, text

_MOST = 4
_MOST_BYTES = 4 << 20  # of one video
_MOST_NAMES = 10_000


def section(run: ShownRun) -> Markup | None:
    """Return the videos of the newest evaluation that has some; None if there are none of a reasonable size."""
    folder = run.stored.path / "videos"
    if not folder.is_dir():
        return None
    names = sorted((path.name for path in folder.iterdir()), reverse=True)[:_MOST_NAMES]
    stems = [name.rpartition("-")[0] for name in names if name.endswith((".mp4", ".gif"))]
    chosen = sorted(name for name in names if stems and name.rpartition("-")[0] == stems[0])
    shown = [video for name in chosen if (video := _video(folder / name)) is not None][:_MOST]
    if not shown:
        return None
    about = f"Episodes of evaluation {text(stems[0], 60)}, with attempt, reward, return and the agent's value."
    return joined(element("p", about), element("div", *shown, class_="grid small"))


def _video(path: Path) -> Markup | None:
    """Return a file as an element; None for one that is large, or not the video that its name says."""
    try:
        content = read_limited(path, _MOST_BYTES)
    except OSError:
        return None
    kind = dict(_kinds(content)).get(path.suffix)
    if kind is None:
        return None
    source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    caption = element("figcaption", text(path.stem, 80))
    label = f"Video of an episode: {text(path.stem, 80)}"
    if path.suffix == ".gif":
        return element("figure", caption, element("img", src=source, alt=label, class_="video"))
    player = element(
        "video",
        src=source,
        controls=True,
        muted=True,
        playsinline=True,
        preload="metadata",
        class_="video",
        aria_label=label,
    )
    return element("figure", caption, player)


def _kinds(content: bytes) -> Iterator[tuple[str, str]]:
    if content[4:8] == b"ftyp":
        yield ".mp4", "video/mp4"
    if content[:6] in (b"GIF87a", b"GIF89a"):
        yield ".gif", "image/gif"
