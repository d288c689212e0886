"""Which recipe a run follows, and how its settings differ from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.config.changes import find_changes, flatten
from pipelines.config.load import EnvModel, resolve
from pipelines.config.settings import Settings

_CHOSEN = (["profile"], ["size"])


def describe_recipe(
    name: str,
    document: Mapping[str, Any],
    assignments: Sequence[tuple[Sequence[str], Any]],
    settings: Settings,
    *,
    env_model: EnvModel,
) -> dict[str, Any]:
    """Describe for run.json the recipe `name`, its profile, and what `settings` changed in it: key -> [recipe, run].

    Of a size only the size itself is listed, and not the settings that it stands for.
    """
    kept = [(path, value) for path, value in assignments if list(path) in _CHOSEN]
    sized = dict(document) | ({"size": settings.size} if settings.size else {})
    plain = resolve(sized, kept, env_model=env_model, source=name)
    found = find_changes(flatten(plain.document()), flatten(settings.document()))
    size = document.get("size") or ""
    if settings.size != size:
        found["size"] = (size, settings.size)
    return {"name": name, "profile": settings.profile, "changed": {key: list(pair) for key, pair in found.items()}}
