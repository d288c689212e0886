"""What a tracker is, and how one is named: `NAME`, `NAME:ARGUMENT`, or `module:attr[:ARGUMENT]` of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pipelines.registry import Registry, require_package

Ending = Literal["finished", "failed", "interrupted"]

# Those that need a client package, in an optional-dependency group, both of the tracker's name.
_PACKAGED = ("tensorboard", "wandb", "mlflow", "trackio")
_TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": "pipelines.tracking.tensorboard:TensorBoardTracker",
        "wandb": "pipelines.tracking.wandb:WandbTracker",
        "mlflow": "pipelines.tracking.mlflow:MlflowTracker",
        "trackio": "pipelines.tracking.trackio:TrackioTracker",
    },
)


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it. `identity` is its name with its unique id, and `config` has all its settings.

    `id` is the tracker's own name for the run, if it was tracked before, and otherwise empty.
    """

    name: str
    identity: str
    directory: Path
    config: Mapping[str, Any]
    id: str = ""


class Tracker(Protocol):
    """One run in one tracker, made by `factory(argument, run)` and used by one thread.

    `id` makes a later call continue the same run; `place` says where to look at it.
    """

    id: str
    place: str

    def log(self, figures: Mapping[str, float], *, step: int, seconds: float) -> None:
        """Add figures of update `step`; `seconds` since the epoch is when they were measured."""
        ...

    def picture(self, name: str, path: Path, *, step: int) -> None:
        """Add a PNG file."""
        ...

    def video(self, name: str, path: Path, *, step: int) -> None:
        """Add an MP4 or GIF file."""
        ...

    def close(self, ending: Ending) -> None:
        """Send what is left, and end the run in the tracker."""
        ...


class TrackerName(NamedTuple):
    """The parts of a tracker's name: that of the registry, and the argument for it."""

    member: str
    argument: str

    @classmethod
    def parse(cls, text: str) -> TrackerName:
        """Split the name of a tracker.

        >>> TrackerName.parse("wandb:my-project")
        TrackerName(member='wandb', argument='my-project')
        """
        first, _, rest = text.partition(":")
        if first in _TRACKERS.names() or not rest:
            return cls(first, rest)
        attribute, _, argument = rest.partition(":")
        return cls(f"{first}:{attribute}", argument)

    def find_factory(self) -> Callable[[str, TrackedRun], Tracker]:
        """Find the class or function that makes the tracker.

        UsageError for an unknown name; InputMissing without its package, or for a module that is not trusted.
        """
        if self.member in _PACKAGED:
            require_package(self.member, self.member, f"tracker '{self.member}'")
        made: Callable[[str, TrackedRun], Tracker] = _TRACKERS.get(self.member)
        return made
