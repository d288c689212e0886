"""What a relabeler is: a pure function from trajectories to the columns that change.

The result becomes an overlay, or a window that is made as it is drawn: the originals stay as they are. A relabeler says
what would have been recorded had the task been another one; it never invents observations. All that it draws follows
from the seed, the original's uid and the number of the copy, so that it does not matter when or among which others a
trajectory is relabelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipelines.config.settings import GoalSettings
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, silent
from pipelines.lake.overlays import OverlayBatch
from pipelines.lake.schema import RESET, Schema
from pipelines.registry import Registry
from pipelines.relabelers.paths import Paths, keys_of


@dataclass(frozen=True, kw_only=True)
class Context:
    """Whose trajectories are relabelled: of this schema, from this environment. `listener`: who hears what is waited
    for.
    """

    schema: Schema
    env: str
    goal: GoalSettings = field(default_factory=GoalSettings)
    listener: Listener = silent

    def require(self, *columns: str, needed_by: str) -> None:
        """InputMissing unless the steps have these columns."""
        known = [column.name for column in self.schema.columns]
        for name in columns:
            if name not in known:
                raise InputMissing(f"{needed_by}: steps have no column '{name}'", hint=f"they have {', '.join(known)}")


class Relabeler(Protocol):
    """`reads`: the columns it must be given; `changes`: those that may differ afterwards, all of them read or made."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def changes(self) -> tuple[str, ...]: ...

    def relabel(self, paths: Paths) -> Paths:
        """The trajectories for which another task was found, or a stretch of each; the arrays given stay as they are.
        Draws come from `paths` alone.
        """
        ...


# A member is called with the text after its name (empty if there is none) and the context.
RELABELERS = Registry(
    "relabeler",
    {
        "hindsight": "pipelines.relabelers.goals:make_hindsight",
        "instruction": "pipelines.relabelers.goals:make_instruction",
        "reward": "pipelines.relabelers.rewards:make_reward",
        "success": "pipelines.relabelers.rewards:make_success",
        "scale": "pipelines.relabelers.rewards:make_scale",
        "clip": "pipelines.relabelers.rewards:make_clip",
        "return": "pipelines.relabelers.rewards:make_return",
        "task": "pipelines.relabelers.rewards:make_task",
    },
)


def _make_relabeler(text: str, context: Context) -> Relabeler:
    """The relabeler that `text` says: `NAME`, `NAME:ARGUMENT`, or `module:attr`.

    UsageError for an unknown name or argument, InputMissing for what does not fit these trajectories.
    """
    name, _, argument = text.partition(":")
    if name not in RELABELERS.names():
        name, argument = text, ""
    relabeler: Relabeler = RELABELERS.get(name)(argument, context)
    return relabeler


class Chain:
    """Relabelers one after the other. What one of them finds nothing for has no version."""

    def __init__(self, texts: Sequence[str], context: Context, *, seed: int) -> None:
        if not texts:
            raise UsageError("no relabeler is named", hint=f"known: {', '.join(RELABELERS.names())}, or module:attr")
        self.seed, self.method = seed, _method_of(texts, seed)
        self._relabelers = [_make_relabeler(text, context) for text in texts]
        names = {name for each in self._relabelers for name in each.changes}
        read = {name for each in self._relabelers for name in each.reads}
        # What is only said of a trajectory as a whole needs some column to be stored with: the smallest.
        changes = names or {RESET}
        in_order = [column.name for column in context.schema.columns]
        self.changes = tuple(name for name in in_order if name in changes)
        self.reads = tuple(name for name in in_order if name in read | changes)

    def derive(
        self, columns: Mapping[str, np.ndarray], rows: np.ndarray, uids: np.ndarray, copies: np.ndarray | int
    ) -> OverlayBatch:
        """The versions `copies` of trajectories given by the columns `reads`, laid one after another."""
        paths = Paths.of(columns, rows, uids, keys_of(self.seed, uids, copies))
        for relabeler in self._relabelers:
            paths = relabeler.relabel(paths.keyed())
            if not len(paths):
                break
        return paths.derived(self.changes)


def _method_of(texts: Sequence[str], seed: int) -> str:
    """What the lake records of how versions came about."""
    return f"{' + '.join(texts)}/{seed}"
