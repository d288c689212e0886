"""A lake that is removed while it is open says so; without its files it would look like an empty one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.errors import InputMissing
from pipelines.lake.reading import Reader
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.store import Lake
from pipelines.view.viewer import LakeViewer
from tests.lake.factories import fill

COUNT = "select count(*) from trajectories"
READERS: dict[str, Callable[[Lake], Callable[[], object]]] = {
    "a query": lambda lake: lambda: query(lake, COUNT),
    "a query of the user": lambda lake: lambda: query(lake, COUNT, limits=QueryLimits()),
    "a reader": lambda lake: Reader(lake).uids,
    "the page's state": lambda lake: LakeViewer(lake).state,
    "the page's table": lambda lake: lambda: LakeViewer(lake).page(where="", order="t_commit", descending=True),
}


@pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])
@pytest.mark.parametrize("name", READERS)
def test_a_removed_lake_is_named(tmp_path: Path, name: str, full: bool) -> None:
    lake = Lake.create(tmp_path / "lake")
    if full:
        fill(lake, [3, 4])
    read = READERS[name](lake)
    read()
    shutil.rmtree(tmp_path / "lake")
    for _ in range(2):
        with pytest.raises(InputMissing, match=f"no lake at '{tmp_path / 'lake'}'"):
            read()
        assert not (tmp_path / "lake").exists()
