"""The helper process for a user's SQL: one for all questions, within its limits, and ended with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipelines.errors import Interrupted, UsageError
from pipelines.events import Event, Waiting
from pipelines.lake.sql import catalog, sandbox
from pipelines.lake.sql.query import StepExpression
from pipelines.lake.sql.sandbox import LimitReached, QueryLimits
from pipelines.lake.sql.selection import select
from pipelines.lake.store import Lake
from tests.lake.factories import SCHEMA, fill

pytestmark = pytest.mark.system

ENDLESS = "with recursive x as (select 1 as i union all select i + 1 from x) select max(i) from x"
ENDLESS_EXPRESSION = "levenshtein(repeat('a', 300000 + t), repeat('b', 300000))"  # DuckDB cannot interrupt it
ENDLESS_QUERY = f"select {ENDLESS_EXPRESSION.replace('t)', 'length)', 1)} from trajectories"
STEPS = {"columns": {}, "time": np.arange(3), "trajectory": np.zeros(3, np.int64)}


def pid() -> int:
    assert sandbox._helper is not None
    return sandbox._helper._process.pid


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_process_answers_all_questions(lake: Lake) -> None:
    fill(lake, [3, 4])
    assert catalog.query(lake, "select count(*) from trajectories", limits=QueryLimits())[1] == [(2,)]
    first = pid()
    assert len(select(lake, "length > 3").uids) == 1
    assert StepExpression("t * 2", SCHEMA.columns).evaluate(**STEPS).tolist() == [0, 2, 4]
    with pytest.raises(UsageError, match="nope"):
        select(lake, "nope")
    fill(lake, [5])
    assert len(select(lake, "length > 3").uids) == 2
    assert pid() == first


def test_lakes_are_found_from_the_directory_of_the_question(tmp_path: Path, monkeypatch) -> None:
    for name, lengths in (("a", [3]), ("b", [3, 4])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        fill(Lake.create("lake"), lengths)
        assert len(select(Lake("lake"), "true").uids) == len(lengths)


def test_a_changed_environment_variable_is_seen(lake: Lake, monkeypatch) -> None:
    select(lake, "true")
    first = pid()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    select(lake, "true")
    assert pid() != first
    assert b"AWS_ACCESS_KEY_ID=another" in Path(f"/proc/{pid()}/environ").read_bytes().split(b"\0")


def test_the_next_question_after_a_limit_or_a_death_is_answered(lake: Lake) -> None:
    fill(lake, [3])
    assert len(select(lake, "true").uids) == 1
    first = pid()
    with pytest.raises(LimitReached, match="time limit"):
        catalog.query(lake, ENDLESS, limits=QueryLimits(seconds=0.2))
    assert len(select(lake, "true").uids) == 1
    second = pid()
    assert second != first
    assert not alive(first)
    os.kill(second, signal.SIGKILL)
    assert len(select(lake, "true").uids) == 1


def test_only_a_limit_that_can_be_raised_is_said_to_be() -> None:
    assert "--timeout" in str(QueryLimits(adjustable=True).out_of_time())
    assert "--memory" in str(QueryLimits(adjustable=True).out_of_memory())
    assert "--" not in f"{QueryLimits().out_of_time()} {QueryLimits().out_of_memory()}"


@pytest.mark.parametrize("ask", ["query", "where", "expression"])
def test_whoever_listens_can_stop_a_question(lake: Lake, ask: str) -> None:
    fill(lake, [3])

    def stop(event: Event) -> None:
        assert isinstance(event, Waiting)
        raise Interrupted("stopped")

    asked = {
        "query": lambda: catalog.query(lake, ENDLESS, limits=QueryLimits(), listener=stop),
        "where": lambda: select(lake, f"({ENDLESS}) > 0", listener=stop),
        "expression": lambda: StepExpression(ENDLESS_EXPRESSION, SCHEMA.columns, listener=stop).evaluate(**STEPS),
    }
    with pytest.raises(Interrupted, match="stopped"):
        asked[ask]()
    assert catalog.query(lake, "select 1", limits=QueryLimits())[1] == [(1,)]


_EVALUATES = """
import resource, sys
import numpy as np
from pipelines.lake.sql import sandbox
from pipelines.lake.sql.query import StepExpression
from pipelines.lake.sql.sandbox import LimitReached, QueryLimits
from tests.lake.factories import SCHEMA
for text in ("t", *sys.argv[1:]):
    try:
        expression = StepExpression(text, SCHEMA.columns, limits=QueryLimits(megabytes=128))
        expression.evaluate({}, np.arange(100), np.zeros(100, np.int64))
    except LimitReached as error:
        assert "memory limit of 128 MB" in str(error)
    else:
        assert text == "t"
    sandbox._end()
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


def test_whoever_listens_can_stop_waiting_for_another_question(lake: Lake) -> None:
    def stop(event: Event) -> None:
        raise Interrupted("stopped")

    with sandbox._lock, pytest.raises(Interrupted):
        catalog.query(lake, "select 1", limits=QueryLimits(), listener=stop)


def test_an_expression_stays_within_its_memory() -> None:
    texts = [
        "list_sum(range(3000000000))",
        "len(list_sort(range(20000000 + t, 0, -1)))",
        "sum(len(list_sort(range(1000000 + t, 0, -1)))) over ()",
        "len(repeat('x', 1000000000 + t))",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _EVALUATES, *texts]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    least, *megabytes = map(int, said.split())
    assert len(megabytes) == len(texts)
    assert max(megabytes) < least + 128 + 64


def test_an_expression_meets_its_time_limit() -> None:
    limits = QueryLimits(seconds=0.2)
    with pytest.raises(LimitReached, match=r"time limit of 0\.2 s"):
        StepExpression(ENDLESS_EXPRESSION, SCHEMA.columns, limits=limits).evaluate(**STEPS)


def test_a_forked_process_asks_a_helper_of_its_own(lake: Lake) -> None:
    fill(lake, [3])
    assert len(select(lake, "true").uids) == 1
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if sandbox._helper is None and len(select(lake, "true").uids) == 1 else 2
            sandbox._end()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(select(lake, "true").uids) == 1


_ASKS = """
import sys, threading
from pipelines.lake.sql import catalog, sandbox
from pipelines.lake.sql.sandbox import QueryLimits
from pipelines.lake.store import Lake
lake = Lake(sys.argv[1])
catalog.query(lake, "select 1", limits=QueryLimits())
said = []
def hear(event):
    if not said:
        said.append(print(sandbox._helper._process.pid, flush=True))
catalog.query(lake, sys.argv[2], limits=QueryLimits(seconds=3600), listener=hear)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("text", [ENDLESS, ENDLESS_QUERY])
def test_a_helper_ends_with_the_process_that_asked(lake: Lake, text: str, number: signal.Signals) -> None:
    fill(lake, [3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _ASKS, str(lake.path), text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as asking:
        assert asking.stdout is not None
        helper = int(asking.stdout.readline())
        assert alive(helper)
        asking.send_signal(number)
    deadline = time.monotonic() + 600
    while alive(helper):
        assert time.monotonic() < deadline
        time.sleep(0.05)
