"""Data of a training: a mixture of lakes that is restored from checkpoints and takes in what collectors add."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pipelines.config.host import is_main
from pipelines.config.model import AgentSettings
from pipelines.config.settings import ReplaySettings, TrainSettings
from pipelines.data.histories import HistoryContext
from pipelines.data.mixture import Mixture, Share
from pipelines.data.relabel_on_the_fly import Versions
from pipelines.data.strategy import Strategy
from pipelines.data.view import HISTORY, Selection, View
from pipelines.errors import InputMissing, StageFailed, StorageError, UsageError
from pipelines.events import Listener, Notice, wait_for
from pipelines.lake.footer import uid_array
from pipelines.lake.schema import Schema
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.sandbox import LimitReached
from pipelines.lake.sql.selection import select, select_rows
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from pipelines.lake.writer import mark_followed
from pipelines.learning.checkpoint import Checkpoint
from pipelines.nets import ranks
from pipelines.relabelers.base import Chain, Context
from pipelines.relabelers.paths import draw_shares
from pipelines.training.capacity import CapacityCheck

_SALVAGE_SECONDS = 10.0  # between two looks for logs of dead collectors, when lakes are followed
# Lakes in directories are looked at so often, unless looks take more than one part in `_WORTH` of the time.
_QUICK_SECONDS, _WORTH = 0.2, 20


class TrainingData:
    """Windows of `lakes` with their shares, as `train` says. Where `train.follow` is set, `refresh` takes in what
    collectors have added, whenever it `is_due`.
    """

    def __init__(
        self,
        lakes: Sequence[tuple[Lake, Share]],
        schema: Schema,
        train: TrainSettings,
        *,
        seed: int,
        listener: Listener,
        span: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.mixture = make_mixture(lakes, schema, train, seed=seed, listener=listener, span=span)
        self._capacity = CapacityCheck(self.mixture, share=span[1] - span[0], listener=listener)
        self.env_steps = 0
        self._settings = train
        self._refreshed = self._salvaged = self._took = 0.0
        # Each look at an object store, and each segment in it, costs money.
        self._is_near = all(isinstance(lake.storage, LocalStorage) for lake, _ in lakes)

    def restore(self, checkpoint: Checkpoint, arrays: Mapping[str, torch.Tensor]) -> None:
        """Continue where the sampler of `checkpoint` was; `arrays`: what it had learned."""
        data = checkpoint.record.get("data")
        if data is not None:
            with checkpoint.understood():
                self.mixture.restore(data["lakes"])
                self.mixture.load_arrays({name: tensor.numpy() for name, tensor in arrays.items()})

    def hold(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Draw from exactly what a checkpoint of another run drew from, as its `snapshots` say.

        InputMissing if some of it has expired, or if the lakes are others; UsageError if trajectories would be selected
        in another way than then.
        """
        like, where, problems = self._settings.like, self._settings.where, []
        known = {snapshot["id"]: snapshot for snapshot in snapshots}
        others = [part.view.lake.name for part in self.mixture.parts if part.view.lake.id not in known]
        missing = known.keys() - {part.view.lake.id for part in self.mixture.parts}
        if others or missing:
            said = [f"it did not draw from '{name}'" for name in others]
            said += [f"it drew from '{known[id]['name']}', which is not given" for id in sorted(missing)]
            raise InputMissing(
                f"train.like '{like}': {'; '.join(said)}", hint="leave out --from-lake, or give its lakes"
            )
        for part in self.mixture.parts:
            view, snapshot = part.view, known[part.view.lake.id]
            if where.strip() != snapshot["where"].strip():
                raise UsageError(
                    f"train.like '{like}': it drew where {snapshot['where'] or 'true'}, not where {where or 'true'}",
                    hint="leave out train.where",
                )
            try:
                view.restore(snapshot, whole=True)
            except InputMissing as error:
                problems.append(error.message)
                continue
            count = "select count(*) from trajectories"
            if where and not select(view.lake, where, schema_id=view.schema.id, among=view.uids()).by_row:
                [(total,)] = query(view.lake, count)[1]
                if total > sum(len(segment.uids) for segment in view.live.segments):
                    raise UsageError(
                        f"train.like '{like}': what its where selects ({where.strip()}) depends on other trajectories, "
                        f"which lake '{view.lake.name}' has gained since",
                        hint="choose a run without such a predicate",
                    )
        if problems:
            raise InputMissing(
                f"train.like '{like}': {'; '.join(problems)}",
                hint="name another checkpoint; amago lake protect LAKE --snapshot RUN@CHECKPOINT keeps those of one",
            )

    def prepare(self, shares: Sequence[Share], *, update: int, listener: Listener) -> None:
        """Take in what is new and draw by `shares` from now on.

        InputMissing if there are no trajectories; under `train.follow`, wait for the first.
        """
        self.mixture.share_out(shares)
        if self._settings.follow:
            wait_for(lambda: self._refresh(update, listener) or None, "the first trajectories", listener)
        elif not self._refresh(update, listener):
            self.mixture.shares(update)  # raises for what is empty

    def _refresh(self, update: int, listener: Listener) -> bool:
        """Take in what is new; return whether there is something to draw from."""
        began = time.monotonic()
        if self._settings.follow and is_main():
            due = began - self._salvaged >= _SALVAGE_SECONDS
            self._salvaged = began if due else self._salvaged
            for lake in (part.view.lake for part in self.mixture.parts):
                if self._is_near:
                    mark_followed(lake.storage)
                if due:
                    lake.salvage(listener=listener)
        self._agree(update)
        if is_main():  # rank 0 has listed the lakes, so this asks the store nothing
            self._capacity()
        self.env_steps = self.mixture.collected_steps
        self._refreshed = time.monotonic()
        self._took = self._refreshed - began
        return not self.mixture.is_empty

    def _agree(self, update: int) -> None:
        """Take in what is new; of several ranks, rank 0 lists the lakes for all, so that all draw from the same."""
        if ranks.count_joined() == 1:
            self.mixture.refresh(update)
            return
        with ranks.raise_together():
            if is_main():
                self.mixture.refresh(update)
        findings = ranks.broadcast([part.view.collect_findings() for part in self.mixture.parts])
        with ranks.raise_together():
            if not is_main():
                self.mixture.refresh(update, findings)

    def cancel(self) -> None:
        """Stop what is evaluated beside the training."""
        for part in self.mixture.parts:
            part.view.cancel()

    @property
    def is_due(self) -> bool:
        """Whether the lakes are followed and were last read `train.refresh_seconds` ago; lakes in directories are read
        more often, as long as that takes a small share of the time."""
        seconds = self._settings.refresh_seconds
        if self._is_near:
            seconds = min(seconds, max(_QUICK_SECONDS, _WORTH * self._took))
        return self._settings.follow and time.monotonic() - self._refreshed >= seconds

    def refresh(self, update: int, listener: Listener) -> None:
        """Take in what is new; while an object store cannot be reached, continue with what is here."""
        try:
            self._refresh(update, listener)
        except (StageFailed, StorageError) as error:
            if not isinstance(error, StorageError) and not isinstance(error.__cause__, StorageError):
                raise
            self._refreshed = time.monotonic()
            listener(Notice(text=f"{error}; training goes on with what it knows of the lake", level="warning"))


