"""Pages of trajectories against all of them, sorted in Python."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pipelines.errors import UsageError
from pipelines.events import Notice
from pipelines.lake.sql import catalog, pages
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import SCHEMA, columns, damage, derive, fill

LIMITS = QueryLimits(seconds=600)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """23 trajectories: equal lengths, and a third without a success. Tests only read it."""
    lake = Lake.create(tmp_path_factory.mktemp("filled") / "lake")
    rng = np.random.default_rng(0)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        for number in range(23):
            success = None if number % 3 == 0 else number % 3 == 1
            info = TrajectoryInfo(env="maze", task=f"it's {number % 4}", success=success, t_start=float(number))
            writer.append(columns(rng, 2 + number % 5), info)
    return lake


def expected(lake: Lake, order: str, descending: bool, where: str = "true") -> list[str]:
    """All uids, NULL last, ties in the order of uids."""
    _, rows = catalog.query(lake, f'select uid, "{order}" from trajectories where {where}')
    known = sorted((row for row in rows if row[1] is not None), key=lambda row: row[0])
    known.sort(key=lambda row: row[1], reverse=descending)
    return [uid for uid, _ in known] + sorted(uid for uid, value in rows if value is None)


def uids(found: pages.TrajectoryPage) -> list[str]:
    place = found.columns.index("uid")
    return [row[place] for row in found.rows]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("order", ["length", "success", "task", "return", "t_start"])
def test_pages_forwards_and_backwards_are_all_trajectories_in_order(filled: Lake, order: str, descending: bool) -> None:
    every = expected(filled, order, descending)

    def page(**anchor: str) -> pages.TrajectoryPage:
        return pages.fetch_page(filled, order=order, descending=descending, rows=5, limits=LIMITS, **anchor)

    forwards = [page()]
    while forwards[-1].more:
        forwards.append(page(after=uids(forwards[-1])[-1]))
    assert [uid for found in forwards for uid in uids(found)] == every
    assert [found.start for found in forwards] == [0, 5, 10, 15, 20]
    for previous, following in pairwise(forwards):
        back = page(before=uids(following)[0])
        assert (uids(back), back.start, back.more) == (uids(previous), previous.start, True)


def test_a_page_has_only_what_matches(filled: Lake) -> None:
    found = pages.fetch_page(filled, where="success", order="length", descending=False, rows=100, limits=LIMITS)
    assert uids(found) == expected(filled, "length", False, "success")
    assert not found.more


def test_a_page_after_a_trajectory_that_is_gone_is_the_first_one(filled: Lake) -> None:
    first = pages.fetch_page(filled, rows=5, limits=LIMITS)
    assert uids(pages.fetch_page(filled, after="f" * 32, rows=5, limits=LIMITS)) == uids(first)


def test_an_anchor_with_a_nan_has_a_place(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        for reward in (math.nan, math.inf, 1.0, -math.inf, 2.0):
            values = columns(rng, 1)
            values["reward"][1] = reward
            writer.append(values, TrajectoryInfo())
    seen: list[str] = []
    for _ in range(5):
        after = seen[-1] if seen else ""
        seen += uids(pages.fetch_page(lake, order="return", after=after, rows=1, limits=LIMITS))
    assert len(set(seen)) == 5


def test_long_texts_are_cut(lake: Lake) -> None:
    long = "x" * 100_000
    info = TrajectoryInfo(task=long, goal_text=long, tags={"a": long}, attempts=(True,) * 5000)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        writer.append(columns(np.random.default_rng(0), 1), info)
    found = pages.fetch_page(lake, limits=LIMITS)
    row = dict(zip(found.columns, found.rows[0], strict=True))
    assert len(row["task"]) == len(row["goal_text"]) == len(row["tags"]) == 400
    assert len(row["attempts"]) == 200


def test_the_count_summarises_what_matches(filled: Lake) -> None:
    _, rows = catalog.query(filled, 'select length, "return", success from trajectories where length > 3')
    rated = [success for _, _, success in rows if success is not None]
    found = pages.fetch_count(filled, "length > 3", limits=LIMITS)
    assert (found["trajectories"], found["steps"]) == (len(rows), sum(length for length, _, _ in rows))
    assert found["return_mean"] == pytest.approx(np.mean([value for _, value, _ in rows]))
    assert found["success_mean"] == pytest.approx(np.mean(rated))


def test_a_curve_bins_the_returns(filled: Lake) -> None:
    _, rows = catalog.query(filled, 'select t_start, "return" from trajectories')
    found = pages.fetch_curve(filled, "", across="t_start", bins=2, limits=LIMITS)
    halves: list[list[Any]] = [[r for t, r in rows if t < 11], [r for t, r in rows if t >= 11]]
    assert [each["episodes"] for each in found] == [11, 12]
    assert [each["mean"] for each in found] == pytest.approx([np.mean(half) for half in halves])
    assert [each["low"] for each in found] == pytest.approx([np.quantile(half, 0.1) for half in halves])


def test_a_curve_over_one_value_is_one_bin(filled: Lake) -> None:
    (only,) = pages.fetch_curve(filled, "", across="policy_version", bins=9, limits=LIMITS)
    assert (only["x"], only["episodes"]) == (-1, 23)


@pytest.mark.parametrize(
    "where", ["success)", "1) or (1 = 1", "length", "select 1", "true; drop table segments", "(*)"]
)
def test_only_one_predicate_is_a_filter(filled: Lake, where: str) -> None:
    for ask in (pages.fetch_count, lambda lake, where, limits: pages.fetch_page(lake, where=where, limits=limits)):
        with pytest.raises(UsageError, match="SQL: "):
            ask(filled, where, limits=LIMITS)


def test_a_wrong_filter_is_marked_in_the_users_text(filled: Lake) -> None:
    with pytest.raises(UsageError, match=r"LINE 2: and lengt > 3\n            \^"):
        pages.fetch_page(filled, where="success\nand lengt > 3", limits=LIMITS)


def test_orders_and_uids_are_checked(filled: Lake) -> None:
    with pytest.raises(UsageError, match="sorted"):
        pages.fetch_page(filled, order='length" desc --', limits=LIMITS)
    with pytest.raises(UsageError, match="uid"):
        pages.fetch_page(filled, after="' or 1=1 --", limits=LIMITS)
    with pytest.raises(UsageError, match="no curve"):
        pages.fetch_curve(filled, "", across="task", bins=3, limits=LIMITS)


def test_derived_trajectories_are_in_the_table(lake: Lake) -> None:
    written = fill(lake, [3, 4])
    base = next(iter(written))
    (own,) = derive(lake, {base: {"reward": np.ones(4, np.float32)}})
    found = pages.fetch_page(lake, where="relabel_method is not null", limits=LIMITS)
    assert uids(found) == [own]


def test_pages_by_steps_report_a_damaged_segment(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    catalog.refresh(lake)
    path = damage(lake, 1)
    where = "uid in (select uid from steps where t = 2 and reward is not null)"
    told: list[Any] = []
    found = pages.fetch_page(lake, where=where, limits=LIMITS, listener=told.append)
    counted = pages.fetch_count(lake, where, limits=LIMITS, listener=told.append)
    curve = pages.fetch_curve(lake, where, across="length", bins=1, limits=LIMITS, listener=told.append)
    assert (len(found.rows), counted["trajectories"], curve[0]["episodes"]) == (2, 2, 2)
    notices = [event.text for event in told if isinstance(event, Notice)]
    assert len(notices) == 3
    assert all(f"'{path}' is damaged" in text for text in notices)
