"""The zoo: small trained policies that come with the package, as bundles without forms for other runtimes.

`tests/benchmarks/zoo.py` makes them.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from pipelines.errors import InputMissing
from pipelines.nearest import did_you_mean

PREFIX = "zoo:"


def names() -> list[str]:
    """Return the names of the policies."""
    return sorted(path.parent.name for path in _folder().glob("*/policy.json"))


def directory(name: str) -> Path:
    """Return the directory of the policy `zoo:NAME`. InputMissing if there is none of this name."""
    wanted, known = name.removeprefix(PREFIX), names()
    if wanted not in known:
        hint = did_you_mean(wanted, known, prefix=PREFIX, otherwise=f"it has: {', '.join(known)}")
        raise InputMissing(f"no policy '{wanted}' in the zoo", hint=hint)
    return _folder() / wanted


def _folder() -> Path:
    return Path(str(resources.files("pipelines"))) / "zoo"
