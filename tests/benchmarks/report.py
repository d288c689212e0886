"""Time and memory of a report of many long runs: `python tests/benchmarks/report.py [RUNS] [LINES]`.

Makes RUNS run directories (default 20) with LINES lines of metrics each (default 100,000) in a temporary directory; two
logs are written, and the others are links to them. Writes the report of one and of all in a process of its own, prints
seconds, peak memory and the page's size, and then the cost of refreshing the page of a run while it is trained.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import runs

_REPORT = """
import resource, sys, time
began = time.perf_counter()
from amago_cli.app import main
code = main(["report", *sys.argv[2:], "--to", sys.argv[1], "-q"])
spent, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
assert code == 0
print(f"{spent:6.2f} s   {peak.ru_utime + peak.ru_stime:6.2f} CPU s   {peak.ru_maxrss >> 10} MB", end="   ")
"""
_REFRESH = """
import sys, time
from pathlib import Path
from pipelines.report.run_report import _LEAST_SECONDS, LivePage
run, spent = Path(sys.argv[1]), []
for _ in range(10):
    began = time.process_time()
    LivePage(run, print)._write(sample=0, lakes=False)
    spent.append(time.process_time() - began)
print(f"refreshing the page of one run: {sorted(spent)[5]:.3f} CPU s every {_LEAST_SECONDS:.0f} s or more")
"""


def main() -> None:
    """Make the runs and time their reports."""
    given = [int(text) for text in sys.argv[1:]]
    count, lines = (*given, *(20, 100_000)[len(given) :])
    with tempfile.TemporaryDirectory() as temporary:
        folder, page = Path(temporary) / "runs", Path(temporary) / "report.html"
        os.environ["AMAGO_CACHE"] = str(Path(temporary) / "cache")
        runs.make(folder, count, 0)
        logs = sorted(folder.glob("*/metrics.jsonl"))
        for number, log in enumerate(logs):
            if number < 2:
                runs.write_metrics(log, lines, random.Random(number))
            else:
                log.unlink()
                log.hardlink_to(logs[number % 2])
        print(f"logs of {logs[0].stat().st_size / 1e6:,.0f} MB each")
        first = str(logs[0].parent)
        for title, places in (
            ("the first report on a host", [first]),
            ("one run", [first]),
            (f"{count} runs", [str(folder)]),
        ):
            print(f"{title:<28}", end="", flush=True)
            subprocess.run([sys.executable, "-c", _REPORT, str(page), *places], check=True)
            print(f"{page.stat().st_size / 1e6:.1f} MB page")
        subprocess.run([sys.executable, "-c", _REFRESH, first], check=True)


if __name__ == "__main__":
    main()
