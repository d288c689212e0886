"""The server of a policy, in this process: what its clients are answered."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.export import forms
from pipelines.export.assets import policy as runtime
from pipelines.export.policy_bundle import write_bundle
from pipelines.export.step_function import StepFunction
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Spaces, zeros
from pipelines.learning import bundle
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from tests.learning.factories import ACTIONS, SEQUENCES, agent, settings
from tests.tiers import crossed

for module in ("starlette", "httpx"):
    pytest.importorskip(module, reason='no server here: pip install "amago[serve]"')

from starlette.testclient import TestClient  # noqa: E402
from starlette.websockets import WebSocketDisconnect  # noqa: E402

from pipelines.serve.acting import FormPolicy, RowPolicy, of_weights  # noqa: E402
from pipelines.serve.app import application  # noqa: E402
from pipelines.serve.sessions import SessionPool  # noqa: E402

TOKEN, CAPACITY = "a-token-of-this-test", 6
SEEN = {"obs": Box(shape=(2,))}


def client(owner: Agent, *, most: int = 8, idle: float = 600.0, body: int = 1 << 16, **options: Any) -> TestClient:
    return serving(of_weights(owner.eval(), capacity=CAPACITY, most=most, **options), most=most, idle=idle, body=body)


def serving(policy: RowPolicy, *, most: int = 8, idle: float = 600.0, body: int = 1 << 16) -> TestClient:
    pool = SessionPool(policy, most=most, idle_seconds=idle)
    app = application(pool, about={"policy": "x"}, token=TOKEN, hosts={"127.0.0.1"}, body_bytes=body)
    return TestClient(app, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {TOKEN}"})


@pytest.fixture
def server() -> Iterator[TestClient]:
    with client(agent("discrete", SEEN)) as made:
        yield made


def begun(server: TestClient) -> str:
    found: str = server.post("/sessions").json()["session"]
    return found


class Reference:
    """One client's policy by `AgentPolicy` alone, with the actions of its environment."""

    def __init__(self, owner: Agent) -> None:
        self._policy, self._space = (
            AgentPolicy(owner, num_actors=1, capacity=CAPACITY, greedy=True),
            owner.spaces.action,
        )
        self._spaces = owner.spaces
        self.reset()

    def reset(self) -> None:
        self._time, self._action = 0, zeros(self._space, (1,))

    def act(self, observation: np.ndarray, reward: float) -> Any:
        seen = {"obs": observation[None]}
        reward = reward if self._time else 0.0
        self._action = self._policy.act(seen, self._action, np.float32([reward]), np.array([self._time]))
        self._time += 1
        return runtime.executed(self._action, self._spaces.to_json()["action"])[0]


