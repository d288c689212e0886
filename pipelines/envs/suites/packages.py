"""Versions of other packages that are known not to go together: refused before they fail in the middle."""

from __future__ import annotations

from importlib import metadata

from pipelines.errors import InputMissing


def release(package: str) -> tuple[int, ...]:
    """(major, minor) of an installed package."""
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])


def refuse_from(package: str, limit: tuple[int, int], *, name: str, why: str) -> None:
    """InputMissing where `package` has release `limit` or a later one."""
    if release(package) >= limit:
        wanted = ".".join(map(str, limit))
        raise InputMissing(
            f"environment '{name}': {package} {metadata.version(package)} does not go with it: {why}",
            hint=f'pip install "{package}<{wanted}", best in a fresh virtual environment',
        )
