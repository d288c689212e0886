"""What a user's SQL may do, in this process and in one of its own, and the table `steps`."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from pipelines.errors import StageFailed, UsageError
from pipelines.events import Notice
from pipelines.lake import segment
from pipelines.lake.sql import catalog
from pipelines.lake.sql import query as queries
from pipelines.lake.sql.query import connect
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.store import Lake
from tests.lake.factories import IMAGES, MIXED, SCHEMA, damage, derive, fill
from tests.tiers import some

SHORT = QueryLimits(seconds=1.5, megabytes=128)
SMALL = QueryLimits(seconds=600, megabytes=128)
COUNT = "select count(*) from trajectories"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two trajectories, of 5 and 6 actions. Tests only read it."""
    lake = Lake.create(tmp_path_factory.mktemp("filled") / "lake")
    fill(lake, [5, 6])
    return lake


@pytest.fixture(scope="module")
def in_segments(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, dict[str, dict[str, np.ndarray]]]:
    """A lake of six segments with a trajectory each, and what was written by uid. Tests only read it."""
    lake = Lake.create(tmp_path_factory.mktemp("segments") / "lake")
    return lake, fill(lake, [3, 4, 5, 6, 7, 8], seal_every=1)


@pytest.fixture(params=some([False, True], 0), ids=["on disk", "in memory"])
def either(request: pytest.FixtureRequest, filled: Lake, lake: Lake) -> Lake:
    """A lake of two trajectories whose index is a file, or one where it cannot be."""
    if request.param:
        fill(lake, [5, 6])
        (lake.path / "index.duckdb").mkdir()
    return lake if request.param else filled


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("selec 1", "syntax error"),
        ("select nope from trajectories", "nope"),
        ("select * from nope", "nope"),
        ("select 1; select 2", "one SELECT"),
        ("select '\udcff'", "is not a character of UTF-8"),
        ("", "one SELECT"),
        ("drop table trajectories", "one SELECT"),
        ("delete from trajectories", "one SELECT"),
        ("create table x as select 1", "one SELECT"),
        ("explain delete from trajectories", "one SELECT"),
        ("explain analyze create table x as select 1", "one SELECT"),
        ("copy trajectories to 'out.csv'", "one SELECT"),
        ("copy (select 1) to 'out.csv'", "one SELECT"),
        ("export database 'out'", "one SELECT"),
        ("attach 'x.db'", "one SELECT"),
        ("set threads = 1", "one SELECT"),
        ("install httpfs", "one SELECT"),
        ("load json", "one SELECT"),
        ("pragma enable_profiling", "one SELECT"),
        ("call pragma_version()", "one SELECT"),
        ("select * from read_csv('/etc/passwd')", "disabled"),
        ("select * from read_text('/etc/passwd')", "disabled"),
        ("select * from main.READ_BLOB('/etc/passwd')", "disabled"),
        ("select * from parquet_scan('x.parquet')", "disabled"),
        ("select * from glob('/*')", "disabled"),
        ("explain select * from glob('/*')", "disabled"),
        ("with x as (select * from glob('/*')) select 1 where exists (from x)", "disabled"),
        ("select * from query('select 1')", "disabled"),
        ("select * from json_execute_serialized_sql(json_serialize_sql('select 1'))", "disabled"),
        ("select * from enable_logging(storage_path = 'out.log')", "disabled"),
        ("select * from enable_profiling(format = 'json', save_location = 'out.json')", "disabled"),
        ("select * from force_checkpoint()", "disabled"),
        ("select * from '/etc/passwd'", "not exist"),
        ("select * from 'x.parquet'", "disabled"),
        ("select getenv('HOME')", "getenv"),
        ("select * from secret_local_table", "not exist"),
    ],
)
def test_sql_can_only_read_the_lake(either: Lake, tmp_path: Path, monkeypatch, sql: str, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    secret_local_table = catalog.pa.table({"x": [1]})
    assert secret_local_table is not None
    with pytest.raises(UsageError, match=text):
        catalog.query(either, sql)
    assert catalog.query(either, COUNT)[1] == [(2,)]
    assert os.listdir(tmp_path) == ["lake"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("limits", "sql", "limit"),
    [
        (
            SHORT,
            "with recursive x as (select 1 as i union all select i + 1 from x) select max(i) from x",
            "time limit of 1.5 s",
        ),
        (SHORT, "select sum(range) from range(1000000000000)", "time limit"),
        (
            SHORT,
            "select levenshtein(repeat('a', 90000 + length), repeat('b', 90000)) from trajectories",
            "time",
        ),  # deaf to it
        (SMALL, "select list(range) from range(1000000000)", "memory limit of 128 MB"),
        (SMALL, "select range from range(1000000000) order by hash(range)", "memory"),
        (SMALL, "select list_sum(range(3000000000))", "memory"),
        (SMALL, "select length(repeat('x', 2000000000))", "memory"),
        (SHORT, "select range from range(1000000000000)", "limit"),
        (SHORT, "select histogram(range) from range(1000000000)", "limit"),
    ],
)
def test_a_user_s_query_meets_its_limits(lake: Lake, limits: QueryLimits, sql: str, limit: str) -> None:
    fill(lake, [3])
    with pytest.raises(UsageError, match=limit):
        catalog.query(lake, sql, limits=limits)
    assert catalog.query(lake, COUNT, limits=QueryLimits())[1] == [(1,)]
    assert [path.name for path in lake.path.iterdir() if "duckdb" in path.name] == ["index.duckdb"]


def test_a_path_that_is_not_utf8_is_refused_and_one_that_the_locale_hides_is_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not UTF-8"):
        connect(str(tmp_path / "\udcff.duckdb"))
    connect(str(tmp_path / "\udcc3\udca4.duckdb")).close()
    assert [path.name for path in tmp_path.iterdir()] == ["ä.duckdb"]


def test_limits_are_checked() -> None:
    for wrong in ({"seconds": 0.0}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"megabytes": 1}):
        with pytest.raises(UsageError, match="limits"):
            QueryLimits(**wrong)


