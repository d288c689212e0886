from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Amago

BY_VERSION = "select policy_version, avg(return) r from trajectories group by all order by all"


def test_rows_as_a_list_of_objects(amago: Amago, small: Path) -> None:
    (row,) = amago("lake", "sql", small, BY_VERSION, "--output", "json").json
    assert row.keys() == {"policy_version", "r"}


def test_the_index_may_be_deleted(amago: Amago, small: Path) -> None:
    before = amago("lake", "sql", small, BY_VERSION, "--output", "json").json
    for index in small.rglob("index.duckdb*"):
        index.unlink()
    assert amago("lake", "sql", small, BY_VERSION, "--output", "json").json == before


def test_text_leaves_numbers_as_they_are(amago: Amago, small: Path) -> None:
    assert amago("lake", "sql", small, "select 1000003 as seed").out.split()[-1] == "1000003"


@pytest.mark.parametrize(
    "sql", ["drop table trajectories", "select", "select * from nothing", "select nothing from trajectories", ""]
)
def test_a_wrong_or_writing_query_is_a_usage_error(amago: Amago, small: Path, sql: str) -> None:
    failed = amago("lake", "sql", small, sql)
    assert failed.code == 2
    assert "Traceback" not in failed.err


def test_no_file_can_be_read_through_it(amago: Amago, small: Path) -> None:
    assert amago("lake", "sql", small, "select * from read_text('/etc/hostname')").code == 2
