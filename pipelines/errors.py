"""Every error a user can cause or meet, with the exit code the command line gives it.

A message says what went wrong, where, and what to do next; `hint` holds the last part.
"""

from __future__ import annotations

import re
from typing import Any

# USER:PASSWORD@ in an address, which may have lost a slash as a path; a password may have slashes in it.
_USER, _PAIR = r"[^/?&\s'\"]*", r"[^?&\s'\":]*:[^?&\s'\"]*"
_CREDENTIALS = re.compile(
    rf"(?:(?<=:/)(/?)|(?<=endpoint_override=)())(?:(?:{_USER}|{_PAIR})@|[^&\s'\"]*%40)", re.IGNORECASE
)


def masked(text: str) -> str:
    """`text` without the credentials of the addresses in it.

    >>> masked("no lake at 's3://KEY:SECRET@bucket/a'")
    "no lake at 's3://***@bucket/a'"
    """
    return _CREDENTIALS.sub(lambda found: f"{found[1] or ''}***@", text)


class AmagoError(Exception):
    """Base of all expected errors: shown as one line, without a traceback and without credentials."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = masked(message)
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else masked(hint)
        self.result: Any = None
        """A stage's Result that is worth showing although it was refused, e.g. the scores that missed `--require`."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class StageFailed(AmagoError):
    """A stage could not go on: an environment raised, a disk is full, a directory is read-only."""

    exit_code = 1


class UsageError(AmagoError):
    """An option or a configuration file is wrong. `problems` lists every fault found, one line each."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(map(masked, problems))


class InputMissing(AmagoError):
    """Something asked for is not there or does not fit: a lake, a run, a column, an extra, another space."""

    exit_code = 3


class IntegrityError(AmagoError):
    """Stored data is corrupt and was refused."""

    exit_code = 4


class RequirementNotMet(AmagoError):
    """`--require` was not met."""

    exit_code = 5


class Locked(AmagoError):
    """Another process holds what is needed; the message says who and since when."""

    exit_code = 75


class Interrupted(AmagoError):
    """The user or the system asked the stage to stop; its state is saved."""

    def __init__(self, message: str, *, signal_number: int = 2, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signal_number


def is_stop(error: BaseException) -> bool:
    """Return whether `error` is a wish to stop, as the front end raises it from a signal, and not a fault of the code
    that was running.
    """
    return isinstance(error, KeyboardInterrupt) or getattr(error, "stops", False) is True


class StorageError(OSError):
    """An object store is out of reach or refused; the message is one short line."""
