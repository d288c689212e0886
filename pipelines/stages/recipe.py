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
from pipelines.runs.recipe import followed
from pipelines.stages.environment import env_model
from pipelines.stages.library import default_run
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
    """Run the stages of a recipe, skipping those that are done, as `amago run` does.

    Args:
        recipe: a name from `amago examples`, FILE.toml, FILE.toml:NAME, or a document (nested mappings).
        directory: directory of the run (default: runs/RECIPE, with a profile runs/RECIPE-PROFILE). Repeating the call
            resumes it.
        profile: profile of the recipe, e.g. "smoke".
        settings: values by dotted key, e.g. {"train.steps": 100}; they override the profile, which overrides the
            recipe. Unlike the command, this chooses no network size for you: without a GPU, give a "size".
        fresh: start over instead of resuming.
        listener: receives progress and notices (`pipelines.events`).

    Returns:
        A `Result` with `status` ("done" or "skipped"), `run`, `lake`, `outputs`, and as `metrics` those of the stages.

    Raises:
        UsageError: there is no such recipe, or settings are unknown or invalid (all are listed).
        Locked: another process works on this run.

    >>> stages = [{"stage": "collect"}, {"stage": "train"}, {"stage": "export"}]
    >>> short = {"collect.steps": 400, "collect.workers": 0, "train.steps": 2, "size": "tiny"}
    >>> run({"env": {"name": "tmaze"}, "stages": stages}, "runs/short", settings=short).status
    'done'
    """
    name, document = find(recipe) if isinstance(recipe, str) else ("run", dict(recipe))
    assignments = [(key.split("."), value) for key, value in (settings or {}).items()]
    if profile:
        assignments.insert(0, (["profile"], profile))
    resolved = resolve(document, assignments, env_model=env_model, source=name)
    if directory is None:
        directory = default_run(f"{name}-{profile}" if profile else name)
    from pipelines.stages import run as stage

    described = followed(name, document, assignments, resolved, env_model=env_model)
    return stage.run(resolved, run=Path(directory), listener=listener, fresh=fresh, recipe=described)


def requirement(recipe: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the extras that `recipe` needs, "a,b" (None: none), and whether they are installed."""
    found = [envs.requirement(recipe["env"]["name"])] if "env" in recipe else []
    if "source" in recipe:
        found.append(sources.requirement(recipe["source"]["name"]))
    extras = [extra for extra, _ in found if extra is not None]
    return ",".join(extras) or None, all(installed for _, installed in found)