@pytest.mark.system
@pytest.mark.parametrize(("action", "sequence"), crossed([*ACTIONS][:3], [*SEQUENCES]))
def test_interleaved_sessions_act_as_each_would_alone(action: str, sequence: str) -> None:
    """Over single requests, batches and a socket; reset, ended and begun again at different times."""
    owner, rng = agent(action, SEEN, sequence=sequence), np.random.default_rng(0)
    for parameter in owner.parameters():
        parameter.data += 0.2 * np.random.default_rng(parameter.numel()).standard_normal()
    with client(owner) as server, server.websocket_connect("ws://127.0.0.1/ws") as socket:
        ids = [begun(server) for _ in range(5)]
        alone = {id: Reference(owner) for id in ids}
        for step in range(40):
            chosen = [id for id in ids if rng.random() < 0.6]
            if step % 7 == 3 and chosen:
                server.post(f"/sessions/{chosen[0]}/reset")
                alone[chosen[0]].reset()
            if step % 11 == 5:
                assert server.delete(f"/sessions/{ids[2]}").status_code == 200
                ids[2] = begun(server)
                alone[ids[2]] = Reference(owner)
                chosen = [ids[2], ids[0]]
            if not chosen:
                continue
            seen = rng.standard_normal((len(chosen), 2)).astype(np.float32)
            reward = rng.standard_normal(len(chosen)).astype(np.float32)
            expected = [alone[id].act(seen[i], float(reward[i])) for i, id in enumerate(chosen)]
            if step % 3 == 0:
                found = [
                    server.post(
                        f"/sessions/{id}/act", json={"observation": seen[i].tolist(), "reward": float(reward[i])}
                    ).json()["action"]
                    for i, id in enumerate(chosen)
                ]
            else:
                body = {"sessions": chosen, "observation": seen.tolist(), "reward": reward.tolist()}
                if step % 3 == 1:
                    found = server.post("/act", json=body).json()["actions"]
                else:
                    socket.send_json({"do": "act", **body})
                    found = socket.receive_json()["actions"]
            np.testing.assert_allclose(found, np.array(expected), atol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize("form", [pytest.param(forms.ONNX, marks=pytest.mark.full), forms.TORCH])
def test_a_form_serves_as_the_weights_do(tmp_path: Path, form: str) -> None:
    if form == forms.ONNX:
        pytest.importorskip("onnxruntime")
    owner, rng = agent("discrete", SEEN).eval(), np.random.default_rng(0)
    function = StepFunction(owner, capacity=CAPACITY)
    record = {"spaces": owner.spaces.to_json(), "agent": owner.settings.model_dump(mode="json"), "update": 0, "env": {}}
    about = forms.describe_step(function) | {"forms": [form]}
    record["context_length"] = CAPACITY
    write_bundle(
        owner.state_dict(), record, tmp_path, greedy=True, forms=forms.make_files(function, (form,)), about=about
    )
    file = forms.FormFile.read(bundle.read(tmp_path), form, trust=True)
    with serving(FormPolicy(file, most=8)) as server:
        ids = server.post("/sessions", json={"count": 5}).json()["sessions"]
        alone = {id: Reference(owner) for id in ids}
        for step in range(3 * CAPACITY):
            chosen = ids if step % 3 == 0 else [id for id in ids if rng.random() < 0.6] or ids[:1]
            if step % 5 == 3:
                server.post(f"/sessions/{chosen[0]}/reset")
                alone[chosen[0]].reset()
            seen, reward = rng.standard_normal((len(chosen), 2), np.float32), rng.standard_normal(len(chosen))
            body = {"sessions": chosen, "observation": seen.tolist(), "reward": reward.tolist()}
            expected = [alone[id].act(seen[i], reward[i]) for i, id in enumerate(chosen)]
            assert server.post("/act", json=body).json()["actions"] == expected


def packed(about: dict[str, Any], *arrays: np.ndarray) -> bytes:
    text = json.dumps(about).encode()
    return struct.pack("<I", len(text)) + text + b"".join(array.tobytes() for array in arrays)


def test_packed_observations_are_those_of_json() -> None:
    image = Box(shape=(4, 5, 3), dtype="uint8")
    spaces = Spaces(observation={"obs.a": Discrete(n=3, start=5), "obs.i": image}, action=Discrete(n=4))
    rng = np.random.default_rng(0)
    binary = {"content-type": "application/octet-stream"}
    with client(Agent(spaces, settings())) as server, server.websocket_connect("ws://127.0.0.1/ws") as socket:
        plain, one, many, socketed = (begun(server) for _ in range(4))
        found = []
        for step in range(4):
            pixels, choice = rng.integers(0, 256, (4, 5, 3), np.uint8), np.array(5 + step % 3, "<i4")
            body = {"observation": {"a": int(choice), "i": pixels.tolist()}, "reward": 0.5}
            expected = server.post(f"/sessions/{plain}/act", json=body).json()["action"]
            content = packed({"reward": 0.5}, choice, pixels)
            found.append(server.post(f"/sessions/{one}/act", content=content, headers=binary).json()["action"])
            content = packed({"sessions": [many], "reward": [0.5]}, choice, pixels)
            found += server.post("/act", content=content, headers=binary).json()["actions"]
            socket.send_bytes(packed({"do": "act", "session": socketed, "reward": 0.5}, choice, pixels))
            found.append(socket.receive_json()["action"])
            assert found[-3:] == [expected] * 3
        for content, status, words in (
            (b"", 422, "'observation' is missing"),
            (b"\x01", 400, "only 0 follow"),
            (struct.pack("<I", 1 << 31) + b"{}", 400, "and only 2 follow"),
            (packed({}, pixels), 422, "60 bytes, not 64"),
            (packed({}, choice, pixels, pixels), 422, "124 bytes, not 64"),
            (packed({}, np.array(8, "<i4"), pixels), 422, "'obs.a': it has a choice outside of 0 to 2"),
            (packed({"observation": 1}, choice, pixels), 400, "follows the object"),
            (packed({"more": 1}, choice, pixels), 422, "'more' is unknown"),
            (packed({}, np.zeros(1 << 17, np.uint8)), 413, "at most"),
        ):
            refused = server.post(f"/sessions/{one}/act", content=content, headers=binary)
            assert (refused.status_code, words in refused.json()["error"]) == (status, True), refused.text
        good = server.post(f"/sessions/{one}/act", content=packed({}, choice, pixels), headers=binary)
        assert good.status_code == 200
        refused = server.request("DELETE", f"/sessions/{one}", content=packed({}, choice), headers=binary)
        assert (refused.status_code, "unknown" in refused.json()["error"]) == (422, True)
        schema = server.get("/openapi.json").json()["paths"]["/act"]["post"]["requestBody"]["content"]
        assert "obs.a: <i4 []; obs.i: |u1 [4, 5, 3]" in schema["application/octet-stream"]["schema"]["description"]


def test_texts_cannot_be_packed() -> None:
    text = Ragged(max_length=6, dtype="uint32", scale=255.0, text=True)
    spaces = Spaces(observation={"obs": text, "obs.length": text.length_space}, action=Discrete(n=4))
    with client(Agent(spaces, settings())) as server:
        headers = {"content-type": "application/octet-stream"}
        refused = server.post(f"/sessions/{begun(server)}/act", content=packed({}, np.zeros(6, "<u4")), headers=headers)
        assert (refused.status_code, "as JSON" in refused.json()["error"]) == (422, True)


def test_dict_and_text_observations_and_shifted_actions() -> None:
    text = Ragged(max_length=6, dtype="uint32", scale=255.0, text=True)
    seen = {"obs.a": Discrete(n=3, start=5), "obs.b.c": MultiBinary(n=2), "obs.t": text}
    columns = {**seen, "obs.t.length": text.length_space}
    spaces = Spaces(observation=columns, action=MultiDiscrete(nvec=(2, 3), start=(4, -1)))
    with client(Agent(spaces, settings())) as server:
        id = begun(server)
        good = {"a": 7, "b": {"c": [0, 1]}, "t": "hëllo"}
        [first, second] = server.post(f"/sessions/{id}/act", json={"observation": good}).json()["action"]
        assert first in (4, 5)
        assert second in (-1, 0, 1)
        for part, words in (
            ({"a": 8}, "outside of 0 to 2"),
            ({"a": 4}, "outside of 0 to 2"),
            ({"a": 6.5}, "not int32"),
            ({"b": {}}, "'b.c' is missing"),
            ({"b": {"c": [0, 2]}}, "outside of 0 to 1"),
            ({"t": "too long"}, "length of 8"),
            ({"t": 3}, "'t'"),
        ):
            refused = server.post(f"/sessions/{id}/act", json={"observation": good | part})
            assert refused.status_code == 422
            assert words in refused.json()["error"]
        many = {"a": [5, 6], "b": {"c": [[0, 0], [1, 1]]}, "t": ["", "x"]}
        body = {"sessions": [id, begun(server)], "observation": many}
        assert len(server.post("/act", json=body).json()["actions"]) == 2


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('{"observation": [0]}', 422, "its shape is [1], not [2]"),
        ('{"observation": [[0, 0]]}', 422, "shape"),
        ('{"observation": [0, NaN]}', 400, "line 1 column 21"),
        ('{"observation": [0, 1e999]}', 400, "number is infinity"),
        ('{"observation": [0, "1"]}', 422, "not an array of numbers"),
        ('{"observation": [0, null]}', 422, "not an array of numbers"),
        ('{"observation": {"x": 1}}', 422, "not an array of numbers"),
        ('{"observation": [0, [1]]}', 422, "observation"),
        ('{"observation": [0, 0], "reward": "much"}', 422, "the reward"),
        ('{"observation": [0, 0], "reward": [1, 2]}', 422, "the reward"),
        ('{"observation": [0, 0], "reward": 1e300}', 422, "the reward"),
        ('{"observation": [0, 0], "session": "other"}', 422, "in the path"),
        ('{"observation": [0, 0], "more": 1}', 422, "'more' is unknown"),
        ("{}", 422, "'observation' is missing"),
        ("[]", 400, "not a JSON object"),
        ("{", 400, "cannot be read"),
        ("\xff", 400, "cannot be read"),
        ("[" * 50_000, 400, "depth limit exceeded"),
        ('{"observation": [' + "0," * 40_000 + "0]}", 413, "at most 65,536 bytes"),
    ],
)
def test_bad_input_is_one_clear_line(server: TestClient, body: str, status: int, words: str) -> None:
    id = begun(server)
    headers = {"content-type": "application/json"}
    refused = server.post(f"/sessions/{id}/act", content=body.encode("latin-1"), headers=headers)
    assert (refused.status_code, "Traceback" in refused.text) == (status, False), refused.text
    assert words in refused.json()["error"]
    assert "\n" not in refused.json()["error"]
    good = server.post(f"/sessions/{id}/act", json={"observation": [0, 0]})
    assert good.status_code == 200  # the session is as it was


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/sessions", {"authorization": ""}, 401),
        ("POST", "/sessions", {"authorization": "Bearer wrong"}, 401),
        ("POST", "/sessions", {"authorization": TOKEN}, 401),
        ("GET", "/metrics", {"authorization": ""}, 401),
        ("GET", "/health", {"authorization": ""}, 200),
        ("GET", "/health", {"host": "evil.example"}, 421),
        ("POST", "/sessions", {"host": "evil.example"}, 421),
        ("GET", "/sessions", {}, 405),
        ("GET", "/nothing", {}, 404),
        ("GET", "/../../etc/passwd", {}, 404),
        ("POST", "/sessions/unknown/act", {"content-type": "text/plain"}, 415),
        ("DELETE", "/sessions/unknown", {}, 409),
    ],
)
def test_who_may_ask_for_what(server: TestClient, method: str, path: str, headers: dict, status: int) -> None:
    content = b"{}" if headers.get("content-type") else None
    answer = server.request(method, path, headers=headers, content=content)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]


