"""Warm starts: which policy a new run takes its first weights from, and the network it has. Read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipelines import trust
from pipelines.config.bundle_record import make_damage_error, read_record
from pipelines.config.checkpoint_place import locate
from pipelines.config.places import bundle_directory, hint, is_run
from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.files.checksums import Mismatch, read_sealed
from pipelines.files.malformed import UNREADABLE, reason


class _WeightsPlace(NamedTuple):
    """Where the weights are: a bundle's directory, or a run's with the name of a checkpoint."""

    directory: Path
    checkpoint: Path | None


def read_network(source: str) -> dict[str, Any]:
    """Read the settings that the weights of `source` need: [agent], and the context length.

    InputMissing if there is no such policy, or if it names a module that is not trusted; IntegrityError if its record
    is damaged.
    """
    place = _find(source)
    try:
        if place.checkpoint is None:
            record = read_record(place.directory)
        else:
            record = read_sealed(place.checkpoint / "checkpoint.json")
        agent, context = record.get("agent"), record.get("context_length")
        if not isinstance(agent, dict) or not isinstance(context, int):
            raise Mismatch("its record lacks the settings of its agent")
    except UNREADABLE as error:
        if place.checkpoint is None:
            raise make_damage_error(place.directory, error) from error
        text = f"checkpoint '{place.checkpoint}' is damaged: {reason(error)}"
        raise IntegrityError(text, hint="name another one: RUN@CHECKPOINT") from error
    trust.require_all(agent, where=f"init.source '{source}'")
    return {"agent": agent, "train": {"context_length": context}}


def pin(source: str, stored: Mapping[str, Any] | None) -> str:
    """Return the source with the number of its checkpoint, so that a run which is repeated begins with the same
    weights. A run that has begun keeps its own: what it has `stored`, unless the call names another checkpoint."""
    if stored and names_same(source, stored):
        return str(stored["init"]["source"])
    place = _find(source)
    return source if place.checkpoint is None else f"{source.partition('@')[0]}@{int(place.checkpoint.name)}"


def names_same(source: str, stored: Mapping[str, Any] | None) -> bool:
    """Return whether a run has stored this source; one that says no number means the number which is stored."""
    table = (stored or {}).get("init")
    before = table.get("source", "") if isinstance(table, Mapping) else ""
    path, _, which = source.partition("@")
    return bool(before) and (source == before or (which in ("", "latest", "best") and before.partition("@")[0] == path))


def require_new(run: Path, source: str, stored: Mapping[str, Any]) -> None:
    """Raise UsageError if a run that has checkpoints did not begin with this source."""
    if not names_same(source, stored):
        raise UsageError(
            f"run '{run}' has been trained already, and did not begin with '{source}'",
            hint="a warm start is for a new run: give another --run, or begin this one again with --fresh",
        )


def _find(source: str) -> _WeightsPlace:
    path, _, which = source.partition("@")
    if is_run(Path(path)):
        return _WeightsPlace(Path(path), locate(Path(path) / "checkpoints", which or "latest"))
    bundle = bundle_directory(source)
    if bundle is None:
        known = "give RUN[@CHECKPOINT], a bundle or zoo:NAME"
        where = hint(Path(path), is_run, inside="it contains runs", otherwise=known)
        raise InputMissing(f"init.source: no run or policy bundle at '{source}'", hint=where)
    return _WeightsPlace(bundle, None)
