"""Protection from expiry, of a whole lake or of the segments of a snapshot. Rewriting is allowed: a snapshot finds its
trajectories in any file.

`protected/lake.json` protects everything, `protected/NAME.json` the segments that it lists.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.files.atomic import explained
from pipelines.files.malformed import UNREADABLE
from pipelines.lake.maintenance.lease import lease
from pipelines.lake.storage import Storage

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

FOLDER = "protected"
WHOLE = "lake"


@dataclass(frozen=True, kw_only=True)
class Protection:
    """A protection. `name` is "lake" for the whole lake (with no `segments`), otherwise that of a snapshot."""

    name: str
    time: float
    segments: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.name == WHOLE


def protections(storage: Storage) -> list[Protection]:
    """Return every protection, the oldest first. IntegrityError if one cannot be read: nothing may expire then."""
    with explained(f"read '{storage.url(FOLDER)}'"):
        names = [name for name in storage.names(FOLDER) if name.endswith(".json") and name[0] != "."]
    found = []
    for name in names:
        try:
            data = json.loads(storage.read(f"{FOLDER}/{name}"))
            found.append(
                Protection(
                    name=unquote(name.removesuffix(".json")),
                    time=float(data["time"]),
                    segments=tuple(str(id) for id in data["segments"]),
                )
            )
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            raise IntegrityError(
                f"'{storage.url(f'{FOLDER}/{name}')}' cannot be read, so what it protects is unknown",
                hint="protect it again, or remove the file",
            ) from error
    return sorted(found, key=lambda protection: (protection.time, protection.name))


def protect(lake: Lake, segments: Iterable[str] = (), *, name: str = WHOLE) -> Protection:
    """Protect the lake, or the trajectories of `segments` under a name, from expiry. A name is replaced."""
    ids = tuple(segments)
    if (name == WHOLE) != (not ids):
        raise UsageError(f"a snapshot cannot be protected as '{name}'", hint="choose another name")
    protection = Protection(name=name, time=time.time(), segments=ids)
    with lease(lake), explained(f"write '{lake.storage.url(FOLDER)}'"):
        text = json.dumps({"time": protection.time, "segments": list(ids)})
        lake.storage.write(_key(name), text.encode())
    return protection


def unprotect(lake: Lake, name: str = WHOLE) -> None:
    """Remove a protection. InputMissing if there is none of that name."""
    with lease(lake), explained(f"write '{lake.storage.url(FOLDER)}'"):
        if not lake.storage.exists(_key(name)):
            known = [protection.name for protection in protections(lake.storage)]
            raise InputMissing(
                f"lake '{lake.name}' has no protection '{name}'",
                hint=f"there are: {', '.join(known)}" if known else "nothing in it is protected",
            )
        lake.storage.remove(_key(name))


def _key(name: str) -> str:
    return f"{FOLDER}/{quote(name, safe='@')}.json"