def require_columns(schema: Schema, agent: AgentSettings, *, lake: str) -> None:
    """Raise InputMissing if the agent needs labels or log-probabilities that the steps of `lake` do not have."""
    if agent.needs_logp and not schema.logp:
        wanted, without = name_need_of_logp(agent)
        raise InputMissing(
            f"{wanted}, but the steps of lake '{lake}' have no logp",
            hint=f"collect with --set collect.logp=true; or {without}",
        )
    if agent.target == "label" and not schema.labelled:
        raise InputMissing(
            f"agent.target is 'label', but the steps of lake '{lake}' have no labels",
            hint=f"add them: amago relabel --from-lake {lake} --with label:expert, or another policy",
        )


def name_need_of_logp(agent: AgentSettings) -> tuple[str, str]:
    """Name the setting that needs log-probabilities, and what to do without them."""
    if agent.trace == "vtrace":
        return "agent.trace is 'vtrace'", "set agent.trace=retrace, which does without"
    return f"agent.reference_ratio is {agent.reference_ratio:g}", "leave agent.reference_ratio out"


def make_mixture(
    lakes: Sequence[tuple[Lake, Share]],
    schema: Schema,
    train: TrainSettings,
    *,
    seed: int,
    listener: Listener,
    span: tuple[float, float] = (0.0, 1.0),
) -> Mixture:
    """What `train` says about drawing, on these lakes."""
    strategy = Strategy(
        weighting=train.weighting,
        placement=train.placement,
        half_life=train.half_life,
        per_alpha=train.per_alpha,
        per_beta=train.per_beta,
    )
    history = None
    if train.context == "history":
        history = HistoryContext(order=train.history_order, stride=train.history_stride, horizon=train.history_horizon)
    extra = strategy.extra if history is None else (*strategy.extra, *HISTORY)
    views, versions = [], []
    for lake, share in lakes:
        schema_id = lake.require_schema(schema)
        selection = Selection(where=train.where, weight=train.weight)
        if train.where or train.weight:
            asked = _LakeSelection(lake, selection, schema_id, fixed=bool(train.like))
            selection = replace(
                selection,
                evaluate=partial(asked.evaluate, listener=listener),
                extend=partial(asked.extend, listener=listener),
                beside=asked.evaluate if train.follow else None,
            )
        options: dict[str, Any] = {"extra": extra, "listener": listener, "verify": train.verify}
        view = View(lake, schema_id, selection=selection, fixed=bool(train.like), **options)
        views.append((view, share))
        if train.relabel.relabeler:
            versions.append(make_versions(lake, schema, train.relabel, seed=seed, listener=listener))
    return Mixture(
        views,
        length=train.resolved_context_length,
        seed=seed,
        strategy=strategy,
        anneal_steps=train.anneal_steps,
        versions=versions or None,
        span=span,
        burn_in=train.burn_in,
        history=history,
    )


