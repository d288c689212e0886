"""Where an environment id that gymnasium does not know may come from: installed packages are searched, not imported."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pipelines.nearest import nearest

_MOST_BYTES = 20 << 20  # of source that is read of one package
_LARGEST_FILE = 1 << 20
_SHOWN = 3


def explain_unknown_id(id: str) -> str:
    """Return a hint for the gymnasium id `id`: the module of an installed package that registers it, else a package of
    a similar name, else the form in which a module is named."""
    packages = list(_packages()) if id else []
    modules = [module for package in packages if (module := _registering_module(package, id)) is not None]
    if modules:
        named = " or ".join(f"gym:{module}:{id}" for module in modules[:_SHOWN])
        return f"an installed package registers it: give {named}"
    hint = f"where a package registers it, name the package's module: gym:MODULE:{id}"
    names = {str(package.name).lower(): package for package in packages}
    about = id.partition("/")[0].rpartition("-v")[0] or id
    if (close := nearest(about.lower(), names, cutoff=0.6)) is not None:
        for module in sorted(_modules(names[close]))[:1]:
            hint += f"; installed is {close}, whose module is {module}"
    return hint


def _packages() -> Iterator[metadata.Distribution]:
    """Yield the installed packages that need gymnasium or offer it environments."""
    for package in metadata.distributions():
        with contextlib.suppress(OSError, ValueError, KeyError):
            needs = any(re.match(r"(gymnasium|gym)\b", text, re.IGNORECASE) for text in package.requires or ())
            offers = any(point.group.startswith("gymnasium.envs") for point in package.entry_points)
            if (needs or offers) and package.name.lower() not in ("gymnasium", "gym", "amago"):
                yield package


def _registering_module(package: metadata.Distribution, id: str) -> str | None:
    """Return the top module of a package whose source contains `id` in quotes, and "register"."""
    quoted = re.compile(rf"""["']{re.escape(id)}["']""".encode())
    left = _MOST_BYTES
    for file in package.files or ():
        if file.suffix != ".py" or left <= 0:
            continue
        with contextlib.suppress(OSError):
            path = Path(str(file.locate()))
            if (size := path.stat().st_size) > _LARGEST_FILE:
                continue
            content, left = path.read_bytes(), left - size
            if b"register" in content and quoted.search(content):
                return file.parts[0].removesuffix(".py")
    return None


def _modules(package: metadata.Distribution) -> set[str]:
    """Return the top modules of a package."""
    return {file.parts[0] for file in package.files or () if len(file.parts) > 1 and file.name == "__init__.py"}
