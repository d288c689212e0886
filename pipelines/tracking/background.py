"""Sending a run to trackers, by threads that read the run's files: `metrics.jsonl`, its pictures and its videos.

Training does no work for a tracker, waits for it only at the end of the run, and cannot fail because of it. The file
`RUN/track.json` records what was sent, so that a resumed run continues in the same place, and a tracker that is added
later gets everything.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pipelines import trust
from pipelines.config.run_directory import RunDirectory
from pipelines.errors import InputMissing, Interrupted, Locked, is_stop
from pipelines.events import Listener, Notice, silent
from pipelines.files.atomic import write_atomically
from pipelines.files.json import Form, parse_object, read_object
from pipelines.files.locks import hold_exclusively
from pipelines.files.malformed import reason
from pipelines.tracking.base import Ending, TrackedRun, Tracker, TrackerName

_SECONDS = 2.0  # between two looks at what is new
_CLOSING_SECONDS = 120.0
_CHUNK = 8 << 20  # bytes of metrics that are read at a time
_MOST_FIGURES = 1000  # of a line
_MOST_ATTEMPTS = 100
_LARGEST_FILE = 256 << 20
_ID = re.compile(r"[\w.:/@ -]{1,200}")
_VIDEO = re.compile(r"(\d{1,12})-\w+-(\d{1,6})\.(?:mp4|gif)")


class _SentRecord(Form):
    """Progress of one tracker: its id of the run, the update of the last training line, and the number of other lines
    that it has; and the modification times of its files."""

    id: str = ""
    train: int = -1
    others: int = Field(0, ge=0)
    files: dict[str, int] = Field(default_factory=dict)


class _RecordFile(Form):
    trackers: dict[str, _SentRecord] = Field(default_factory=dict)


@contextlib.contextmanager
def track_run(
    trackers: Sequence[str],
    directory: RunDirectory,
    config: Mapping[str, Any],
    listener: Listener = silent,
    *,
    videos: Path | None = None,
) -> Iterator[None]:
    """Send the run, with its `videos` (default: the run's own), to `trackers`, by name, until the block ends.

    Errors are those of `factory`, before anything is sent; later errors of a tracker are warnings. If another process
    is sending this run, that process sends all of it. Nothing is sent to a tracker that only a file names
    (`pipelines.trust`), since the author of the file would choose the recipient.
    """
    made = {}
    for name in dict.fromkeys(trackers):
        try:
            trust.require("tracker", name)
        except InputMissing:
            text = (
                f"nothing is sent to '{name}', which the run's configuration names and you do not: give --track {name}"
            )
            listener(Notice(stage="track", text=text))
        else:
            made[name] = TrackerName.parse(name).find_factory()
    with contextlib.ExitStack() as stack:
        if made:
            try:
                stack.enter_context(hold_exclusively(directory.path / ".track.lock", what=f"run '{directory.path}'"))
            except Locked as error:
                listener(Notice(stage="track", text=f"left to the process that tracks this run: {error.message}"))
                made = {}
        store = _RecordStore(directory.track_path)
        shown = videos or directory.videos
        senders = [_Sender(name, make, directory, config, shown, store, listener) for name, make in made.items()]
        ending: Ending = "failed"
        try:
            yield
            ending = "finished"
        except BaseException as error:
            ending = "interrupted" if isinstance(error, Interrupted) or is_stop(error) else "failed"
            raise
        finally:
            for sender in senders:
                sender.stop(ending)
            for sender in senders:
                sender.wait()


class _RecordStore:
    """The file in which all trackers of a run record what they have."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        found = read_object(path, _RecordFile)
        self._trackers = _RecordFile.model_validate(found).trackers if found is not None else {}

    def load(self, name: str) -> _SentRecord:
        """Copy the record of one tracker. An id in a form that no tracker uses drops the record."""
        found = self._trackers.get(name, _SentRecord())
        return found.model_copy(deep=True) if not found.id or _ID.fullmatch(found.id) else _SentRecord()

    def save(self, name: str, record: _SentRecord) -> None:
        with self._lock:
            self._trackers[name] = record.model_copy(deep=True)
            content = {each: kept.model_dump() for each, kept in self._trackers.items()}
            write_atomically(self._path, json.dumps({"trackers": content}, indent=1))


class _Sender:
    """A thread that sends a run to one tracker."""

    def __init__(
        self,
        name: str,
        make: Callable[[str, TrackedRun], Tracker],
        directory: RunDirectory,
        config: Mapping[str, Any],
        videos: Path,
        store: _RecordStore,
        listener: Listener,
    ) -> None:
        self._name, self._make, self._directory, self._store = name, make, directory, store
        self._config, self._videos, self._listener = config, videos, listener
        self._sent = store.load(name)
        self._lines = MetricsTail(directory.metrics_path)
        self._over = threading.Event()
        self._ending: Ending = "finished"
        self._update = 0
        self._thread = threading.Thread(target=self._run, name=f"track {name}", daemon=True)
        self._thread.start()

    def stop(self, ending: Ending) -> None:
        """Ask the thread to send the rest and end."""
        self._ending = ending
        self._over.set()

    def wait(self) -> None:
        """Wait for the thread to end, up to a limit."""
        self._thread.join(_CLOSING_SECONDS)
        if self._thread.is_alive():
            self._warn(f"has not taken everything after {_CLOSING_SECONDS:.0f} s; what is missing is sent next time")

    def _run(self) -> None:
        try:
            self._track()
        except BaseException as error:  # whatever a tracker raises, SystemExit too
            self._warn(f"failed, and the run continues without it: {reason(error) or type(error).__name__}")

    def _track(self) -> None:
        run = TrackedRun(
            name=self._directory.name,
            identity=self._directory.identity,
            directory=self._directory.path.resolve(),
            config=self._config,
            id=self._sent.id,
        )
        tracker = self._make(TrackerName.parse(self._name).argument, run)
        if tracker.id != self._sent.id:  # a run that was not there before has nothing yet
            self._sent = _SentRecord(id=tracker.id)
            self._store.save(self._name, self._sent)
        self._listener(Notice(stage="track", text=f"{self._name}: {tracker.place}"))
        over = False
        while not over:
            over = self._over.wait(_SECONDS)
            if self._send(tracker):
                self._store.save(self._name, self._sent)
        tracker.close(self._ending)

    def _send(self, tracker: Tracker) -> bool:
        """Send what is new; return whether there was anything."""
        before = self._sent.model_copy(deep=True)
        for place, entry in self._lines.new():
            update, stage = entry["update"], entry["stage"]
            self._update = max(self._update, update)
            if stage == "train":
                if update <= self._sent.train:
                    continue
                self._sent.train = update
            elif place < self._sent.others:
                continue
            else:
                self._sent.others = place + 1
            seconds = entry.get("time")
            tracker.log(figures(entry), step=update, seconds=seconds if isinstance(seconds, int | float) else 0.0)
        for path in sorted(self._directory.path.glob("*.png")):
            if self._is_new(path):
                tracker.picture(path.stem, path, step=self._update)
        for path in sorted(self._videos.glob("*.*")):
            if (found := _VIDEO.fullmatch(path.name)) and self._is_new(path):
                tracker.video(f"evaluate/episode_{found[2]}", path, step=int(found[1]))
        return self._sent != before

    def _is_new(self, path: Path) -> bool:
        """Decide whether this version of a file is still to be sent, and note that it is being sent."""
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_size <= _LARGEST_FILE and self._sent.files.get(path.name) != status.st_mtime_ns:
                self._sent.files[path.name] = status.st_mtime_ns
                return True
        return False

    def _warn(self, what: str) -> None:
        self._listener(Notice(stage="track", text=f"tracker '{self._name}' {what}", level="warning"))


class MetricsTail:
    """Reader of the lines that are appended to a metrics.jsonl; it starts over if the file is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._read, self._others = (0, 0), 0, 0

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each line that is new and whole, with the number of lines of other stages than training before it."""
        while True:
            try:
                with self._path.open("rb") as file:
                    status = self._path.stat()
                    if (status.st_dev, status.st_ino) != self._file or status.st_size < self._read:
                        self._file, self._read, self._others = (status.st_dev, status.st_ino), 0, 0
                    file.seek(self._read)
                    chunk = file.read(_CHUNK)
            except OSError:
                return
            whole = chunk[: chunk.rfind(b"\n") + 1]
            if not whole:
                return
            self._read += len(whole)
            for line in whole.splitlines():
                entry = parse_object(line)
                if entry is None or type(entry.get("update")) is not int or not isinstance(entry.get("stage"), str):
                    continue
                yield self._others, entry
                self._others += entry["stage"] != "train"


def figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """Flatten the numbers of a line of metrics.jsonl, each named `STAGE/NAME`, of evaluations `evaluate/SPLIT/NAME`.

    Scores on tasks for training and on tasks for testing are not one curve, hence the split. Intervals become two
    numbers, and figures by attempt one for each attempt.

    >>> figures({"stage": "evaluate", "update": 5, "return_mean": 2, "return_ci95": [1, 3], "label": "x"})
    {'evaluate/return_mean': 2.0, 'evaluate/return_ci95_low': 1.0, 'evaluate/return_ci95_high': 3.0}
    """
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if name == "per_attempt" and isinstance(value, list):
            for attempt, parts in enumerate(value[:_MOST_ATTEMPTS], start=1):
                if isinstance(parts, Mapping):
                    values |= {f"attempt_{attempt}/{part}": number for part, number in parts.items()}
        elif name not in ("stage", "update", "time"):
            values[name] = value
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float):
            found[name] = float(value)
        elif isinstance(value, list) and len(value) == 2 and all(isinstance(bound, int | float) for bound in value):
            found |= {f"{name}_low": float(value[0]), f"{name}_high": float(value[1])}
    finite = [(name, number) for name, number in found.items() if math.isfinite(number)]
    split = entry.get("split")
    prefix = f"{entry['stage']}/{split}/" if split in ("train", "test") else f"{entry['stage']}/"
    return {prefix + name: number for name, number in finite[:_MOST_FIGURES]}
