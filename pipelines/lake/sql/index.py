"""What can be wrong with the file of the SQL index, which repeats what the segments say and can be made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from pipelines.errors import AmagoError, IntegrityError

_T = TypeVar("_T")


class IndexDamaged(IntegrityError):
    """It does not hold what it should: it is removed then, and the question can be asked again."""


class NotOurs(AmagoError):
    """It is not what we write: it is removed unread, and made again."""


class NewerIndex(AmagoError):
    """It is of a version after ours: it is left alone."""


def healed(ask: Callable[[], _T]) -> _T:
    """What `ask` returns, asked a second time if the first removed a damaged index."""
    try:
        return ask()
    except IndexDamaged:
        return ask()


def refuse_newer(versions: Iterable[int], known: int, lake: str) -> None:
    """NewerIndex if one of the versions that an index claims is after the one that is `known`."""
    if any(version > known for version in versions):
        text = f"the index of lake '{lake}' is of a newer version: it is left alone, and one is made in memory"
        raise NewerIndex(text, hint="upgrade amago, or make it anew with: amago lake reindex")
