"""relabel: derive new goals, rewards and labels as overlays, which leave the originals unchanged.

The choice of trajectories and goals follows from the seed and the trajectory's uid, and so does the derived uid.
Existing versions are not derived again, so the command can be repeated, after a kill or after more data has been
collected. An error leaves the lake unchanged.

An episode in pieces is relabelled as a whole, once all of it is there, by the uid of its first piece; the version is
stored in pieces, too.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pipelines.config.settings import RelabelSettings, Settings
from pipelines.errors import InputMissing
from pipelines.events import Listener, Notice, Progress, silent
from pipelines.lake.footer import hex_uids
from pipelines.lake.overlays import OverlayWriter, overlay_uids, split_versions
from pipelines.lake.reading import Reader, join_pieces
from pipelines.lake.spaces import find_widest
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake, describe_difference
from pipelines.lake.uids import positions, raw_uids
from pipelines.relabelers.base import Chain, Context
from pipelines.relabelers.columns import find_added
from pipelines.relabelers.paths import draw_shares
from pipelines.rollout.labels import make_labels
from pipelines.stages.result import Result

_CHUNK_BYTES = 32 << 20  # of columns that are relabelled at once
_PIECES = "select uid from trajectories where episode <> uid and base_uid is null"
_EPISODES = "select env, uids from episodes where complete and chunks > 1 and base_uid is null order by episode"
_DERIVED = "select uids from episodes where complete and base_uid is not null"


def run(settings: Settings, *, lake: Path | str, listener: Listener = silent) -> Result:
    """Relabel the selected share of the lake's original trajectories, `relabel.copies` times each."""
    started = time.monotonic()
    store = Lake(lake)
    store.salvage(listener=listener)
    job = _Job(store, settings.relabel, seed=settings.seed, listener=listener)
    work = job.plan()
    with contextlib.ExitStack() as stack:
        for part in work:
            job.relabel(part, stack)
    if job.expired:
        text = f"{job.expired} of {job.total} trajectories expired before they were relabelled"
        listener(Notice(text=text))
    seconds = time.monotonic() - started
    writers = job.writers.values()
    steps = sum(writer.steps for writer in writers)
    return Result(
        command="relabel",
        status="done" if job.total else "skipped",
        lake=store.name,
        metrics={
            "trajectories": sum(writer.trajectories for writer in writers),
            "steps": steps,
            "overlay_bytes": sum(writer.bytes for writer in writers),
            "base_bytes": steps * job.schema.step_bytes,
            "considered": job.total,
            "trajectories_per_second": job.done * settings.relabel.copies / seconds if job.done else 0.0,
        },
        outputs=[store.name],
        seconds=seconds,
    )


@dataclass(frozen=True)
class _RelabelledPart:
    """Trajectories `uids` (n,) "S16" of one environment in the segment `number`."""

    number: int
    env: str
    uids: np.ndarray


@dataclass(frozen=True)
class _RelabelledEpisodes:
    """Episodes of one environment: the uids of their pieces, in order."""

    env: str
    uids: list[list[str]]


