"""What has to be installed for a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.envs import make as envs
from pipelines.formats import make as sources


def requirement(recipe: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The extras that `recipe` needs, "a,b" (None: none), and whether they are there."""
    found = [envs.requirement(recipe["env"]["name"])] if "env" in recipe else []
    if "source" in recipe:
        found.append(sources.requirement(recipe["source"]["name"]))
    extras = [extra for extra, _ in found if extra is not None]
    return ",".join(extras) or None, all(installed for _, installed in found)
