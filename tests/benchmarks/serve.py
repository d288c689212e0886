"""Decisions a second of a served policy beside the same policy in a process.

`python tests/benchmarks/serve.py [WIDTH LAYERS CONTEXT [SESSIONS]]`: a Transformer (default: width 128, 3 layers, 256
tokens, 1,000 sessions) with random weights acts greedily on random vectors of 16 numbers, with full memories, on one
thread. Rates are per second of CPU time of the process that acts, so clients on the same cores do not count: `eager` is
`AgentPolicy` with all actors in one batch; `socket` and `http` send all sessions in one message or request; `half`, two
sockets with half of the sessions each; `single`, 100 sockets with one session each.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx
import numpy as np
import torch
from websockets.sync.client import connect

from pipelines.config.model import AgentSettings
from pipelines.export.policy_bundle import write_bundle
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent

SECONDS, ROUNDS = 1.5, 2
ROOT = Path(__file__).parents[2]
SINGLE = 100


def main() -> None:
    """Print a row for each way of asking."""
    numbers = [int(text) for text in sys.argv[1:]]
    width, layers, context = numbers[:3] or (128, 3, 256)
    sessions = numbers[3] if len(numbers) > 3 else 1_000
    torch.set_num_threads(1)
    sequence = {"kind": "transformer", "d_model": width, "num_layers": layers, "num_heads": 8, "d_ff": 4 * width}
    settings = AgentSettings.model_validate({"timestep": {"hidden": [128], "output": 64}, "sequence": sequence})
    spaces = Spaces(observation={"obs": Box(shape=(16,))}, action=Discrete(n=4))
    agent = Agent(spaces, settings).eval()
    eager = in_process(agent, sessions, context)
    print(f"{sessions} sessions, width {width}, {layers} layers, {context} tokens; decisions a second of CPU time")
    print(f"{'eager':>8}{eager:>10,.0f}")
    with tempfile.TemporaryDirectory() as folder:
        record = {"spaces": spaces.to_json(), "agent": settings.model_dump(mode="json"), "context_length": context}
        write_bundle(agent.state_dict(), record | {"update": 0, "env": {}}, Path(folder), greedy=True)
        command = [sys.executable, "-m", "amago_cli", "serve", folder, "--port", "0", "--output", "json"]
        with subprocess.Popen(
            [*command, "--sessions", str(sessions)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            server = Server(found["address"], found["token"], process.pid, sessions)
            try:
                for name, rate in server.rates(context):
                    print(f"{name:>8}{rate:>10,.0f} ({rate / eager:.2f})", flush=True)
            finally:
                process.terminate()


def in_process(agent: Agent, sessions: int, context: int) -> float:
    """Return the rate of `AgentPolicy`."""
    policy = AgentPolicy(agent, num_actors=sessions, capacity=context, greedy=True)
    rng, action = np.random.default_rng(0), np.zeros(sessions, np.int32)
    policy._memories[0].written_N += context  # type: ignore[attr-defined]
    time_N, reward = np.full(sessions, context), np.zeros(sessions, np.float32)
    best = 0.0
    for _ in range(ROUNDS):
        began, steps = time.process_time(), 0
        while (spent := time.process_time() - began) < SECONDS:
            action = policy.act({"obs": rng.standard_normal((sessions, 16), np.float32)}, action, reward, time_N)
            steps += sessions
        best = max(best, steps / spent)
    return best


class Server:
    """A running server, and the ways to ask it."""

    def __init__(self, address: str, token: str, pid: int, sessions: int) -> None:
        self._address, self._pid = address, pid
        self._headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=address, headers=self._headers, timeout=600, trust_env=False)
        self._ids: list[str] = self._http.post("/sessions", json={"count": sessions}).json()["sessions"]
        rng = np.random.default_rng(0)
        self._seen = rng.standard_normal((sessions, 16)).round(4).tolist()

    def rates(self, context: int) -> Any:
        """Yield the name and the rate of each way."""
        with self._socket() as whole, self._socket() as first, self._socket() as second:
            half = len(self._ids) // 2
            body = self._body(slice(None))
            message = json.dumps({"do": "act", **body})
            for _ in range(context):  # until memories are full
                ask(whole, message)
            yield "socket", self._rate(lambda: ask(whole, message), len(self._ids))
            yield "http", self._rate(lambda: self._http.post("/act", json=body).raise_for_status(), len(self._ids))
            parts = [
                (each, json.dumps({"do": "act", **self._body(part)}))
                for each, part in ((first, slice(half)), (second, slice(half, None)))
            ]
            yield "half", self._rate(lambda: together(parts), len(self._ids))
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(self._socket()) for _ in self._ids[:SINGLE]]
            singles = [
                (socket, json.dumps({"do": "act", "session": id, "observation": seen, "reward": 0}))
                for socket, id, seen in zip(sockets, self._ids, self._seen, strict=False)
            ]
            yield "single", self._rate(lambda: together(singles), len(singles))

    def _body(self, part: slice) -> dict[str, Any]:
        ids = self._ids[part]
        return {"sessions": ids, "observation": self._seen[part], "reward": [0.0] * len(ids)}

    def _socket(self) -> Any:
        address = self._address.replace("http", "ws") + "/ws"
        return connect(address, additional_headers=self._headers, max_size=None, compression=None, proxy=None)

    def _rate(self, way: Callable[[], object], count: int) -> float:
        best = 0.0
        for _ in range(ROUNDS):
            began, decisions = self._cpu(), 0
            while (spent := self._cpu() - began) < SECONDS:
                way()
                decisions += count
            best = max(best, decisions / spent)
        return best

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


def ask(socket: Any, message: str) -> None:
    """Send a message and wait for its answer."""
    socket.send(message)
    answer = socket.recv()
    assert '"error"' not in answer, answer


def together(parts: list[tuple[Any, str]]) -> None:
    """Send all messages, then wait for all answers."""
    for socket, message in parts:
        socket.send(message)
    for socket, _ in parts:
        assert '"error"' not in socket.recv()


if __name__ == "__main__":
    main()
