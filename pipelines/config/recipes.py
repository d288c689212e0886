"""Recipes: named settings documents, shipped in `examples.toml` or in any file of the same form; and how the settings
of a run differ from the recipe that it follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pipelines.config.changes import find_changes, flatten
from pipelines.config.load import EnvModel, read_toml, resolve
from pipelines.config.settings import Settings
from pipelines.errors import InputMissing, UsageError
from pipelines.nearest import did_you_mean

_CHOSEN = (["profile"], ["size"])


def read_shipped_recipes() -> dict[str, dict[str, Any]]:
    """Read the recipes of `examples.toml`, by name."""
    return read_toml(find_shipped_recipes())


def find_shipped_recipes() -> Path:
    """Find `examples.toml`: beside the packages in a checkout, inside `pipelines` in a wheel."""
    package = Path(str(resources.files("pipelines")))
    for candidate in (package / "examples.toml", package.parent / "examples.toml"):
        if candidate.is_file():
            return candidate
    raise InputMissing("examples.toml is missing from the installation", hint="install amago again")


def find(reference: str) -> tuple[str, dict[str, Any]]:
    """Read (name, document) of `NAME` (shipped), `FILE` (a whole document) or `FILE:NAME` (one of its tables)."""
    recipes = read_shipped_recipes()
    if reference in recipes:
        return reference, recipes[reference]
    path = Path(reference)
    if path.suffix == ".toml" or path.is_file():
        document = read_toml(path)
        name = path.parent.name if path.name == "config.toml" else path.stem
        return name, document
    head, separator, name = reference.rpartition(":")
    if separator and (Path(head).suffix == ".toml" or Path(head).is_file()):
        document = read_toml(Path(head))
        if not isinstance(document.get(name), dict):
            tables = [key for key, value in document.items() if isinstance(value, dict)]
            raise UsageError(f"no recipe '{name}' in '{head}'", hint=f"it has: {', '.join(tables)}")
        return name, document[name]
    hint = did_you_mean(reference, recipes, otherwise=f"known: {', '.join(recipes)}; or a TOML file")
    raise UsageError(f"unknown recipe '{reference}'", hint=hint)


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
