"""How fast the lake is beside simpler stores, all in one run: the ratios count, not the rates.

    python tests/benchmarks/lake.py [--only sampling,cold,...] [--trajectories 1000] [--large] [--json] [--dir DIR]

sampling  random windows of 128 steps, 101 B a step, one core, page cache warm: slices of raw mapped columns, the lake
          (copying alone, then draw, copy, padding and mask), npz a trajectory, HDF5, Parquet; the same windows
segments  windows of 32 steps of one lake in 10, 100, 1,000 and 10,000 segments
cold      the page cache emptied before each round: the lake against page faults, and against the kernel's own reading
          ahead
images    64x64x3 and 84x84x4 frames against npz, plain and compressed
writing   appends, MB/s, commits a second by one and by eight processes, against npz files, HDF5 and bare fsyncs
refresh   100 new trajectories beside 1,000, 100,000 and 1,000,000 others: a follower, and the SQL index
index     the SQL index at a million trajectories, --large: ten million
maintenance  expiry by SQL, merging, and the index after them, at a hundred thousand and a million trajectories
millions  lakes of --millions million trajectories, from the first write to the first batch after merging; their figures
          are appended with --to FILE.jsonl, and drawn over the number of trajectories by --draw FILE.jsonl PICTURE
pages     what `amago view` asks of a million trajectories: pages, filters, the curve
overlay   new rewards: bytes, and the speed of sampling through them
relabel   relabelling trajectories of 500 steps: how many a second, and bytes of the overlays

What limits, by profiles: a warm window is copying, 13 kB at the speed of memory plus a call of numpy a column, however
many files there are; end to end the draw adds a few per cent. Cold, the disk's queue: all ranges of a
batch are named before the first is touched. A window of pictures is unpacking its batches. An append is a checksum, a
copy and one write into the page cache; a commit is two fsyncs and waiting for them. A refresh is reading the footer of
what is new and listing the hours that changed; the index adds opening its file, a transaction and a checkpoint,
whatever the size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lake_sections import growth, images, relabelling, sampling, writing
from lake_sections.common import Section, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--trajectories", type=int, default=1000, help="of 1000 steps, for the sampling sections")
    parser.add_argument("--pictures", type=int, default=24, help="trajectories of each kind of pictures")
    parser.add_argument("--large", action="store_true", help="ten million trajectories in the index")
    parser.add_argument(
        "--millions", default="1", help="million trajectories in the section of that name, e.g. .1,1,10"
    )
    parser.add_argument("--to", type=Path, metavar="FILE.jsonl", help="append the figures of millions")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("FILE.jsonl", "PICTURE"), help="draw them, and no more")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, help="where to put the files: a real disk (default: the temporary folder)")
    options = parser.parse_args()
    if options.draw:
        growth.draw_growth(*options.draw)
        return
    count, sizes = options.trajectories, [round(1e6 * float(size)) for size in options.millions.split(",")]
    sections: dict[str, Callable[[Path], Section]] = {
        "sampling": lambda folder: sampling.warm(folder, count),
        "segments": lambda folder: sampling.segments(folder, [10, 100, 1_000, 10_000]),
        "histories": lambda folder: sampling.histories(folder, 1000 * count),
        "cold": lambda folder: sampling.cold(folder, 2 * count),
        "images": lambda folder: images.images(folder, options.pictures),
        "writing": lambda folder: writing.writing(folder, count),
        "refresh": lambda folder: growth.refresh(folder, [1_000, 100_000, 1_000_000]),
        "index": lambda folder: growth.index(folder, [1_000_000, *([10_000_000] if options.large else [])]),
        "maintenance": lambda folder: growth.maintenance(folder, [100_000, 1_000_000]),
        "millions": lambda folder: growth.millions(folder, sizes, options.to),
        "pages": lambda folder: growth.pages(folder, 1_000_000),
        "overlay": lambda folder: sampling.overlay(folder, count),
        "relabel": lambda folder: relabelling.relabelling(folder, count),
    }
    chosen = options.only.split(",") if options.only else list(sections)
    if unknown := set(chosen) - set(sections):
        parser.error(f"no such sections: {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    found = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        for name in chosen:
            folder = Path(root) / name
            folder.mkdir()
            begun = time.perf_counter()
            section = sections[name](folder)
            shutil.rmtree(folder)
            found[name] = {"figures": section.figures, "notes": section.notes}
            seconds = time.perf_counter() - begun
            if not options.json:
                print(table(f"{name} ({seconds:.0f} s)", section.figures, section.notes), flush=True)
    if options.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
        json.dump({"machine": machine, **found}, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
