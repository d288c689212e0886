"""Sources by name: `KIND:PLACE`, or `module:attr` for trajectories from a user's own code."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from pipelines.config.source import SourceSettings
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.lake.spaces import Spaces
from pipelines.registry import Registry
from pipelines.sources.base import Request, Source

SOURCES = Registry(
    "source",
    {
        "d4rl": "pipelines.sources.d4rl:D4rl",
        "minari": "pipelines.sources.minari:Minari",
        "npz": "pipelines.sources.npz:Npz",
        "parquet": "pipelines.sources.tables:Tables",
        "arrow": "pipelines.sources.tables:ArrowTables",
    },
)


def requirement(name: str) -> tuple[str | None, bool]:
    """The extra that source `name` needs in any case (None: none), and whether it is there."""
    if name.partition(":")[0] == "d4rl":
        return "hdf5", importlib.util.find_spec("h5py") is not None
    return None, True


def open_source(
    settings: SourceSettings, *, spaces: Spaces | None = None, horizon: int | None = None, listener: Listener = silent
) -> Source:
    """The source that `settings.name` names; `spaces`, `horizon`: of the environment that its steps are to fit.

    UsageError for a name that is none, InputMissing where there is nothing or it does not fit, IntegrityError where
    it is damaged.
    """
    kind, colon, place = settings.name.partition(":")
    if not colon or not place:
        raise UsageError(
            f"'{settings.name}' is no source",
            hint=f"give KIND:PLACE with one of {', '.join(SOURCES.names())}, or module:attr",
        )
    request = Request(place=place, settings=settings, spaces=spaces, horizon=horizon, listener=listener)
    if kind in SOURCES.names():
        found: Source = SOURCES.get(kind)(request)
        return found
    from pipelines.sources.own import Own

    return Own(replace(request, place=settings.name))
