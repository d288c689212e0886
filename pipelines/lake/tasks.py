"""The tasks of chosen trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from pipelines.events import Listener, silent
from pipelines.lake.footer import hex_uids
from pipelines.lake.sql import catalog
from pipelines.lake.sql.selection import select

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


def tasks(lake: Lake, where: str, *, env: str, listener: Listener = silent) -> list[str]:
    """Names of the tasks of environment `env` in which trajectories are for which the SQL predicate `where` holds, in
    order. UsageError as `select`.
    """
    chosen = select(lake, where, listener=listener)
    with catalog.reading(lake, listener) as connection:
        connection.register("chosen", pa.table({"uid": pa.array(hex_uids(chosen.uids), pa.string())}))
        text = "select distinct task from trajectories semi join chosen using (uid) where env = ? order by task"
        return [task for (task,) in connection.execute(text, [env]).fetchall()]
