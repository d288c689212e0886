"""Which `module:attr` may be imported: names that the user typed, never names that were only read from a file.

A run, a checkpoint, a bundle or a lake may come from somebody else, and to import a module is to execute it. So every
import by name passes `require`. The command line says what was typed (its arguments and the recipe they name); as a
library, a name in settings or arguments is the caller's, and what is read from a checkpoint or bundle is refused unless
the caller trusts it. Built-ins and entry points of installed packages are always allowed.

A module that the user typed is also found in the current directory, which comes last on the path; one that a file names
is not, even with `--trust`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pipelines.errors import InputMissing

_HINT = (
    "if you trust where it comes from, repeat with --trust (as a library: trust=True);"
    " names that you type yourself, e.g. with --env, are trusted"
)
_typed: list[str] | None = None  # None: there is no command line, whose arguments would show it


@contextmanager
def only(texts: Iterable[str]) -> Iterator[None]:
    """Until the end, allow names in `texts` and those added by `typed`, and no others, in this whole process."""
    global _typed
    before, _typed = _typed, list(texts)
    try:
        yield
    finally:
        _typed = before


@contextmanager
def everything() -> Iterator[None]:
    """Allow every name until the end."""
    with only(()):
        trust_everything()
        yield


def typed(document: Any) -> None:
    """Allow the names in all texts of a document that the user named."""
    if _typed is not None:
        _typed.extend(_texts(document))


def typed_names() -> list[str] | None:
    """Return the texts whose names are allowed, for `only` in another process; None if every name is."""
    return None if _typed is None else list(_typed)


def is_typed(name: str) -> bool:
    """Return whether the user typed `name` itself. False as a library, where nothing is typed, and for `--trust`."""
    return _typed is not None and _was_typed(name, _typed)


def trust_everything() -> None:
    """Allow every name, as `--trust` does."""
    if _typed is not None:
        _typed.append("*")


def require(kind: str, name: str) -> None:
    """Raise InputMissing unless the user typed `name`, which would import a module."""
    if _typed is None:
        return
    if not _was_typed(name, _typed):
        if "*" not in _typed:
            raise _refusal(kind, name)
        return
    # The current directory comes last on the path, so that none of its files hides an installed module.
    here, module = Path.cwd(), name.removeprefix("gym:").partition(":")[0].partition(".")[0]
    if str(here) not in sys.path and ((here / f"{module}.py").is_file() or (here / module / "__init__.py").is_file()):
        sys.path.append(str(here))


def require_address(place: str, host: str) -> None:
    """Raise InputMissing unless the user typed `host`, to which requests for `place` would be sent."""
    whole = re.compile(rf"(?<![\w.:/-]){re.escape(host)}(?![\w.:-])")
    if _typed is None or "*" in _typed or any(whole.search(unquote(text)) for text in _typed):
        return
    raise InputMissing(
        f"'{place}' names the host '{host}'; a file says so, not you",
        hint="if you trust where it comes from, set AWS_ENDPOINT_URL to it, or repeat with --trust",
    )


def require_all(document: Mapping[str, Any], *, where: str, trusted: Mapping[str, Any] | None = None) -> None:
    """Raise InputMissing if a `kind` in `document`, read from `where`, would import a module that is not trusted.

    As a library those are trusted that are in `trusted` as well: settings of the caller's own.
    """
    own = set(_kinds(trusted or {}))
    for name in _kinds(document):
        if not (name in own if _typed is None else "*" in _typed or _was_typed(name, _typed)):
            raise _refusal(where, name)


def _was_typed(name: str, texts: Iterable[str]) -> bool:
    whole = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])")
    return any(whole.search(text) for text in texts)


def _refusal(where: str, name: str) -> InputMissing:
    module = name.rpartition(":")[0].rpartition(":")[2]
    return InputMissing(
        f"{where}: '{name}' would import the module '{module}'; a file says so, not you",
        hint=_HINT,
    )


def _kinds(document: Any) -> Iterator[str]:
    """All values of a key `kind` that are of the form module:attr."""
    if isinstance(document, Mapping):
        kind = document.get("kind")
        if isinstance(kind, str) and ":" in kind:
            yield kind
        document = list(document.values())
    if isinstance(document, list | tuple):
        for value in document:
            yield from _kinds(value)


def _texts(document: Any) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, Mapping):
        for value in document.values():
            yield from _texts(value)
    elif isinstance(document, list | tuple):
        for value in document:
            yield from _texts(value)
