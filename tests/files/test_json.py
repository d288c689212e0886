from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.files.json import read_object, read_objects


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_object_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert read_object(tmp_path / "a.json") is None
    assert read_object(tmp_path) is None
    assert read_object(tmp_path / "nothing.json") is None


def test_lines_that_hold_no_object_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\n[2]\n\n{"a": 3}\n{"a": 4')
    assert list(read_objects(path)) == [{"a": 1}, {"a": 3}]
    assert list(read_objects(tmp_path / "nothing")) == []