def test_a_socket_needs_the_token(server: TestClient) -> None:
    headers = {"authorization": ""}
    with pytest.raises(WebSocketDisconnect) as refused, server.websocket_connect("ws://127.0.0.1/ws", headers=headers):
        pass
    assert refused.value.code == 1008


def test_a_socket_goes_on_after_a_mistake(server: TestClient) -> None:
    with server.websocket_connect("ws://127.0.0.1/ws") as socket:
        for message, status in (("{", 400), ('{"do": "dance"}', 422), ('{"do": "act", "session": "x"}', 409)):
            socket.send_text(message)
            answer = socket.receive_json()
            assert (answer["status"], "error" in answer) == (status, True)
        socket.send_json({"do": "begin", "count": 2})
        ids = socket.receive_json()["sessions"]
        socket.send_json({"do": "act", "session": ids[0], "observation": [0, 0]})
        assert socket.receive_json()["action"] in range(5)
        socket.send_json({"do": "end", "sessions": ids})
        assert socket.receive_json() == {}


def test_a_session_that_ended_or_never_was_is_a_conflict(server: TestClient) -> None:
    id = begun(server)
    assert server.delete(f"/sessions/{id}").status_code == 200
    for answer in (
        server.post(f"/sessions/{id}/act", json={"observation": [0, 0]}),
        server.post(f"/sessions/{id}/reset"),
        server.post("/act", json={"sessions": [begun(server), id], "observation": [[0, 0]] * 2}),
    ):
        assert answer.status_code == 409
        assert "begin again" in answer.json()["hint"]


