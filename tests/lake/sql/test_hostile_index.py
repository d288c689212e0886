"""The index of a lake that somebody else made: nothing in it is run."""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import pytest

from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from tests.lake.factories import fill

EVERYTHING = "select * from trajectories order by uid"
TRICKS = {
    "about is a view": """
        create table old as from bookkeeping.about; drop table bookkeeping.about;
        create view bookkeeping.about as select version, lake from old, (from read_text('{secret}'))""",
    "about logs into a file": """
        create table old as from bookkeeping.about; drop table bookkeeping.about;
        create view bookkeeping.about as select version, lake from old
        where exists (select 1 from enable_logging(storage := 'file', storage_path := '{secret}.log')) or true""",
    "trajectories is another view": """
        create or replace view trajectories as select r.* exclude (live) replace (t.content as task)
        from bookkeeping.rows r, read_text('{secret}') t""",
    "trajectories is a table": """
        create table t as from trajectories; drop view overlays; drop view trajectories;
        alter table t rename to trajectories""",
    "a macro takes a function's name": "create macro coalesce(a, b) as 7",
    "a default is computed": "alter table bookkeeping.files alter problem set default (getvariable('x'))",
    "a table more": "create table more as select 1",
}


@pytest.fixture
def foreign(lake: Lake, tmp_path: Path) -> Lake:
    """A lake of somebody else, and a secret of ours."""
    fill(lake, [3, 4, 5], seal_every=2)
    catalog.refresh(lake)
    (tmp_path / "secret").write_text("hush")
    return lake


@pytest.mark.system
@pytest.mark.parametrize("trick", TRICKS)
def test_an_index_that_is_not_as_we_write_it_is_thrown_away_unread(foreign: Lake, tmp_path: Path, trick: str) -> None:
    index, expected = foreign.path / "index.duckdb", catalog.query(foreign, EVERYTHING)
    with duckdb.connect(str(index)) as connection:
        connection.execute(TRICKS[trick].format(secret=tmp_path / "secret"))
    catalog._checked.clear()
    assert catalog.SqlIndex(foreign).recall_uids("x") == []
    assert catalog.query(foreign, EVERYTHING) == expected
    with duckdb.connect(str(index)) as connection:
        assert set(connection.execute(catalog._OBJECTS).fetchall()) == catalog.list_expected_objects()
    assert sorted(os.listdir(tmp_path)) == ["lake", "secret"]


def test_an_index_reaches_no_other_file(foreign: Lake, tmp_path: Path) -> None:
    """Even where its catalog were not looked at."""
    with catalog.SqlIndex(foreign).write() as connection:
        for statement in (
            f"from read_text('{tmp_path / 'secret'}')",
            f"copy (select 1) to '{tmp_path / 'out'}'",
            f"attach '{tmp_path / 'other.duckdb'}'",
            "load httpfs",
        ):
            with pytest.raises(duckdb.Error, match="disabled"):
                connection.execute(statement)
    assert sorted(os.listdir(tmp_path)) == ["lake", "secret"]


@pytest.mark.system
def test_a_link_in_place_of_the_index_is_not_followed(foreign: Lake, tmp_path: Path) -> None:
    index, expected = foreign.path / "index.duckdb", catalog.query(foreign, EVERYTHING)
    mine = tmp_path / "mine.duckdb"
    with duckdb.connect(str(mine)) as connection:
        connection.execute("create table precious as select 42 as answer")
    content = mine.read_bytes()
    for target in (mine, tmp_path / "not there"):
        index.unlink()
        index.symlink_to(target)
        assert catalog.query(foreign, EVERYTHING) == expected
        assert not index.is_symlink()
    assert mine.read_bytes() == content
    assert not (tmp_path / "not there").exists()
