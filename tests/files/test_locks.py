from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from pipelines.errors import Locked
from pipelines.files.locks import hold_exclusively


def test_a_lock_whose_last_holder_removed_the_file_meanwhile_is_taken_on_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tried, flock = tmp_path / ".x.lock", [], fcntl.flock

    def late(descriptor: int, how: int) -> None:
        if not tried:
            file.unlink()  # after it was opened, and before it is locked
        tried.append(how)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold_exclusively(file, what="it"):
        monkeypatch.undo()
        assert len(tried) == 2
        with pytest.raises(Locked, match="it, pid"), hold_exclusively(file, what="it"):
            pass