def test_a_query_of_a_process_of_its_own_answers_the_same(lake: Lake) -> None:
    fill(lake, [5, 6, 7], seal_every=1)
    for sql in ("select * from trajectories order by uid", "select * from steps order by uid, t", "show tables"):
        assert catalog.query(lake, sql, limits=QueryLimits()) == catalog.query(lake, sql)


def test_its_notices_arrive(lake: Lake) -> None:
    fill(lake, [5, 6], seal_every=1)
    path = min((lake.path / "segments").glob("*/*.arrow"))
    path.write_bytes(path.read_bytes()[:100])
    told: list = []
    assert catalog.query(lake, COUNT, limits=QueryLimits(), listener=told.append)[1] == [(1,)]
    assert [event.level for event in told if isinstance(event, Notice)] == ["warning"]


@pytest.mark.parametrize(
    ("sql", "marked"),
    [
        ("select avg(reward from trajectories", "from"),
        ("select 'ü', nope from trajectories", "nope"),
        ("select 1,\n  nope\nfrom trajectories", "nope"),
        ("select 'ü' from glob('*')", "glob"),
    ],
)
def test_a_wrong_query_points_at_the_place(filled: Lake, sql: str, marked: str) -> None:
    with pytest.raises(UsageError) as caught:
        catalog.query(filled, sql)
    *_, line, mark = caught.value.message.split("\n")
    assert line.startswith("LINE ")
    assert line[mark.index("^") :].startswith(marked)


@pytest.mark.system
def test_explaining_and_describing(lake: Lake) -> None:
    fill(lake, [3])
    for sql in ("explain select count(*) from steps", "EXPLAIN ANALYZE select avg(reward) from steps", "from steps"):
        assert catalog.query(lake, sql)[1]
    assert ("reward", "FLOAT") in [row[:2] for row in catalog.query(lake, "describe steps")[1]]
    assert catalog.query(lake, "summarize select reward from steps")[1][0][0] == "reward"


