"""Memory of a trainer over a million trajectories (50 GB, in sparse files), beside the same over a small lake.

    python tests/benchmarks/memory.py [--trajectories 1000000] [--updates 200] [--json] [--dir DIR]

The real train stage with a tiny model, each lake in a process of its own, measured by the mappings of /proc/self/smaps
(Linux): private memory is Private_Dirty + Private_Clean of everything but the lake's own files. Pages of those are page
cache that the process looks at: the system takes them back when anybody needs memory; they are shown apart. The peak is
that of the private memory at every update.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from lake_sections.common import HOURS, PLAIN, footer_table

from pipelines.lake import footer, segment
from pipelines.lake.arrow import arrow_schema, to_arrow
from pipelines.lake.folders import segment_key
from pipelines.lake.store import Lake

STEPS, A_SEGMENT = 500, 1000
SETTINGS = {
    "agent": {
        "timestep": {"hidden": [8], "output": 8},
        "sequence": {"kind": "transformer", "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16},
        "actor": {"hidden": [8]},
        "critic": {"hidden": [8]},
    },
    "train": {"context_length": 128, "batch_size": 24, "threads": 1, "log_every": 50},
}


class Sparse:
    """A file in which large pieces are left out: they are zeros."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size >= 1 << 18:  # a column; the footer is smaller
            self._file.seek(size, 1)
        else:
            self._file.write(data)
        return size

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()


def build(folder: Path, trajectories: int) -> None:
    """A lake of that many trajectories of zeros, whose footers and checksums are right."""
    lake, rng = Lake.create(folder), np.random.default_rng(0)
    lake.register(PLAIN)
    count = min(trajectories, A_SEGMENT)
    rows = count * (STEPS + 1)
    values = PLAIN.empty(rows)
    batch = pa.record_batch([to_arrow(c, values[c.name]) for c in PLAIN.columns], schema=arrow_schema(PLAIN.columns))
    header = {
        "format": footer.FORMAT,
        "kind": "steps",
        "schema": PLAIN.id,
        "writer": "bench",
        "t_commit": 1e9,
        "rows": rows,
        "columns": {name: segment.checksum(array) for name, array in values.items()},
    }
    for number in range(trajectories // count):
        id = f"{HOURS[number // 100]}/{number:016x}-bench.0.0-{number:08d}"
        path = lake.path / segment_key(id)
        path.parent.mkdir(exist_ok=True)
        texts = footer.encode(header, footer_table(count, STEPS, number, rng))
        with (
            open(path, "wb") as file,
            pa.ipc.new_file(pa.PythonFile(Sparse(file), mode="w"), batch.schema, metadata=texts) as out,
        ):
            out.write_batch(batch)


def private(lake: str) -> tuple[float, float]:
    """MB of private memory of this process, and of mapped pages of the lake."""
    own = mapped = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=1)
        if not name.endswith(":"):
            inside = lake in line
        elif inside and name == "Rss:":
            mapped += int(rest[0].split()[0])
        elif not inside and name in ("Private_Clean:", "Private_Dirty:"):
            own += int(rest[0].split()[0])
    return own / 1e3, mapped / 1e3


def train(lake: Path, run: Path, updates: int) -> None:
    """Train in this process; prints what it held."""
    from pipelines.config.load import merge, resolve
    from pipelines.events import Event, Progress
    from pipelines.rollout.environment import find_env_model
    from pipelines.stages import train as stage

    import_only, _ = private(str(lake))
    import_only, _ = private(str(lake))
    seen: list[tuple[float, float]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Progress):
            seen.append(private(str(lake)))

    settings = resolve(merge(SETTINGS, {"train": {"steps": updates}}), env_model=find_env_model)
    stage.run(settings, run=run, lakes=[(lake, 1.0)], listener=listen)
    held, mapped = zip(*seen, strict=True)
    found = {"imports": import_only, "first update": held[0], "peak": max(held), "end": held[-1], "mapped": mapped[-1]}
    print(json.dumps(found))


def measured(lake: Path, run: Path, updates: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--train", str(lake), str(run), "--updates", str(updates)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, help="where to put the files: a disk that knows sparse ones")
    parser.add_argument("--train", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*options.train, options.updates)
        return
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        for name, count in (("small", 100), ("large", options.trajectories)):
            build(Path(root) / name, count)
            found[name] = measured(Path(root) / name, Path(root) / f"run-{name}", options.updates)
        size = sum(path.stat().st_size for path in (Path(root) / "large").rglob("*.arrow"))
    extra = {key: found["large"][key] - found["small"][key] for key in ("first update", "peak", "end")}
    if options.json:
        print(json.dumps({**found, "extra": extra, "gigabytes": size / 1e9}, indent=1))
        return
    print(f"private memory in MB; {options.trajectories:,} trajectories, {size / 1e9:.1f} GB, against 100 trajectories")
    for name, figures in (*found.items(), ("large - small", extra)):
        print(f"  {name:14}", "  ".join(f"{key} {value:,.0f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
