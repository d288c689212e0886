"""The plugin that records what CI ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.results import BUDGET_SECONDS, read_results, summarize

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert False
def test_absent(): pytest.importorskip("package_that_does_not_exist")
@pytest.mark.extras
def test_more(): pass
@pytest.mark.parametrize("name", ["tab\\there", "b"])
def test_cases(name): pass
"""


def run_pytest(folder: Path, *arguments: str) -> None:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = extras: again")
    command = [sys.executable, "-m", "pytest", "-p", "tests.results", "-p", "no:cacheprovider", *arguments, str(folder)]
    command += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=False, capture_output=True)


@pytest.mark.system
@pytest.mark.parametrize("processes", ["0", "2"])
def test_tests_that_ran_before_are_left_out(tmp_path: Path, processes: str) -> None:
    first, second = tmp_path / "first.tsv", tmp_path / "second.tsv"
    run_pytest(tmp_path, f"--results={first}", "-n", processes)
    run_pytest(tmp_path, f"--results={second}", f"--not-in={first}", "-n", processes)
    outcomes = {result.test.partition("::")[2]: result.outcome for result in read_results(first)}
    assert outcomes == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_absent": "skipped",
        "test_more": "passed",
        "test_cases[tab\\there]": "passed",
        "test_cases[b]": "passed",
    }
    again = {result.test.partition("::")[2] for result in read_results(second)}
    assert again == {"test_absent", "test_more"}


def test_summary_counts_a_test_once_and_names_files_over_budget(tmp_path: Path) -> None:
    core, extras = tmp_path / "core.tsv", tmp_path / "extras.tsv"
    core.write_text("passed\t1.00\ta.py::one\nskipped\t0.10\ta.py::two\nskipped\t0.10\tb.py::three\n")
    extras.write_text(f"passed\t2.00\ta.py::two\npassed\t1.00\ta.py::one\npassed\t{BUDGET_SECONDS}\tc.py::four\n")
    lines, kept = summarize([core, extras])
    assert lines[0] == "3 distinct tests ran (1 of them more than once), 1 were skipped"
    assert kept
    extras.write_text(f"passed\t{BUDGET_SECONDS}\tc.py::four\npassed\t1.00\tc.py::five\n")
    lines, kept = summarize([core, extras])
    assert not kept
    assert lines[-1].startswith("OVER BUDGET: c.py took 121 CPU s (extras)")
    night = extras.rename(tmp_path / "slow.tsv")
    assert summarize([core, night])[1]
