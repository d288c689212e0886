"""NPZ files whose arrays are compared with the CRC-32 that a zip archive has of each.

`numpy.load` stops reading a member where its header says that the array ends. zipfile compares the checksum only at the
end of a member, so a damaged header that claims fewer rows would go unnoticed.
"""

from __future__ import annotations

import contextlib
import lzma
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipelines.files.malformed import explain_damage, open_regular
from pipelines.formats.base import require_file

_SUFFIX = ".npy"
_PIECE = 1 << 20


class NpzArchive:
    """The arrays of an NPZ file by name; one is read whole, each time it is asked for.

    IntegrityError for a damaged file, InputMissing where there is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_regular(require_file(path))
        try:
            with self._decoding():
                self._zip = zipfile.ZipFile(self._file)
        except BaseException:
            self._file.close()
            raise
        self._members = {name.removesuffix(_SUFFIX): name for name in self._zip.namelist()}

    def __enter__(self) -> NpzArchive:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
        self._file.close()

    def names(self) -> list[str]:
        """List the arrays."""
        return list(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> np.ndarray:
        with self._decoding(), self._zip.open(self._members[name]) as member:
            values: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
            while member.read(_PIECE):
                pass
        return values

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn what zipfile and numpy raise over a damaged file into IntegrityError."""
        raised = (SyntaxError, tokenize.TokenError, lzma.LZMAError)
        with explain_damage(self._path, *raised, hint="fetch or make it again"):
            yield
