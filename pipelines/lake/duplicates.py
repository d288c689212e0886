"""Identical experience under different ids: collectors that played the same environment by the same policy with the
same seed. Merged or mixed, it counts twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.events import Notice
from pipelines.lake import collectors
from pipelines.lake.sql.catalog import query

if TYPE_CHECKING:
    from pipelines.lake.store import Lake


@dataclass(frozen=True)
class DuplicateExperience:
    """`trajectories` that two collectors have both stored, each its own; `first` and `second` name them."""

    trajectories: int
    first: str
    second: str
    seed: int

    def as_notice(self) -> Notice:
        """Return the warning for the user."""
        text = (
            f"{self.trajectories:,} trajectories are there twice: {self.first} and {self.second} played the same "
            f"episodes (seed {self.seed}); collect with another --seed, or leave one out with --where"
        )
        return Notice(text=text, level="warning")


def find_duplicates(lakes: Sequence[Lake]) -> list[DuplicateExperience]:
    """Find identical trajectories of different collectors within `lakes`, compared by their checksums.

    Only collectors of the same environment and seed are compared, so lakes without such a pair cost nothing.
    """
    groups: dict[str, list[tuple[Lake, str, int]]] = defaultdict(list)
    for lake in lakes:
        for name, record in collectors.read_all(lake).items():
            if isinstance(seed := record.get("seed"), int):
                env = {key: value for key, value in (record.get("env") or {}).items() if key != "source"}
                groups[collectors.digest({"env": env, "seed": seed})].append((lake, name, seed))
    found = []
    for members in groups.values():
        contents = [_contents(lake, name) for lake, name, _ in members] if len(members) > 1 else []
        for place, (lake, name, seed) in enumerate(members[: len(contents)]):
            for other in range(place):
                shared = (contents[place] & contents[other]).total()
                if shared:
                    names = (
                        _format_collector(members[other][0], members[other][1], lakes),
                        _format_collector(lake, name, lakes),
                    )
                    found.append(DuplicateExperience(shared, *names, seed))
    return found


def _contents(lake: Lake, collector: str) -> Counter[tuple[int, int]]:
    """Count the checksums and lengths of a collector's original trajectories."""
    quoted = collector.replace("'", "''")
    sql = f"select crc, length from trajectories where collector = '{quoted}' and base_uid is null"
    return Counter((crc, length) for crc, length in query(lake, sql)[1])


def _format_collector(lake: Lake, collector: str, lakes: Sequence[Lake]) -> str:
    return f"'{collector}'" if len(lakes) == 1 else f"'{collector}' in '{lake.name}'"