class _LakeSelection:
    """The weights that a selection gives to trajectories of one schema of a lake. `fixed`: as if the lake had only
    those that are weighed."""

    def __init__(self, lake: Lake, selection: Selection, schema_id: str, *, fixed: bool = False) -> None:
        self._lake, self._where, self._weight, self._schema_id = lake, selection.where, selection.weight, schema_id
        self._fixed = fixed
        self._by_row = False  # as of the last evaluation

    def evaluate(self, uids: np.ndarray, listener: Listener) -> np.ndarray:
        """Select from the whole lake, or among `uids`; return the weights (n,) of `uids`."""
        among = uids if self._fixed else None
        found = select(self._lake, self._where, self._weight, self._schema_id, among=among, listener=listener)
        self._by_row = found.by_row
        return found.weights_of(uids)

    def extend(self, rows: Sequence[Any], listener: Listener) -> np.ndarray | None:
        """Return the weights (n,) of new rows of footers; None where they do not follow from the rows, or a limit was
        met."""
        if self._by_row and rows:
            try:
                found = select_rows(rows, self._where, self._weight, listener=listener)
            except LimitReached:
                return None
            self._by_row = found.by_row
            return (
                found.weights_of(np.concatenate([uid_array(table["uid"]) for table in rows])) if found.by_row else None
            )
        return np.zeros(0) if self._by_row else None


def make_versions(lake: Lake, schema: Schema, relabel: ReplaySettings, *, seed: int, listener: Listener) -> Versions:
    """What `relabel` says, on one lake. Where the lake has trajectories, what is wrong with it is found here."""
    chain = _Once(lake, schema, relabel, seed, listener)
    if chain.environments():
        chain()
    evaluate = partial(_find_versions, lake, relabel, seed, listener)
    return Versions(derivation=chain, evaluate=evaluate, share=relabel.share, copies=relabel.copies)


class _Once:
    """The chain of relabelers, made when it is asked for the first time: by then there is an environment."""

    def __init__(self, lake: Lake, schema: Schema, relabel: ReplaySettings, seed: int, listener: Listener) -> None:
        self._lake, self._schema, self._relabel, self._seed = lake, schema, relabel, seed
        self._listener = listener
        self._chain: Chain | None = None

    def __call__(self) -> Chain:
        if self._chain is None:
            found = self.environments()
            if len(found) > 1:
                raise InputMissing(
                    f"lake '{self._lake.name}' holds {len(found)} environments: {', '.join(found)}; train.relabel "
                    "relabels those of one",
                    hint="store the versions instead: amago relabel",
                )
            context = Context(schema=self._schema, env=found[0], goal=self._relabel.goal, listener=self._listener)
            self._chain = Chain(self._relabel.relabeler, context, seed=self._seed)
        return self._chain

    def environments(self) -> list[str]:
        """Those of the lake's original trajectories."""
        text = "select distinct env from trajectories where base_uid is null order by env"
        return [env for (env,) in query(self._lake, text, listener=self._listener)[1]]


def _find_versions(
    lake: Lake, relabel: ReplaySettings, seed: int, listener: Listener, uids: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """(n,) bool: which of `uids` have versions; `keys`: the uids that decide whether they are in the share."""
    chosen = np.ones(len(uids), dtype=bool)
    if relabel.where:
        chosen &= select(lake, relabel.where, originals=True, listener=listener).places(uids) >= 0
    if relabel.fraction < 1:
        chosen &= draw_shares(seed, keys) < relabel.fraction
    return chosen