def test_the_same_session_twice_is_refused(server: TestClient) -> None:
    id = begun(server)
    answer = server.post("/act", json={"sessions": [id, id], "observation": [[0, 0]] * 2})
    assert (answer.status_code, "twice" in answer.json()["error"]) == (422, True)


def test_sessions_are_limited_and_places_are_given_again(server: TestClient) -> None:
    ids = server.post("/sessions", json={"count": 8}).json()["sessions"]
    full = server.post("/sessions")
    assert (full.status_code, "8 of at most 8" in full.json()["error"]) == (503, True)
    assert server.post("/sessions", json={"count": 1e9}).status_code == 422
    server.delete(f"/sessions/{ids[3]}")
    assert server.post("/sessions").status_code == 201


def test_an_idle_session_ends() -> None:
    with client(agent("discrete", SEEN), idle=0.01) as server:
        id = begun(server)
        while server.get("/health").json()["sessions"]:
            time.sleep(0.01)
        assert server.post(f"/sessions/{id}/reset").status_code == 409
        assert "amago_sessions_expired_total 1" in server.get("/metrics").text


def test_sampled_actions_vary() -> None:
    with client(agent("discrete", SEEN), greedy=False, seed=3) as server:
        id = begun(server)
        act = {"observation": [0, 0]}
        found = {server.post(f"/sessions/{id}/act", json=act).json()["action"] for _ in range(60)}
        assert len(found) > 1


def test_metrics_are_prometheus_text(server: TestClient) -> None:
    id = begun(server)
    server.post(f"/sessions/{id}/act", json={"observation": [0, 0]})
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    line = re.compile(r'(# (HELP|TYPE) amago_\w+ .+|amago_\w+(\{status="\d+"\})? [-+0-9.e]+)')
    assert all(line.fullmatch(each) for each in answer.text.splitlines())
    values = dict(each.rsplit(" ", 1) for each in answer.text.splitlines() if not each.startswith("#"))
    assert (values["amago_sessions"], values["amago_actions_total"], values["amago_steps_total"]) == ("1", "1", "1")
    assert values['amago_responses_total{status="200"}'] == "1"


@pytest.mark.system
def test_the_description_is_valid_openapi(server: TestClient) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    document = server.get("/openapi.json").json()
    validator.validate(document)
    act = document["paths"]["/sessions/{id}/act"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert act["properties"]["observation"] == {
        "type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2,
    }  # fmt: skip
    assert json.dumps(document).count("operationId") == 8
