"""The one way in which an error suggests what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.5  # of difflib's ratio: 1 for equal names, 0 for names without a common letter


def nearest(name: str, known: Iterable[str], *, cutoff: float = _CUTOFF) -> str | None:
    """The one of `known` that is most like `name`; None where none is like it.

    >>> nearest("corridoor", ["corridor", "penalty"])
    'corridor'
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str, prefix: str = "", cutoff: float = _CUTOFF) -> str:
    """A hint that names the nearest of `known`, with `prefix` before it; `otherwise` where none is near.

    >>> did_you_mean("png", ["pong", "qbert"], prefix="atari-", otherwise="see amago envs")
    "did you mean 'atari-pong'?"
    """
    close = nearest(name, known, cutoff=cutoff)
    return otherwise if close is None else f"did you mean '{prefix}{close}'?"