@pytest.mark.system
def test_steps_are_rows(lake: Lake) -> None:
    written = fill(lake, [5, 6, 7], seal_every=2)
    uid, values = next(iter(written.items()))
    (new,) = derive(lake, {uid: {"reward": values["reward"] * 0 + 1}})
    expected = {**{u: v["reward"] for u, v in written.items()}, new: np.ones(6)}
    _, rows = catalog.query(lake, "select uid, t, reward, task from steps order by uid, t")
    for uid, reward in expected.items():
        mine = [(t, r) for u, t, r, _ in rows if u == uid]
        assert [t for t, _ in mine] == list(range(len(reward)))
        np.testing.assert_allclose([r for _, r in mine], reward, rtol=1e-6)
    assert catalog.query(lake, "select count(*) from steps")[1] == [(6 + 7 + 8 + 6,)]
    (state,) = catalog.query(lake, f"select \"obs.state\" from steps where uid = '{new}' and t = 2")[1][0]
    np.testing.assert_allclose(state, values["obs.state"][2], rtol=1e-6)
    assert catalog.query(lake, "select count(*) from steps a join steps b using (uid, t)")[1] == [(27,)]


@pytest.mark.system
@pytest.mark.parametrize(
    ("batch_rows", "batch_bytes"), some([(1, 1 << 20), (3, 1 << 20), (1000, 40), (1000, 1 << 20)], 1)
)
def test_batches_of_any_size_give_the_same_steps(lake: Lake, monkeypatch, batch_rows: int, batch_bytes: int) -> None:
    """Also with a relabelled trajectory that begins inside its base, and with images."""
    monkeypatch.setattr(queries, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(queries, "BATCH_BYTES", batch_bytes)
    written = fill(lake, [5, 1, 7, 2], seal_every=3)
    uid, values = list(written.items())[2]
    own = {"reward": np.arange(4, dtype=np.float32), "action": np.arange(4)}
    (new,) = derive(lake, {uid: own}, offset=2)
    written[new] = {name: array[2:6] for name, array in values.items()} | own
    pictures = fill(lake, [4, 3], schema=IMAGES, seed=1)
    for uid, columns in {**written, **pictures}.items():
        _, rows = catalog.query(lake, f"select t, reward, action from steps where uid = '{uid}' order by t")
        assert [row[0] for row in rows] == list(range(len(columns["reward"])))
        np.testing.assert_allclose([row[1] for row in rows], columns["reward"], rtol=1e-6)
        np.testing.assert_allclose([np.squeeze(row[2]) for row in rows], np.squeeze(columns["action"]), rtol=1e-6)
    _, rows = catalog.query(lake, f"select \"obs.state\" from steps where uid = '{new}' order by t")
    np.testing.assert_allclose([row[0] for row in rows], values["obs.state"][2:6], rtol=1e-6)
    for uid, columns in pictures.items():
        _, rows = catalog.query(lake, f"select obs from steps where uid = '{uid}' order by t")
        np.testing.assert_array_equal([row[0] for row in rows], columns["obs"])


def test_steps_of_several_schemas_go_together(lake: Lake) -> None:
    fill(lake, [5])
    fill(lake, [6], schema=IMAGES)
    assert catalog.query(lake, "select count(*), count(action) from steps where t > 0")[1] == [(11, 11)]
    names, _ = catalog.query(lake, "from steps")
    assert "obs" not in names  # a wide column is there for who names it
    assert {"uid", "t", "env", "task", "policy_version", "obs.state", "reward"} <= set(names)
    sums = "select count(*), sum(list_sum(flatten(obs[1]::uinteger[][]))) from steps where obs is not null"
    assert catalog.query(lake, sums)[1][0][0] == 7


def test_observations_keep_their_shape(lake: Lake) -> None:
    (values,) = fill(lake, [4], schema=MIXED).values()
    sql = 'select "obs.grid", "obs.grid"[2][3], "obs.flag", "obs.wide" from steps order by t'
    _, rows = catalog.query(lake, sql)
    np.testing.assert_array_equal([row[0] for row in rows], values["obs.grid"])
    np.testing.assert_array_equal([row[1] for row in rows], values["obs.grid"][:, 1, 2])
    np.testing.assert_array_equal([row[2] for row in rows], values["obs.flag"])
    assert "obs.wide" not in catalog.query(lake, "from steps")[0]  # 1600 bytes a step
    np.testing.assert_allclose([row[3] for row in rows], values["obs.wide"])


def test_steps_of_an_empty_lake(lake: Lake) -> None:
    assert catalog.query(lake, "select count(*) from steps")[1] == [(0,)]
    lake.register(SCHEMA)
    assert catalog.query(lake, "select count(*), avg(reward) from steps")[1] == [(0, None)]


@pytest.mark.parametrize(
    ("sql", "read"),
    [
        ("select count(*) from steps", set()),
        ("select count(*) from (select *, reward + 1 from steps)", set()),
        ('select avg(reward) from steps -- not "obs.state"', {"reward"}),
        ("select 'obs.state', avg(ReWard) from steps", {"reward"}),
        ('select avg(s."reward") from steps s', {"reward"}),
        ("select columns('re.*') from steps", {"reward", "reset"}),
        ("select struct_extract(x, 'reward') from (select steps as x from steps)", None),
        ("select x.reward from (select {'reward': reward, 'b': t} as x from steps)", {"reward"}),
        (
            'select * exclude ("obs.state", "obs.bits") from steps',
            {"reward", "reset", "action", "terminated", "truncated"},
        ),
        ("select t from steps where reward > 0", {"reward"}),
        ("select a.reward from steps a join steps b using (uid, t) where b.action = 1", {"reward", "action"}),
        ("with x as materialized (from steps) select x.reset from x join x y using (t)", {"reset"}),
        ("select (select max(reward) from steps s where s.t = m.length) from trajectories m", {"reward"}),
        ("describe steps", set()),
    ],
)
def test_only_the_columns_that_count_are_read(filled: Lake, monkeypatch, sql: str, read: set[str] | None) -> None:
    touched = set()
    real = queries._Piece.values
    monkeypatch.setattr(queries._Piece, "values", lambda self, files, c: touched.add(c.name) or real(self, files, c))
    assert catalog.query(filled, sql)[1]
    assert touched == ({c.name for c in SCHEMA.columns} if read is None else read)


@pytest.mark.parametrize(
    ("condition", "files"),
    [
        ("task = 't1'", 2),
        ("task in ('t1', 't2')", 4),
        ("task = 't1' or task = 't2'", 4),
        ("policy_version >= 1", 2),
        ("policy_version between 0 and 0", 4),
        ("task <> 't1'", 4),
        ("task = 'it''s'", 0),
        ("task = 't1'' or task = ''t2'", 0),
        ("t = 1", 6),
        ("task = 't1' or t = 1", 6),
    ],
)
def test_a_condition_on_trajectories_spares_segments(in_segments, monkeypatch, condition: str, files: int) -> None:
    lake, written = in_segments
    opened = set()
    real = segment.open_segment
    monkeypatch.setattr(
        segment, "open_segment", lambda storage, id, *a, **k: opened.add(id) or real(storage, id, *a, **k)
    )
    _, rows = catalog.query(lake, f"select uid, t, reward from steps where {condition}")
    assert len(opened) == files
    _, facts = catalog.query(lake, "select uid, task, policy_version from trajectories")
    steps_of = "(select unnest(range(?::int + 1)) as t, ? as task, ? as policy_version)"
    sql = f"select count(*) from {steps_of} where {condition}"
    with catalog.duckdb.connect() as oracle:
        expected = {
            uid: oracle.execute(sql, [len(written[uid]["reward"]) - 1, task, version]).fetchall()[0][0]
            for uid, task, version in facts
        }
    assert len(rows) == sum(expected.values())


def test_a_segment_that_cannot_be_read_is_left_out_of_steps(lake: Lake) -> None:
    fill(lake, [5, 6], seal_every=1)
    catalog.refresh(lake)
    path = min((lake.path / "segments").glob("*/*.arrow"))
    stat = path.parent.stat()
    path.unlink()
    os.utime(path.parent, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    told: list = []
    assert catalog.query(lake, "select count(reward) from steps", listener=told.append)[1] in ([(7,)], [(6,)])


@pytest.mark.parametrize("join", ["", " join steps using (uid, t)"])
def test_a_query_of_a_process_of_its_own_reports_a_damaged_segment_once(lake: Lake, join: str) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    text = f"select count(a.reward) from steps a{join}"
    assert catalog.query(lake, text, limits=QueryLimits())[1] == [(15,)]
    path = damage(lake, 1)
    told: list[Any] = []
    assert catalog.query(lake, text, limits=QueryLimits(), listener=told.append)[1] == [(10,)]
    (notice,) = [event for event in told if isinstance(event, Notice)]
    assert f"'{path}' is damaged" in notice.text


def test_python_is_warned_of_segments_that_are_left_out(lake):
    fill(lake, [3, 4, 5], seal_every=1)
    assert len(lake.sql("from steps")) == 15
    path = damage(lake, 1)
    for ask in (lake.sql, lake.to_arrow):
        with pytest.warns(UserWarning, match=f"{path.name}.*left out"):
            assert len(ask("from steps")) == 10


class Interrupted:
    """A connection that reports an interrupt in place of rows, as DuckDB now and then does when a thread fails."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, text: str) -> None:
        self.connection, self.text = connection, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def execute(self, text: str, *arguments: Any) -> Any:
        result = self.connection.execute(text, *arguments)
        return self if text == self.text else result

    def fetchall(self) -> Any:
        raise duckdb.InterruptException("INTERRUPT Error: Interrupted!")


BOOM = "select case when range = 190000 then error('boom') else range::varchar end from range(200000)"
MISCAST = "select case when range = 190000\n  then ('x' || range)::int end from range(200000)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOOM, "SQL: Invalid Input Error: boom"),
        (MISCAST, f"SQL: Conversion Error: Could not convert string 'x190000' to INT32\n\nLINE 2: {{}}\n{' ' * 29}^"),
    ],
)
def test_an_interrupt_by_another_thread_is_reported_as_its_error(filled: Lake, text: str, message: str) -> None:
    with catalog.open_index(filled) as connection:
        for each in (connection, Interrupted(connection, text)):
            with pytest.raises(UsageError) as caught, queries.enforce_limits(connection, SMALL):
                queries.answer(each, filled, lambda event: None, text)
            assert caught.value.message == message.format(text.split("\n")[-1])


def test_an_interrupt_before_the_time_limit_is_not_the_time_limit(filled: Lake) -> None:
    with catalog.open_index(filled) as connection:
        with pytest.raises(StageFailed, match="does not say why; repeat it"), queries.enforce_limits(connection, SMALL):
            queries.answer(Interrupted(connection, "select 1"), filled, lambda event: None, "select 1")
        with pytest.raises(duckdb.InterruptException):
            queries.answer(Interrupted(connection, "select 1"), filled, lambda event: None, "select 1")


def test_a_query_is_interrupted_until_it_ends() -> None:
    """Since DuckDB forgets an interrupt that comes between two statements."""
    calls, third = [], threading.Event()

    class Connection:
        def interrupt(self) -> None:
            calls.append(1)
            if len(calls) == 3:
                third.set()

    with queries.enforce_limits(Connection(), QueryLimits(seconds=0.001)):
        assert third.wait(600)


def test_times_with_a_zone_need_pytz_or_a_cast(filled: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytz", None)
    for value in ("to_timestamp(length)", "[to_timestamp(length)]"):
        with pytest.raises(UsageError, match=r"needs pytz, which is not installed; cast it, e\.g\. .*::varchar"):
            catalog.query(filled, f"select {value} from trajectories")
    text = "select to_timestamp(length)::varchar, [to_timestamp(length)]::timestamp[] from trajectories"
    assert len(catalog.query(filled, text)[1]) == 2


@pytest.mark.system
def test_queries_draw_no_progress_where_python_is_interactive() -> None:
    """DuckDB takes a program without a file for interactive, and prints how far a long query is."""
    program = 'from pipelines.lake.sql.query import connect as c; print(c().sql("from duckdb_settings()").filter'
    program += "(\"name = 'enable_progress_bar'\").fetchone()[1])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["false"]
