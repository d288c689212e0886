"""Names of lakes in settings and options: LAKE, LAKE:WEIGHT, LAKE:WEIGHT..LAST, and `{run}` for a run's directory."""

from __future__ import annotations

import re
from pathlib import Path

from pipelines.errors import UsageError

RUN = "{run}"
STORES = ("s3", "gs", "az")
"""Schemes of object stores."""

_WEIGHT = r"(?:\d+\.?\d*?|\.\d+)(?:[eE][+-]?\d+)?"
_BEFORE_PORT = re.compile(r"endpoint_override=(?:\w+://)?[^:/&]*$")
_SHARE = re.compile(rf"(?P<place>.+):(?P<weight>{_WEIGHT})(?:\.\.(?P<last>{_WEIGHT}))?")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/")


def refuse_scheme(
    place: Path | str, *, what: str = "a lake is a directory, or s3://bucket/prefix (gs://, az://)"
) -> None:
    """Raise UsageError for an address with an unsupported scheme, which would otherwise become a folder name."""
    found = _SCHEME.match(str(place))
    if found is not None:
        hint = f"a directory of that name is './{place}'" if "://" not in str(place) else None
        raise UsageError(f"'{place}': the scheme '{found[1]}' is not supported here; {what}", hint=hint)


def parse_share(text: str) -> tuple[str, float, float | None]:
    """Parse a lake, its weight (1 unless given) and its last weight, if the weight is a range."""
    match = _SHARE.fullmatch(text)
    if match is None or _BEFORE_PORT.search(match["place"]):
        return text, 1.0, None
    last = match["last"]
    return match["place"], float(match["weight"]), None if last is None else float(last)


def located(place: str, run: Path) -> Path | str:
    """Substitute the run's directory for `{run}` in `place`; the run's own lake if empty."""
    if place in ("", RUN):
        return run / "lake"
    return run / place.removeprefix(f"{RUN}/") if place.startswith(f"{RUN}/") else place
