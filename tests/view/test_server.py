"""The server's answers, and what it refuses."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import numpy as np
import pytest

from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import SCHEMA, columns, damage, derive, fill
from tests.tiers import crossed
from tests.view.lakes import episode, put

pytest.importorskip("starlette", reason='no server here: pip install "amago[view]"')
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from pipelines.view import server
from pipelines.view.server import application
from pipelines.view.viewer import LakeViewer

TOKEN = "a-token"
PORT = 8642
BASE = f"http://127.0.0.1:{PORT}"


def client(lake: Lake, *, token: str | None = TOKEN, **more: Any) -> TestClient:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    app = application(LakeViewer(lake, **more), token=TOKEN, port=PORT)
    return TestClient(app, base_url=BASE, headers=headers, follow_redirects=False)


@pytest.fixture
def filled(lake: Lake) -> Lake:
    put(lake, episode(5), TrajectoryInfo(env="play", task="one", policy_version=3, success=True))
    put(lake, episode(9, seed=1), TrajectoryInfo(env="play", task="two", policy_version=4, success=False))
    return lake


EVERY = [
    *(
        "/",
        "/app.js",
        "/style.css",
        "/vega.js",
        "/api/lake",
        "/api/state",
        "/api/trajectories",
        "/api/count",
        "/api/curve",
    ),
    *(f"/api/{name}/{'0' * 32}" for name in ("trajectory", "origin", "steps", "values", "frame", "strip")),
    *("/api/sql", "/nothing", "/%2e%2e/%2e%2e/etc/passwd"),
]


@pytest.mark.parametrize("path", EVERY)
def test_requests_without_the_token_are_refused(filled: Lake, path: str) -> None:
    for token in (None, "", "another", TOKEN[:-1], f"{TOKEN}x", "ü"):
        headers = {} if token is None else {"authorization": f"Bearer {token}".encode()}
        reply = client(filled, token=None).get(path, headers=headers)
        assert reply.status_code == 403, (path, token)
        assert "set-cookie" not in reply.headers
    assert client(filled, token=None).get(path, params={"token": "another"}).status_code == 403
    assert client(filled, token=None).get(path, cookies={f"amago_view_{PORT}": "x"}).status_code == 403


def test_the_token_in_the_address_becomes_a_cookie_of_this_host_only(filled: Lake) -> None:
    browser = client(filled, token=None)
    reply = browser.get("/", params={"token": TOKEN})
    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert "domain" not in cookie
    assert browser.get("/").status_code == 200
    assert browser.get("/api/lake").status_code == 200


def test_the_token_is_taken_in_the_address_of_the_page_only(filled: Lake) -> None:
    assert client(filled, token=None).get("/api/lake", params={"token": TOKEN}).status_code == 403


@pytest.mark.parametrize(
    ("host", "path"),
    crossed(
        [
            "evil.example",
            "127.0.0.1.evil.example",
            "evil.example:8642",
            "127.0.0.2",
            "[::1]",
            "",
            "localhost:x",
            "a@localhost",
        ],
        ["/", "/api/lake", "/app.js"],
    ),
)
def test_another_host_header_is_refused(filled: Lake, host: str, path: str) -> None:
    reply = client(filled).get(path, headers={"host": host})
    assert reply.status_code == 421
    assert filled.name not in reply.text


@pytest.mark.parametrize("host", ["127.0.0.1:8642", "localhost:8642", "LOCALHOST:9000", "localhost"])
def test_this_host_may_be_reached_through_a_forwarded_port(filled: Lake, host: str) -> None:
    assert client(filled).get("/api/lake", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    crossed(
        ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "MKCOL"],
        ["/", "/api/lake", "/api/trajectories", "/app.js"],
    ),
)
def test_every_method_that_could_write_is_refused(filled: Lake, method: str, path: str) -> None:
    reply = client(filled).request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD")


def test_the_query_is_the_only_post(filled: Lake) -> None:
    assert client(filled).get("/api/sql").status_code == 405
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert client(filled).request(method, "/api/sql").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/../viewer.py", "/static/../viewer.py", "/%2e%2e/viewer.py", "/..%2fviewer.py"),
        *("//etc/passwd", "/etc/passwd"),
        *("/index.html", "/app.js/", "/viewer.py", "/static/app.js", "/api", "/api/"),
        *("/api/frame/../lake.json", "/api/trajectory/..%2f..%2flake.json", "/api/trajectory/%00"),
    ],
)
def test_only_the_listed_paths_exist(filled: Lake, path: str) -> None:
    assert client(filled).get(path).status_code in (307, 400, 404)
    redirected = client(filled).get(path, follow_redirects=True) if "%00" not in path else None
    assert redirected is None or "class LakeViewer" not in redirected.text


def test_other_sites_are_refused_and_nothing_is_shared_with_them(filled: Lake) -> None:
    reading = client(filled)
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        assert reading.get("/api/lake", headers=headers).status_code == 403, headers
    own = reading.get("/api/lake", headers={"origin": BASE, "sec-fetch-site": "same-origin"})
    assert own.status_code == 200
    assert not [name for name in own.headers if name.startswith("access-control-")]
    assert reading.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link to the page


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/lake", "/nothing", "/api/trajectory/x"])
def test_every_answer_has_the_headers_that_confine_it(filled: Lake, path: str) -> None:
    for reply in (client(filled).get(path), client(filled, token=None).get(path)):
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "server" not in reply.headers


def test_the_page_and_its_files_have_their_types(filled: Lake) -> None:
    reading = client(filled)
    assert reading.get("/").headers["content-type"].startswith("text/html")
    assert reading.get("/app.js").headers["content-type"].startswith("text/javascript")
    assert reading.get("/style.css").headers["content-type"].startswith("text/css")
    assert reading.head("/").content == b""


def test_every_file_that_a_script_imports_is_served(filled: Lake) -> None:
    reading, waiting, seen = client(filled), ["app.js"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        reply = reading.get(f"/{name}")
        assert reply.status_code == 200, name
        waiting += [each for each in re.findall(r'from "\./([\w.]+)"', reply.text) if each not in seen]
    assert {name for name in server._FILES if name.endswith(".js")} == seen


def test_the_static_files_ask_no_other_host_and_parse_no_html(filled: Lake) -> None:
    for file in resources.files("pipelines.view").joinpath("static").iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file.name
        assert "https:" not in text, file.name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, file.name


def test_the_lake_is_described(filled: Lake) -> None:
    found = client(filled).get("/api/lake").json()
    assert (found["lake"], found["trajectories"], found["steps"], found["values"]) == (filled.name, 2, 14, None)
    assert found["environments"] == ["play"]


@pytest.mark.system
def test_pages_are_filtered_and_sorted(filled: Lake) -> None:
    found = client(filled).get("/api/trajectories", params={"where": "length > 3", "order": "-length"}).json()
    assert [row[found["columns"].index("length")] for row in found["rows"]] == [9, 5]
    found = client(filled).get("/api/trajectories", params={"where": "success", "order": "length"}).json()
    assert [row[found["columns"].index("task")] for row in found["rows"]] == ["one"]


def test_wrong_sql_is_explained(filled: Lake) -> None:
    for path in ("/api/trajectories", "/api/count", "/api/curve"):
        reply = client(filled).get(path, params={"where": "succes"})
        assert reply.status_code == 400
        assert "LINE 1: succes" in reply.json()["error"]


def test_a_lake_in_an_object_store_is_shown_like_any_other(bucket: str) -> None:
    lake = Lake.create(f"s3://{bucket}/lake")
    uid = put(lake, episode(5), TrajectoryInfo(env="play", task="far"))
    reading = client(lake)
    assert reading.get("/api/lake").json()["look_seconds"] == 15
    found = reading.get("/api/trajectories", params={"where": "task = 'far'"}).json()
    assert [row[0] for row in found["rows"]] == [uid]
    steps = reading.get(f"/api/steps/{uid}", params={"column": "reward"}).json()
    assert len(steps["lanes"][0]["mean"][0]) == 6
    frame = reading.get(f"/api/frame/{uid}", params={"column": "obs.image"})
    assert frame.content.startswith(b"\x89PNG")
    assert reading.get(f"/api/origin/{uid}").json()["trained"] == []


def query(lake: Lake, sql: str) -> Any:
    return client(lake).post("/api/sql", json={"sql": sql})


@pytest.mark.system
def test_a_query_is_answered(filled: Lake) -> None:
    found = query(filled, "select task, length from trajectories order by length").json()
    assert found == {"columns": ["task", "length"], "rows": [["one", 5], ["two", 9]], "more": False, "warnings": []}


def test_answer_names_segments_that_were_left_out(filled: Lake) -> None:
    """Not only segments that are missing from the index, but also those that prove to be damaged when they are read."""
    query(filled, "select 1")  # builds the index
    put(filled, episode(3, seed=2), TrajectoryInfo(env="play", task="three"))
    query(filled, "select 1")
    path = damage(filled, -1)
    found = query(filled, "select count(reward) as n from steps").json()
    assert found["rows"] == [[16]]
    assert [path.name in warning for warning in found["warnings"]] == [True]
    assert query(filled, "select count(*) from trajectories").json()["warnings"] == []


def test_an_answer_is_bounded(filled: Lake) -> None:
    found = query(filled, "select range as n from range(1000000)").json()
    assert (len(found["rows"]), found["more"]) == (1000, True)
    reply = query(filled, "select repeat('x', 30000) as big, range from range(900)")
    assert len(reply.content) < 6_000_000
    assert reply.json()["more"]


@pytest.mark.parametrize(
    "sql",
    [
        *("drop table trajectories", "select 1; select 2", "copy trajectories to '/tmp/x'", "attach 'x'", "pragma x"),
        *("select * from read_text('/etc/passwd')", "select * from '/etc/passwd'", "set memory_limit='9GB'", ""),
    ],
)
def test_a_query_can_only_read_the_lake(filled: Lake, sql: str) -> None:
    reply = query(filled, sql)
    assert reply.status_code == 400
    assert "root:" not in reply.text


@pytest.mark.system
def test_a_query_is_limited_in_time(filled: Lake) -> None:
    reading = client(filled, seconds=0.2)
    reply = reading.post("/api/sql", json={"sql": "select count(*) from range(1000000000) a, range(1000) b"})
    assert reply.status_code == 400
    assert "time limit" in reply.json()["error"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"sql": "select 1"}', "text/plain", 415),  # what a form of another site could send
        (b'{"sql": "select 1"}', "application/x-www-form-urlencoded", 415),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"sql": 3}', "application/json", 400),
        (b"[" * 60_000, "application/json", 400),
        (b" " * 100_000, "application/json", 413),
    ],
)
def test_malformed_queries_are_refused(filled: Lake, body: bytes, kind: str, status: int) -> None:
    reply = client(filled).post("/api/sql", content=body, headers={"content-type": kind})
    assert reply.status_code == status


@pytest.mark.parametrize("value", ["x", "1e9", "9" * 20, "--1", "1.5", "²"])
def test_a_number_is_a_number(filled: Lake, value: str) -> None:
    uid = client(filled).get("/api/trajectories").json()["rows"][0][0]
    assert client(filled).get(f"/api/steps/{uid}", params={"start": value}).status_code == 400


def test_a_trajectory_is_described_with_its_relabelled_versions(lake: Lake) -> None:
    base = next(iter(fill(lake, [7])))
    (own,) = derive(lake, {base: {"reward": np.arange(5, dtype=np.float32)}}, offset=3)
    reading = client(lake)
    found = reading.get(f"/api/trajectory/{base}").json()
    assert [each["uid"] for each in found["derived"]] == [own]
    assert (found["derived"][0]["base_offset"], found["changed"]) == (3, [])
    found = reading.get(f"/api/trajectory/{own}").json()
    assert (found["facts"]["base_uid"], found["facts"]["base_offset"]) == (base, 3)
    assert found["changed"] == ["reward", "terminated", "truncated"]


def test_steps_and_pictures_are_served(filled: Lake) -> None:
    reading = client(filled)
    uid = reading.get("/api/trajectories").json()["rows"][0][0]
    steps = reading.get(f"/api/steps/{uid}", params={"column": ["reward", "obs.many"], "start": 1, "stop": 3}).json()
    assert [lane["name"] for lane in steps["lanes"]] == ["reward", "obs.many"]
    assert steps["t"] == [1, 2]
    frame = reading.get(f"/api/frame/{uid}", params={"column": "obs.image", "step": 2})
    assert frame.headers["content-type"] == "image/png"
    assert frame.content.startswith(b"\x89PNG")
    assert reading.get(f"/api/strip/{uid}", params={"column": "obs.grid", "count": 3}).content.startswith(b"\x89PNG")
    assert reading.get(f"/api/frame/{uid}", params={"column": "reward"}).status_code == 404


def test_without_an_agent_there_are_no_values(filled: Lake) -> None:
    uid = client(filled).get("/api/trajectories").json()["rows"][0][0]
    reply = client(filled).get(f"/api/values/{uid}")
    assert reply.status_code == 404
    assert "--values" in reply.json()["hint"]


def test_a_damaged_segment_is_an_answer(filled: Lake) -> None:
    uid = client(filled).get("/api/trajectories").json()["rows"][0][0]
    for file in (filled.path / "segments").rglob("*.arrow"):
        file.write_bytes(b"x" * 100)
    assert client(filled).get(f"/api/steps/{uid}", params={"column": "reward"}).status_code in (404, 500)


def test_unreadable_segments_are_warned_of(filled: Lake) -> None:
    (filled.path / "segments" / "2026010100").mkdir()
    (filled.path / "segments" / "2026010100" / "0000000000000000-w.1.aaaaaaaa-00000000.arrow").write_bytes(b"x" * 64)
    found = client(filled).get("/api/state").json()
    assert found["trajectories"] == 2
    assert "damaged" in found["warnings"][0]


def test_texts_of_a_lake_are_not_interpreted_as_html(lake: Lake) -> None:
    evil = "<script>alert(1)</script>"
    info = TrajectoryInfo(env=evil, task=evil, goal_text=evil, tags={evil: evil})
    uid = put(lake, episode(2, missions={0: evil}), info)
    reading = client(lake)
    of_one = (f"/api/trajectory/{uid}", f"/api/steps/{uid}?column=obs.mission", f"/api/origin/{uid}")
    for path in ("/api/trajectories", *of_one):
        reply = reading.get(path)
        assert reply.headers["content-type"] == "application/json", path
        json.loads(reply.text)


def test_a_long_trajectory_is_answered_in_few_bytes(lake: Lake) -> None:
    uid = put(lake, columns(np.random.default_rng(0), 200_000), schema=SCHEMA)
    params = {"column": ["reward", "action", "obs.state"], "points": 10**6}
    reply = client(lake).get(f"/api/steps/{uid}", params=params)
    assert reply.status_code == 200
    assert len(reply.content) < 1_000_000
