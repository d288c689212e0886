from __future__ import annotations

import pytest

from pipelines.errors import InputMissing, IntegrityError, UsageError
from pipelines.lake.log import list_protections, protect, unprotect
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from tests.lake.factories import fill


def test_protections_are_listed_replaced_and_taken_back_by_name(lake: Lake) -> None:
    assert list_protections(lake.storage) == []
    protect(lake, ["a", "b"], name="runs/x@12")
    protect(lake)
    protect(lake, ["c"], name="runs/x@12")
    assert [(kept.name, kept.segments) for kept in list_protections(lake.storage)] == [
        ("lake", ()),
        ("runs/x@12", ("c",)),
    ]
    unprotect(lake)
    assert [kept.is_whole for kept in list_protections(lake.storage)] == [False]
    with pytest.raises(InputMissing, match="there are: runs/x@12"):
        unprotect(lake, "runs/y@12")
    unprotect(lake, "runs/x@12")
    assert list_protections(lake.storage) == []


def test_a_snapshot_cannot_pose_as_the_lake(lake: Lake) -> None:
    with pytest.raises(UsageError):
        protect(lake, ["a"], name="lake")
    with pytest.raises(UsageError):
        protect(lake, [], name="run@1")


def test_nothing_expires_while_the_log_cannot_be_read(lake: Lake) -> None:
    fill(lake, [3, 4])
    protect(lake, name="lake")
    (entry,) = (lake.path / "log").iterdir()
    whole = entry.read_bytes()
    for break_it in (lambda: entry.write_bytes(b"{"), lambda: entry.rename(entry.with_name("000000000002.json"))):
        break_it()
        with pytest.raises(IntegrityError, match=r"is damaged|is missing"):
            expire(lake, RetentionLimits(max_trajectories=1))
        entry.write_bytes(whole)
    assert len(Reader(lake).uids()) == 2
