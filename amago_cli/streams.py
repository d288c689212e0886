"""Standard streams, which may be closed, full or limited to ASCII, and which other code prints to."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

_ASCII = {"─": "-", "│": "|", "├": "|", "└": "`", "…": "..."}
_STDOUT, _STDERR = 1, 2


def prepare() -> None:
    """Make the standard streams of this process usable: redirect closed ones to /dev/null, replace characters that the
    encoding lacks by escapes, and ignore failures to write to stderr.
    """
    for descriptor in (0, _STDOUT, _STDERR):  # otherwise the next file to be opened gets the number
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            continue
        os.open(os.devnull, os.O_RDWR)
    codecs.register_error("amago", _substitute)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        encoding = getattr(sys.stderr, "encoding", "utf-8")
        raw = io.BufferedWriter(_Lossy(_STDERR, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, encoding=encoding, errors="amago", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="amago")


@contextlib.contextmanager
def result_alone() -> Iterator[None]:
    """Redirect stdout to stderr within the block, for environments, C libraries and child processes alike."""
    real = sys.stdout is sys.__stdout__
    if real:
        sys.stdout.flush()
        kept = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if real:
            os.dup2(kept, _STDOUT)
            os.close(kept)


def drop_stdout() -> None:
    """Redirect stdout, with its unwritten buffer, to /dev/null."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def carries_unicode() -> bool:
    """Return whether stdout can encode non-ASCII characters."""
    try:
        "├▁".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class _Lossy(io.FileIO):
    """File whose writes never fail."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_ASCII.get(each) or each.encode("ascii", "backslashreplace").decode() for each in text), error.end
