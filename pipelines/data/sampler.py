"""Drawing windows from one view: a `Strategy` chooses trajectories and places, a `Gatherer` reads the contents."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pipelines.data.batch import Batch
from pipelines.data.gather import Columns, Gatherer, LentRows, SegmentLost
from pipelines.data.histories import Histories, HistoryContext
from pipelines.data.relabel_on_the_fly import Derivation, DrawnVersions, Versions
from pipelines.data.strategy import Strategy, pieces
from pipelines.data.sum_tree import SumTree
from pipelines.data.view import Neighbours, View, bases, first_steps
from pipelines.errors import InputMissing
from pipelines.lake.overlays import split_versions
from pipelines.lake.reading import join_pieces
from pipelines.lake.uids import positions

ERROR_STEP = 0.3  # step of the moving average of a trajectory's TD errors
MIN_PRIORITY = 1e-6  # so that a TD error of zero does not exclude a trajectory


class WindowSampler:
    """Sampler of batches of windows of `length` steps from a view, deterministic given the view and a generator.

    With prioritized replay, the view must have been made with the strategy's `extra` fields. With `versions`, some
    windows show a version instead of the drawn trajectory.

    With a `span` [start, stop) of [0, 1), trajectories are drawn from this part of the total mass, in which files have
    a random order that is the same in every process (overlays are beside the files of their bases). Samplers whose
    spans divide [0, 1) read different files, except for at most one on each border.

    The first `burn_in` steps of a window only warm up a memory (`Batch.warm_up`), unless it begins its trajectory. One
    that begins a piece of an episode is preceded by up to `burn_in` rows of the piece before, as far as it has room.

    With a `history`, windows go on with the next episodes of the history that their first trajectory belongs to; the
    view must have been made with the fields `HISTORY`. Others are not drawn, and `versions` are not shown.

    Exact: if each sampler draws in proportion to the length of its span, the expected number of draws of every
    trajectory is that of one sampler of the whole. Only in expectation: the draws themselves are others, and since
    each sampler's number of draws is fixed, those of a batch are spread more evenly. Borders move as the lake grows.
    """

    def __init__(
        self,
        view: View,
        *,
        length: int,
        strategy: Strategy | None = None,
        versions: Versions | None = None,
        span: tuple[float, float] = (0.0, 1.0),
        burn_in: int = 0,
        history: HistoryContext | None = None,
    ) -> None:
        self._burn_in, self._context = burn_in, history
        self._histories: Histories | None = None
        self.view, self.length, self.strategy = view, length, strategy or Strategy()
        self._span = span
        self._order: np.ndarray | None = None  # rows of the table as they are drawn from; None: in their own order
        self._place_of: np.ndarray | None = None  # of each row: its place in that order
        self._gatherer = Gatherer(view, length + 1)
        self._version = -1
        self._cumulative = np.zeros(0)
        self._last = 0
        self._mass = np.zeros(0)
        self._tree = SumTree(self._mass)
        self._highest = 1.0
        self._versions = versions
        self._derivation: Derivation | None = None
        self._uids = np.zeros(0, "S16")
        self._varied = np.zeros(0, dtype=bool)  # whether rows of the table have versions
        self._varied_at = -1

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw from."""
        self._weigh()
        return not self._total > 0

    @property
    def how_to_fill(self) -> str:
        """The hint where there is nothing to draw from."""
        if self._context is None:
            return "fill it with: amago collect; or widen the selection"
        return 'train.context = "history" draws from histories alone: amago collect --tasks N stores them'

    def sample(self, batch_size: int, rng: np.random.Generator, out: Columns | None = None) -> Batch:
        """Draw `batch_size` windows: independent draws, ordered by segment; into `out`, if given. InputMissing if there
        is nothing to draw from."""
        while True:
            chosen = self._choose(batch_size, rng)
            try:
                if self._histories is not None:
                    batch = self._sample_histories(self._histories, chosen, rng, out)
                    return replace(batch, importance=self._importance(batch)) if self.strategy.per_alpha else batch
                drawn = self._draw_versions(chosen, rng) if self._versions is not None else None
                start, stop = self._place(chosen, rng, drawn)
                lent = self._lend(chosen, start, stop, drawn) if self._burn_in else None
                batch = self._gatherer.gather(chosen, start, stop, out, drawn, lent)
            except SegmentLost as lost:
                self.view.lose(lost.number, str(lost))
                continue
            return replace(batch, importance=self._importance(batch)) if self.strategy.per_alpha else batch

    def _sample_histories(
        self, histories: Histories, chosen: np.ndarray, rng: np.random.Generator, out: Columns | None
    ) -> Batch:
        goes_on = histories.context.horizon == "history"
        parts = histories.walk(chosen, self.length, rng)
        batch = self._gatherer.gather_parts(parts, len(chosen), out, goes_on=goes_on)
        return replace(batch, warm_up=np.where(batch.start == 0, 0, self._burn_in)) if self._burn_in else batch

    def draw(self, batch_size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw rows of the view's table, and steps [start, stop) of windows, (batch_size,) int64 each; no versions."""
        chosen = self._choose(batch_size, rng)
        return chosen, *self._place(chosen, rng)

    def _choose(self, batch_size: int, rng: np.random.Generator) -> np.ndarray:
        if self.is_empty:
            raise InputMissing(
                f"lake '{self.view.lake.name}' has no trajectories to draw from",
                hint=self.how_to_fill,
            )
        first, stop = self._span
        point = (first + rng.random(batch_size) * (stop - first)) * self._total
        if self.strategy.per_alpha:
            found = self._tree.find(point)
        else:
            found = np.minimum(np.searchsorted(self._cumulative, point, side="right"), self._last)
        return found if self._order is None else self._order[found]

    def _place(
        self, chosen: np.ndarray, rng: np.random.Generator, drawn: DrawnVersions | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        length = self.view.table["length"][chosen].astype(np.int64)
        length = length if drawn is None else drawn.lengths(length)
        return self.strategy.place(length, self.length, rng.random(len(chosen)))

    def _lend(self, chosen: np.ndarray, start: np.ndarray, stop: np.ndarray, drawn: DrawnVersions | None) -> LentRows:
        """Return the rows of the piece before that precede each window, and the steps that do not count."""
        lent, before = np.zeros(len(chosen), dtype=np.int64), np.full(len(chosen), -1)
        neighbours = self.view.neighbours
        if neighbours is not None:
            before = np.where(start == 0, neighbours.before[chosen], -1)
            if drawn is not None:
                before[drawn.windows] = -1
            room = np.minimum(self._burn_in, self.length - (stop - start))
            lent = np.where(before >= 0, np.minimum(self.view.table["length"][before], room), 0)
        return LentRows(before=before, count=lent, warm_up=np.where(start == 0, lent, self._burn_in))

    def _draw_versions(self, chosen: np.ndarray, rng: np.random.Generator) -> DrawnVersions | None:
        """Draw versions for some of the trajectories `chosen`."""
        versions = self._versions
        assert versions is not None
        if self._varied_at != self.view.version:
            table = self.view.table
            self._uids, neighbours = self.view.uids(), self.view.neighbours
            first = np.arange(len(table)) if neighbours is None else neighbours.first
            chosen_by = (table["segment"] == bases(table)) & versions.evaluate(self._uids, self._uids[first])
            self._varied = (np.bincount(first, weights=chosen_by, minlength=len(table)) > 0)[first]
            self._varied_at = self.view.version
        u = rng.random((2, len(chosen)))
        windows = np.flatnonzero(self._varied[chosen] & (u[0] < versions.share))
        if not len(windows):
            return None
        if self._derivation is None:
            self._derivation = versions.derivation()
        copies = (u[1, windows] * versions.copies).astype(np.int64)
        if self.view.neighbours is None:
            columns, rows = self._gatherer.whole(chosen[windows], self._derivation.reads)
            return DrawnVersions(windows, self._derivation.derive(columns, rows, self._uids[chosen[windows]], copies))
        return self._derive_pieces(self.view.neighbours, windows, chosen[windows], copies, self._derivation)

    def _derive_pieces(
        self,
        neighbours: Neighbours,
        windows: np.ndarray,
        chosen: np.ndarray,
        copies: np.ndarray,
        derivation: Derivation,
    ) -> DrawnVersions:
        """Derive versions of the whole episodes, and return what they say of the pieces `chosen`; where one does not
        reach its piece, the window shows the original."""
        episodes = [neighbours.episode(row) for row in chosen.tolist()]
        columns, rows = self._gatherer.whole(np.concatenate(episodes), derivation.reads)
        ends, counts = np.cumsum(rows), np.cumsum([0, *map(len, episodes)])
        joined = []
        for a, b in itertools.pairwise(counts.tolist()):
            spans = [slice(stop - count, stop) for stop, count in zip(ends[a:b], rows[a:b], strict=True)]
            joined.append(join_pieces([{name: values[span] for name, values in columns.items()} for span in spans]))
        lengths = [rows[a:b] - 1 for a, b in itertools.pairwise(counts.tolist())]
        first = np.array([mine[0] for mine in episodes])
        derived = derivation.derive(
            {name: np.concatenate([each[name] for each in joined]) for name in columns},
            np.array([each.sum() + 1 for each in lengths]),
            self._uids[first],
            copies,
        )
        names, begins = [""] * len(episodes), first_steps(self.view.table)[first].tolist()
        numbers, parts = split_versions(derived, lengths, names, begins)
        drawn = np.array([mine.index(row) for mine, row in zip(episodes, chosen.tolist(), strict=True)])
        kept = np.flatnonzero(numbers == drawn[parts.place]) if len(parts) else np.zeros(0, dtype=np.int64)
        return DrawnVersions(windows, parts.part(kept, np.zeros(len(kept), dtype=np.int64), parts.rows[kept]))

    def prioritise(self, trajectory: np.ndarray, error: np.ndarray) -> None:
        """Update priorities with the mean absolute TD errors (n,) of windows of the trajectories (n,). NaN: the window
        has none."""
        trajectory, error = trajectory[~np.isnan(error)], error[~np.isnan(error)]
        rows, which = np.unique(trajectory, return_inverse=True)
        mean = np.bincount(which, weights=error) / np.bincount(which) + MIN_PRIORITY
        table = self.view.table
        old = table["priority"][rows]
        table["priority"][rows] = np.where(table["measured"][rows], old + ERROR_STEP * (mean - old), mean)
        table["measured"][rows] = True
        self._highest = max(self._highest, float(table["priority"][rows].max(initial=0.0)))
        if self._version == self.view.version:
            places = rows if self._place_of is None else self._place_of[rows]
            self._tree.set(places, self._mass[rows] * self._powers(table["priority"][rows]))

    @property
    def _total(self) -> float:
        if self.strategy.per_alpha:
            return self._tree.total
        return float(self._cumulative[-1]) if len(self._cumulative) else 0.0

    def _weigh(self) -> None:
        if self._version == self.view.version:
            return
        table = self.view.table
        windows = None
        if self._context is not None:
            self._histories = Histories(table, self._context)
            windows = self._histories.windows(len(table), self.length)
        mass = self.strategy.mass(table, self.length, windows)
        if self._span != (0.0, 1.0):
            self._order = np.argsort(self.view.file_places()[self.view.file_of[bases(table)]], kind="stable")
            self._place_of = np.argsort(self._order) if self.strategy.per_alpha else None
        if self.strategy.per_alpha:
            table["priority"][table["priority"] == 0] = self._highest
            self._mass = mass
            weights = mass.copy()
            for rows, own in zip(pieces(table), pieces(weights), strict=True):
                own *= self._powers(rows["priority"])
            self._tree = SumTree(weights if self._order is None else weights[self._order])
        else:
            mass = mass if self._order is None else mass[self._order]
            self._last = int(np.flatnonzero(mass)[-1]) if mass.any() else 0
            self._cumulative = np.cumsum(mass, out=mass)
        self._version = self.view.version

    def _powers(self, priority: np.ndarray) -> np.ndarray:
        return priority.astype(np.float64) ** self.strategy.per_alpha

    def _importance(self, batch: Batch) -> np.ndarray:
        return self._powers(self.view.table["priority"][batch.trajectory]) ** -self.strategy.per_beta

    def priorities(self) -> dict[str, np.ndarray]:
        """Return the trajectories' priorities by uid, which outlives changes of the table."""
        table = self.view.table
        uids = np.frombuffer(self.view.uids().tobytes(), dtype=np.uint8).reshape(-1, 16)
        known = {name: np.ascontiguousarray(table[name]) for name in ("priority", "measured")}
        return {"uid": uids, **known, "highest": np.array([self._highest])}

    def load_priorities(self, known: Mapping[str, np.ndarray]) -> None:
        """Restore `priorities` of an earlier sampler; trajectories it did not know count as new."""
        uids = np.frombuffer(np.ascontiguousarray(known["uid"]).tobytes(), dtype="S16")
        place, table = positions(uids, self.view.uids()), self.view.table
        found = place >= 0
        for name in ("priority", "measured"):
            table[name][found] = known[name][place[found]]
        self._highest = float(known["highest"][0])
        self._version = -1
