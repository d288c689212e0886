"""LeRobot's datasets, versions 2.0 to 3.0: a folder with `meta/info.json` and a row a frame in Parquet.

    data/chunk-*/*.parquet         an episode a file (v2), or several (v3)
    observation.*                  numbers become obs.*; videos and images are left out, which is reported, unless
                                   source.columns asks for them: {"obs.top" = "observation.images.top"}
    videos/**/*.mp4                their frames, (height, width, 3) uint8, by the timestamps of the rows
    action, episode_index          as they are called
    next.reward, next.done         optional: rewards are 0 without, and an episode ends truncated
    meta/episodes.jsonl, meta/episodes/*/*.parquet    the tasks of an episode, which become goal_text
    meta/stats.json, meta/episodes_stats.jsonl        bounds of actions, where neither --env nor the settings give them

`source.columns` names what is called otherwise, as for tables.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.files.json import parse_object
from pipelines.files.malformed import explain_damage, open_regular, read_limited
from pipelines.formats.base import BATCH_BYTES, EPISODE, Request, decode_pictures, require_file
from pipelines.formats.tables.files import as_damage
from pipelines.formats.tables.reader import Block, TableImporter
from pipelines.lake.arrow import UNREADABLE
from pipelines.lake.schema import ACTION, REWARD, TERMINATED
from pipelines.lake.spaces import OBSERVATION
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.registry import require_package

INFO = "meta/info.json"
_NUMBERS = ("float", "int", "uint", "bool")
_LARGEST = 64 << 20  # bytes of a file of metadata
_LONGEST_TEXT = 4_096
_LARGEST_FRAME = 64 << 20  # bytes
_SEEK_SECONDS = 2.0  # frames that are nearer are reached by decoding those between
_HINT = "fetch or make it again"
_NUMBER, _TIME = "episode_index", "timestamp"
_PLACE = ("chunk_index", "file_index", "from_timestamp")  # of a video, by episode, in version 3


class LeRobotImporter(TableImporter):
    """The importer of LeRobot's datasets; see the module."""

    form = "lerobot"
    needed = (ACTION,)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.label = self._folder.resolve().name
        self.env = self._robot or self.label

    def _find(self, request: Request) -> list[Path]:
        self._folder = Path(request.place)
        [about] = _read_objects(self._folder / INFO)
        files = [require_file(path) for path in sorted(self._folder.glob("data/*/*.parquet"))]
        if not files:
            raise InputMissing(f"{self._what} has no data/*/*.parquet", hint="fetch all of the dataset")
        self._about = about
        self._warn_of_lacking(files)
        self._robot = str(about.get("robot_type") or "")[:_LONGEST_TEXT]
        self._goals = self._read_goals()
        columns = self._defaults(about, self.reader.schema(files[0]).names)
        update: dict[str, Any] = {"columns": columns | self._settings.columns}
        if request.spaces is None and self._settings.action_low == -1 and self._settings.action_high == 1:
            update |= self._bounds()
        self._settings = self._settings.model_copy(update=update)
        return files

    def _warn_of_lacking(self, files: Sequence[Path]) -> None:
        """Report a version that is not known, and frames that the dataset has and the folder has not: LeRobot itself
        may download some of the episodes only."""
        version, total = self._about.get("codebase_version"), self._about.get("total_frames")
        if not str(version).startswith(("v2.", "v3.")):
            self._warn(f"version {str(version)[:40]!r} is not known; it is read as 2.0 to 3.0")
        rows = sum(self.reader.rows(path) for path in files)
        if isinstance(total, int) and total != rows:
            self._warn(f"{rows:,} frames are here, and '{INFO}' says {total:,}: some may not have been fetched")

    def _warn(self, text: str) -> None:
        self._listener(Notice(text=f"{self._what}: {text}", level="warning"))

    def _defaults(self, about: Mapping[str, Any], names: list[str]) -> dict[str, str]:
        """Map our names to the features of the dataset, and report what is left out."""
        features = about.get("features")
        if not isinstance(features, dict) or not all(isinstance(one, dict) for one in features.values()):
            raise IntegrityError(f"'{self._folder / INFO}' does not list its features", hint="fetch it again")
        observed = {name: str(one.get("dtype")) for name, one in features.items() if name.startswith("observation.")}
        taken = [name for name, kind in observed.items() if kind.startswith(_NUMBERS) and name in names]
        self._pictures = {name: kind for name, kind in observed.items() if kind in ("video", "image")}
        asked_for = set(self._settings.columns.values())
        if left := [name for name in observed if name not in taken and name not in asked_for]:
            hint = f'source.columns takes videos and images: {{"obs.NAME" = "{left[0]}"}}'
            self._listener(Notice(text=f"{self._what}: left out: {', '.join(left)} ({hint})"))
        asked = any(name.partition(".")[0] == OBSERVATION for name in self._settings.columns)
        if not taken and not asked:
            raise InputMissing(
                f"{self._what} observes no numbers, only {', '.join(observed) or 'nothing'}",
                hint="map observations with source.columns",
            )
        found = {} if asked else {f"{OBSERVATION}{name.removeprefix('observation')}": name for name in taken}
        found |= {ACTION: "action", EPISODE: "episode_index"}
        for ours, theirs, assumed in (
            (REWARD, "next.reward", "rewards are 0"),
            (TERMINATED, "next.done", "episodes end truncated"),
        ):
            if theirs in names:
                found[ours] = theirs
            elif ours not in self._settings.columns:
                self._listener(Notice(text=f"{self._what} has no '{theirs}': {assumed}", level="warning"))
        return found

    def _find_columns(self, names: list[str]) -> dict[str, list[str]]:
        videos = [name for name, kind in self._pictures.items() if kind == "video"]
        found = super()._find_columns([*names, *videos])
        asked = {ours: theirs[0] for ours, theirs in found.items() if set(theirs) & set(videos)}
        self._videos = Videos(self._folder, self._about, asked) if asked else None
        found = {ours: theirs for ours, theirs in found.items() if ours not in asked}
        return found | ({ours: [ours] for ours in (_NUMBER, _TIME)} if asked else {})

    def _blocks(self, only: list[str] | None = None, files: list[Path] | None = None) -> Iterator[Block]:
        """Yield rows as of a table, and the frames of videos if all columns are read."""
        for block in super()._blocks(only, files):
            if self._videos is None or only is not None:
                yield block
                continue
            numbers, times = block.pop(_NUMBER), block.pop(_TIME)
            for rows in self._videos.pieces(numbers, times):
                part = {name: values[rows] for name, values in block.items()}
                yield part | self._videos.frames(numbers[rows], times[rows])

    def _part(self, batch: pa.RecordBatch, text: str) -> np.ndarray:
        if self._pictures.get(text) != "image":
            return super()._part(batch, text)
        cells = batch.column(text).to_pylist()
        return decode_pictures([cell["bytes"] for cell in cells], f"{self._what}: {text}", extra="video")

    def close(self) -> None:
        if self._videos is not None:
            self._videos.close()

    def _read_goals(self) -> dict[str, str]:
        """Map episodes to their tasks, as text."""
        found: dict[str, str] = {}
        for row in read_episodes(self._folder, ["tasks"]):
            number, tasks = row.get("episode_index"), row.get("tasks")
            if isinstance(number, int) and isinstance(tasks, list):
                found[str(number)] = "; ".join(map(str, tasks))[:_LONGEST_TEXT]
        return found

    def _bounds(self) -> dict[str, Any]:
        """Find settings with the bounds of the actions in the statistics; none if these are within [-1, 1]."""
        path = self._folder / "meta" / "stats.json"
        by_episode = path.with_name("episodes_stats.jsonl")
        rows = [{"stats": _read_objects(path)[0]}] if path.is_file() else _read_objects(by_episode, lines=True)
        lows, highs = [], []
        for row in rows:
            stats = row.get("stats")
            action = stats.get("action") if isinstance(stats, dict) else None
            if not isinstance(action, dict):
                continue
            try:
                low, high = (np.asarray(action.get(name), dtype=np.float64) for name in ("min", "max"))
            except (ValueError, TypeError):
                low = high = np.array(math.nan)
            lows.append(low)
            highs.append(high)
        if not lows:
            return {}
        shapes = {each.shape for each in (*lows, *highs)}
        if len(shapes) > 1 or len(next(iter(shapes))) != 1 or not np.isfinite([lows, highs]).all():
            self._warn("the statistics of 'action' are not a 'min' and a 'max' of numbers each; bounds are -1 and 1")
            return {}
        low, high = np.min(lows, axis=0), np.max(highs, axis=0)
        if (low >= -1).all() and (high <= 1).all():
            return {}
        text = (
            f"{self._what}: actions are scaled by their least and greatest in the data (source.action_low, action_high)"
        )
        self._listener(Notice(text=text))
        same = high <= low
        low, high = np.where(same, low - 1, low), np.where(same, low + 1, high)
        return {"action_low": tuple(low.tolist()), "action_high": tuple(high.tolist())}

    def _info(self, number: int, id: Any, dropped: bool) -> TrajectoryInfo:
        goal = "" if id is None else self._goals.get(str(id), "")
        return replace(super()._info(number, id, dropped), goal_text=goal)


