"""Windows from several lakes: each window's lake is drawn first, by shares that may change during training.

With one lake nothing is drawn for the choice: its windows are those of its sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.data.batch import Batch, Buffers
from pipelines.data.gather import Columns
from pipelines.data.histories import HistoryContext
from pipelines.data.randomness import Purpose, stream
from pipelines.data.relabel_on_the_fly import Versions
from pipelines.data.sampler import WindowSampler
from pipelines.data.strategy import Strategy
from pipelines.data.view import View, ViewFindings, first_steps
from pipelines.errors import InputMissing
from pipelines.lake.schema import Schema
from pipelines.lake.writer import refuse_unsealed


@dataclass(frozen=True)
class Share:
    """Relative frequency of a lake in a mixture: `first` at the start, `last` once annealing is done."""

    first: float = 1.0
    last: float = 1.0

    def at(self, progress: float) -> float:
        """Return the share at this fraction of the annealing."""
        return self.first + (self.last - self.first) * min(max(progress, 0.0), 1.0)


@dataclass
class _MixedLake:
    """A lake of a mixture. `history`: [n, number of segments], update n being the first to draw from so many."""

    view: View
    sampler: WindowSampler
    share: Share
    history: list[list[int]] = field(default_factory=list)


class Mixture:
    """Sampler of batches from several `lakes`: views of one schema, made with the strategy's extra fields; with
    `versions` of each; from a `span` of each, with `burn_in` and `history`, as `WindowSampler` says.

    A batch is a function of `seed`, the update, the micro-batch and what is drawn from: `snapshots` and `arrays`
    together restore a mixture in another process.
    """

    def __init__(
        self,
        lakes: Sequence[tuple[View, Share]],
        *,
        length: int,
        seed: int,
        strategy: Strategy | None = None,
        anneal_steps: int = 0,
        versions: Sequence[Versions] | None = None,
        span: tuple[float, float] = (0.0, 1.0),
        burn_in: int = 0,
        history: HistoryContext | None = None,
    ) -> None:
        schema: Schema = lakes[0][0].schema
        assert all(view.schema.id == schema.id for view, _ in lakes), "lakes of other spaces cannot be mixed"
        self._seed, self._anneal_steps = seed, anneal_steps
        options: dict[str, Any] = {"length": length, "strategy": strategy, "span": span, "burn_in": burn_in}
        options["history"] = history
        self.parts = [
            _MixedLake(view, WindowSampler(view, versions=own, **options), share)
            for (view, share), own in zip(lakes, versions or (None,) * len(lakes), strict=True)
        ]
        self._buffers = Buffers(schema.columns, length + 1)

    def share_out(self, shares: Sequence[Share]) -> None:
        """Set the lakes' shares."""
        for part, share in zip(self.parts, shares, strict=True):
            part.share = share

    @property
    def is_empty(self) -> bool:
        """Whether no lake has a trajectory to draw from."""
        return all(part.sampler.is_empty for part in self.parts)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever the drawn trajectories or their weights change."""
        return tuple(part.view.version for part in self.parts)

    @property
    def longest(self) -> int:
        """Actions in the longest episode that may be drawn, as far as it is stored (0: there is none)."""
        tables = [part.view.table[part.view.table["weight"] > 0] for part in self.parts]
        return max(int((first_steps(table).astype(np.int64) + table["length"]).max(initial=0)) for table in tables)

    @property
    def collected_steps(self) -> int:
        """Environment steps put into the lakes so far."""
        return sum(part.view.collected_steps for part in self.parts)

    def refresh(self, update: int, findings: Sequence[ViewFindings] | None = None) -> int:
        """Apply additions, moves and removals in the lakes before `update`; return the number of new trajectories.
        `findings`: those of another process in each lake (None: look)."""
        known: Sequence[ViewFindings | None] = [None] * len(self.parts) if findings is None else findings
        added = sum(part.view.refresh(found) for part, found in zip(self.parts, known, strict=True))
        for part in self.parts:
            seen = len(part.view.live.segments)
            if not part.history or part.history[-1][1] != seen:
                if part.history and part.history[-1][0] == update + 1:
                    part.history.pop()
                part.history.append([update + 1, seen])
        return added

    def shares(self, update: int) -> np.ndarray:
        """Return the probability of each lake at `update`; 0 for an empty one. InputMissing if all are empty."""
        progress = update / self._anneal_steps if self._anneal_steps else 0.0
        weights = np.array([0.0 if part.sampler.is_empty else part.share.at(progress) for part in self.parts])
        if not weights.sum() > 0:
            names = ", ".join(f"'{part.view.lake.name}'" for part in self.parts)
            for part in self.parts:
                refuse_unsealed(part.view.lake.storage)
            raise InputMissing(f"no trajectories to draw from in {names}", hint=self.parts[0].sampler.how_to_fill)
        return weights / weights.sum()

    def sample(self, batch_size: int, update: int, micro_batch: int = 0) -> Batch:
        """Draw `batch_size` windows for a micro-batch of `update` (0: the first), ordered by lake and segment."""
        rng = stream(self._seed, update, micro_batch, Purpose.WINDOWS)
        if len(self.parts) == 1:
            return self.parts[0].sampler.sample(batch_size, rng)
        ends = np.cumsum(self.shares(update))
        lake = np.sort(np.searchsorted(ends, rng.random(batch_size) * ends[-1], side="right"))
        buffers = self._buffers.take(batch_size)
        edges = np.searchsorted(lake, np.arange(len(self.parts) + 1)).tolist()
        batches = [
            part.sampler.sample(b - a, rng, {name: buffer[a:b] for name, buffer in buffers.items()})
            for part, a, b in zip(self.parts, edges[:-1], edges[1:], strict=True)
            if b > a
        ]
        return join_batches(buffers, batches, lake)

    def prioritise(self, trajectory: np.ndarray, lake: np.ndarray | None, error: np.ndarray) -> None:
        """Update priorities with the mean absolute TD errors (B,) of windows of the trajectories (B,) of the lakes (B,)
        (None: the only one)."""
        for number, part in enumerate(self.parts):
            own = slice(None) if lake is None else lake == number
            part.sampler.prioritise(trajectory[own], error[own])

    def snapshots(self) -> list[dict[str, Any]]:
        """Return what was drawn from, by lake, JSON-serialisable."""
        return [
            {**part.view.snapshot(), "share": [part.share.first, part.share.last], "history": part.history}
            for part in self.parts
        ]

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Restore the views of `snapshots`; a lake that is not among them starts fresh."""
        known = {snapshot["id"]: snapshot for snapshot in snapshots}
        for part in self.parts:
            snapshot = known.get(part.view.lake.id)
            if snapshot is None:
                continue
            part.view.restore(snapshot)
            alive = {segment.id for segment in part.view.live.segments}
            part.history = [
                [update, len(alive.intersection(snapshot["segments"][:seen]))] for update, seen in snapshot["history"]
            ]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the trajectories' priorities, by lake; empty without prioritized replay."""
        return {
            f"{part.view.lake.id}/{name}": values
            for part in self.parts
            if part.sampler.strategy.per_alpha
            for name, values in part.sampler.priorities().items()
        }

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        for part in self.parts:
            prefix = f"{part.view.lake.id}/"
            own = {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
            if own and part.sampler.strategy.per_alpha:
                part.sampler.load_priorities(own)


def join_batches(columns: Columns, batches: Sequence[Batch], lake: np.ndarray) -> Batch:
    """Join batches whose windows are consecutive in `columns`."""
    importance = [batch.importance for batch in batches if batch.importance is not None]
    cut_off = None
    if any(batch.cut_off is not None for batch in batches):
        steps = next(iter(columns.values())).shape[1] - 1
        marks = [np.zeros((len(each), steps), dtype=bool) if each.cut_off is None else each.cut_off for each in batches]
        cut_off = np.concatenate(marks)
    warm_up = [batch.warm_up for batch in batches if batch.warm_up is not None]
    return Batch(
        columns={name: buffer[:] for name, buffer in columns.items()},
        lengths=np.concatenate([batch.lengths for batch in batches]),
        start=np.concatenate([batch.start for batch in batches]),
        trajectory=np.concatenate([batch.trajectory for batch in batches if batch.trajectory is not None]),
        lake=lake,
        importance=np.concatenate(importance) if importance else None,
        warm_up=np.concatenate(warm_up) if warm_up else None,
        cut_off=cut_off,
    )
