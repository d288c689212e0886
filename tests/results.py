"""A pytest plugin that records the outcome and the CPU time of each test, and leaves out tests that ran before.

CI tests one tree in several environments. Each of them needs only the tests that no earlier environment could run:

    python -m pytest -p tests.results --results=core.tsv
    python -m pytest -p tests.results --results=extras.tsv --not-in=core.tsv    # what core skipped

`python -m tests.results core.tsv extras.tsv` then prints how many distinct tests ran, and the files that took the most
CPU time; it exits with 1 if a file took more than its budget.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

BUDGET_SECONDS = 120.0
"""CPU seconds that the tests of one file may take together in one environment. Wall time would fail CI on a busy host.
A file that needs more moves cases to the tiers of the night."""
NIGHT_BUDGET_SECONDS = 1_200.0
"""Likewise, in the parts of the night."""
_NIGHT = ("slow", "full", "smoke", "procgen", "clients")

_CPU = "cpu_seconds"


@dataclass(frozen=True)
class TestResult:
    """The outcome of one test (passed, failed or skipped) and its CPU seconds, those of child processes included."""

    __test__ = False

    test: str
    outcome: str
    cpu_seconds: float

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


def read_results(path: Path) -> list[TestResult]:
    """Read a file that `--results` wrote."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [TestResult(test, outcome, float(seconds)) for outcome, seconds, test in rows]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("results")
    group.addoption("--results", type=Path, help="write the outcome and the CPU seconds of each test to this file")
    group.addoption(
        "--not-in", type=Path, action="append", default=[], help="leave out the tests that ran according to this file"
    )


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`, whose deselected tests would be counted twice
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    before = [result for path in config.getoption("--not-in") for result in read_results(path)]
    ran = {result.test for result in before if result.outcome != "skipped"}
    left_out = [item for item in items if item.nodeid in ran and item.get_closest_marker("extras") is None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        chosen = set(left_out)
        items[:] = [item for item in items if item not in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Reports are made in the worker process, and the last one carries the time to the process that writes the file.
    item.stash[_START] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append((_CPU, _cpu_seconds() - item.stash[_START]))
    return report


_START = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class _Recorder:
    """Writes a line when the last report of a test has come."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = before if report.outcome == "passed" else report.outcome
        if report.when == "teardown":
            seconds = dict(report.user_properties).get(_CPU, 0.0)
            outcome = self._outcomes.pop(report.nodeid)
            self._file.write(f"{outcome}\t{seconds:.2f}\t{report.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path is not None and not hasattr(config, "workerinput"):  # xdist's workers send their reports to one process
        config.pluginmanager.register(_Recorder(path))


def summarize(paths: Sequence[Path], most: int = 12) -> tuple[list[str], bool]:
    """Return lines about the tests in `paths`, and whether every file kept its budget.

    A test counts once however many environments ran it, and as skipped only if none did.
    """
    ran, skipped = set[str](), set[str]()
    spent = defaultdict[tuple[str, str], float](float)
    repeated = 0
    for path in paths:
        for result in read_results(path):
            if result.outcome == "skipped":
                skipped.add(result.test)
                continue
            repeated += result.test in ran
            ran.add(result.test)
            spent[result.file, path.stem] += result.cpu_seconds
    lines = [
        f"{len(ran):,} distinct tests ran ({repeated:,} of them more than once), {len(skipped - ran):,} were skipped"
    ]
    dearest = sorted(spent.items(), key=lambda item: -item[1])
    lines += [f"{seconds:7.1f} CPU s  {file} ({where})" for (file, where), seconds in dearest[:most]]
    over = [
        (file, where, seconds, budget)
        for (file, where), seconds in dearest
        if seconds > (budget := NIGHT_BUDGET_SECONDS if where in _NIGHT else BUDGET_SECONDS)
    ]
    lines += [
        f"OVER BUDGET: {file} took {seconds:.0f} CPU s ({where}), its budget is {budget:.0f}"
        for file, where, seconds, budget in over
    ]
    return lines, not over


def main() -> int:
    """Print the summary of the files named on the command line."""
    parser = argparse.ArgumentParser(description="Summarize what --results wrote.")
    parser.add_argument("files", nargs="+", type=Path)
    lines, kept = summarize([path for path in parser.parse_args().files if path.is_file()])
    print("\n".join(lines))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
