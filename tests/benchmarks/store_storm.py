"""A storm on a lake in an object store: collectors that are killed, trainers of two ranks that follow, a server that
fails a third of all requests. What was acknowledged must be there once, and requests must stay few.

    python tests/benchmarks/store_storm.py FOLDER [--minutes 20] [--collectors 8] [--trainers 2] [--seed 0]

Each collector and each trainer has a cache of its own, as if it were on a host of its own. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipelines.lake.folders import is_rewritten  # noqa: E402
from pipelines.lake.wal import parse  # noqa: E402
from tests.cli.conftest import tiny  # noqa: E402
from tests.conftest import Server  # noqa: E402
from tests.ranks import find_free_port  # noqa: E402

BUCKET = "storm"
LAKE = f"s3://{BUCKET}/lake"
SEAL_SECONDS, REFRESH_SECONDS, KILL_SECONDS = 10, 5, 60
CHUNK_SECONDS = 240  # of one call of a trainer
PATIENCE_SECONDS = 900  # for what must end by itself

PLUGIN = """
    import time
    import gymnasium
    import numpy as np

    class Slow(gymnasium.Env):
        '''Episodes of 10 to 29 steps of 50 ms.'''

        observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self._left = int(self.np_random.integers(10, 30))
            return self._seen(), {}

        def step(self, action):
            time.sleep(0.05)
            self._left -= 1
            return self._seen(), float(action), self._left == 0, False, {}

        def _seen(self):
            return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def wait(states, batch, mask):
        time.sleep(0.25)
        return states[:, 1:, 0] * 0
