"""Recipes for programs and notebooks: `run` does what `amago run` does; `requirement` names the extras to install."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.load import resolve
from pipelines.config.recipes import find
from pipelines.envs import make as envs
from pipelines.events import Listener, silent
from pipelines.formats import make as sources
from pipelines.stages.environment import env_model
from pipelines.stages.result import Result


def run(
    recipe: str | Mapping[str, Any],
    directory: Path | str | None = None,
    *,
    profile: str = "",
    settings: Mapping[str, Any] | None = None,
    fresh: bool = False,
    listener: Listener = silent,
) -> Result:
    """Run every stage of a recipe that is not done yet, in the run `directory` (default: runs/RECIPE, with a profile
    runs/RECIPE-PROFILE).

    `recipe`: a name that `amago examples` lists, FILE.toml, FILE.toml:NAME, or a document. `settings`: values by dotted
    key, e.g. {"train.steps": 100}; they come before the profile, and that before the recipe. The network has the size
    that these say, also without a GPU. `listener` gets progress and notices (pipelines.events). UsageError lists every
    fault of the configuration.
    """
    name, document = find(recipe) if isinstance(recipe, str) else ("run", dict(recipe))
    assignments = [(key.split("."), value) for key, value in (settings or {}).items()]
    if profile:
        assignments.insert(0, (["profile"], profile))
    resolved = resolve(document, assignments, env_model=env_model, source=name)
    if directory is None:
        directory = Path("runs") / (f"{name}-{profile}" if profile else name)
    from pipelines.stages import run as stage

    return stage.run(resolved, run=Path(directory), listener=listener, fresh=fresh)


def requirement(recipe: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The extras that `recipe` needs, "a,b" (None: none), and whether they are there."""
    found = [envs.requirement(recipe["env"]["name"])] if "env" in recipe else []
    if "source" in recipe:
        found.append(sources.requirement(recipe["source"]["name"]))
    extras = [extra for extra, _ in found if extra is not None]
    return ",".join(extras) or None, all(installed for _, installed in found)
