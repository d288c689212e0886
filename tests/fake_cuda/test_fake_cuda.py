"""Runs tests of CUDA without a GPU, each file in a process of its own: the fake device stays in its process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fake_cuda import guard

pytestmark = pytest.mark.system
FILES = ["training/test_cuda.py", "fake_cuda/devices.py", "fake_cuda/budget.py", "fake_cuda/kernels.py"]


@pytest.mark.parametrize("file", FILES)
def test_passes_on_a_fake_device(file: str, request: pytest.FixtureRequest) -> None:
    _run(request, file, "not full")


@pytest.mark.full
@pytest.mark.parametrize("file", FILES[:2])
def test_remaining_cases_pass_on_a_fake_device(file: str, request: pytest.FixtureRequest) -> None:
    _run(request, file, "full")


def _run(request: pytest.FixtureRequest, file: str, cases: str) -> None:
    if (reason := guard.obstacle()) is not None:
        pytest.skip(reason)
    guard.build()
    command = [sys.executable, "-m", "pytest", "-p", "tests.fake_cuda.plugin", "-n", "0", "-m", cases, f"tests/{file}"]
    done = subprocess.run(
        command, cwd=request.config.rootpath, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
