from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Amago


def test_the_index_is_built_again_and_counted(amago: Amago, small: Path) -> None:
    index = small / "lake" / "index.duckdb"
    before = amago("lake", "info", small, "--output", "json").json["metrics"]
    index.write_bytes(b"no index")
    done = amago("lake", "reindex", small, "--output", "json")
    assert done.code == 0
    assert done.json["metrics"].items() <= before.items()
    assert done.json["seconds"] > 0
    assert index.stat().st_size > len(b"no index")


def test_a_missing_lake(amago: Amago) -> None:
    assert amago("lake", "reindex", "nowhere").code == 3
