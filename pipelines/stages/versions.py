"""`train.relabel`: which windows show relabelled versions, and how those are made."""

from __future__ import annotations

from functools import partial

import numpy as np

from pipelines.config.relabelling import ReplaySettings
from pipelines.data.versions import Versions
from pipelines.errors import InputMissing
from pipelines.events import Listener
from pipelines.lake.schema import Schema
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.relabelers.base import Chain, Context
from pipelines.relabelers.paths import shares_of


def make_versions(lake: Lake, schema: Schema, relabel: ReplaySettings, *, seed: int, listener: Listener) -> Versions:
    """What `relabel` says, on one lake. Where the lake has trajectories, what is wrong with it is found here."""
    chain = _Once(lake, schema, relabel, seed, listener)
    if chain.environments():
        chain()
    evaluate = partial(_varied, lake, relabel, seed, listener)
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


def _varied(lake: Lake, relabel: ReplaySettings, seed: int, listener: Listener, uids: np.ndarray) -> np.ndarray:
    """(n,) bool: which of `uids` have versions."""
    chosen = np.ones(len(uids), dtype=bool)
    if relabel.where:
        chosen &= select(lake, relabel.where, originals=True, listener=listener).places(uids) >= 0
    if relabel.fraction < 1:
        chosen &= shares_of(seed, uids) < relabel.fraction
    return chosen
