"""`amago serve` in a process of its own, asked by clients that are not ours."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from pipelines import load_policy
from tests.cli.conftest import Amago

httpx = pytest.importorskip("httpx")
for module in ("starlette", "uvicorn", "websockets"):
    pytest.importorskip(module, reason='no server here: pip install "amago[serve]"')

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Served:
    """A running server."""

    address: str
    token: str
    process: subprocess.Popen[str]

    def client(self) -> Any:
        return httpx.Client(
            base_url=self.address, headers={"authorization": f"Bearer {self.token}"}, timeout=600, trust_env=False
        )


@contextmanager
def served(bundle: Path, *options: str, descriptors: int | None = None) -> Iterator[Served]:
    command = [sys.executable, "-m", "amago_cli", "serve", str(bundle), "--port", "0", "--output", "json", *options]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.stderr.read())
        found = json.loads(line)
        try:
            yield Served(found["address"], found.get("token", ""), process)
        finally:
            process.kill()


@pytest.fixture
def bundle(amago: Amago, small: Path) -> Path:
    assert amago("export", small, "--to", "policy").code == 0
    return Path("policy").resolve()


@pytest.mark.system
def test_a_connection_outlasts_what_clients_keep_idle(bundle: Path) -> None:
    with served(bundle) as server:
        place = urlsplit(server.address)
        connection = HTTPConnection(place.hostname or "", place.port, timeout=600)
        connection.connect()
        used = connection.sock
        for idle in (0, 6):  # httpx keeps one for 5 s
            time.sleep(idle)
            connection.request("GET", "/health", headers={"authorization": f"Bearer {server.token}"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            assert connection.sock is used
        connection.close()


@pytest.mark.system
def test_half_open_connections_lock_nobody_out(bundle: Path) -> None:
    with served(bundle, descriptors=512) as server, ExitStack() as held:
        place = urlsplit(server.address)
        for _ in range(600):
            connection = held.enter_context(socket.create_connection((place.hostname, place.port)))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127")
        with server.client() as client:
            assert client.post("/sessions").status_code == 201
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


@pytest.mark.system
@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_requests_without_a_token_leave_no_connection_behind(bundle: Path, path: str) -> None:
    with served(bundle) as server:
        place = urlsplit(server.address)
        with socket.create_connection((place.hostname, place.port)) as connection:
            connection.settimeout(60)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            found = b""
            while part := connection.recv(1 << 16):
                found += part
        assert found.startswith(b"HTTP/1.1 ")


@pytest.mark.system
def test_two_hundred_sessions_at_once_act_as_each_would_alone(bundle: Path) -> None:
    rng = np.random.default_rng(0)
    seen = rng.standard_normal((200, 5, 4)).astype(np.float32)

    def play(episode: np.ndarray) -> list[int]:
        with server.client() as client:
            id = client.post("/sessions").json()["session"]
            found = []
            for observation in episode:
                answer = client.post(f"/sessions/{id}/act", json={"observation": observation.tolist(), "reward": 1})
                found.append(answer.raise_for_status().json()["action"])
            assert client.delete(f"/sessions/{id}").status_code == 200
            return found

    with served(bundle, "--greedy") as server, ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(play, seen))
        with server.client() as client:
            metrics = client.get("/metrics").text
    policy = load_policy(bundle, greedy=True)
    for episode, found in zip(seen, answers, strict=True):
        policy.reset()
        assert [policy.act(observation, float(step > 0)) for step, observation in enumerate(episode)] == found
    assert "amago_actions_total 1000" in metrics
    assert "amago_sessions 0" in metrics


@pytest.mark.system
def test_a_restarted_server_knows_no_session(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    options = ("--token-file", str(tmp_path / "token"))
    headers = {"authorization": "Bearer 0123456789abcdef"}
    with served(bundle, *options) as server:
        assert server.token == ""
        id = httpx.post(f"{server.address}/sessions", headers=headers, trust_env=False).json()["session"]
    with served(bundle, *options) as server:
        body = {"observation": [0, 0, 0, 0]}
        answer = httpx.post(f"{server.address}/sessions/{id}/act", headers=headers, json=body, trust_env=False)
        assert (answer.status_code, answer.json()["hint"]) == (409, "begin again: POST /sessions")


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(bundle: Path, number: signal.Signals) -> None:
    with served(bundle) as server, server.client() as client:
        assert client.post("/sessions").status_code == 201
        server.process.send_signal(number)
        assert server.process.wait() == 0
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


@pytest.mark.system
@pytest.mark.parametrize("packing", [False, True])
def test_the_client_of_the_documentation_works(bundle: Path, packing: bool) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    code, packed = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(code.splitlines()) <= 20
    if packing:
        [act] = re.findall(r"    body = .*?\n    answer = .*?\n", code, re.S)
        code = "import json, struct\n" + code.replace(act, textwrap.indent(packed, "    "))
    with served(bundle) as server:
        code = code.replace("http://127.0.0.1:8650", server.address).replace("TOKEN", server.token)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 8


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 3, "no policy bundle at 'nowhere'"),
        (["policy", "--token-file", "short"], 2, "holds no token"),
        (["policy", "--token-file", "none"], 3, "no token at 'none'"),
        (["policy", "--sessions", "0"], 2, "--sessions"),
        (["policy", "--host", "203.0.113.1"], 2, "cannot be used"),
        (["damaged"], 4, "weights.safetensors"),
    ],
)
def test_mistakes_are_named(amago: Amago, bundle: Path, arguments: list[str], code: int, words: str) -> None:
    Path("short").write_text("x")
    assert amago("export", "small", "--to", "damaged").code == 0
    with Path("damaged/weights.safetensors").open("ab") as file:
        file.write(b"x")
    failed = amago("serve", *arguments)
    assert (failed.code, "Traceback" in failed.err) == (code, False), failed.err
    assert words in failed.err
