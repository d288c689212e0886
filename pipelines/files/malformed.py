"""Input files that are not what they should be: the one place where what a decoder raises becomes an error of ours.

A JSON, TOML, npz, HDF5 or Arrow file, or a pickle, may be cut, altered, of another program, or made to harm. Decoders
answer with anything from KeyError to MemoryError; a user gets one line with the file's name, and a process that does
not wait for a pipe or read without end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipelines.errors import AmagoError, IntegrityError

# What decoding and using malformed content raises. Those of other libraries derive from these or are named by callers.
MALFORMED: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
    EOFError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)
UNREADABLE: tuple[type[Exception], ...] = (OSError, *MALFORMED)
"""The same, and what the system says of a file."""
RECORD_BYTES = 1 << 28
"""Largest file of records (JSON) that is read."""
_OF_FORM = (TypeError, AttributeError, LookupError, AssertionError)
_LONGEST = 160


@contextlib.contextmanager
def explain_damage(what: Path | str, *more: type[Exception], hint: str = "restore it from a copy") -> Iterator[None]:
    """Turn what decoding a file raises, `more` included, into IntegrityError that names `what`; errors of ours and
    FileNotFoundError pass.
    """
    try:
        yield
    except (AmagoError, FileNotFoundError):
        raise
    except UNREADABLE + more as error:
        raise IntegrityError(f"'{what}' is damaged: {reason(error)}", hint=hint) from error


def reason(error: BaseException) -> str:
    """Put what a decoder said into one short line."""
    text = str(error).strip().strip("'\"").split("\n")[0].strip()
    if isinstance(error, KeyError):
        return f"it lacks '{text[:_LONGEST]}'"
    if isinstance(error, _OF_FORM):
        return f"its content is not of the expected form ({text[:_LONGEST] or type(error).__name__})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return text[:_LONGEST] or type(error).__name__


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading. OSError for a pipe or a device, which might never end or never begin."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.ESPIPE, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: Path | str, limit: int = RECORD_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes; OSError for any other."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit >> 20} MiB", str(path))
    return content