class _Job:
    """Counts of originals: `total` without all their versions, `done`, and `expired` before they were read."""

    def __init__(self, store: Lake, wanted: RelabelSettings, *, seed: int, listener: Listener) -> None:
        self.store, self.wanted, self.seed, self.listener = store, wanted, seed, listener
        self._added = find_added(wanted.relabelers).keys()
        self.schema = store.only_schema(lacking=self._added)
        self.writers: dict[tuple[str, ...], OverlayWriter] = {}
        self.total = self.done = self.expired = 0
        self._unfit: Counter[str] = Counter()  # originals that are passed over, by schema
        self._chains: dict[str, Chain] = {}

    def plan(self) -> list[_RelabelledPart | _RelabelledEpisodes]:
        """Find originals without all their versions. Invalid settings are detected here."""
        chosen = select(self.store, self.wanted.where, originals=True, listener=self.listener).uids
        num_filled = 0
        if self._added:  # the value of a column is not chosen twice
            filled = query(self.store, "select base_uid, schema from trajectories where base_uid is not null")[1]
            has = {id for id, schema in self.store.schemas().items() if self._added <= schema.spaces.observation.keys()}
            done = np.sort(raw_uids(sorted({uid for uid, schema in filled if schema in has})))
            is_filled = positions(done, chosen, np.arange(len(done))) >= 0
            num_filled, chosen = int(is_filled.sum()), chosen[~is_filled]
        _, episodes = query(self.store, _EPISODES, listener=self.listener)
        pieces = np.sort(raw_uids([uid for (uid,) in query(self.store, _PIECES, listener=self.listener)[1]]))
        self._reader = Reader(self.store, listener=self.listener)
        self._reader.refresh()
        self._known = self._reader.list_derived()
        whole = self._episodes(chosen, episodes)
        chosen = chosen[positions(pieces, chosen, np.arange(len(pieces))) < 0]
        if self.wanted.fraction < 1:
            chosen = chosen[draw_shares(self.seed, chosen) < self.wanted.fraction]
        parts: list[_RelabelledPart] = []
        for segment in self._reader.list_originals():
            mine = segment.uids[positions(chosen, segment.uids, np.arange(len(chosen))) >= 0]
            if not self._fits(segment.schema_id):
                self._unfit[segment.schema_id] += len(mine)
                continue
            portion = self._reader.read_portion(segment.number, mine)
            if portion is not None:
                names, codes = portion.envs()
                found = ((env, portion.uids[codes == code]) for code, env in enumerate(names))
                parts += [_RelabelledPart(segment.number, env, self._lacking(env, uids)) for env, uids in found]
        if self._added:
            if num_filled := num_filled + self._unfit.total():
                added = ", ".join(f"'{name}'" for name in self._added)
                text = f"{num_filled:,} trajectories that have {added} keep its value and are passed over"
                self.listener(Notice(stage="relabel", text=text))
        elif self._unfit.total():
            self._explain_unfit(any_fits=bool(self._chains))
        parts = [part for part in parts if len(part.uids)]
        self.total = sum(len(part.uids) for part in parts) + sum(len(each.uids) for each in whole)
        return [*parts, *whole]

    def _explain_unfit(self, *, any_fits: bool) -> None:
        """Warn of originals that are passed over. InputMissing if there are no others."""
        held = [self.store.schema(id).spaces.observation for id, count in self._unfit.items() if count]
        missing = ", ".join(name for name in self.schema.spaces.observation if any(name not in each for each in held))
        without = f"{self._unfit.total():,} trajectories were recorded without {missing or 'some columns'}"
        if not any_fits:
            raise InputMissing(
                f"lake '{self.store.name}' has nothing to relabel: all {without}",
                hint="collect with all columns of the lake; versions to which a column was added are not relabelled",
            )
        self.listener(Notice(text=f"{without} and are passed over", level="warning"))

    def _episodes(self, chosen: np.ndarray, stored: Sequence[tuple[str, list[str]]]) -> list[_RelabelledEpisodes]:
        """Find the complete episodes in pieces of which one is `chosen`, without those that have all versions."""
        found: dict[str, list[list[str]]] = {}
        if not stored:
            return []
        derived = query(self.store, _DERIVED, listener=self.listener)[1]
        whole = np.sort(raw_uids([uid for (uids,) in derived for uid in uids]))
        for env, uids in stored:
            mine = raw_uids(uids)
            if not (positions(chosen, mine, np.arange(len(chosen))) >= 0).any():
                continue
            schema_id = self._reader.locate(uids[0])[0].schema_id
            if not self._fits(schema_id):
                self._unfit[schema_id] += len(uids)
                continue
            if self.wanted.fraction < 1 and draw_shares(self.seed, mine[:1])[0] >= self.wanted.fraction:
                continue
            versions = (overlay_uids(mine, self._chain(env).method, copy) for copy in range(self.wanted.copies))
            if not all((positions(whole, each, np.arange(len(whole))) >= 0).any() for each in versions):
                found.setdefault(env, []).append(uids)
        return [_RelabelledEpisodes(env, uids) for env, uids in found.items()]

    def _chain(self, env: str) -> Chain:
        if env not in self._chains:
            context = Context(
                schema=self.schema,
                env=env,
                goal=self.wanted.goal,
                listener=self.listener,
                make_labels=partial(make_labels, reader=self._reader),
            )
            chain = self._chains[env] = Chain(self.wanted.relabelers, context, seed=self.seed)
            if find_widest([*self.store.list_spaces(), chain.schema.spaces]) is None:
                known = self.store.only_schema().spaces
                what = "; ".join(describe_difference(known, chain.schema.spaces))
                raise InputMissing(
                    f"lake '{self.store.name}' has other columns: {what}", hint="add them with the types that they have"
                )
        return self._chains[env]

    def _fits(self, schema_id: str) -> bool:
        """Check whether originals of this schema have the columns that are relabelled, and not yet those to add."""
        return self.store.schema(schema_id).spaces == self.schema.spaces

    def _lacking(self, env: str, uids: np.ndarray) -> np.ndarray:
        """Select those of `uids` that lack a version."""
        lacks = np.zeros(len(uids), dtype=bool)
        for copy in range(self.wanted.copies):
            lacks |= ~self._is_known(overlay_uids(uids, self._chain(env).method, copy))
        return uids[lacks]

    def _is_known(self, uids: np.ndarray) -> np.ndarray:
        """Check which uids are in the lake: (n,) bool."""
        return positions(self._known, uids, np.arange(len(self._known))) >= 0

    def relabel(self, part: _RelabelledPart | _RelabelledEpisodes, stack: contextlib.ExitStack) -> None:
        """Write the missing versions of a part."""
        chain = self._chain(part.env)
        if isinstance(part, _RelabelledEpisodes):
            self._relabel_episodes(part, chain, stack)
            return
        portion = self._reader.read_portion(part.number, part.uids)
        gone = len(part.uids) - (len(portion) if portion is not None else 0)
        self.expired += gone
        self.done += gone
        if portion is None:
            return
        for chunk in portion.chunks(chain.reads, _CHUNK_BYTES):
            for copy in range(self.wanted.copies):
                targets = overlay_uids(chunk.uids, chain.method, copy)
                lacking = np.flatnonzero(~self._is_known(targets))
                if not len(lacking):
                    continue
                some = chunk.only(lacking)
                derived = chain.derive(some.columns(chain.reads), some.rows, some.uids, copy)
                own = targets[lacking][derived.place]
                self._writer(chain, stack).append(some.id, some.table, derived, own, chain.method)
            self._advance(len(chunk))

    def _advance(self, count: int) -> None:
        self.done += count
        figures = {"written": float(sum(writer.trajectories for writer in self.writers.values()))}
        self.listener(Progress(stage="relabel", done=self.done, total=self.total, unit="trajectories", metrics=figures))

    def _relabel_episodes(self, part: _RelabelledEpisodes, chain: Chain, stack: contextlib.ExitStack) -> None:
        """Write the missing versions of episodes in pieces."""
        held: list[tuple[list[str], dict[str, np.ndarray], np.ndarray]] = []
        size = 0
        for number, uids in enumerate(part.uids, 1):
            try:
                pieces = [self._reader.read_columns(uid, chain.reads) for uid in uids]
            except InputMissing:
                self.expired += 1
                self.done += 1
            else:
                lengths = np.array([len(next(iter(piece.values()))) - 1 for piece in pieces])
                held.append((uids, join_pieces(pieces), lengths))
                size += sum(values.nbytes for values in held[-1][1].values())
            if held and (size >= _CHUNK_BYTES or number == len(part.uids)):
                self._derive_episodes(held, chain, stack)
                self._advance(len(held))
                held, size = [], 0

    def _derive_episodes(
        self, held: list[tuple[list[str], dict[str, np.ndarray], np.ndarray]], chain: Chain, stack: contextlib.ExitStack
    ) -> None:
        columns = {name: np.concatenate([joined[name] for _, joined, _ in held]) for name in chain.reads}
        lengths = [mine for _, _, mine in held]
        keys = raw_uids([uids[0] for uids, _, _ in held])
        for copy in range(self.wanted.copies):
            derived = chain.derive(columns, np.array([mine.sum() + 1 for mine in lengths]), keys, copy)
            if not len(derived):
                continue
            # Not the uid of a version of the first piece: a trajectory named like its episode is a whole one.
            names = hex_uids(overlay_uids(keys, f"episode {chain.method}", copy))
            numbers, parts = split_versions(derived, lengths, names, [0] * len(held))
            bases = raw_uids(
                [held[at][0][number] for at, number in zip(parts.place.tolist(), numbers.tolist(), strict=True)]
            )
            targets = overlay_uids(bases, chain.method, copy)
            segments = np.array([self._reader.locate(uid)[0].number for uid in hex_uids(bases)])
            for segment in np.unique(segments).tolist():
                mine = np.flatnonzero((segments == segment) & ~self._is_known(targets))
                portion = self._reader.read_portion(segment, bases[mine])
                if portion is None:
                    continue
                place = positions(portion.uids, bases[mine])
                mine, place = mine[place >= 0], place[place >= 0]
                mine, place = mine[np.argsort(place)], np.sort(place)
                chosen = parts.part(mine, np.zeros(len(mine), dtype=np.int64), parts.rows[mine])
                own = replace(chosen, place=place)
                self._writer(chain, stack).append(portion.id, portion.table, own, targets[mine], chain.method)

    def _writer(self, chain: Chain, stack: contextlib.ExitStack) -> OverlayWriter:
        """Open the writer for these columns on first use; `stack` closes it."""
        if chain.changes not in self.writers:
            writer = OverlayWriter(self.store, chain.schema, chain.changes, name="relabel")
            self.writers[chain.changes] = stack.enter_context(writer)
        return self.writers[chain.changes]