"""


class Storm:
    """The processes of a storm in a folder, and what they have acknowledged."""

    def __init__(self, folder: Path, *, collectors: int, trainers: int, seed: int) -> None:
        folder.mkdir(parents=True)
        (folder / "storm_plugin.py").write_text(textwrap.dedent(PLUGIN))
        self.folder, self.rng = folder, random.Random(seed)
        self.log = folder / "requests.jsonl"
        self.acknowledged: set[str] = set()
        self.kills = self.collector_starts = self.trainer_starts = 0
        self.exits: list[int] = []
        self.problems: list[str] = []
        self._held = contextlib.ExitStack()
        self.server = Server()
        self._held.callback(self.server.stop)
        self.direct = int(self.server.url.rpartition(":")[2])
        self.port = find_free_port()
        self._proxy = self._start_proxy("--seed", seed)
        self._held.callback(lambda: self._proxy.kill())
        self._make_bucket()
        self.collectors: dict[int, subprocess.Popen[bytes]] = {}
        self.trainers: dict[int, subprocess.Popen[bytes]] = {}
        self._goals = dict.fromkeys(range(trainers), 0)
        self._began: dict[int, float] = {}
        self._before: dict[int, int] = {}  # updates of each trainer before its present call
        self._numbers = range(collectors)

    def _start_proxy(self, *options: object) -> subprocess.Popen[bytes]:
        words = (ROOT / "tests/benchmarks/failing_proxy.py", self.port, self.direct, self.log, *options)
        return subprocess.Popen([sys.executable, *map(str, words)])

    def calm(self) -> None:
        """Stop the failures. The address stays, as a host's directory for a lake depends on it."""
        self._proxy.kill()
        self._proxy.wait()
        self._proxy = self._start_proxy("--share", 0)
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)

    def _make_bucket(self) -> None:
        import boto3

        settings = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=self.server.url, **settings).create_bucket(Bucket=BUCKET)

    def environment(self, who: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return kept | {
            "AWS_ACCESS_KEY_ID": who,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AMAGO_CACHE": str(self.folder / f"host-{who}"),
            "PYTHONPATH": f"{ROOT}:{self.folder}",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, who: str, *words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "amago_cli", *map(str, words), "--output", "json"]
        with open(self.folder / f"{who}.out", "ab") as out, open(self.folder / f"{who}.err", "ab") as err:
            return subprocess.Popen(
                command, stdout=out, stderr=err, env=self.environment(who), cwd=self.folder, start_new_session=True
            )

    def collecting(self, number: int, steps: int) -> tuple[object, ...]:
        who, settings = f"collector-{number}", (f"collect.seal_seconds={SEAL_SECONDS}", f"seed={number}")
        chosen = [word for each in settings for word in ("--set", each)]
        words = ("--env", "storm_plugin:Slow", "--actors", 2, "--workers", 0, "--steps", steps)
        return ("collect", "--run", who, "--lake", LAKE, *words, *chosen)

    def start_collector(self, number: int) -> None:
        self.collectors[number] = self.start(f"collector-{number}", *self.collecting(number, 10_000_000))
        self.collector_starts += 1

    def start_trainer(self, number: int, steps: int) -> None:
        who = f"trainer-{number}"
        self._goals[number], self._began[number] = steps, time.monotonic()
        plugin = "agent.auxiliary_losses=[{ kind = 'storm_plugin:wait' }]"
        settings = tiny(plugin, f"train.refresh_seconds={REFRESH_SECONDS}", "train.log_every=5")
        words = ("--run", who, "--from-lake", LAKE, "--follow", "--ranks", 2, "--steps", steps)
        self.trainers[number] = self.start(who, "train", *words, *settings)
        self.trainer_starts += 1

    def watch_logs(self) -> None:
        """Note what collectors' logs hold: it is acknowledged."""
        for path in self.folder.glob("host-collector-*/*/wal/*.wal"):
            with contextlib.suppress(FileNotFoundError):
                self.acknowledged.update(row["uid"] for row, _ in parse(path.read_bytes()).records)

    def kill_collector(self) -> None:
        """Kill one with -9, once what it has acknowledged is noted, and start it again."""
        number = self.rng.choice(self._numbers)
        process = self.collectors[number]
        os.kill(process.pid, signal.SIGSTOP)
        self.watch_logs()
        process.kill()
        process.wait()
        self.kills += 1
        self.start_collector(number)

    def tend(self, deadline: float) -> None:
        """Start collectors again that have ended, and trainers, with more to do, that have reached their goal."""
        for number, process in self.collectors.items():
            if process.poll() is not None:
                self.problems.append(f"collector {number} ended with {process.returncode}")
                self.start_collector(number)
        for number, process in self.trainers.items():
            if process.poll() is None or number not in self._began:
                continue
            self.exits.append(process.returncode)
            before, seconds = self._goals[number], time.monotonic() - self._began.pop(number)
            left = min(CHUNK_SECONDS, deadline - time.monotonic())
            if left > 30 and process.returncode == 0:
                done = before - self._before.get(number, 0)
                self._before[number] = before
                self.start_trainer(number, before + max(5, int(done * left / seconds)))
            elif process.returncode:
                self.problems.append(f"trainer {number} ended with {process.returncode}")

    def run(self, minutes: float) -> dict[str, Any]:
        began = time.monotonic()
        deadline, killing = began + minutes * 60, began + KILL_SECONDS
        for number in self._numbers:
            self.start_collector(number)
        for number in list(self._goals):
            self.start_trainer(number, 20)
        while time.monotonic() < deadline:
            time.sleep(2)
            self.watch_logs()
            self.tend(deadline)
            if time.monotonic() >= killing:
                self.kill_collector()
                killing += KILL_SECONDS
        totals = self.end()
        return totals | {"minutes": round((time.monotonic() - began) / 60, 1)} | self.verify()

    def end(self) -> dict[str, Any]:
        """End collectors by SIGTERM, and wait for the trainers' goals."""
        for process in self.collectors.values():
            process.terminate()
        codes = [process.wait(PATIENCE_SECONDS) for process in self.collectors.values()]
        for number, process in self.trainers.items():
            if number in self._began:
                self.exits.append(process.wait(PATIENCE_SECONDS))
        return {
            "kills": self.kills,
            "collector_starts": self.collector_starts,
            "collector_exits": sorted(codes),
            "trainer_starts": self.trainer_starts,
            "trainer_exits": sorted(self.exits),
            "updates": list(self._goals.values()),
            "problems": self.problems,
        }

    def ask(self, *words: object, who: str = "reader") -> Any:
        """Call a command and return its result."""
        done = subprocess.run(
            [sys.executable, "-m", "amago_cli", *map(str, words), "--output", "json"],
            capture_output=True,
            text=True,
            env=self.environment(who),
            cwd=self.folder,
            timeout=PATIENCE_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{words}: {done.returncode}: {done.stdout} {done.stderr}")
        return json.loads(done.stdout)

    def verify(self) -> dict[str, Any]:
        """Count what is in the lake, once each collector's host has sealed what was left of it."""
        counts = self.requests()
        self.calm()
        reported = [
            self.ask(*self.collecting(number, 1), who=f"collector-{number}")["metrics"]["steps_total"]
            for number in self._numbers
        ]
        checked = self.ask("lake", "verify", LAKE)["metrics"]
        rows = self.ask("lake", "sql", LAKE, "select uid, length from trajectories")
        uids = [row["uid"] for row in rows]
        logs = list(self.folder.glob("host-collector-*/*/wal/*.wal"))
        return {
            "corrupt": checked["corrupt"],
            "trajectories": len(uids),
            "doubled": len(uids) - len(set(uids)),
            "acknowledged": len(self.acknowledged),
            "lost": len(self.acknowledged - set(uids)),
            "logs_left": len(logs),
            "steps": sum(row["length"] for row in rows),
            "steps_reported": sum(reported),
            **counts,
        }

    def notes(self) -> Iterator[dict[str, Any]]:
        yield from map(json.loads, self.log.read_text().splitlines())

    def requests(self) -> dict[str, Any]:
        """Count requests, those that have failed apart: a client repeats them."""
        fates: Counter[str] = Counter()
        counts: dict[str, dict[str, Counter[str]]] = {"served": {}, "failed": {}}
        written: set[str] = set()
        looks: Counter[str] = Counter()
        seen: dict[str, set[str]] = {}
        for note in self.notes():
            fates[note["fate"] or "served"] += 1
            place = note["key"].removeprefix(f"/{BUCKET}/").removeprefix("lake/").partition("/")[0] or "all"
            kind, what = note["who"].partition("-")[0], f"{note['kind']} {place}"
            counts["failed" if note["fate"] else "served"].setdefault(kind, Counter())[what] += 1
            if what == "PUT segments" and kind == "collector" and note["fate"] in ("", "lost"):
                written.add(note["key"])
            if note["fate"] or kind != "trainer":
                continue
            looks[note["who"]] += what == "LIST all" and not note["delimited"]
            if what == "GET segments":
                seen.setdefault(note["who"], set()).add(note["key"])
        merged = sum(map(is_rewritten, written))
        segments = len(written) - merged
        return {
            "fates": dict(fates),
            "segments": segments,
            "merged": merged,
            "looks": dict(looks),
            "segments_seen": {who: len(keys) for who, keys in seen.items()},
            "requests_of_collectors_a_segment": {
                fate: round(sum(of.get("collector", Counter()).values()) / max(segments, 1), 2)
                for fate, of in counts.items()
            },
            **{fate: {kind: dict(count.most_common()) for kind, count in of.items()} for fate, of in counts.items()},
        }

    def close(self) -> None:
        for process in (*self.collectors.values(), *self.trainers.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._held.close()


def storm(folder: Path, *, minutes: float, collectors: int, trainers: int, seed: int = 0) -> dict[str, Any]:
    """Let it rage; returns counts."""
    made = Storm(folder, collectors=collectors, trainers=trainers, seed=seed)
    try:
        return made.run(minutes)
    finally:
        made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--collectors", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    print(json.dumps(storm(options.pop("folder").absolute(), **options), indent=1))


if __name__ == "__main__":
    main()
