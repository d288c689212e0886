"""What a relabeler is: a pure function from trajectories to the columns that change.

The result becomes an overlay, or a window that is made as it is drawn: the originals stay as they are. A relabeler says
what would have been recorded had the task been another one; it never invents observations. All that it draws follows
from the seed, the original's uid and the number of the copy, so that it does not matter when or among which others a
trajectory is relabelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from pipelines.config.settings import GoalSettings
from pipelines.errors import InputMissing, UsageError
from pipelines.events import Listener, silent
from pipelines.lake.overlays import OverlayBatch
from pipelines.lake.schema import LABEL, OPTIONAL, RESET, Schema
from pipelines.registry import Registry
from pipelines.relabelers.paths import Paths, make_keys


@dataclass(frozen=True, kw_only=True)
class Context:
    """The trajectories that are relabelled: their schema and environment. `listener` receives notices of waiting.
    `make_labels` makes the relabeler that adds the labels of the policy of this name; None while sampling.
    """

    schema: Schema
    env: str
    goal: GoalSettings = field(default_factory=GoalSettings)
    listener: Listener = silent
    make_labels: Callable[[str, Context], Relabeler] | None = None

    def require(self, *columns: str, needed_by: str) -> None:
        """Raise InputMissing unless the steps have these columns."""
        known = [column.name for column in self.schema.columns]
        for name in columns:
            if name not in known:
                raise InputMissing(f"{needed_by}: steps have no column '{name}'", hint=f"they have {', '.join(known)}")


class Relabeler(Protocol):
    """`reads`: the columns it must be given; `changes`: those that may differ afterwards, all of them read or made.

    A relabeler may also have `method`, a text: the lake names its versions by it, not by the text that named it; and
    `space`, that of the observation column that it adds, the only one that it changes.
    """

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def changes(self) -> tuple[str, ...]: ...

    def relabel(self, paths: Paths) -> Paths:
        """Return the trajectories for which another task was found, or a stretch of each; the arrays given stay as they
        are. Draws come from `paths` alone.
        """
        ...


def make_label(policy: str, context: Context) -> Relabeler:
    """Make the relabeler that adds what `policy` would have done. UsageError while sampling: acting is too slow."""
    if context.make_labels is None:
        raise UsageError(
            f"train.relabel: 'label:{policy}' is not for windows that are being drawn",
            hint=f"store labels: amago relabel --with label:{policy}",
        )
    return context.make_labels(policy, context)


# A member is called with the text after its name (empty if there is none) and the context.
RELABELERS = Registry(
    "relabeler",
    {
        "hindsight": "pipelines.relabelers.goals:make_hindsight",
        "instruction": "pipelines.relabelers.goals:make_instruction",
        "reward": "pipelines.relabelers.rewards:Rewards.from_values",
        "success": "pipelines.relabelers.rewards:Success.from_values",
        "scale": "pipelines.relabelers.rewards:Rewards.from_scale",
        "clip": "pipelines.relabelers.rewards:Rewards.from_range",
        "return": "pipelines.relabelers.rewards:DiscountedReturn.from_discount",
        "task": "pipelines.relabelers.rewards:Task.from_label",
        "label": "pipelines.relabelers.base:make_label",
        "column": "pipelines.relabelers.columns:AddedColumn.from_text",
    },
)


class Chain:
    """Relabelers one after the other, each `NAME`, `NAME:ARGUMENT`, or `module:attr`. A trajectory for which one of
    them finds nothing has no version.

    UsageError for an unknown name or argument, InputMissing for one that does not fit these trajectories. `method`: how
    the lake records where versions came from. `schema`: that of the versions, which labels and columns may be added to.
    """

    def __init__(self, texts: Sequence[str], context: Context, *, seed: int) -> None:
        if not texts:
            raise UsageError("no relabeler is named", hint=f"known: {', '.join(RELABELERS.names())}, or module:attr")
        self.seed = seed
        self._relabelers: list[Relabeler] = []
        for text in texts:
            name, _, argument = text.partition(":")
            if name not in RELABELERS.names():
                name, argument = text, ""
            self._relabelers.append(RELABELERS.get(name)(argument, context))
        methods = [getattr(each, "method", text) for each, text in zip(self._relabelers, texts, strict=True)]
        self.method = f"{' + '.join(methods)}/{seed}"
        names = {name for each in self._relabelers for name in each.changes}
        if LABEL in names and len(texts) > 1:
            raise UsageError(
                f"'{' + '.join(texts)}': labels are of trajectories as they were recorded",
                hint="give label:POLICY alone; relabel again for other versions",
            )
        optional = context.schema.optional
        if optional and names & context.schema.spaces.observation.keys():
            raise UsageError(
                f"'{' + '.join(texts)}' changes what is observed, but the lake has {OPTIONAL[optional[0]]} of the "
                "observations that were made",
                hint=f"relabel a lake that was collected without collect.{optional[0]}",
            )
        read = {name for each in self._relabelers for name in each.reads}
        # A label of a whole trajectory has to be stored with some column: the smallest.
        changes = names or {RESET}
        spaces = context.schema.spaces
        for each in self._relabelers:
            if (space := getattr(each, "space", None)) is not None:
                spaces = spaces.with_column(each.changes[0], space)
        self.schema = replace(context.schema, spaces=spaces, labelled=context.schema.labelled or LABEL in names)
        self.changes = tuple(column.name for column in self.schema.columns if column.name in changes)
        self.reads = tuple(column.name for column in context.schema.columns if column.name in read | changes)

    def derive(
        self, columns: Mapping[str, np.ndarray], rows: np.ndarray, uids: np.ndarray, copies: np.ndarray | int
    ) -> OverlayBatch:
        """Derive the versions `copies` of trajectories given by the columns `reads`, laid one after another."""
        paths = Paths.of(columns, rows, uids, make_keys(self.seed, uids, copies))
        for relabeler in self._relabelers:
            paths = relabeler.relabel(paths.renew_keys())
            if not len(paths):
                break
        return paths.as_overlay(self.changes)