class Videos:
    """The videos of a dataset by column; of each feature the file that was read last stays open."""

    def __init__(self, folder: Path, about: Mapping[str, Any], features: Mapping[str, str]) -> None:
        self._folder, self._features = folder, dict(features)
        for name in features.values():
            if "/" in name or name.startswith("."):
                raise InputMissing(f"'{folder}': a feature is called '{name}', which is not the name of a folder")
        fps = about.get("fps")
        if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < 1e6:
            raise InputMissing(f"'{folder / INFO}': 'fps' is {fps!r}, not a number above 0", hint=_HINT)
        self._fps = float(fps)
        chunk = about.get("chunks_size")
        self._chunk = chunk if isinstance(chunk, int) and chunk > 0 else 1_000
        places = [f"videos/{name}/{part}" for name in features.values() for part in _PLACE]
        self._rows = {
            row["episode_index"]: row
            for row in read_episodes(folder, places)
            if isinstance(row.get("episode_index"), int) and places[0] in row
        }
        self._open: dict[str, tuple[Path, Video]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._frame_bytes = 0

    def close(self) -> None:
        for _, video in self._open.values():
            video.close()
        self._open = {}

    def pieces(self, numbers: np.ndarray, times: np.ndarray) -> Iterator[slice]:
        """Divide rows, so that the frames of each piece take about `BATCH_BYTES`."""
        if not self._frame_bytes and len(numbers):
            self._frame_bytes = sum(values.nbytes for values in self.frames(numbers[:1], times[:1]).values())
        count = max(BATCH_BYTES // max(self._frame_bytes, 1), 1)
        yield from (slice(at, at + count) for at in range(0, len(numbers), count))

    def frames(self, numbers: np.ndarray, times: np.ndarray) -> dict[str, np.ndarray]:
        """Read the frames of rows by column; `numbers` are those of their episodes, `times` their seconds."""
        cuts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        parts = [*zip([0, *cuts.tolist()], [*cuts.tolist(), len(numbers)], strict=True)]
        found = {}
        for column, name in self._features.items():
            shots = [self._shots(name, int(numbers[a]), np.asarray(times[a:b], np.float64)) for a, b in parts]
            sizes = {shot.shape[1:] for shot in shots} | {self._sizes.setdefault(name, shots[0].shape[1:])}
            if len(sizes) > 1:
                listed = " and ".join(f"{height} x {width}" for height, width, _ in sorted(sizes))
                raise InputMissing(f"'{self._folder}': the videos of {name} are of different sizes, {listed}")
            found[column] = np.concatenate(shots)
        return found

    def _shots(self, name: str, number: int, times: np.ndarray) -> np.ndarray:
        row = self._rows.get(number)
        if row is None:
            path = self._folder / f"videos/chunk-{number // self._chunk:03d}/{name}/episode_{number:06d}.mp4"
            return self._video(name, path).frames(times)
        chunk, file, start = (row.get(f"videos/{name}/{part}") for part in _PLACE)
        if not isinstance(chunk, int) or not isinstance(file, int) or not isinstance(start, int | float):
            raise IntegrityError(f"'{self._folder}': where the video of episode {number} is, is not a number")
        path = self._folder / f"videos/{name}/chunk-{chunk:03d}/file-{file:03d}.mp4"
        return self._video(name, path).frames(times + start)

    def _video(self, name: str, path: Path) -> Video:
        known = self._open.get(name)
        if known is not None and known[0] == path:
            return known[1]
        if known is not None:
            known[1].close()
        self._open[name] = path, Video(path, self._fps)
        return self._open[name][1]


def read_episodes(folder: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the metadata of the episodes of a dataset; from Parquet files these columns."""
    yield from _read_objects(folder / "meta" / "episodes.jsonl", lines=True)
    for path in map(require_file, sorted((folder / "meta").glob("episodes/*/*.parquet"))):
        try:
            wanted = ["episode_index", *columns]
            columns = [name for name in pq.read_schema(path).names if name in wanted]
            yield from pq.read_table(path, columns=columns, page_checksum_verification=True).to_pylist()
        except UNREADABLE as error:
            raise as_damage(path, error) from error


class Video:
    """The frames of the first video stream of an MP4 file, `fps` a second, decoded with PyAV.

    The demuxer is fixed: ffmpeg's choice by content knows playlists, which name other files and addresses.
    """

    def __init__(self, path: Path, fps: float) -> None:
        require_package("av", "video", f"'{path}'")
        import av

        self._path, self._period = require_file(path), 1 / fps
        with contextlib.ExitStack() as stack, self._decoding():
            file = stack.enter_context(open_regular(path))
            self._container = stack.enter_context(av.open(file, "r", format="mp4"))
            if not self._container.streams.video:
                raise IntegrityError(f"'{path}' has no video", hint=_HINT)
            self._stream = self._container.streams.video[0]
            self._stream.codec_context.thread_count = 1
            size = self._stream.width * self._stream.height * 3
            if not 0 < size <= _LARGEST_FRAME:
                raise IntegrityError(f"'{path}' has frames of {size:,} bytes, at most {_LARGEST_FRAME:,} are read")
            self._frames = self._container.decode(self._stream)
            self._last: Any = None
            self._open = stack.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._open.close()

    def frames(self, seconds: np.ndarray) -> np.ndarray:
        """Decode the (n, height, width, 3) uint8 frames at these times. IntegrityError where there is none."""
        with self._decoding():
            return np.stack([self._find_frame(float(at)).to_ndarray(format="rgb24") for at in seconds])

    def _find_frame(self, wanted: float) -> Any:
        """Find the frame nearest to `wanted`, which is at most half a period away."""
        if not np.isfinite(wanted):
            raise IntegrityError(f"'{self._path}': a frame is asked for at {wanted} s", hint=_HINT)
        if self._last is None or not 0 <= wanted - self._last.time + self._period / 2 <= _SEEK_SECONDS:
            self._seek(wanted)
        while self._last is None or self._last.time < wanted - self._period / 2:
            self._last = next(self._frames, None)
            if self._last is None or self._last.time is None:
                self._last = None
                raise IntegrityError(f"'{self._path}' ends before the frame at {wanted:.3f} s", hint=_HINT)
        if self._last.time > wanted + self._period / 2:
            raise IntegrityError(f"'{self._path}' has no frame at {wanted:.3f} s", hint=_HINT)
        return self._last

    def _seek(self, wanted: float) -> None:
        start = max(wanted - self._period, 0.0) / float(self._stream.time_base or 1)
        self._container.seek(int(start), stream=self._stream)
        self._frames, self._last = self._container.decode(self._stream), None

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        import av

        with explain_damage(self._path, av.FFmpegError, hint=_HINT):
            yield


def _read_objects(path: Path, *, lines: bool = False) -> list[dict[str, Any]]:
    """Read the JSON object of a file, or one of each of its `lines`: none where there is no such file."""
    if lines and not path.is_file():
        return []
    try:
        content = read_limited(path, _LARGEST)
    except FileNotFoundError as error:
        hint = "give the folder of a LeRobot dataset, with meta and data"
        raise InputMissing(f"no file '{path}'", hint=hint) from error
    except OSError as error:
        raise InputMissing(f"cannot read '{path}': {error.strerror or error}") from error
    found = []
    for text in [line for line in content.splitlines() if line.strip()] if lines else [content]:
        if (parsed := parse_object(text)) is None:
            raise IntegrityError(f"'{path}' is damaged: it is not a JSON object", hint="fetch it again")
        found.append(parsed)
    return found
