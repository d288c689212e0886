"""Predicates and weights against the same worked out by hand."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.errors import UsageError
from pipelines.events import Notice
from pipelines.lake import reading
from pipelines.lake.footer import hex_uids
from pipelines.lake.sql import catalog
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.sql.selection import SelectionResult, select
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, SCHEMA, damage, derive, fill

LENGTHS = [3, 9, 4, 8, 2, 7]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Tasks t0 t1 t2 t0 t1 t2, success true false true false true false, policy 0 0 0 0 1 1. Tests only read it."""
    lake = Lake.create(tmp_path_factory.mktemp("filled") / "lake")
    fill(lake, LENGTHS, seal_every=4)
    return lake


def by_length(lake: Lake, chosen: SelectionResult) -> dict[int, float]:
    """Weights by length, which tells the trajectories of `filled` apart."""
    _, rows = catalog.query(lake, "select uid, length from trajectories")
    weights = dict(zip(hex_uids(chosen.uids), chosen.weights.tolist(), strict=True))
    return {length: weights[uid] for uid, length in rows if uid in weights}


def test_everything_has_weight_one(filled: Lake) -> None:
    for chosen in (select(filled), select(filled, "", ""), select(filled, None, " ")):
        assert by_length(filled, chosen) == dict.fromkeys(LENGTHS, 1.0)
        assert (chosen.uids[1:] > chosen.uids[:-1]).all()


def test_nothing_to_choose_from(lake: Lake) -> None:
    chosen = select(lake, "success", "length")
    assert (chosen.uids.dtype, len(chosen.uids), len(chosen.weights)) == ("S16", 0, 0)
    assert chosen.weights_of(np.array([b"x" * 16])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("where", "lengths"),
    [
        ("length > 5", {9, 8, 7}),
        ("length > 5 -- long ones", {9, 8, 7}),
        ("success and policy_version > 0", {2}),
        ("length > 5 or success", {3, 9, 4, 8, 2, 7}),
        ("nullif(epsilon, 0) < 0.5", set()),  # NULL is not true
        ("task in (select 't' || range from range(2))", {3, 9, 8, 2}),
        ("length = (select max(length) from trajectories)", {9}),
        ("segment in (select segment from segments where trajectories = 2)", {2, 7}),
        ("trajectories.length = 3", {3}),
        ("uid in (select uid from steps group by uid having count(*) > 9)", {9}),
        ("exists (select 1 from overlays o where o.base_uid = trajectories.uid)", set()),
        ("not exists (select 1 from metrics)", set(LENGTHS)),
    ],
)
def test_a_predicate_chooses(filled: Lake, where: str, lengths: set[int]) -> None:
    assert by_length(filled, select(filled, where)).keys() == lengths


@pytest.mark.parametrize(
    ("where", "weight", "expected"),
    [
        ("", "length", dict(zip(LENGTHS, LENGTHS, strict=True))),
        ("", "1.0 / count(*) over (partition by task)", dict.fromkeys(LENGTHS, 0.5)),
        ("length <> 7", "1.0 / count(*) over (partition by task)", {3: 0.5, 9: 0.5, 4: 1.0, 8: 0.5, 2: 0.5}),
        ("success", "length::decimal(9, 2) / 2", {3: 1.5, 4: 2.0, 2: 1.0}),
        ("success", "case when policy_version > 0 then 0 else 1 end", {3: 1, 4: 1, 2: 0}),
        ("not success", "length - (select min(length) from trajectories)", {9: 7, 8: 6, 7: 5}),
        ("success", "sum(length) over () -- of the chosen", {3: 9, 4: 9, 2: 9}),
        ("success", "coalesce(nullif(epsilon, 0), 0.25)", {3: 0.25, 4: 0.25, 2: 0.25}),
    ],
)
def test_a_weight_is_worked_out_over_the_chosen(
    filled: Lake, where: str, weight: str, expected: dict[int, float]
) -> None:
    assert by_length(filled, select(filled, where, weight)) == pytest.approx(expected)


def test_weights_by_uid(filled: Lake) -> None:
    chosen = select(filled, "length > 5", "length")
    every = select(filled).uids
    expected = {uid: float(weight) for uid, weight in zip(chosen.uids.tolist(), chosen.weights, strict=True)}
    order = np.random.default_rng(0).permutation(len(every))
    assert chosen.weights_of(every[order]).tolist() == [expected.get(uid, 0.0) for uid in every[order].tolist()]
    assert chosen.weights_of(np.array([b"nobody"], "S16")).tolist() == [0.0]


def test_uids_that_end_in_zeros_come_back(lake: Lake, monkeypatch) -> None:
    uids = iter([b"\x01\x00\x02" + bytes(13), b"\x01" + bytes(15)])
    monkeypatch.setattr("pipelines.lake.writer._new_uids", lambda count: [next(uids) for _ in range(count)])
    fill(lake, [3, 4])
    assert hex_uids(select(lake).uids) == ["01" + "00" * 15, "010002" + "00" * 13]


def test_only_of_a_schema_and_only_originals(lake: Lake) -> None:
    fill(lake, LENGTHS, seal_every=4)
    pictures = fill(lake, [5], schema=IMAGES)
    base = hex_uids(select(lake, "length = 9").uids)[0]
    (derived,) = derive(lake, {base: {"reward": np.zeros(10, dtype=np.float32)}})
    assert hex_uids(select(lake, schema_id=IMAGES.id).uids) == list(pictures)
    assert len(select(lake, schema_id=SCHEMA.id).uids) == 7
    assert hex_uids(select(lake, "length = 9 or true", schema_id=SCHEMA.id, originals=True).uids).count(derived) == 0
    assert len(select(lake, schema_id="' or true --").uids) == 0


