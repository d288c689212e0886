"""The viewer shows an episode in pieces as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.lake.footer import hex_uids
from pipelines.lake.reading import Reader, sample
from pipelines.lake.sql import pages
from pipelines.lake.sql.catalog import query
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from pipelines.stages import collect, relabel
from pipelines.view.steps import StepReader
from pipelines.view.viewer import LakeViewer
from tests.lake.pieces import fill_twice
from tests.stages.recipes import tiny

LENGTHS = [7, 3, 23, 4, 20, 9]
LIMITS = QueryLimits()
FACTS = ("length", "return", "success", "attempts", "terminated", "truncated", "env", "task", "seed")


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Lake, Lake, list[str], list[list[str]]]:
    whole, pieces = Lake.create(tmp_path / "whole"), Lake.create(tmp_path / "pieces")
    known, cut = fill_twice(whole, pieces, LENGTHS, steps=4)
    return whole, pieces, known, cut


def test_the_table_has_a_row_for_each_episode(stored) -> None:
    whole, pieces, _, cut = stored
    tables = []
    for lake in (whole, pieces):
        columns, rows, start, more = pages.fetch_page(lake, order="length", descending=False, limits=LIMITS)
        assert (start, more) == (0, False)
        tables.append([dict(zip(columns, row, strict=True)) for row in rows])
    for ours, theirs in zip(*tables, strict=True):
        assert {name: ours[name] for name in FACTS} == {name: theirs[name] for name in FACTS}
    assert {row["uid"] for row in tables[1]} == {uids[0] for uids in cut}
    for where in ("", "success", "length > 3"):
        counts = [pages.fetch_count(lake, where, limits=LIMITS) for lake in (whole, pieces)]
        if where != "length > 3":
            assert counts[0] == pytest.approx(counts[1])
    curves = [pages.fetch_curve(lake, "", across="length", bins=4, limits=LIMITS) for lake in (whole, pieces)]
    assert [pytest.approx(point) for point in curves[0]] == curves[1]
    second = pages.fetch_page(
        pieces, order="length", descending=False, after=tables[1][1]["uid"], rows=2, limits=LIMITS
    )
    assert (second.start, second.more) == (2, True)
    assert [row[second.columns.index("length")] for row in second.rows] == [7, 9]


@pytest.mark.system
def test_any_piece_of_an_episode_gives_access_to_all_its_rows(stored) -> None:
    whole, pieces, known, cut = stored
    reader, viewer = StepReader(pieces), LakeViewer(pieces)
    for uid, uids in zip(known, cut, strict=True):
        values = Reader(whole).read(uid).columns
        for piece in {uids[0], uids[-1]}:
            found = reader.find(piece)
            assert found.length == len(values["reward"]) - 1
            for name, column in values.items():
                np.testing.assert_array_equal(reader.rows(piece, name, 0, found.length + 1), column)
                for start, stop in ((2, 6), (4, 5), (3, 3), (found.length, found.length + 1)):
                    if stop <= found.length + 1:
                        np.testing.assert_array_equal(reader.rows(piece, name, start, stop), column[start:stop])
            facts = viewer.trajectory(piece)["facts"]
            theirs = LakeViewer(whole).trajectory(uid)["facts"]
            assert {name: facts[name] for name in FACTS} == {name: theirs[name] for name in FACTS}
            assert facts["uid"] == piece


@pytest.mark.system
def test_versions_of_an_episode_are_shown_once_and_where_they_begin(tmp_path: Path) -> None:
    goals = {"name": "goal-frozen-lake"}
    collect.run(tiny(env=goals, collect={"steps": 300, "chunk_steps": 3}), lake=tmp_path / "lake")
    relabel.run(tiny(env=goals, relabel={"relabeler": "hindsight:future", "copies": 3}), lake=tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    viewer = LakeViewer(lake)
    text = "select uids from episodes where base_uid is null and chunks > 2 order by episode"
    shown = 0
    for (uids,) in query(lake, text)[1]:
        for each in viewer.trajectory(uids[1])["derived"]:
            reader, base = StepReader(lake), StepReader(lake)
            derived = viewer.trajectory(each["uid"])["facts"]
            assert each["base_offset"] == derived["base_offset"]
            assert each["length"] == derived["length"]
            rows = each["length"] + 1
            begin = each["base_offset"]
            np.testing.assert_array_equal(
                reader.rows(each["uid"], "obs.achieved_goal", 0, rows),
                base.rows(uids[0], "obs.achieved_goal", begin, begin + rows),
            )
            shown += each["base_offset"] > 3
    assert shown > 3


@pytest.mark.system
def test_samples_are_whole_episodes_where_asked(stored) -> None:
    _, pieces, _, cut = stored
    total = sum(map(len, cut))
    assert len(list(sample(pieces, total))) == total
    assert sorted(each.trajectory.length for each in sample(pieces, total, whole=True)) == sorted(LENGTHS)
    for k in (1, 3, len(LENGTHS)):
        assert len(list(sample(pieces, k, whole=True))) == k


@pytest.mark.parametrize("where", ["success", '"return" > 1', "not truncated", "terminated", "len(attempts) > 0"])
def test_predicates_see_the_outcome_of_the_episode_in_each_of_its_pieces(stored, where: str) -> None:
    whole, pieces, known, cut = stored
    chosen = set(hex_uids(select(whole, where).uids))
    expected = {uid for episode, uids in zip(known, cut, strict=True) if episode in chosen for uid in uids}
    assert set(hex_uids(select(pieces, where).uids)) == expected
    _, rows, *_ = pages.fetch_page(pieces, where=where, limits=LIMITS)
    assert len(rows) == len(chosen)


def test_weights_see_the_outcome_of_the_episode(stored) -> None:
    whole, pieces, known, cut = stored
    weights = []
    for lake in (whole, pieces):
        found = select(lake, weight='"return" + 100')
        weights.append(dict(zip(hex_uids(found.uids), found.weights, strict=True)))
    for episode, uids in zip(known, cut, strict=True):
        for uid in uids:
            assert weights[1][uid] == pytest.approx(weights[0][episode])
    assert set(hex_uids(select(pieces, "length = 3").uids)) > set(cut[1])  # other columns are the piece's own
