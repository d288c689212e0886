"""LeRobot's datasets, versions 2.0 to 3.0: a folder with `meta/info.json` and a row a frame in Parquet.

    data/chunk-*/*.parquet         an episode a file (v2), or several (v3)
    observation.*                  numbers become obs.*; videos and images are left out, which is reported
    action, episode_index          as they are called
    next.reward, next.done         optional: rewards are 0 without, and an episode ends truncated
    meta/episodes.jsonl, meta/episodes/*/*.parquet    the tasks of an episode, which become goal_text
    meta/stats.json, meta/episodes_stats.jsonl        bounds of actions, where neither --env nor the settings give them

`source.columns` names what is called otherwise, as for tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Notice
from pipelines.files.json import parse_object
from pipelines.files.malformed import read_limited
from pipelines.lake.arrow import UNREADABLE
from pipelines.lake.schema import ACTION, REWARD, TERMINATED
from pipelines.lake.spaces import OBSERVATION
from pipelines.lake.trajectory import TrajectoryInfo
from pipelines.sources.base import EPISODE, Request, require_file
from pipelines.sources.table_files import unreadable
from pipelines.sources.tables import Tables

INFO = "meta/info.json"
_NUMBERS = ("float", "int", "uint", "bool")
_LARGEST = 64 << 20  # bytes of a file of metadata
_LONGEST_TEXT = 4_096


class LeRobot(Tables):
    """See the module."""

    form = "lerobot"
    needed = (ACTION,)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.label = self._folder.resolve().name
        self.env = self._robot or self.label

    def _find(self, request: Request) -> list[Path]:
        self._folder = Path(request.place)
        about = _read(self._folder / INFO)
        files = [require_file(path) for path in sorted(self._folder.glob("data/*/*.parquet"))]
        if not files:
            raise InputMissing(f"{self._what} has no data/*/*.parquet", hint="fetch all of the dataset")
        self._robot = str(about.get("robot_type") or "")[:_LONGEST_TEXT]
        self._goals = self._read_goals()
        columns = self._defaults(about, self.reader.schema(files[0]).names)
        update: dict[str, Any] = {"columns": columns | self._settings.columns}
        if request.spaces is None and self._settings.action_low == -1 and self._settings.action_high == 1:
            update |= self._bounds()
        self._settings = self._settings.model_copy(update=update)
        return files

    def _defaults(self, about: Mapping[str, Any], names: list[str]) -> dict[str, str]:
        """Ours -> theirs, of the features of the dataset; reports what is left out."""
        features = about.get("features")
        if not isinstance(features, dict) or not all(isinstance(one, dict) for one in features.values()):
            raise IntegrityError(f"'{self._folder / INFO}' does not say its features", hint="fetch it again")
        observed = {name: str(one.get("dtype")) for name, one in features.items() if name.startswith("observation.")}
        taken = [name for name, kind in observed.items() if kind.startswith(_NUMBERS) and name in names]
        if left := [name for name in observed if name not in taken]:
            self._listener(Notice(text=f"{self._what}: left out: {', '.join(left)} (only numbers are taken)"))
        asked = any(name.partition(".")[0] == OBSERVATION for name in self._settings.columns)
        if not taken and not asked:
            raise InputMissing(
                f"{self._what} observes no numbers, only {', '.join(observed) or 'nothing'}",
                hint="say what is observed by source.columns",
            )
        found = {} if asked else {f"{OBSERVATION}{name.removeprefix('observation')}": name for name in taken}
        for ours, theirs in ((ACTION, "action"), (EPISODE, "episode_index")):
            found[ours] = theirs
        for ours, theirs, assumed in (
            (REWARD, "next.reward", "rewards are 0"),
            (TERMINATED, "next.done", "episodes end truncated"),
        ):
            if theirs in names:
                found[ours] = theirs
            elif ours not in self._settings.columns:
                self._listener(Notice(text=f"{self._what} has no '{theirs}': {assumed}", level="warning"))
        return found

    def _read_goals(self) -> dict[str, str]:
        """Episode -> its tasks in words."""
        meta = self._folder / "meta"
        found: dict[str, str] = {}
        for row in itertools.chain(
            _lines(meta / "episodes.jsonl"), _rows(map(require_file, sorted(meta.glob("episodes/*/*.parquet"))))
        ):
            number, tasks = row.get("episode_index"), row.get("tasks")
            if isinstance(number, int) and isinstance(tasks, list):
                found[str(number)] = "; ".join(map(str, tasks))[:_LONGEST_TEXT]
        return found

    def _bounds(self) -> dict[str, Any]:
        """Settings that bound the actions by what the statistics say of them; none where they are within [-1, 1]."""
        path = self._folder / "meta" / "stats.json"
        rows = [{"stats": _read(path)}] if path.is_file() else _lines(path.with_name("episodes_stats.jsonl"))
        lows, highs = [], []
        for row in rows:
            stats = row.get("stats")
            action = stats.get("action") if isinstance(stats, dict) else None
            if not isinstance(action, dict):
                continue
            try:
                low, high = (np.asarray(action.get(name), dtype=np.float64) for name in ("min", "max"))
            except (ValueError, TypeError):
                continue
            if low.ndim == 1 and low.shape == high.shape and np.isfinite(low).all() and np.isfinite(high).all():
                lows.append(low)
                highs.append(high)
        if not lows or len({low.shape for low in lows}) != 1:
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


def _object(text: bytes, path: Path) -> dict[str, Any]:
    found = parse_object(text)
    if found is None:
        raise IntegrityError(f"'{path}' is damaged: it is not a JSON object", hint="fetch it again")
    return found


def _read(path: Path) -> dict[str, Any]:
    return _object(_content(path), path)


def _content(path: Path) -> bytes:
    try:
        return read_limited(path, _LARGEST)
    except FileNotFoundError as error:
        hint = "give the folder of a LeRobot dataset, with meta and data"
        raise InputMissing(f"no file '{path}'", hint=hint) from error
    except OSError as error:
        raise InputMissing(f"cannot read '{path}': {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, a line each; none where there is no file."""
    if path.is_file():
        yield from (_object(line, path) for line in _content(path).splitlines() if line.strip())


def _rows(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in files:
        try:
            yield from pq.read_table(path, columns=["episode_index", "tasks"]).to_pylist()
        except UNREADABLE as error:
            raise unreadable(path, error) from error
