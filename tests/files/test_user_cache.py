"""The user's cache folder: the nearest of three names."""

from __future__ import annotations

from pathlib import Path

from pipelines.files.user_cache import cache_home


def test_the_nearest_name_wins(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "own"))
    assert cache_home() == tmp_path / "own"
    monkeypatch.delenv("AMAGO_CACHE")
    assert cache_home() == tmp_path / "xdg" / "amago"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == tmp_path / "home" / ".cache" / "amago"
