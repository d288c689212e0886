"""Recipes for programs and notebooks: `run` does what `amago run` does; `requirement` names the extras to install."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.load import fold, resolve
from pipelines.config.recipes import describe_recipe, find
from pipelines.config.run_directory import RunDirectory
from pipelines.config.settings import Settings
from pipelines.envs import make as envs
from pipelines.errors import UsageError
from pipelines.events import Listener, silent
from pipelines.formats import make as sources
from pipelines.rollout.environment import find_env_model
from pipelines.stages.library import label_source, name_default_run
from pipelines.stages.make_recipe import begin, find_budget, make_budget
from pipelines.stages.result import Result


def run(
    recipe: str | Mapping[str, Any] | None = None,
    directory: Path | str | None = None,
    *,
    env: str | None = None,
    source: str | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    profile: str = "",
    settings: Mapping[str, Any] | None = None,
    fresh: bool = False,
    listener: Listener = silent,
) -> Result:
    """Run the stages of a recipe, skipping those that are done, as `amago run` does; or train without a recipe.

    Args:
        recipe: a name from `amago examples`, FILE.toml, FILE.toml:NAME, or a document (nested mappings). None: measure
            `env`, and choose the settings, as of a recipe without stages.
        directory: directory of the run (default: runs/RECIPE, with a profile runs/RECIPE-PROFILE; runs/ENV). Repeating
            the call resumes it.
        env: environment, as `amago envs` lists it, or "gym:ID", "module:attr"; of a recipe, in place of its own.
        source: dataset to learn from alone, e.g. "hopper.hdf5" or "minari:ID", instead of acting in `env`, where the
            policy is evaluated; of a recipe that imports one, in place of its own.
        minutes: where settings are chosen, the minutes of this machine to use (default: the recipe's, or 5).
        steps: where settings are chosen, the environment steps to use instead; with a dataset, those to take after
            half of the minutes.
        profile: profile of the recipe, e.g. "smoke".
        settings: values by dotted key, e.g. {"train.steps": 100}; they override the profile, which overrides the
            recipe. Unlike the command, this chooses no network size for a recipe: without a GPU, give a "size".
        fresh: start over instead of resuming.
        listener: receives progress and notices (`pipelines.events`).

    Returns:
        A `Result` with `status` ("done" or "skipped"), `run`, `lake`, `outputs`, and as `metrics` those of the stages.

    Raises:
        UsageError: there is no such recipe, settings are unknown or invalid (all are listed), or a recipe has a budget.
        Locked: another process works on this run.

    >>> stages = [{"stage": "collect"}, {"stage": "train"}, {"stage": "export"}]
    >>> short = {"collect.steps": 400, "collect.workers": 0, "train.steps": 2, "size": "tiny"}
    >>> run({"env": {"name": "tmaze"}, "stages": stages}, "runs/short", settings=short).status
    'done'
    """
    assignments = [(key.split("."), value) for key, value in (settings or {}).items()]
    for key, value in (("env", env), ("source", source)):
        if value is not None:
            assignments.insert(0, ([key, "name"], value))
    if profile:
        assignments.insert(0, (["profile"], profile))
    name = ""
    document: dict[str, Any] = {}
    if recipe is not None:
        name, document = find(recipe) if isinstance(recipe, str) else ("run", dict(recipe))
    given = fold(document, assignments, source=name)
    if "stages" not in given:
        if directory is None and name:
            directory = name_default_run(f"{name}-{profile}" if profile else name)

        def settle(chosen: Mapping[str, Any]) -> Settings:
            return resolve(document, assignments, env_model=find_env_model, stored=chosen, source=name or "call")

        make_budget(minutes, steps, has_data=True)  # refuses numbers that are not positive
        assignments += [([key], value) for key, value in (("minutes", minutes), ("steps", steps)) if value is not None]
        given = fold(document, assignments, source=name)
        plain = settle({})
        budget = find_budget(plain, minutes=minutes, steps=steps)
        label = label_source(plain.source.name) if plain.source.name else plain.env.name
        if not label:
            raise UsageError("neither a recipe nor an environment is named", hint="give recipe, env or source")
        place = RunDirectory(directory if directory is not None else name_default_run(label))
        recipe_given = (name if isinstance(recipe, str) else "", document)
        begun = begin(place, budget, given, settle, recipe=recipe_given, fresh=fresh, listener=listener)
        from pipelines.stages import run as stage

        return stage.run(begun.settings, run=place.path, listener=listener, fresh=fresh, recipe=begun.recipe)
    if minutes is not None or steps is not None:
        raise UsageError("minutes and steps are for runs without stages", hint="leave minutes and steps out")
    resolved = resolve(document, assignments, env_model=find_env_model, source=name)
    if source is not None and not any(stage.stage == "ingest" for stage in resolved.stages):
        raise UsageError("source: the recipe imports no dataset", hint="leave source out")
    if directory is None:
        directory = name_default_run(f"{name}-{profile}" if profile else name)
    from pipelines.stages import run as stage

    described = describe_recipe(name, document, assignments, resolved, env_model=find_env_model)
    return stage.run(resolved, run=Path(directory), listener=listener, fresh=fresh, recipe=described)


def requirement(recipe: Mapping[str, Any]) -> tuple[str | None, bool]:
    """List the extras that `recipe` needs, as "a,b" (None: none), and whether they are installed."""
    found = [envs.requirement(recipe["env"]["name"])] if "env" in recipe else []
    if "source" in recipe:
        found.append(sources.find_requirement(recipe["source"]["name"]))
    extras = [extra for extra, _ in found if extra is not None]
    return ",".join(extras) or None, all(installed for _, installed in found)
