"""NPZ files whose arrays are compared with the CRC-32 that a zip archive has of each, and with their number.

`numpy.load` stops reading a member where its header says that the array ends. zipfile compares the checksum only at the
end of a member, so a damaged header that claims fewer rows would go unnoticed. It also believes a damaged length in its
directory, behind which the arrays that follow are skipped, although the end of the file says how many there are.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import struct
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipelines.files.malformed import explain_damage, open_regular
from pipelines.formats.base import require_file

_SUFFIX = ".npy"
_PIECE = 1 << 20
_END = struct.Struct("<4s6xH10x")  # the end of a zip archive before its comment: a signature, the number of members
_MANY = 0xFFFF  # members or more, whose number is elsewhere


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
                self._file.seek(-_END.size - len(self._zip.comment), os.SEEK_END)
                signature, count = _END.unpack(self._file.read(_END.size))
                if signature == b"PK\5\6" and count not in (len(self._zip.infolist()), _MANY):
                    raise zipfile.BadZipFile(f"its directory lists {len(self._zip.infolist())} of {count} arrays")
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
        """List the names of the arrays."""
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
