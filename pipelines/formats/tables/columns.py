"""Which column of a table is what: by its name, or as `source.columns` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelines.errors import InputMissing
from pipelines.formats.base import EPISODE
from pipelines.formats.flat.arrays import part_of
from pipelines.lake.schema import ACTION, RESET, REWARD, TERMINATED, TRUNCATED
from pipelines.lake.spaces import OBSERVATION

FLAGS = (TERMINATED, TRUNCATED, RESET)
_IDS = ("uid", "episode", "episode_id")
_FOLLOWING = f"next_{OBSERVATION}"


def columns_of(
    names: Sequence[str], named: Mapping[str, str], needed: Sequence[str], *, what: str
) -> dict[str, list[str]]:
    """Map our names to columns of a table that has `names`, as `named` says first. InputMissing where one is not there,
    or where `needed` or an observation is not.
    """
    given = {name: [part.strip() for part in text.split(",")] for name, text in named.items() if text}
    observed = {name: [name] for name in names if is_observation(name)}
    after = {name: [name] for name in names if _is_next(name)}
    if any(map(is_observation, given)):
        observed = after = {}
    found = {**observed, **after, **{n: [n] for n in (ACTION, REWARD, *FLAGS) if n in names}, **given}
    if EPISODE not in named:
        found |= next(({EPISODE: [name]} for name in _IDS if name in names), {})
    problems = [f"'{part}'" for parts in found.values() for part in parts if part_of(part)[0] not in names]
    problems += [f"'{name}'" for name in needed if name not in found]
    if not any(map(is_observation, found)):
        problems.append(f"'{OBSERVATION}'")
    if EPISODE not in found and TERMINATED not in found:
        problems.append(f"'{EPISODE}' or '{TERMINATED}'")
    if problems:
        raise InputMissing(
            f"{what} lacks {', '.join(dict.fromkeys(problems))}",
            hint=f"map its columns with source.columns; it has: {', '.join(names)}",
        )
    ours = (ACTION, REWARD, EPISODE, *FLAGS)
    unknown = [name for name in given if name not in ours and not is_observation(name) and not _is_next(name)]
    if unknown:
        raise InputMissing(
            f"source.columns: unknown names: {', '.join(unknown)}",
            hint=f"known: {OBSERVATION}, {OBSERVATION}.NAME, {_FOLLOWING}, action, reward, episode, "
            "terminated, truncated, reset",
        )
    return found


def is_observation(name: str) -> bool:
    """Return whether `name` is `obs` or `obs.NAME`."""
    return name.partition(".")[0] == OBSERVATION


def _is_next(name: str) -> bool:
    """Return whether `name` is `next_obs` or `next_obs.NAME`."""
    return name.partition(".")[0] == _FOLLOWING
