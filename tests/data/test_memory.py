"""What a trainer needs to know of a million trajectories, 50 GB of steps in sparse files."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.lake import footer
from pipelines.lake.arrow import arrow_schema, to_arrow
from pipelines.lake.folders import FolderChooser, segment_key
from pipelines.lake.schema import Schema
from pipelines.lake.segment import checksum
from pipelines.lake.spaces import Box, MultiBinary, Spaces
from pipelines.lake.store import Lake

SCHEMA = Schema(
    Spaces(observation={"obs.state": Box(shape=(17,)), "obs.bits": MultiBinary(n=2)}, action=Box(shape=(6,)))
)
SEGMENTS, TRAJECTORIES, STEPS = 1000, 1000, 500
LIMIT = 300 << 20

CHILD = """
import json, sys, threading, time
from pathlib import Path
import numpy as np
from pipelines.data.mixture import Mixture, Share
from pipelines.data.strategy import Strategy
from pipelines.data.view import View
from pipelines.lake.store import Lake
import pipelines.stages.train

def private():
    # Pages of mapped files belong to the system's cache, whoever reads them.
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

def watch():
    global peak
    while True:
        peak = max(peak, private())
        time.sleep(0.02)

before = peak = private()
threading.Thread(target=watch, daemon=True).start()
strategy = Strategy(**json.loads(sys.argv[2]))
lake = Lake(sys.argv[1])
began = time.monotonic()
view = View(lake, next(iter(lake.schemas())), extra=strategy.extra)
mixture = Mixture([(view, Share())], length=128, seed=0, strategy=strategy)
mixture.refresh(0)
opened = time.monotonic() - began
for update in range(40):
    batch = mixture.sample(256, update)
    if strategy.per_alpha:
        mixture.prioritise(batch.trajectory, batch.lake, np.ones(len(batch)))
print(json.dumps({"before": before, "after": private() - before, "peak": max(peak, private()) - before,
                  "seconds": opened, "trajectories": view.num_trajectories, "steps": view.num_steps}))
"""


class Sparse:
    """A file in which long pieces of zeros are holes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self.closed = False

    def write(self, content: Any) -> int:
        if len(content) > 4096 and not np.frombuffer(content, np.uint8).any():
            self._file.seek(len(content), 1)
        else:
            self._file.write(bytes(content))
        return len(content)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self.closed = True


def make_lake(path: Path, segments: int = SEGMENTS) -> Lake:
    """A lake of zeros that says it is full: every trajectory has a uid, an environment and a task of its own."""
    lake = Lake.create(path)
    rows = TRAJECTORIES * (STEPS + 1)
    zeros = {c.name: np.zeros((rows, *c.shape), dtype=c.dtype) for c in SCHEMA.columns}
    batch = pa.record_batch([to_arrow(c, zeros[c.name]) for c in SCHEMA.columns], schema=arrow_schema(SCHEMA.columns))
    header = {
        "format": footer.FORMAT,
        "kind": "steps",
        "schema": lake.register(SCHEMA),
        "writer": "w",
        "t_commit": 0.0,
        "rows": rows,
        "columns": {name: checksum(values) for name, values in zeros.items()},
    }
    lines = [
        {
            "row0": i * (STEPS + 1),
            "length": STEPS,
            "env": "maze",
            "task": f"t{i % 50}",
            "chunk": 0,
            "first_step": 0,
            "continues": False,
            "tags": [],
        }
        for i in range(TRAJECTORIES)
    ]
    table = pa.Table.from_pylist([{"uid": bytes(16), **line} for line in lines], schema=footer.TRAJECTORIES)
    folders = FolderChooser(lake.storage)
    for number in range(segments):
        uids = pa.array([uuid.uuid4().bytes for _ in range(TRAJECTORIES)], pa.binary(16))
        filled = table.set_column(table.schema.get_field_index("uid"), "uid", uids)
        id = folders.name_segment("w", number, overlay=False)
        target = path / segment_key(id)
        target.parent.mkdir(exist_ok=True)
        sink = Sparse(target)
        with pa.ipc.new_file(
            sink, batch.schema, metadata=footer.encode({**header, "sequence": number}, filled)
        ) as writer:
            writer.write_batch(batch)
        sink.close()
    return lake


def measure(lake: Lake, **strategy: Any) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, lake.path, json.dumps(strategy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell private memory")
def test_a_million_trajectories_fit_into_300_mb_beside_the_model(tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake")
    for strategy in ({}, {"weighting": "task", "half_life": 1e6, "per_alpha": 0.6}):
        found = measure(lake, **strategy)
        print({name: round(value / 2**20) if value > 1e4 else value for name, value in found.items()})
        assert found["trajectories"] == SEGMENTS * TRAJECTORIES
        assert found["steps"] == SEGMENTS * TRAJECTORIES * STEPS
        assert found["peak"] < LIMIT, found