def test_trajectories_are_read_by_a_predicate(filled: Lake) -> None:
    found = [len(t.columns["reward"]) - 1 for t in reading.trajectories(filled, "length > 5")]
    assert found == [9, 8, 7]


def test_tables_of_the_run_may_be_joined(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "run" / "lake")
    fill(lake, LENGTHS)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"seed": 4}))
    folder = tmp_path / "run" / "checkpoints" / "000001"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(json.dumps({"update": 1, "time": 1.0}))
    assert by_length(lake, select(lake, "length in (select seed from runs)")).keys() == {4}
    where = 'policy_version >= (select max("update") from checkpoints)'
    assert by_length(lake, select(lake, where)).keys() == {2, 7}


@pytest.mark.parametrize(
    ("where", "text", "marked"),
    [
        ("true); drop table trajectories; select (1", "syntax error", ")"),
        ("1) from trajectories where (1", "syntax error", ")"),
        ("true) or (true", "syntax error", ")"),
        ("success; select 1", "one expression", ""),
        ("success;", "syntax error", ";"),
        ("success union select true", "one expression", ""),
        ("success, success", "one expression", ""),
        ("success as trajectories", "one expression", ""),
        ("success from trajectories", "one expression", ""),
        ("success order by 1", "one expression", ""),
        ("distinct success", "one expression", ""),
        ("*", "one value", "*"),
        ("trajectories.*", "one value", "trajectories"),
        ("length >", "end of input", ""),
        ("'unfinished", "unterminated", "'unfinished"),
        ("/* unfinished", "unterminated", "/*"),
        ("-- nothing", "one expression", ""),
        ("length >> nope", "nope", "nope"),
        ("success\n  and nope", "nope", "nope"),
        ("'ü' = nope", "nope", "nope"),
        ("count(*) > 3", "aggregates", "count"),
        ("task::int > 3", "Conversion", "::int"),
        ("exists (from read_csv('/etc/passwd'))", "read_csv is disabled", "read_csv"),
        ("(select count(*) from glob('/*')) > 0", "glob is disabled", "glob"),
        ("exists (from 'x.parquet')", "disabled", None),
        ("getenv('HOME') = 'x'", "getenv", "getenv"),
        ("length", "type is BIGINT", None),
        ("task", "type is VARCHAR", None),
        ("[true]", "type is BOOLEAN", None),
        ("? or true", "parameters", None),
    ],
)
def test_what_is_not_a_predicate_is_refused_at_its_place(
    filled: Lake, tmp_path: Path, monkeypatch, where: str, text: str, marked: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=text) as caught:
        select(filled, where)
    if marked is not None:
        *_, line, mark = caught.value.message.split("\n")
        assert line in {f"LINE {i}: {part}" for i, part in enumerate(where.split("\n"), 1)}
        place = mark.index("^")
        assert line[place : place + len(marked)] == marked
        assert bool(marked) == (place < len(line))
    assert (os.listdir(tmp_path), os.listdir(filled.path.parent)) == ([], ["lake"])


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        ("nullif(epsilon, 0)", "of 6 weights 6 NULL"),
        ("nullif(length, 9)", "of 6 weights 1 NULL"),
        ("case when success then 'nan'::double else 1 end", "3 NaN"),
        ("1e308 * 10 * length", "6 infinite"),
        ("length - 4", "2 negative"),
        ("task", "type is VARCHAR"),
        ("success", "type is BOOLEAN"),
        ("[1, 2]", "type is INTEGER"),
        ("unnest([1, 2])", "several values"),
        ("avg(length)", "over ()"),
        ("length) from trajectories --", "syntax error"),
        ("length as weight", "one expression"),
        ("nope", "LINE 1: nope"),
    ],
)
def test_what_is_not_a_weight_is_refused(filled: Lake, weight: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        select(filled, "length > 1", weight)
    assert text in str(caught.value)


@pytest.mark.system
@pytest.mark.parametrize(
    ("limits", "where", "limit"),
    [
        (
            QueryLimits(seconds=1),
            "(with recursive x as (select 1 i union all select i + 1 from x) select max(i) from x) > 0",
            "time limit of 1 s",
        ),
        (QueryLimits(seconds=600, megabytes=64), "list_sum(range(1000000000 + length)) > 0", "memory limit of 64 MB"),
    ],
)
def test_a_selection_meets_its_limits(filled: Lake, limits: QueryLimits, where: str, limit: str) -> None:
    with pytest.raises(UsageError, match=limit):
        select(filled, where, limits=limits)


def test_a_selection_without_an_index_file(lake: Lake) -> None:
    fill(lake, LENGTHS, seal_every=4)
    (lake.path / "index.duckdb").mkdir()
    assert by_length(lake, select(lake, "length > 5", "length")) == {9: 9, 8: 8, 7: 7}


@pytest.mark.parametrize(
    ("where", "weight", "weights"),
    [
        ("uid in (select uid from steps where t = 2 and reward is not null)", "", {3: 1.0, 5: 1.0}),
        ("", "(select count(reward) from steps s where s.uid = trajectories.uid)", {3: 4.0, 4: 0.0, 5: 6.0}),
    ],
)
def test_a_selection_by_steps_reports_a_damaged_segment(
    lake: Lake, where: str, weight: str, weights: dict[int, float]
) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    catalog.refresh(lake)
    path = damage(lake, 1)
    told: list[Any] = []
    assert by_length(lake, select(lake, where, weight, listener=told.append)) == weights
    (notice,) = [event for event in told if isinstance(event, Notice)]
    assert f"'{path}' is damaged" in notice.text
