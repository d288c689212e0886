"""Places that a user names: lakes in settings and options, runs, policy bundles and the zoo; and hints for a path where
nothing was found.

The zoo consists of small trained policies that come with the package, as bundles without forms for other runtimes
(`tests/benchmarks/zoo.py` makes them). This module imports no library, since shell completion waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from pipelines.errors import InputMissing, UsageError
from pipelines.nearest import did_you_mean, nearest

RUN = "{run}"
STORES = ("s3", "gs", "az")
"""Schemes of object stores."""
ZOO = "zoo:"
AMAGO = "amago:"

_SHOWN = 3
_WEIGHT = r"(?:\d+\.?\d*?|\.\d+)(?:[eE][+-]?\d+)?"
_BEFORE_PORT = re.compile(r"endpoint_override=(?:\w+://)?[^:/&]*$")
_SHARE = re.compile(rf"(?P<place>.+):(?P<weight>{_WEIGHT})(?:\.\.(?P<last>{_WEIGHT}))?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/")
_ZOO_FOLDER = Path(__file__).parent.parent / "zoo"


def refuse_scheme(
    place: Path | str, *, what: str = "a lake is a directory, or s3://bucket/prefix (gs://, az://)"
) -> None:
    """Raise UsageError for an address with an unsupported scheme, which would otherwise become a folder name."""
    found = _SCHEME.match(str(place))
    if found is not None:
        hint = f"a directory of that name is './{place}'" if "://" not in str(place) else None
        raise UsageError(f"'{place}': the scheme '{found[1]}' is not supported here; {what}", hint=hint)


def parse_share(text: str) -> tuple[str, float, float | None]:
    """Parse LAKE, LAKE:WEIGHT or LAKE:WEIGHT..LAST: a lake, its weight (1 unless given) and its last weight, if the
    weight is a range."""
    match = _SHARE.fullmatch(text)
    if match is None or _BEFORE_PORT.search(match["place"]):
        return text, 1.0, None
    last = match["last"]
    return match["place"], float(match["weight"]), None if last is None else float(last)


def locate_lake(place: str, run: Path) -> Path | str:
    """Substitute the run's directory for `{run}` in `place`; the run's own lake if empty."""
    if place in ("", RUN):
        return run / "lake"
    return run / place.removeprefix(f"{RUN}/") if place.startswith(f"{RUN}/") else place


def is_run(path: Path) -> bool:
    """Check whether a run is recorded at `path`."""
    return (path / "config.toml").is_file()


def split_checkpoint(name: str) -> tuple[str, str]:
    """Split RUN[@CHECKPOINT] into the run and "latest", "best" or a number, "" if none is named. The path of a run may
    contain an @ itself.
    """
    if is_run(Path(name)) or "@" not in name:
        return name, ""
    path, _, which = name.rpartition("@")
    return path, which


def is_lake(path: Path) -> bool:
    """Check whether `path` is a lake or a run that has one."""
    return (path / "lake.json").is_file() or (path / "lake" / "lake.json").is_file()


def list_zoo() -> list[str]:
    """List the names of the zoo's policies."""
    return sorted(path.parent.name for path in _ZOO_FOLDER.glob("*/policy.json"))


def locate_in_zoo(name: str) -> Path:
    """Find the directory of the policy `zoo:NAME`. InputMissing if there is none of this name."""
    wanted, known = name.removeprefix(ZOO), list_zoo()
    if wanted not in known:
        hint = did_you_mean(wanted, known, prefix=ZOO, otherwise=f"it has: {', '.join(known)}")
        raise InputMissing(f"no policy '{wanted}' in the zoo", hint=hint)
    return _ZOO_FOLDER / wanted


def find_bundle(name: Path | str) -> Path | None:
    """Find the directory of the policy bundle called `name`, a path, zoo:NAME or hf://ORG/NAME[@REVISION][/PATH], which
    is fetched; None if there is none.

    InputMissing if the zoo lacks it, or it cannot be fetched.
    """
    if str(name).startswith(ZOO):
        return locate_in_zoo(str(name))
    if str(name).startswith("hf://"):
        from pipelines.files.hub import HubAddress

        return HubAddress.parse(str(name), kind="models").fetch_bundle()
    path = Path(name)
    return path if (path / "policy.json").is_file() else None


def suggest(path: Path, wanted: Callable[[Path], bool], *, inside: str, otherwise: str) -> str:
    """Suggest where something `wanted` can be found instead of at `path`: in it (preceded by `inside`), beside it, or
    in runs/ under that name; else `otherwise`."""

    def list_wanted(folder: Path) -> list[Path]:
        return [child for child in sorted(folder.iterdir()) if wanted(child)] if folder.is_dir() else []

    try:
        found = list_wanted(path)
        if found:
            return f"{inside}: {', '.join(map(str, found[:_SHOWN]))}{', ...' if len(found) > _SHOWN else ''}"
        known = [*list_wanted(path.parent), *list_wanted(Path("runs"))]
        names = {place.name: str(place) for place in reversed(known)}
        close = nearest(path.name, names, cutoff=0.6)
    except OSError:
        close = None
    return otherwise if close is None else f"did you mean '{names[close]}'?"
