"""Some trajectories of a lake, drawn by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.errors import InputMissing
from pipelines.events import Listener, silent
from pipelines.lake.follower import Follower
from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader
from pipelines.lake.trajectory import Trajectory

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


@dataclass(frozen=True)
class Sampled:
    """A trajectory, and its row of the table `trajectories`: uid and base_uid as 32 hex digits."""

    trajectory: Trajectory
    row: Mapping[str, Any]
    schema_id: str


def draw(
    lake: Lake, k: int, *, where: str = "", weight: str = "", seed: int = 0, listener: Listener = silent
) -> list[str]:
    """The uids of `k` different trajectories (fewer if there are not as many), drawn one after another in proportion
    to `weight` (empty: all alike) from those for which `where` holds (empty: all).

    The same seed on the same trajectories draws the same, whatever files they lie in. UsageError for wrong SQL,
    InputMissing if there is nothing to draw from.
    """
    if where.strip() or weight.strip():
        from pipelines.lake.sql.selection import select

        chosen = select(lake, where, weight, listener=listener)
        uids, weights = chosen.uids[chosen.weights > 0], chosen.weights[chosen.weights > 0]
    else:
        follower = Follower(lake, listener)
        follower.refresh()
        uids = np.sort(np.concatenate([np.zeros(0, "S16"), *(segment.uids for segment in follower.segments)]))
        weights = np.ones(len(uids))
    if not len(uids):
        what = "no trajectory that matches" if where.strip() or weight.strip() else "no trajectories"
        raise InputMissing(f"lake '{lake.name}' has {what}")
    rng = np.random.default_rng(seed)
    places = rng.choice(len(uids), size=min(k, len(uids)), replace=False, p=weights / weights.sum())
    return hex_uids(uids[places])


def sample(
    lake: Lake, k: int, *, where: str = "", weight: str = "", seed: int = 0, listener: Listener = silent
) -> Iterator[Sampled]:
    """What `draw` draws, read one at a time. IntegrityError for a damaged segment."""
    uids = draw(lake, k, where=where, weight=weight, seed=seed, listener=listener)
    reader = Reader(lake, listener=listener)
    for uid in uids:
        trajectory, row = reader.read(uid), dict(reader.row(uid))
        row |= {"uid": uid, "base_uid": row["base_uid"].hex() if row["base_uid"] else None}
        yield Sampled(trajectory, {**row, "tags": dict(row["tags"] or ())}, reader.locate(uid)[0].schema_id)
